"""From the command line to a page that answers."""

from __future__ import annotations

import errno
import secrets
import socket
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from evals.report.results_file import refuse_unwritable
from evals.sets.task_config import TaskConfig
from sparo_train.core.errors import ConfigError

from ..runs.slot_work import EITHER, Bench, SlotOptions
from ..views.terminal import console, out
from .guard import Guard, is_loopback
from .opened import Side, able_of
from .pictures import Pictures

_FIRST = ("retrieval", "pairs", "zeroshot", "knn")  # whose images have most to tell, first


class Page(NamedTuple):
    """tasks: whose scores are shown.  on: the one whose images are shown.  images: so many of them.  compare: a second checkpoint.

    out: where the selection goes.  host, port: where the page is served.  token: asked for on loopback, too.
    """

    tasks: list[str] | None
    on: str | None
    images: int
    compare: str | None
    out: Path
    host: str
    port: int
    token: bool = False


def explore(checkpoint: str, wanted: Page, options: SlotOptions) -> None:
    """Serve the page until Ctrl-C."""
    try:
        import uvicorn

        from .app import Explorer, routes
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"sparo slots explore: needs {error.name}; pip install -e '.[explore]' in sparo's checkout"
        ) from None
    if options.units == "heads":
        raise ConfigError("--units heads: the page switches slots or parts; choose heads by sparo slots select")
    refuse_unwritable(wanted.out.parent, "--out")
    door = _door(wanted.host, wanted.port)  # before anything is loaded: a port in use is known at once
    with door:
        bench = Bench(checkpoint, options)
        tasks = bench.tasks(wanted.tasks, "--tasks")
        pictures = Pictures(_shown(bench, tasks, wanted.on), bench.encoder, wanted.images)
        first = Side(bench, tasks, pictures)
        first.tell()
        # Beside slots an encoding without any is seen as equal parts, as the paper compares them.
        second = replace(options, units=EITHER, parts=options.parts or first.units.number)
        explorer = Explorer(first, pictures, wanted.out, lambda name: Side(Bench(name, second), tasks, pictures))
        if wanted.compare is not None:
            explorer.compare(wanted.compare)
        token = None if is_loopback(wanted.host) and not wanted.token else secrets.token_urlsafe(24)
        app = Guard(routes(explorer), wanted.host, token)
        out.print(_address(door, wanted.host, token), soft_wrap=True)
        console.print(f"{checkpoint}: saves to {wanted.out}; Ctrl-C ends", soft_wrap=True)
        config = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=3)
        try:
            uvicorn.Server(config).run(sockets=[door])
        except KeyboardInterrupt:  # uvicorn has closed everything, and passes it on
            return


def _shown(bench: Bench, tasks: dict[str, TaskConfig], on: str | None) -> TaskConfig:
    if on is not None:
        return bench.one(on, "--on")[1]
    able = able_of(tasks, bench)
    if able:
        return min(able.values(), key=lambda task: _FIRST.index(task.task))
    seen = [
        task for task in tasks.values() if task.task == "masks"
    ]  # of a slot model: nothing to score here, much to look at
    if seen and "masks" in bench.encoder.offers:
        return seen[0]
    raise ConfigError(
        f"{bench.checkpoint}: of {', '.join(tasks)} none fits it; the page shows {', '.join(_FIRST)}: name others with --tasks"
    )


def _door(host: str, port: int) -> socket.socket:
    """A socket that listens. Raises `ConfigError` where that cannot be."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[
            0
        ]
        found = socket.socket(family, kind)
    except OSError as error:
        raise ConfigError(f"--host {host}: {error.strerror or error}; give an address of this machine") from None
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
        found.listen(128)
    except OSError as error:
        found.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"--port {port}: is in use on {host}; give another, or --port 0 for one that is free"
            ) from None
        raise ConfigError(f"--host {host} --port {port}: {error.strerror or error}") from None
    return found


def _address(door: socket.socket, host: str, token: str | None) -> str:
    port = door.getsockname()[1]
    name = host if host not in ("0.0.0.0", "::") else socket.gethostname()
    return f"http://{f'[{name}]' if ':' in name else name}:{port}/" + (f"?token={token}" if token else "")
