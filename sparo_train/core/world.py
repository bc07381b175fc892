"""Which rank of how many a process is, read off the environment; nothing heavy is needed to know it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from .errors import ConfigError

_STARTED: list[World] = []


@dataclass(frozen=True)
class World:
    """Which of how many ranks this process is, and which on this machine."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0


def find_world(environment: Mapping[str, str] | None = None) -> World:
    """The world that torchrun or SLURM started, read off the environment; of one rank where neither did.

    Raises:
        ConfigError: the environment says half of it.
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
        raise ConfigError(f"{missing[0]} is not set, although {names[1]} is; start with torchrun or srun")
    rank, size, local_rank = (whole_number(env, name, 0) for name in names)
    if not 0 <= rank < size or local_rank < 0:
        raise ConfigError(f"{names[0]}={rank}: is no rank of {names[1]}={size}; start with torchrun or srun")
    return World(rank, size, local_rank)


def whole_number(environment: Mapping[str, str], name: str, default: int) -> int:
    """A variable that holds a number. Raises `ConfigError` naming it where it holds something else."""
    text = environment.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{name}={text}: is no whole number; unset it, or start with torchrun or srun") from None


def note_start(world: World) -> None:
    """This process joins the others of `world`."""
    _STARTED.append(world)


def started() -> World | None:
    """The world of several ranks that this process was part of, if any."""
    return _STARTED[0] if _STARTED else None
