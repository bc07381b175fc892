"""Owner of loader workers: they always end, and if one dies, an error explains it."""

from __future__ import annotations

import atexit
import functools
import os
import signal
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from ...core.errors import ConfigError, SparoError, WorkerLostError
from ...core.world import ignore_in_worker

_LONGEST_FOLDER = 107 - len("/listener-12345678")  # bytes; the path of a socket may have 107
_LOOK = 5.0  # seconds without an item before workers are inspected
_LOOKS = {"T": 12, "D": 120}  # consecutive inspections: one minute if stopped, ten if a file system may recover
_STUCK = {
    "T": ("is stopped (SIGSTOP)", "Find out what stops it"),
    "D": ("waits for its file system", "Check the disk or the server that the data is on"),
}
_PATIENCE = 1.0  # seconds to wait for the exit status of a worker


class WorkerItems(Iterator[Any]):
    """Items of a dataset, prepared by processes that start with this object. `close` ends them.

    Args:
        dataset: the dataset.
        workers: number of processes (0: this process prepares the items).
        collate: combines samples to an item.
        batches: indices of samples per item; None: the dataset is an iterable of items.
        prefetch: items that each worker prepares ahead.

    Raises:
        SparoError: an error that a worker returned as an item, because torch would bury its message in the worker's
            traceback.
        WorkerLostError: a worker was killed (most likely out of memory), is stopped, or hangs in its file system.
        ConfigError: the path of the folder for temporary files is too long.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        workers: int,
        collate: Callable[[Any], Any],
        batches: Sequence[Sequence[int]] | None = None,
        prefetch: int = 2,
    ):
        if workers:
            _refuse_long_folder()
        loader = DataLoader(
            dataset,
            batch_size=None if batches is None else 1,
            batch_sampler=batches,  # type: ignore[arg-type]
            num_workers=workers,
            prefetch_factor=prefetch if workers else None,
            timeout=_LOOK if workers else 0,
            # With a fork server as parent, workers would not notice that this process was killed. Forked workers also
            # share the index and the decoded tables of all shards.
            multiprocessing_context="fork" if workers else None,
            collate_fn=collate,
            worker_init_fn=_start_worker,
            generator=torch.Generator(),  # its own, so that starting a loader does not change training's random numbers
        )
        with _restore_sigchld_handler():
            self._parts: Any = iter(loader)
        # Workers ignore SIGTERM, with which multiprocessing would end them if this process exits without closing the
        # loader. A weak reference, so that this function does not keep the loader alive.
        self._kill = functools.partial(_kill, weakref.ref(self._parts))
        if workers:
            self._parts._workers_done_event = _KillWorkersEvent(self._kill)
        atexit.register(self._kill)
        self._stuck = Counter[tuple[int, str]]()

    def __next__(self) -> Any:
        try:
            return self._next()
        except BaseException:  # at once, because a traceback may keep this object and the workers alive
            self.close()
            raise

    def _next(self) -> Any:
        while self._parts is not None:
            try:
                item = next(self._parts)
            except (RuntimeError, OSError, EOFError) as error:
                if str(error).startswith("DataLoader timed out"):  # and leaves it unchanged
                    _refuse_stuck(self._parts, self._stuck)
                    continue
                if (lost := _worker_lost_error(self._parts)) is not None:
                    raise lost from None
                raise
            self._stuck.clear()
            if isinstance(item, SparoError):
                raise item
            return item
        raise StopIteration

    def close(self) -> None:
        """End the workers. They have no state to lose, and one might be in a long sample."""
        parts, self._parts = self._parts, None
        if parts is None:
            return
        self._kill()
        if hasattr(parts, "_shutdown_workers"):
            parts._shutdown_workers()
        atexit.unregister(self._kill)


def _refuse_long_folder() -> None:
    """Raise `ConfigError` if sockets cannot have a path in the folder for temporary files.

    Workers share tensors through sockets in a folder of this process, which removes it at its end. Workers would leave
    their own folders behind when they are killed.
    """
    folder = get_temp_dir()
    if len(os.fsencode(folder)) > _LONGEST_FOLDER:
        raise ConfigError(
            f"TMPDIR: is too long a path for the sockets of loader workers, got {folder}. Set TMPDIR to a shorter "
            "path, such as /tmp."
        )


class _KillWorkersEvent(threading.Event):
    """Replaces the event that torch shares with workers, whose lock is lost if a worker is killed while it holds it."""

    def __init__(self, kill: Callable[[], None]):
        super().__init__()
        self._kill = kill

    def set(self) -> None:
        """Kill the workers instead of telling them to end, because they have no state to lose."""
        self._kill()
        super().set()


def _worker_lost_error(parts: Iterator[Any]) -> WorkerLostError | None:
    """Return an error if a worker has ended by itself; its connection may break before its exit status is known."""
    workers, dead, end = getattr(parts, "_workers", []), [], time.monotonic() + _PATIENCE
    while workers and not dead and time.monotonic() < end:
        dead = [worker for worker in workers if worker.exitcode not in (None, 0)]
        time.sleep(0 if dead else 0.05)
    if not dead:
        return None
    code = dead[0].exitcode
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    return WorkerLostError(
        f"a loader worker (process {dead[0].pid}) {how}, probably out of memory. Start again with fewer workers or a "
        "smaller data.prefetch (of tasks: their `workers`)"
    )


def _refuse_stuck(parts: Iterator[Any], stuck: Counter[tuple[int, str]]) -> None:
    """Raise `WorkerLostError` for a worker that was stopped, or waiting for its file system, at too many consecutive inspections.

    Args:
        parts: the workers.
        stuck: number of consecutive inspections by process and state; kept between calls. Inspections are counted
            instead of seconds, because Ctrl-Z stops this process as well.
    """
    now = {(worker.pid, read_process_state(worker.pid)) for worker in getattr(parts, "_workers", [])}
    for key in [*stuck]:
        if key not in now:
            del stuck[key]
    stuck.update(now)
    for (pid, state), looks in stuck.items():
        if looks < _LOOKS.get(state, looks + 1):
            continue
        what, remedy = _STUCK[state]
        raise WorkerLostError(
            f"a loader worker (process {pid}) {what} and has sent no sample for {looks * _LOOK:.0f} s. {remedy}, then "
            "run the same command again."
        )


def read_process_state(pid: int) -> str:
    """Return Linux's letter for the state of a process (`R`, `S`, `T`: stopped, `D`: waits for a device); empty on other systems."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(") ")[2][:1]
    except OSError:
        return ""


@contextmanager
def _restore_sigchld_handler() -> Iterator[None]:
    """Restore the handler of SIGCHLD that torch replaces, because torch's handler raises anywhere, even in the middle of a step.

    A death is still noticed within five seconds by the process that waits for the next item.
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
    # A worker uses one core; additional threads would compete with the other workers.
    torch.set_num_threads(1)
    ignore_in_worker()
