"""This process: the rank and world size set by the launcher, and signals as flags that the loop reads between steps."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import FrameType, TracebackType

from .errors import ConfigError, StoppedError

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_NAMES = ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP")


class StopFlag:
    """Context manager in which signals that would end the process set `received` instead.

    SIGHUP comes from a closed terminal. If it is ignored, as under nohup, it stays ignored.

    A second Ctrl-C raises KeyboardInterrupt at once, for users who do not want to wait for the step to end.
    """

    def __init__(self) -> None:
        self.received: str | None = None
        self._old: dict[str, object] = {}

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        # Only for Ctrl-C: SLURM sends SIGTERM more than once by itself.
        if name == "SIGINT" and self.received == "SIGINT":
            raise KeyboardInterrupt
        self.received = self.received or name

    def number(self) -> int:
        """Return 0 if no signal was received, otherwise its index among the signals that stop a run, so that ranks can agree on one."""
        return 0 if self.received is None else 1 + _NAMES.index(self.received)

    @staticmethod
    def name(number: int) -> str | None:
        """Return the name of signal `number`, or None for 0."""
        return _NAMES[number - 1] if number else None

    def __enter__(self) -> StopFlag:
        for name in _NAMES:
            if name != "SIGHUP" or signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
                self._old[name] = signal.signal(getattr(signal, name), self._handle)
        _open.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        _open.remove(self)
        for name, old in self._old.items():
            # Restore the handlers, so that a notebook's own Ctrl-C works after the run.
            signal.signal(getattr(signal, name), old)  # type: ignore[arg-type]


_open: list[StopFlag] = []


def stop_here() -> None:
    """Raise `StoppedError` if an open `StopFlag` received a signal. Call it where long work can be abandoned and repeated after resuming."""
    for flag in _open:
        if flag.received is not None:
            raise StoppedError(flag.received)


def ignore_in_worker() -> None:
    """Ignore signals in a loader worker: the main process saves and closes its workers; if it is killed, they end, too.

    A worker holds open sockets of its rank. While it lives, other ranks do not notice that their peer died.
    """
    for name in _NAMES:
        # Ctrl-C in a terminal reaches the whole process group.
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    end_with_parent()


def end_with_parent() -> None:
    """Let the kernel end this process when its parent is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        parent = multiprocessing.parent_process()
        if parent is not None and os.getppid() != parent.pid:  # the parent was killed before the kernel was asked
            os._exit(1)


_STARTED: list[World] = []


@dataclass(frozen=True)
class World:
    """Rank and world size of this process, globally and on this machine."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0


def find_world(environment: Mapping[str, str] | None = None) -> World:
    """Return the world that torchrun or SLURM started, from the environment; a world of one rank if there is none.

    Raises:
        ConfigError: the environment is incomplete.
    """
    env = os.environ if environment is None else environment
    if "WORLD_SIZE" in env:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    elif whole_number(env, "SLURM_STEP_NUM_TASKS", 1) > 1 and "SLURM_PROCID" in env:
        names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
    else:
        return World()
    missing = [name for name in names if name not in env]
    if missing:
        raise ConfigError(f"{missing[0]} is not set, although {names[1]} is. Start with torchrun or srun.")
    rank, size, local_rank = (whole_number(env, name, 0) for name in names)
    if not 0 <= rank < size or local_rank < 0:
        raise ConfigError(f"{names[0]}={rank}: must be below {names[1]}={size}. Start with torchrun or srun.")
    return World(rank, size, local_rank)


def whole_number(environment: Mapping[str, str], name: str, default: int) -> int:
    """Return a variable that must contain a whole number. Raises `ConfigError` naming it otherwise."""
    text = environment.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise ConfigError(
            f"{name}={text}: expected a whole number. Unset it, or start with torchrun or srun."
        ) from None


def note_start(world: World) -> None:
    """Record that this process joins the others of `world`."""
    _STARTED.append(world)


def launched_world() -> World | None:
    """Return the world of several ranks that this process was launched into, or None."""
    return _STARTED[0] if _STARTED else None
