"""What the page asks the server for: a table of routes and a function for each."""

from __future__ import annotations

import base64
import secrets
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from sparo_train.core.errors import ConfigError
from sparo_train.core.untrusted import shown

from .bodies import MOST_IMAGE, MOST_JSON, answered, json_object, with_body
from .one_file import one_file
from .opened import Side
from .pictures import Pictures
from .selection_file import SelectionFile

PAGE = Path(__file__).parent / "page"
_SMALL = 200  # pixels of a picture in one file
_SECOND = 2  # checkpoints beside the first that stay open


class Explorer:
    """Everything behind the page.

    Args:
        first: the checkpoint.  out: where its selection goes.
        another: from what a person typed to a second checkpoint. Raises `ConfigError`.

    Checkpoints are known by numbers that nobody gave before, another server neither: a tab that was left behind must not get
    another one's answers, nor save over them.
    """

    def __init__(self, first: Side, pictures: Pictures, out: Path, another: Callable[[str], Side]):
        self.pictures, self._another = pictures, another
        self.first = secrets.randbelow(2**31)
        self.sides = {self.first: first}
        self.files = {self.first: SelectionFile(first, out)}
        self._out = out
        self._model = threading.Lock()  # one pass through a model at a time
        self._opening = threading.Lock()  # its own: a checkpoint may come over a slow network
        self.looked: dict[tuple[int, int], dict[str, Any]] = {}

    def facts(self) -> dict[str, Any]:
        """What the page draws first: the checkpoint, and the second one that was opened last."""
        return self._facts(list(dict.fromkeys((self.first, list(self.sides)[-1]))))

    def _facts(self, sides: list[int]) -> dict[str, Any]:
        return {
            "sides": [self.side_facts(number) for number in sides],
            "images": [{"key": shown(s.key), "caption": shown(s.caption), "own": s.own} for s in self.pictures.shown],
            "colours": (255 * matplotlib.colormaps["inferno"](np.arange(256))[:, :3]).round().astype(int).tolist(),
        }

    def side_facts(self, number: int) -> dict[str, Any]:
        """One checkpoint's, with its selection as the file has it."""
        return {"id": number, **self.side(number).facts(), "selection": self.files[number].facts(whole=False)}

    def side(self, number: int) -> Side:
        """Raises `ConfigError` for one that is not open."""
        if number not in self.sides:
            raise ConfigError(
                "this checkpoint is no longer open: others were opened since, or sparo slots explore was started again; load the page anew"
            )
        return self.sides[number]

    def task(self, side: int, number: int) -> bytes:
        """A task's arrays one after another, as its layout says."""
        found = list(self.side(side).arrays.values())
        if not 0 <= number < len(found):
            raise ConfigError(f"task {number}: there are {len(found)}")
        return b"".join(array.tobytes() for array in found[number].arrays.values())

    def attention(self, side: int, image: int) -> dict[str, Any]:
        """Kept, as people go back and forth, and as one file holds what was looked at."""
        self.pictures.check(image)
        with self._model:
            if (side, image) not in self.looked:
                self.looked[side, image] = plain(self.side(side).attention(image))
        return self.looked[side, image]

    def compare(self, checkpoint: str) -> dict[str, Any]:
        """Open a second checkpoint. The two that were opened last stay open, as there may be another tab."""
        if not self._opening.acquire(blocking=False):
            raise ConfigError(f"{checkpoint}: another checkpoint is being opened. Wait for it, then open this one.")
        try:
            side = self._another(checkpoint)
            weights = side.encoder.weights
        finally:
            self._opening.release()
        if weights == self.side(self.first).encoder.weights:
            raise ConfigError(f"{checkpoint}: has the weights of the checkpoint that is open; name another")
        with self._model:
            file = SelectionFile(side, self._out.with_name(f"{self._out.stem}_{weights[:8]}.json"))
            number = secrets.randbelow(2**31)
            self.sides[number], self.files[number] = side, file
            # Never the first: what it was started for stays.
            for old in list(self.sides)[1:-_SECOND]:
                del self.sides[old], self.files[old]
            self.looked = {key: value for key, value in self.looked.items() if key[0] in self.sides}
        return self.side_facts(number)

    def held(self, state: dict[str, Any]) -> dict[str, Any]:
        """All that one file needs: scores' arrays, small pictures, and the attention of the images that were looked at.

        Args:
            state: `sides`, for each checkpoint in sight its `id`, what is on, names and notes as the page has them, saved or not;
                `image`, the one in sight.
        """
        given = state.get("sides")
        if not isinstance(given, list) or not all(
            isinstance(one, dict) and type(one.get("id")) is int for one in given
        ):
            raise ConfigError("one file: says of no checkpoint what is on")
        sides = [one["id"] for one in given]
        tasks = {f"{side}/{i}": self.task(side, i) for side in sides for i in range(len(self.side(side).arrays))}
        pictures = [self.pictures.jpeg(i, _SMALL) for i in range(len(self.pictures.shown))]
        return {
            "facts": self._facts(sides),
            "state": {"sides": given, "image": state.get("image")},
            "tasks": {name: base64.b64encode(found).decode() for name, found in tasks.items()},
            "attention": {f"{side}/{i}": told for (side, i), told in self.looked.items() if side in sides},
            "pictures": [base64.b64encode(found).decode() for found in pictures],
        }

    def locked(self, work: Callable[[], Any]) -> Any:
        """The model's turn."""
        with self._model:
            return plain(work())


def plain(value: Any) -> Any:
    """Arrays as base64 of little-endian fp32; text without control characters."""
    if isinstance(value, np.ndarray):
        return base64.b64encode(np.ascontiguousarray(value, "<f4").tobytes()).decode()
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    if isinstance(value, list):
        return [plain(one) for one in value]
    return shown(value) if isinstance(value, str) else value


def routes(explorer: Explorer) -> Starlette:
    """The application, without its guard."""

    async def index(_: Request) -> Response:
        return FileResponse(PAGE / "index.html")

    async def facts(_: Request) -> Response:
        return await answered(explorer.facts)

    async def task(request: Request) -> Response:
        path = request.path_params
        return await answered(
            lambda: Response(explorer.task(path["side"], path["number"]), media_type="application/octet-stream")
        )

    async def image(request: Request) -> Response:
        number = request.path_params["number"]
        return await answered(lambda: Response(explorer.pictures.jpeg(number), media_type="image/jpeg"))

    async def attention(request: Request) -> Response:
        path = request.path_params
        return await answered(lambda: explorer.attention(path["side"], path["number"]))

    async def own(request: Request) -> Response:
        name, caption = (str(request.query_params.get(key, ""))[:1000] for key in ("name", "caption"))

        def add(data: bytes) -> Any:
            number = explorer.pictures.add(data, name or "image", caption)
            return {"image": number, "key": shown(name), "caption": shown(caption), "own": True}

        return await with_body(request, MOST_IMAGE, add)

    def asking(work: Callable[[int, dict[str, Any]], Any]) -> Callable[[Request], Any]:
        async def endpoint(request: Request) -> Response:
            side = request.path_params.get("side", 0)
            return await with_body(request, MOST_JSON, lambda data: work(side, json_object(data)))

        return endpoint

    def search(side: int, given: dict[str, Any]) -> Any:
        found = explorer.locked(lambda: [one._asdict() for one in explorer.side(side).search(_word(given, "text"))])
        return {"found": found}

    def captions(side: int, given: dict[str, Any]) -> Any:
        texts, number = given.get("captions"), given.get("image")
        if not isinstance(texts, list) or not all(isinstance(t, str) for t in texts) or type(number) is not int:
            raise ConfigError("captions: give an image's number and a list of texts")
        explorer.pictures.check(number)
        return explorer.locked(lambda: explorer.side(side).captions(number, texts))

    def save(side: int, given: dict[str, Any]) -> Any:
        explorer.side(side)
        return explorer.files[side].write(given)

    def read(side: int, _: dict[str, Any]) -> Any:
        explorer.side(side)
        return explorer.files[side].facts()

    def whole(_: int, given: dict[str, Any]) -> Any:
        return Response(one_file(PAGE, explorer.held(given)), media_type="text/html; charset=utf-8")

    def post(path: str, work: Callable[[int, dict[str, Any]], Any]) -> Route:
        return Route(path, asking(work), methods=["POST"])

    return Starlette(
        routes=[
            Route("/", index),
            Route("/facts", facts),
            Route("/task/{side:int}/{number:int}", task),
            Route("/image/{number:int}", image),
            Route("/attention/{side:int}/{number:int}", attention),
            Route("/own", own, methods=["POST"]),
            post("/search/{side:int}", search),
            post("/captions/{side:int}", captions),
            post("/save/{side:int}", save),
            post("/read/{side:int}", read),
            post("/compare", lambda _, given: explorer.compare(_word(given, "checkpoint"))),
            post("/one-file", whole),
            Mount("/page", StaticFiles(directory=PAGE)),
        ]
    )


def _word(given: dict[str, Any], key: str) -> str:
    if not isinstance(given.get(key), str) or not given[key].strip():
        raise ConfigError(f"{key}: is empty")
    return given[key].strip()
