"""The one owner of loader workers: whatever happens, they end, and a death among them is an error that can be acted on."""

from __future__ import annotations

import atexit
import functools
import os
import signal
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from ...core.errors import ConfigError, SparoError, WorkerLostError
from ...core.world import ignore_in_worker

_LONGEST_FOLDER = 107 - len("/listener-12345678")  # bytes; a socket's path has 107
_LOOK = 5.0  # seconds without an item after which workers are looked at
_LOOKS = {"T": 12, "D": 120}  # looks in a row: a minute where stopped, ten where a file system may come back
_STUCK = {
    "T": ("is stopped (SIGSTOP)", "Find out what stops it"),
    "D": ("waits for its file system", "Check the disk or the server that the data is on"),
}
_PATIENCE = 1.0  # seconds that the end of a worker may take to be known


def iterate_in_workers(
    dataset: Dataset[Any],
    workers: int,
    collate: Callable[[Any], Any],
    batches: Sequence[Sequence[int]] | None = None,
    prefetch: int = 2,
) -> Generator[Any, None, None]:
    """What a dataset gives, prepared by `workers` processes (0: by this one).

    Args:
        batches: numbers of samples; None: the dataset is an iterable of what is delivered.
        prefetch: items that each worker prepares ahead.

    Raises:
        SparoError: one that a worker delivered in place of an item: torch would bury its message in the worker's traceback.
        WorkerLostError: a worker was killed, most likely for memory; or it is stopped, or hangs in its file system.
        ConfigError: the folder for temporary files has too long a path.
    """
    if workers:
        # Workers share tensors through sockets in a folder of this process, which removes it at its end. A worker that made one
        # itself would leave it behind, because workers are killed.
        folder = get_temp_dir()
        if len(os.fsencode(folder)) > _LONGEST_FOLDER:
            raise ConfigError(
                f"TMPDIR: is too long for the sockets of loader workers, got {folder}. Set TMPDIR to a shorter folder, as in /tmp."
            )
    loader = DataLoader(
        dataset,
        batch_size=None if batches is None else 1,
        batch_sampler=batches,  # type: ignore[arg-type]
        num_workers=workers,
        prefetch_factor=prefetch if workers else None,
        timeout=_LOOK if workers else 0,
        # Workers whose parent is a fork server do not notice that this process was killed, and stay.
        # Forked: the index and the decoded tables of all shards are shared, not copied.
        multiprocessing_context="fork" if workers else None,
        collate_fn=collate,
        worker_init_fn=_start_worker,
        generator=torch.Generator(),  # its own: a loader's start must not move the training's random stream
    )
    with _restore_sigchld_handler():
        parts = iter(loader)
    # Workers ignore SIGTERM, which is how multiprocessing would end those of a process that exits without closing us.
    # By a weak reference: this function must not keep the loader alive that it ends.
    end = functools.partial(_kill, weakref.ref(parts))
    if workers:
        parts._workers_done_event = _KillWorkersEvent(end)  # pyright: ignore[reportAttributeAccessIssue]
    atexit.register(end)
    stuck = Counter[tuple[int, str]]()
    try:
        while True:
            try:
                item = next(parts)
                stuck.clear()
            except StopIteration:
                return
            except (RuntimeError, OSError, EOFError) as error:
                if str(error).startswith("DataLoader timed out"):  # which leaves it as it was
                    _refuse_stuck(parts, stuck)
                    continue
                if (lost := _worker_lost_error(parts)) is not None:
                    raise lost from None
                raise
            if isinstance(item, SparoError):
                raise item
            yield item
    finally:  # at once: an exception's traceback may keep this frame, and with it the workers, alive
        end()  # they hold nothing that could be lost, and one in a long sample would have to be waited for
        if workers:
            parts._shutdown_workers()  # pyright: ignore[reportAttributeAccessIssue]
        atexit.unregister(end)


class _KillWorkersEvent(threading.Event):
    """In place of the event that torch shares with workers, whose lock is never given back by one that is killed while it asks."""

    def __init__(self, kill: Callable[[], None]):
        super().__init__()
        self._kill = kill

    def set(self) -> None:
        """They are not told to end, but ended: they hold nothing that could be lost."""
        self._kill()
        super().set()


def _worker_lost_error(parts: Iterator[Any]) -> WorkerLostError | None:
    """What became of the workers, where one of them has ended by itself; its connection may break before its end is known."""
    workers, dead, end = getattr(parts, "_workers", []), [], time.monotonic() + _PATIENCE
    while workers and not dead and time.monotonic() < end:
        dead = [worker for worker in workers if worker.exitcode not in (None, 0)]
        time.sleep(0 if dead else 0.05)
    if not dead:
        return None
    code = dead[0].exitcode
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    return WorkerLostError(
        f"a loader worker (process {dead[0].pid}) {how}, most likely because memory ran out; start again with fewer workers or a "
        "smaller data.prefetch (of tasks: their `workers`)"
    )


def _refuse_stuck(parts: Iterator[Any], stuck: Counter[tuple[int, str]]) -> None:
    """Raise `WorkerLostError` for a worker that was found stopped, or waiting for its file system, at every look for too long.

    Args:
        stuck: by process and state, at how many looks in a row; kept between calls. Looks are counted, not seconds: Ctrl-Z stops
            this process as well, and looks at nothing meanwhile.
    """
    now = {(worker.pid, state_of(worker.pid)) for worker in getattr(parts, "_workers", [])}
    for key in [*stuck]:
        if key not in now:
            del stuck[key]
    stuck.update(now)
    for (pid, state), looks in stuck.items():
        if looks < _LOOKS.get(state, looks + 1):
            continue
        what, remedy = _STUCK[state]
        raise WorkerLostError(
            f"a loader worker (process {pid}) {what}, got no sample for {looks * _LOOK:.0f} s. {remedy}, then run the same command again."
        )


def state_of(pid: int) -> str:
    """Return Linux's letter for the state of a process (`R`, `S`, `T`: stopped, `D`: waits for a device); empty on other systems."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(") ")[2][:1]
    except OSError:
        return ""


@contextmanager
def _restore_sigchld_handler() -> Iterator[None]:
    """Undo the handler of SIGCHLD that torch sets: it raises wherever the program stands, in the middle of a step, too.

    A death is noticed all the same, within five seconds, by whoever waits for the next item.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGCHLD)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, before)


def _kill(loader: weakref.ref[Any]) -> None:
    for worker in getattr(loader(), "_workers", []):
        if worker.is_alive():
            worker.kill()


def _start_worker(_number: int) -> None:
    # A worker is one core; threads of its own would take those of the others.
    torch.set_num_threads(1)
    ignore_in_worker()
