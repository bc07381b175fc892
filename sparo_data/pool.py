"""Processes that make or check data; one of them that is killed is an error that can be acted on."""

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
    """What is started meanwhile does not hear SIGINT, from its first import on; this process hears it behind that."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # which is inherited
    received: list[int] = []
    # A progress bar's thread may take it all the same, and Python would raise here, in the middle of telling a process its work.
    main = threading.current_thread() is threading.main_thread()  # which alone may set handlers
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
    """This process itself, which does what was submitted when its result is asked for."""

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
    """So many processes, no more than there are jobs, started afresh: a fork would take torch's threads along, and leave them behind.
    For one alone this process does the work: another would need seconds to start.

    A Ctrl-C is this process's to hear; they are ended with what it interrupts.

    Raises:
        WorkerLostError: one of them was killed.
    """
    processes = min(processes, jobs)
    if processes < 2:
        yield _InProcessExecutor()
        return
    try:
        with ProcessPoolExecutor(processes, get_context("spawn"), end_with_parent) as pool:
            try:
                # A Ctrl-C that waited is heard as this ends: the processes are there by then.
                with _defer_sigint():
                    for _ in range(processes):  # each starts one
                        pool.submit(int)
                yield pool
            except BaseException:
                # They would finish all that was submitted; after a lost one the pool has none left.
                for process in list((getattr(pool, "_processes", None) or {}).values()):
                    process.kill()
                raise
    except BrokenProcessPool:
        raise WorkerLostError(
            "a process that works on the data was killed, most likely because memory ran out; use fewer --processes; what is "
            "written is whole, and the same line goes on"
        ) from None


def run_jobs(
    jobs: Sequence[tuple[Callable[..., int], tuple[Any, ...]]],
    processes: int,
    total: int,
    on_progress: Callable[[int, int], None] | None = None,
) -> None:
    """Run functions that return how many samples they made; `on_progress` is called with (samples done, `total`) at once and behind each."""
    done = 0
    if on_progress:
        on_progress(done, total)
    with process_pool(processes, len(jobs)) as pool:
        for future in [pool.submit(job, *arguments) for job, arguments in jobs]:
            done += future.result()
            if on_progress:
                on_progress(done, total)
