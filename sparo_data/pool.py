"""Processes that make or check data; if one is killed, an error explains it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any

from sparo_train.core.errors import WorkerLostError
from sparo_train.core.world import end_with_parent


@contextmanager
def _defer_sigint() -> Iterator[None]:
    """Make processes that start in this context ignore SIGINT, even while importing; this process handles it afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # inherited by the processes
    received: list[int] = []
    # The thread of a progress bar may receive it all the same, and Python would raise here, while handing work to a
    # process.
    main = threading.current_thread() is threading.main_thread()  # only the main thread may set handlers
    handler = signal.signal(signal.SIGINT, lambda number, _frame: received.append(number)) if main else None
    try:
        yield
    finally:
        if main:
            signal.signal(signal.SIGINT, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if received:
            signal.raise_signal(signal.SIGINT)


class _InProcessExecutor(Executor):
    """Executor that runs a job in this process when its result is requested."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return _LazyFuture(fn, args, kwargs)


class _LazyFuture(Future[Any]):
    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]):
        super().__init__()
        self._work = (fn, args, kwargs)

    def result(self, timeout: float | None = None) -> Any:
        if not self.done():
            fn, args, kwargs = self._work
            self.set_result(fn(*args, **kwargs))
        return super().result(timeout)


@contextmanager
def process_pool(processes: int, jobs: int) -> Iterator[Executor]:
    """Yield an executor of `processes` processes, at most one per job, started with spawn, because a fork would copy torch's threads in a broken state.

    A single process is this one, because starting another takes seconds. Ctrl-C is handled by this process, which then
    ends the others.

    Raises:
        WorkerLostError: a process was killed.
    """
    processes = min(processes, jobs)
    if processes < 2:
        yield _InProcessExecutor()
        return
    try:
        with ProcessPoolExecutor(processes, get_context("spawn"), end_with_parent) as pool:
            try:
                # A pending Ctrl-C is handled at the end of this context, when the processes exist.
                with _defer_sigint():
                    for _ in range(processes):  # each starts a process
                        pool.submit(int)
                yield pool
            except BaseException:
                # Otherwise they would finish all submitted jobs; after a loss, the pool has no processes left.
                for process in list((getattr(pool, "_processes", None) or {}).values()):
                    process.kill()
                raise
    except BrokenProcessPool:
        raise WorkerLostError(
            "a worker process was killed, probably because memory ran out. Run the same command again with "
            "fewer --processes: finished files are kept, and the work continues after them."
        ) from None


def run_jobs(
    jobs: Sequence[tuple[Callable[..., int], tuple[Any, ...]]],
    processes: int,
    total: int,
    on_progress: Callable[[int, int], None] | None = None,
) -> None:
    """Run functions that return their number of samples; `on_progress` is called with (finished samples, `total`) at the start and after each."""
    done = 0
    if on_progress:
        on_progress(done, total)
    with process_pool(processes, len(jobs)) as pool:
        for future in [pool.submit(job, *arguments) for job, arguments in jobs]:
            done += future.result()
            if on_progress:
                on_progress(done, total)
