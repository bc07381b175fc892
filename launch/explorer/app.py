"""Routes of the explorer's page, and a function for each."""

from __future__ import annotations

import base64
import secrets
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from sparo_train.core.errors import ConfigError
from sparo_train.core.files import escape_control_chars

from ..views.html import stylesheet
from .bodies import MAX_IMAGE_BYTES, MAX_JSON_BYTES, json_object, respond, respond_to_body
from .offline_page import PAGE, build_offline_page
from .opened import Pictures, Side
from .selection_file import SelectionFile

_THUMBNAIL_SIZE = 200  # pixels of a picture in the single file
_MAX_RUNS = 200  # runs that the page offers for a comparison
_MAX_SECOND_CHECKPOINTS = 2  # further checkpoints that stay open


class Explorer:
    """State of the page's server.

    Checkpoints have numbers that no server used before: an old tab must not receive another checkpoint's data, nor save
    over its selection.

    Args:
        first: the checkpoint.
        out: path of its selection.
        another: opens a second checkpoint from the user's input. Raises `ConfigError`.
    """

    def __init__(self, first: Side, pictures: Pictures, out: Path, open_checkpoint: Callable[[str], Side]):
        self.pictures, self._open_checkpoint = pictures, open_checkpoint
        self.first = secrets.randbelow(2**31)
        self.sides = {self.first: first}
        self.files = {self.first: SelectionFile(first, out)}
        self._out = out
        self._model = threading.Lock()  # one pass through a model at a time
        self._opening = threading.Lock()  # separate, because a checkpoint may be on a slow network
        self.attention_cache: dict[tuple[int, int], dict[str, Any]] = {}

    def facts(self) -> dict[str, Any]:
        """Return the data that the page draws first: the checkpoint, the second one that was opened last, and other runs of its folder."""
        facts = self._facts(list(dict.fromkeys((self.first, list(self.sides)[-1]))))
        return {**facts, "runs": sibling_runs(self.sides[self.first].bench.checkpoint)}

    def _facts(self, sides: list[int]) -> dict[str, Any]:
        return {
            "sides": [self.side_facts(number) for number in sides],
            "images": [
                {"key": escape_control_chars(s.key), "caption": escape_control_chars(s.caption), "own": s.own}
                for s in self.pictures.entries
            ],
        }

    def side_facts(self, number: int) -> dict[str, Any]:
        """Return one checkpoint's data, with its selection as in the file."""
        return {"id": number, **self.side(number).facts(), "selection": self.files[number].facts(whole=False)}

    def side(self, number: int) -> Side:
        """Return an open checkpoint. Raises `ConfigError` for another number."""
        if number not in self.sides:
            raise ConfigError(
                "this checkpoint was closed, because others were opened or `sparo slots explore` was restarted. Reload the page."
            )
        return self.sides[number]

    def task(self, side: int, number: int) -> bytes:
        """Return a task's arrays concatenated, as described by its layout."""
        arrays = list(self.side(side).arrays.values())
        if not 0 <= number < len(arrays):
            raise ConfigError(f"task {number}: expected a number below {len(arrays)}")
        return b"".join(array.tobytes() for array in arrays[number].arrays.values())

    def attention(self, side: int, image: int) -> dict[str, Any]:
        """Return the attention of an image; it is cached for navigation, and for the single file."""
        self.pictures.check(image)
        with self._model:
            if (side, image) not in self.attention_cache:
                self.attention_cache[side, image] = to_jsonable(self.side(side).attention(image))
        return self.attention_cache[side, image]

    def compare(self, checkpoint: str) -> dict[str, Any]:
        """Open a second checkpoint. The last two stay open, because there may be another tab."""
        if not self._opening.acquire(blocking=False):
            raise ConfigError(f"{checkpoint}: another checkpoint is being opened. Wait for it, then open this one.")
        try:
            side = self._open_checkpoint(checkpoint)
            weights = side.encoder.weights
        finally:
            self._opening.release()
        if weights == self.side(self.first).encoder.weights:
            raise ConfigError(
                f"{checkpoint}: has the same weights as the checkpoint that is already open. Name another."
            )
        with self._model:
            file = SelectionFile(side, self._out.with_name(f"{self._out.stem}_{weights[:8]}.json"))
            number = secrets.randbelow(2**31)
            self.sides[number], self.files[number] = side, file
            # Never close the first one.
            for old in list(self.sides)[1:-_MAX_SECOND_CHECKPOINTS]:
                del self.sides[old], self.files[old]
            self.attention_cache = {key: value for key, value in self.attention_cache.items() if key[0] in self.sides}
        return self.side_facts(number)

    def offline_bundle(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return everything that the single file needs: scores' arrays, small pictures, and the attention of the images that were viewed.

        Args:
            state: `sides` with the `id`, selection, names and notes of each visible checkpoint, saved or not; `image`,
                the visible one.
        """
        side_states = state.get("sides")
        if not isinstance(side_states, list) or not all(
            isinstance(one, dict) and type(one.get("id")) is int for one in side_states
        ):
            raise ConfigError("cannot save as a single file: the request does not list the checkpoints to save")
        sides = [one["id"] for one in side_states]
        tasks = {f"{side}/{i}": self.task(side, i) for side in sides for i in range(len(self.side(side).arrays))}
        pictures = [self.pictures.jpeg(i, _THUMBNAIL_SIZE) for i in range(len(self.pictures.entries))]
        return {
            "facts": self._facts(sides),
            "state": {"sides": side_states, "image": state.get("image")},
            "tasks": {name: base64.b64encode(data).decode() for name, data in tasks.items()},
            "attention": {
                f"{side}/{i}": attention for (side, i), attention in self.attention_cache.items() if side in sides
            },
            "pictures": [base64.b64encode(found).decode() for found in pictures],
        }

    def run_locked(self, work: Callable[[], Any]) -> Any:
        """Run `work` while no other request uses the model."""
        with self._model:
            return to_jsonable(work())


def sibling_runs(checkpoint: str) -> list[str]:
    """Return the other runs in the folder of a run that have a checkpoint, at most 200; none if `checkpoint` is not a run."""
    run = Path(checkpoint)
    if not (run / "config.yaml").is_file():
        return []
    others = (
        path for path in sorted(run.parent.iterdir()) if path.name != run.name and (path / "config.yaml").is_file()
    )
    return [escape_control_chars(str(path)) for path in others if any((path / "checkpoints").glob("*"))][:_MAX_RUNS]


def to_jsonable(value: Any) -> Any:
    """Convert arrays to base64 of little-endian fp32, and remove control characters from text."""
    if isinstance(value, np.ndarray):
        return base64.b64encode(np.ascontiguousarray(value, "<f4").tobytes()).decode()
    if isinstance(value, dict):
        return {name: to_jsonable(one) for name, one in value.items()}
    if isinstance(value, list):
        return [to_jsonable(one) for one in value]
    return escape_control_chars(value) if isinstance(value, str) else value


def make_app(explorer: Explorer) -> Starlette:
    """Return the application, without its guard."""

    async def index(_: Request) -> Response:
        return FileResponse(PAGE / "index.html")

    async def base_style(_: Request) -> Response:
        return Response(stylesheet(), media_type="text/css")

    async def facts(_: Request) -> Response:
        return await respond(explorer.facts)

    async def task(request: Request) -> Response:
        path = request.path_params
        return await respond(
            lambda: Response(explorer.task(path["side"], path["number"]), media_type="application/octet-stream")
        )

    async def image(request: Request) -> Response:
        number = request.path_params["number"]
        return await respond(lambda: Response(explorer.pictures.jpeg(number), media_type="image/jpeg"))

    async def attention(request: Request) -> Response:
        path = request.path_params
        return await respond(lambda: explorer.attention(path["side"], path["number"]))

    async def own(request: Request) -> Response:
        name, caption = (str(request.query_params.get(key, ""))[:1000] for key in ("name", "caption"))

        def add(data: bytes) -> Any:
            number = explorer.pictures.add(data, name or "image", caption)
            return {
                "image": number,
                "key": escape_control_chars(name),
                "caption": escape_control_chars(caption),
                "own": True,
            }

        return await respond_to_body(request, MAX_IMAGE_BYTES, add)

    def json_endpoint(work: Callable[[int, dict[str, Any]], Any]) -> Callable[[Request], Any]:
        async def endpoint(request: Request) -> Response:
            side = request.path_params.get("side", 0)
            return await respond_to_body(request, MAX_JSON_BYTES, lambda data: work(side, json_object(data)))

        return endpoint

    def save(side: int, body: dict[str, Any]) -> Any:
        explorer.side(side)
        return explorer.files[side].write(body)

    def read(side: int, _: dict[str, Any]) -> Any:
        explorer.side(side)
        return explorer.files[side].facts()

    def export_html(_: int, body: dict[str, Any]) -> Any:
        return Response(build_offline_page(PAGE, explorer.offline_bundle(body)), media_type="text/html; charset=utf-8")

    def post(path: str, work: Callable[[int, dict[str, Any]], Any]) -> Route:
        return Route(path, json_endpoint(work), methods=["POST"])

    return Starlette(
        routes=[
            Route("/", index),
            Route("/facts", facts),
            Route("/task/{side:int}/{number:int}", task),
            Route("/image/{number:int}", image),
            Route("/attention/{side:int}/{number:int}", attention),
            Route("/own", own, methods=["POST"]),
            *(post(f"/{name}/{{side:int}}", work) for name, work in _model_requests(explorer).items()),
            post("/save/{side:int}", save),
            post("/read/{side:int}", read),
            post("/compare", lambda _, given: explorer.compare(_required_text(given, "checkpoint"))),
            post("/one-file", export_html),
            Route("/page/base.css", base_style),
            Mount("/page", StaticFiles(directory=PAGE)),
        ]
    )


def _model_requests(explorer: Explorer) -> dict[str, Callable[[int, dict[str, Any]], Any]]:
    """Return the functions that answer requests by running a checkpoint's model, by the first part of their path."""

    def search(side: int, body: dict[str, Any]) -> Any:
        hits = explorer.run_locked(
            lambda: [one._asdict() for one in explorer.side(side).search(_required_text(body, "text"))]
        )
        return {"found": hits}

    def captions(side: int, body: dict[str, Any]) -> Any:
        texts, number = body.get("captions"), body.get("image")
        if not isinstance(texts, list) or not all(isinstance(t, str) for t in texts) or type(number) is not int:
            raise ConfigError("captions: expected an image's number and a list of texts")
        explorer.pictures.check(number)
        return explorer.run_locked(lambda: explorer.side(side).captions(number, texts))

    def alike(side: int, body: dict[str, Any]) -> Any:
        number, slots = body.get("image"), body.get("slots")
        if not isinstance(slots, list) or not all(type(slot) is int for slot in slots) or type(number) is not int:
            raise ConfigError("alike: expected an image's number and a list of slots")
        explorer.pictures.check(number)
        return {
            "matches": explorer.run_locked(
                lambda: [one._asdict() for one in explorer.side(side).find_alike(number, slots)]
            )
        }

    def edit(side: int, body: dict[str, Any]) -> Any:
        number = body.get("image")
        if type(number) is not int:
            raise ConfigError("edit: expected an image's number")
        explorer.pictures.check(number)
        return Response(explorer.run_locked(lambda: explorer.side(side).edit(number, body)), media_type="image/jpeg")

    return {"search": search, "captions": captions, "alike": alike, "edit": edit}


def _required_text(body: dict[str, Any], key: str) -> str:
    if not isinstance(body.get(key), str) or not body[key].strip():
        raise ConfigError(f"{key}: is empty")
    return body[key].strip()
