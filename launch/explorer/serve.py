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

from ..commands.slot_work import EITHER, Bench, SlotOptions
from ..views.terminal import console, out
from .guard import Guard, is_loopback
from .opened import Side, supported_tasks
from .pictures import Pictures

_TASK_PRIORITY = ("retrieval", "pairs", "zeroshot", "knn")  # whose images have most to tell, first


class PageOptions(NamedTuple):
    """tasks: whose scores are shown.  image_task: the one whose images are shown.  images: so many of them.  compare: a second checkpoint.

    out: where the selection goes.  host, port: where the page is served.  token: asked for on loopback, too.
    """

    tasks: list[str] | None
    image_task: str | None
    images: int
    compare: str | None
    out: Path
    host: str
    port: int
    token: bool = False


def explore(checkpoint: str, page_options: PageOptions, options: SlotOptions) -> None:
    """Serve the page until Ctrl-C."""
    try:
        import uvicorn

        from .app import Explorer, make_app
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"sparo slots explore: needs {error.name}; pip install -e '.[explore]' in sparo's checkout"
        ) from None
    if options.units == "heads":
        raise ConfigError("--units heads: the page switches slots or parts; choose heads by sparo slots select")
    refuse_unwritable(page_options.out.parent, "--out")
    sock = _listening_socket(
        page_options.host, page_options.port
    )  # before anything is loaded: a port in use is known at once
    with sock:
        bench = Bench(checkpoint, options)
        tasks = bench.tasks(page_options.tasks, "--tasks")
        pictures = Pictures(_image_task(bench, tasks, page_options.image_task), bench.encoder, page_options.images)
        first = Side(bench, tasks, pictures)
        first.set_picture_metadata()
        # Beside slots an encoding without any is seen as equal parts, as the paper compares them.
        second = replace(options, units=EITHER, parts=options.parts or first.units.number)
        explorer = Explorer(first, pictures, page_options.out, lambda name: Side(Bench(name, second), tasks, pictures))
        if page_options.compare is not None:
            explorer.compare(page_options.compare)
        token = None if is_loopback(page_options.host) and not page_options.token else secrets.token_urlsafe(24)
        app = Guard(make_app(explorer), page_options.host, token)
        out.print(_address(sock, page_options.host, token), soft_wrap=True)
        console.print(f"{checkpoint}: saves to {page_options.out}; Ctrl-C ends", soft_wrap=True)
        config = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=3)
        try:
            uvicorn.Server(config).run(sockets=[sock])
        except KeyboardInterrupt:  # uvicorn has closed everything, and passes it on
            return


def _image_task(bench: Bench, tasks: dict[str, TaskConfig], task_name: str | None) -> TaskConfig:
    if task_name is not None:
        return bench.single_task(task_name, "--task")[1]
    candidates = supported_tasks(tasks, bench)
    if candidates:
        return min(candidates.values(), key=lambda task: _TASK_PRIORITY.index(task.task))
    mask_tasks = [
        task for task in tasks.values() if task.task == "masks"
    ]  # of a slot model: nothing to score here, much to look at
    if mask_tasks and "masks" in bench.encoder.offers:
        return mask_tasks[0]
    raise ConfigError(
        f"{bench.checkpoint}: of {', '.join(tasks)} none fits it; the page shows {', '.join(_TASK_PRIORITY)}: name others with --tasks"
    )


def _listening_socket(host: str, port: int) -> socket.socket:
    """A socket that listens. Raises `ConfigError` where that cannot be."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[
            0
        ]
        sock = socket.socket(family, kind)
    except OSError as error:
        raise ConfigError(f"--host {host}: {error.strerror or error}; give an address of this machine") from None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(128)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"--port {port}: is in use on {host}; give another, or --port 0 for one that is free"
            ) from None
        raise ConfigError(f"--host {host} --port {port}: {error.strerror or error}") from None
    return sock


def _address(sock: socket.socket, host: str, token: str | None) -> str:
    port = sock.getsockname()[1]
    name = host if host not in ("0.0.0.0", "::") else socket.gethostname()
    return f"http://{f'[{name}]' if ':' in name else name}:{port}/" + (f"?token={token}" if token else "")
