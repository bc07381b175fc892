"""This process: the rank and world size set by the launcher, and signals as flags that the loop reads between steps."""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import NamedTuple

from .errors import ConfigError, StoppedError

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_NAMES = ("SIGINT", "SIGTERM", "SIGUSR2", "SIGHUP")


class StopFlag:
    """Context manager in which signals that would end the process set `received` instead.

    SIGUSR1 sets `save` and stops nothing: the loop writes a checkpoint and continues.

    SIGHUP comes from a closed terminal. If it is ignored, as under nohup, it stays ignored.

    A second Ctrl-C raises KeyboardInterrupt at once, for users who do not want to wait for the step to end.
    """

    def __init__(self) -> None:
        self.received: str | None = None
        self.save = False
        self._old: dict[str, object] = {}

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        # Only for Ctrl-C: SLURM sends SIGTERM more than once by itself.
        if name == "SIGINT" and self.received == "SIGINT":
            logger.warning("second Ctrl-C: stopped at once, without saving a checkpoint")
            raise KeyboardInterrupt
        self.received = self.received or name

    def _request_save(self, _number: int, _frame: FrameType | None) -> None:
        self.save = True

    def take_save(self) -> bool:
        """Return whether a checkpoint was requested since the last call."""
        requested, self.save = self.save, False
        return requested

    def number(self) -> int:
        """Return 0 if no signal was received, otherwise its index among the signals that stop a run, so that ranks can agree on one."""
        return 0 if self.received is None else 1 + _NAMES.index(self.received)

    @staticmethod
    def name(number: int) -> str | None:
        """Return the name of signal `number`, or None for 0."""
        return _NAMES[number - 1] if number else None

    def __enter__(self) -> StopFlag:
        _open.append(self)
        if threading.current_thread() is not threading.main_thread():
            logger.warning(
                "Training runs in a thread, so signals do not stop it: Python handles them in the main thread."
            )
            return self
        for name in _NAMES:
            if name != "SIGHUP" or signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
                self._old[name] = signal.signal(getattr(signal, name), self._handle)
        self._old["SIGUSR1"] = signal.signal(signal.SIGUSR1, self._request_save)
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
    for name in (*_NAMES, "SIGUSR1"):
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


class Launcher(NamedTuple):
    """Program that starts ranks, and the variables that it sets for each of them.

    Attributes:
        name: torchrun, srun, mpirun (Open MPI) or mpiexec (MPICH, Intel MPI, PALS).
        rank, size, local_rank: names of the variables.
        local_size: number of ranks on this machine.
        job: variable that differs between jobs on one machine.
    """

    name: str
    rank: str
    size: str
    local_rank: str
    local_size: str
    job: str


_TORCHRUN = Launcher("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID")
_SRUN = Launcher(
    "srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_TASKS_PER_NODE", "SLURM_JOB_ID"
)
# In this order. Inside a SLURM job, mpirun and mpiexec start their daemons with srun, so the ranks inherit variables of
# that step, which counts nodes. `srun --mpi=pmi2` sets PMI_RANK, too, but not MPI_LOCALRANKID.
LAUNCHERS = (
    _TORCHRUN,
    Launcher(
        "mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE", "PMIX_NAMESPACE",
    ),
    Launcher("mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "PMI_PORT"),
    _SRUN,
    Launcher("mpiexec", "PMI_RANK", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE", "PALS_APID"),
)  # fmt: skip


def find_launcher(environment: Mapping[str, str]) -> Launcher | None:
    """Return the program that started this process as one of several ranks, or None."""
    for launcher in LAUNCHERS:
        if launcher is _TORCHRUN:
            if launcher.size in environment:  # with any size, because its other variables must be complete
                return launcher
        elif (
            whole_number(environment, launcher.size, 1) > 1
            and launcher.rank in environment
            and (launcher is _SRUN or launcher.local_rank in environment)
        ):
            return launcher
    return None


def find_world(environment: Mapping[str, str] | None = None) -> World:
    """Return the world that torchrun, srun, mpirun or mpiexec started, from the environment; one rank if there is none.

    Raises:
        ConfigError: the environment is incomplete.
    """
    env = os.environ if environment is None else environment
    launcher = find_launcher(env)
    if launcher is None:
        return World()
    names = (launcher.rank, launcher.size, launcher.local_rank)
    missing = [name for name in names if name not in env]
    # Kubernetes starts one process per pod and sets no LOCAL_RANK; the process has the pod's devices for itself.
    if missing == ["LOCAL_RANK"]:
        missing = []
    if missing:
        raise ConfigError(f"{missing[0]} is not set, although {names[1]} is. Start with torchrun, srun or mpirun.")
    rank, size, local_rank = (whole_number(env, name, 0) for name in names)
    if not 0 <= rank < size or local_rank < 0:
        raise ConfigError(f"{names[0]}={rank}: must be below {names[1]}={size}. Start with torchrun, srun or mpirun.")
    return World(rank, size, local_rank)


def whole_number(environment: Mapping[str, str], name: str, default: int) -> int:
    """Return a variable that must contain a whole number. Raises `ConfigError` naming it otherwise."""
    text = environment.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise ConfigError(
            f"{name}={text}: expected a whole number. Unset it, or start with torchrun, srun or mpirun."
        ) from None


def note_start(world: World) -> None:
    """Record that this process joins the others of `world`."""
    _STARTED.append(world)


def launched_world() -> World | None:
    """Return the world of several ranks that this process was launched into, or None."""
    return _STARTED[0] if _STARTED else None
