"""Server of the explorer's page."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import secrets
import shlex
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

import uvicorn

from evals.report.results_file import refuse_unwritable
from evals.sets.task_config import TaskConfig
from sparo_train.core.errors import ConfigError

from ..commands.slot_work import EITHER, Bench, SlotOptions
from ..views.terminal import console, out
from .app import Explorer, make_app
from .opened import Pictures, Side, supported_tasks
from .static_page import refuse_unsupported, write_static

POLICY = "default-src 'self'; img-src 'self' blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
_HEADERS = [
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
]
_MAX_PATH_LENGTH = 200  # limit in characters for a path; ours are shorter


class Guard:
    """ASGI middleware that checks requests.

    The Host header must name this machine, or a foreign page could reach the server under its own name (DNS rebinding).
    Requests that change something must come from the explorer's own page, by their Origin or Sec-Fetch-Site, and have a header
    that forms cannot send.

    Args:
        app: the application.
        host: address on which the server listens.
        token: must be given once as `?token=`; None on loopback.
        names: further names of this machine, such as that of a proxy; they need a token.
    """

    def __init__(self, app: Any, host: str, token: str | None, names: Sequence[str] = ()):
        self.app, self._host, self._token = app, host, token
        self._names = {host.lower(), socket.gethostname().lower(), socket.getfqdn().lower(), *map(str.lower, names)}

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        extra = list(_HEADERS)
        query_token = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("token", [""])[0]
        if not self._is_allowed_host(headers.get("host", "")):
            text = "The Host header names another machine. Use the address that sparo printed, or start sparo with --allow-host."
            await _refuse(send, 400, text)
            return
        if len(scope["path"]) > _MAX_PATH_LENGTH:
            await _refuse(send, 404, "There is nothing here.")
            return
        # Named by port, because cookies of one host are sent to all of its ports.
        cookie = f"sparo_explore_{scope.get('server', ('', 0))[1]}"
        if self._token is not None:
            if query_token and secrets.compare_digest(query_token.encode(), self._token.encode()):
                # Remove the token from the address bar, whose content gets copied and logged. Neither the address nor the
                # cookie names a path, because a proxy may serve the page below a prefix that requests do not contain.
                cookie_header = f"{cookie}={self._token}; HttpOnly; SameSite=Strict"
                extra += [(b"set-cookie", cookie_header.encode()), (b"location", b"./")]
                await _refuse(send, 303, "", extra)
                return
            if not secrets.compare_digest(_cookie(headers, cookie).encode(), self._token.encode()):
                await _refuse(send, 403, "A token is required. Open the full address that sparo printed.")
                return
        if scope["method"] not in ("GET", "HEAD") and not _is_same_origin(headers):
            await _refuse(send, 403, "Only the explorer's own page may change something.")
            return

        started = False

        async def send_with_headers(message: dict[str, Any]) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message = {**message, "headers": [*message.get("headers", []), *extra]}
            await send(message)

        try:
            await self.app(scope, receive, send_with_headers)
        except asyncio.CancelledError:  # Ctrl-C: the server ends, and would print a traceback for every pending request
            if not started:
                await _refuse(send, 503, "The explorer was stopped.")

    def _is_allowed_host(self, value: str) -> bool:
        try:
            name = "" if "@" in value else (urlsplit(f"//{value}").hostname or "").lower()
        except ValueError:
            return False
        if is_loopback(name):
            return True
        if self._token is None:
            return False
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name in self._names
        return True  # an address is not a name that others could redirect


def is_loopback(name: str) -> bool:
    """Return whether a name is `localhost`, 127.0.0.0/8 or ::1."""
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost"


def _is_same_origin(headers: dict[str, str]) -> bool:
    origin = headers.get("origin")
    try:
        # Browsers send Sec-Fetch-Site, which no page can set. Host differs from Origin behind proxies that replace it.
        same = (
            headers.get("sec-fetch-site") == "same-origin"
            or origin is None
            or urlsplit(origin).netloc.lower() == headers.get("host", "").lower()
        )
    except ValueError:
        return False
    return same and headers.get("x-sparo") == "explore"


def _cookie(headers: dict[str, str], name: str) -> str:
    try:
        morsel = SimpleCookie(headers.get("cookie", "")).get(name)
    except CookieError:
        return ""
    return morsel.value if morsel else ""


async def _refuse(send: Any, status: int, text: str, headers: list[tuple[bytes, bytes]] = _HEADERS) -> None:
    kind = (b"content-type", b"text/plain; charset=utf-8")
    await send({"type": "http.response.start", "status": status, "headers": [*headers, kind]})
    await send({"type": "http.response.body", "body": text.encode()})


_TASK_PRIORITY = (
    "retrieval",
    "pairs",
    "choice",
    "matching",
    "paraphrases",
    "zeroshot",
    "knn",
)  # tasks in order of preference for the images


class PageOptions(NamedTuple):
    """Options of the page.

    Attributes:
        tasks: tasks whose scores are shown.
        image_task: task whose images are shown.
        images: number of images.
        compare: a second checkpoint.
        out: path of the selection.
        host, port: address of the page.
        token: require a token on loopback, too.
        names: further names of this machine that requests may give, together with a token.
    """

    tasks: list[str] | None
    image_task: str | None
    images: int
    compare: str | None
    out: Path
    host: str
    port: int
    token: bool = False
    names: tuple[str, ...] = ()


def explore(checkpoint: str, page_options: PageOptions, options: SlotOptions) -> None:
    """Serve the page until Ctrl-C."""
    sock = _listening_socket(
        page_options.host, page_options.port
    )  # before anything is loaded, so that a port in use is reported at once
    with sock:
        explorer = _open(checkpoint, page_options, options)
        local = is_loopback(page_options.host) and not page_options.token and not page_options.names
        token = None if local else secrets.token_urlsafe(24)
        app = Guard(make_app(explorer), page_options.host, token, page_options.names)
        config = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=3)
        # Before uvicorn handles Ctrl-C, and afterwards: it closes everything, and raises the exception again.
        with suppress(KeyboardInterrupt):
            out.print(_address(sock, page_options.host, token), soft_wrap=True)
            console.print(f"{checkpoint}: saves to {page_options.out}; Ctrl-C ends", soft_wrap=True)
            uvicorn.Server(config).run(sockets=[sock])


def write_page(checkpoint: str, page_options: PageOptions, options: SlotOptions, target: Path, precision: str) -> None:
    """Write the page with its model, for any web server, or as one file if `target` ends with .html."""
    one_file = target.suffix.lower() == ".html"
    refuse_unsupported(checkpoint, target, one_file)
    refuse_unwritable(target.parent if one_file else target, "--static")
    paths = write_static(_open(checkpoint, page_options, options), checkpoint, precision, target, one_file)
    for path in paths:
        out.print(f"{path}  {path.stat().st_size / 1e6:.1f} MB", soft_wrap=True)
    how = (
        f"open {target} in a browser" if one_file else f"python3 -m http.server --directory {shlex.quote(str(target))}"
    )
    console.print(f"next: {how}", soft_wrap=True)


def _open(checkpoint: str, page_options: PageOptions, options: SlotOptions) -> Explorer:
    """Open the checkpoints, and encode their tasks."""
    if options.units == "heads":
        raise ConfigError("--units heads: the page supports slots or parts. Use `sparo slots select` to select heads.")
    refuse_unwritable(page_options.out.parent, "--out")
    bench = Bench(checkpoint, options)
    tasks = bench.tasks(page_options.tasks, "--tasks")
    pictures = Pictures(_image_task(bench, tasks, page_options.image_task), bench.encoder, page_options.images)
    first = Side(bench, tasks, pictures)
    first.set_picture_metadata()
    # An encoding without slots is divided into equal parts for comparison, as in the paper.
    second = replace(options, units=EITHER, parts=options.parts or first.units.number)
    explorer = Explorer(first, pictures, page_options.out, lambda name: Side(Bench(name, second), tasks, pictures))
    if page_options.compare is not None:
        explorer.compare(page_options.compare)
    return explorer


def _image_task(bench: Bench, tasks: dict[str, TaskConfig], task_name: str | None) -> TaskConfig:
    if task_name is not None:
        return bench.single_task(task_name, "--task")[1]
    candidates = supported_tasks(tasks, bench)
    if candidates:
        return min(candidates.values(), key=lambda task: _TASK_PRIORITY.index(task.task))
    mask_tasks = [
        task for task in tasks.values() if task.task == "masks"
    ]  # a slot model: nothing to score here, much to see
    if mask_tasks and "masks" in bench.encoder.offers:
        return mask_tasks[0]
    raise ConfigError(
        f"{bench.checkpoint}: supports none of the tasks {', '.join(tasks)}. Name others with --tasks; the page of "
        f"this command can show only tasks of kind {', '.join(_TASK_PRIORITY)}."
    )


def _listening_socket(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises `ConfigError` if the address cannot be used."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[
            0
        ]
        sock = socket.socket(family, kind)
    except OSError as error:
        raise ConfigError(f"--host {host}: {error.strerror or error}. Give an address of this machine.") from None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(128)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"--port {port}: is in use on {host}. Give another, or --port 0 for a free one."
            ) from None
        raise ConfigError(f"--host {host} --port {port}: {error.strerror or error}") from None
    return sock


def _address(sock: socket.socket, host: str, token: str | None) -> str:
    port = sock.getsockname()[1]
    name = host if host not in ("0.0.0.0", "::") else socket.gethostname()
    return f"http://{f'[{name}]' if ':' in name else name}:{port}/" + (f"?token={token}" if token else "")
