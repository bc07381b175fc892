"""What the page asks the server for: a table of routes and a function for each."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import secrets
import threading
from collections.abc import Callable, Mapping
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
from sparo_train.core.files import escape_control_chars

from .bodies import MAX_IMAGE_BYTES, MAX_JSON_BYTES, json_object, respond, respond_to_body
from .opened import Pictures, Side
from .selection_file import SelectionFile

_IMPORT = re.compile(r'^import (?:\{[^}]*\}|\w+) from "\./(\w+)\.js";\n', re.MULTILINE)
_MAX_BYTES = 256 << 20
_ICON = '<link rel="icon" href="page/icon.svg">'
_STYLE = '<link rel="stylesheet" href="page/page.css">'
_SCRIPT = '<script type="module" src="page/main.js"></script>'


def build_offline_page(page: Path, offline_bundle: Mapping[str, Any]) -> bytes:
    """HTML: page, style, modules, and what they would ask a server for.

    Args:
        page: folder of the page's files.  offline_bundle: `Explorer.held`.

    Raises:
        ConfigError: more than a browser takes as one file.
    """
    # No sequence in it can end the element that it stands in.
    data = json.dumps(offline_bundle).replace("<", "\\u003c")
    style, script = (page / "page.css").read_text(encoding="utf-8"), bundle_modules(page, "main")
    policy = f"default-src 'none'; img-src data:; style-src {_hash(style)}; script-src {_hash(script)}; base-uri 'none'; form-action 'none'"
    html = (page / "index.html").read_text(encoding="utf-8")
    for old, new in (
        (_ICON, ""),
        (_STYLE, f'<meta http-equiv="Content-Security-Policy" content="{policy}"><style>{style}</style>'),
        (_SCRIPT, f'<script type="application/json" id="held">{data}</script><script type="module">{script}</script>'),
    ):
        if old not in html:
            raise ConfigError(f"{page / 'index.html'}: does not hold {old}; install sparo again")
        html = html.replace(old, new)
    if len(html) > _MAX_BYTES:
        raise ConfigError(f"one file would take {len(html) >> 20} MB; start with fewer --images, or a --limit")
    return html.encode()


def bundle_modules(page: Path, name: str) -> str:
    """A module behind all that it imports, as one script: their names are different, so nothing else has to be done."""
    order: list[str] = []

    def visit(module: str) -> None:
        if module in order:
            return
        for dependency in _IMPORT.findall((page / f"{module}.js").read_text(encoding="utf-8")):
            visit(dependency)
        order.append(module)

    visit(name)
    texts = (_IMPORT.sub("", (page / f"{module}.js").read_text(encoding="utf-8")) for module in order)
    return "".join(re.sub(r"^export ", "", text, flags=re.MULTILINE) for text in texts)


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


PAGE = Path(__file__).parent / "page"
_THUMBNAIL_SIZE = 200  # pixels of a picture in one file
_MAX_SECOND_CHECKPOINTS = 2  # checkpoints beside the first that stay open


class Explorer:
    """Everything behind the page.

    Args:
        first: the checkpoint.  out: where its selection goes.
        another: from what a person typed to a second checkpoint. Raises `ConfigError`.

    Checkpoints are known by numbers that nobody gave before, another server neither: a tab that was left behind must not get
    another one's answers, nor save over them.
    """

    def __init__(self, first: Side, pictures: Pictures, out: Path, open_checkpoint: Callable[[str], Side]):
        self.pictures, self._open_checkpoint = pictures, open_checkpoint
        self.first = secrets.randbelow(2**31)
        self.sides = {self.first: first}
        self.files = {self.first: SelectionFile(first, out)}
        self._out = out
        self._model = threading.Lock()  # one pass through a model at a time
        self._opening = threading.Lock()  # its own: a checkpoint may come over a slow network
        self.attention_cache: dict[tuple[int, int], dict[str, Any]] = {}

    def facts(self) -> dict[str, Any]:
        """What the page draws first: the checkpoint, and the second one that was opened last."""
        return self._facts(list(dict.fromkeys((self.first, list(self.sides)[-1]))))

    def _facts(self, sides: list[int]) -> dict[str, Any]:
        return {
            "sides": [self.side_facts(number) for number in sides],
            "images": [
                {"key": escape_control_chars(s.key), "caption": escape_control_chars(s.caption), "own": s.own}
                for s in self.pictures.entries
            ],
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
        arrays = list(self.side(side).arrays.values())
        if not 0 <= number < len(arrays):
            raise ConfigError(f"task {number}: there are {len(arrays)}")
        return b"".join(array.tobytes() for array in arrays[number].arrays.values())

    def attention(self, side: int, image: int) -> dict[str, Any]:
        """Kept, as people go back and forth, and as one file holds what was looked at."""
        self.pictures.check(image)
        with self._model:
            if (side, image) not in self.attention_cache:
                self.attention_cache[side, image] = to_jsonable(self.side(side).attention(image))
        return self.attention_cache[side, image]

    def compare(self, checkpoint: str) -> dict[str, Any]:
        """Open a second checkpoint. The two that were opened last stay open, as there may be another tab."""
        if not self._opening.acquire(blocking=False):
            raise ConfigError(f"{checkpoint}: another checkpoint is being opened. Wait for it, then open this one.")
        try:
            side = self._open_checkpoint(checkpoint)
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
            for old in list(self.sides)[1:-_MAX_SECOND_CHECKPOINTS]:
                del self.sides[old], self.files[old]
            self.attention_cache = {key: value for key, value in self.attention_cache.items() if key[0] in self.sides}
        return self.side_facts(number)

    def offline_bundle(self, state: dict[str, Any]) -> dict[str, Any]:
        """All that one file needs: scores' arrays, small pictures, and the attention of the images that were looked at.

        Args:
            state: `sides`, for each checkpoint in sight its `id`, what is on, names and notes as the page has them, saved or not;
                `image`, the one in sight.
        """
        side_states = state.get("sides")
        if not isinstance(side_states, list) or not all(
            isinstance(one, dict) and type(one.get("id")) is int for one in side_states
        ):
            raise ConfigError("one file: says of no checkpoint what is on")
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
        """The model's turn."""
        with self._model:
            return to_jsonable(work())


def to_jsonable(value: Any) -> Any:
    """Arrays as base64 of little-endian fp32; text without control characters."""
    if isinstance(value, np.ndarray):
        return base64.b64encode(np.ascontiguousarray(value, "<f4").tobytes()).decode()
    if isinstance(value, dict):
        return {name: to_jsonable(one) for name, one in value.items()}
    if isinstance(value, list):
        return [to_jsonable(one) for one in value]
    return escape_control_chars(value) if isinstance(value, str) else value


def make_app(explorer: Explorer) -> Starlette:
    """The application, without its guard."""

    async def index(_: Request) -> Response:
        return FileResponse(PAGE / "index.html")

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

    def search(side: int, body: dict[str, Any]) -> Any:
        hits = explorer.run_locked(
            lambda: [one._asdict() for one in explorer.side(side).search(_required_text(body, "text"))]
        )
        return {"found": hits}

    def captions(side: int, body: dict[str, Any]) -> Any:
        texts, number = body.get("captions"), body.get("image")
        if not isinstance(texts, list) or not all(isinstance(t, str) for t in texts) or type(number) is not int:
            raise ConfigError("captions: give an image's number and a list of texts")
        explorer.pictures.check(number)
        return explorer.run_locked(lambda: explorer.side(side).captions(number, texts))

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
            post("/search/{side:int}", search),
            post("/captions/{side:int}", captions),
            post("/save/{side:int}", save),
            post("/read/{side:int}", read),
            post("/compare", lambda _, given: explorer.compare(_required_text(given, "checkpoint"))),
            post("/one-file", export_html),
            Mount("/page", StaticFiles(directory=PAGE)),
        ]
    )


def _required_text(body: dict[str, Any], key: str) -> str:
    if not isinstance(body.get(key), str) or not body[key].strip():
        raise ConfigError(f"{key}: is empty")
    return body[key].strip()
