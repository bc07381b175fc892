"""Who may write into a run folder: the start that claimed it last.

A lock alone cannot tell. A node that is cut off keeps its lock and its processes, while the scheduler starts the job
anew elsewhere; when it comes back, what it still wanted to write has to be refused. So every start writes its name
into `owner.json`, and every writer reads it again before it writes.
"""

from __future__ import annotations

import json
import os
import platform
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import SupersededError, TrainingError
from ..files import write_whole
from ..world import whole_number

_TRIES = 10


@dataclass(frozen=True)
class Attempt:
    """One start of training: its SLURM job and how often that was restarted, where there is one."""

    token: str
    job: str | None = None
    restart: int = 0

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Attempt:
        """The start that this process is."""
        env = os.environ if environment is None else environment
        return cls(uuid.uuid4().hex[:12], env.get("SLURM_JOB_ID"), whole_number(env, "SLURM_RESTART_COUNT", 0))

    def supersedes(self, other: Mapping[str, Any]) -> bool:
        """True where SLURM started the same job anew: whatever is left of `other` has lost its right to write."""
        return self.job is not None and self.job == other.get("job") and self.restart > other.get("restart", 0)


class RunLease:
    """A start's right to write into a folder.

    Args:
        folder: the run folder.
        token: of the start, on every rank.
    """

    def __init__(self, folder: Path, token: str):
        self.path, self.token = folder / "owner.json", token

    def acquire(self, start: Attempt) -> None:
        """Make `start` the owner, whoever was it before."""
        facts = {"token": start.token, "job": start.job, "restart": start.restart}
        facts |= {"host": os.environ.get("SLURMD_NODENAME", platform.node()), "pid": os.getpid(), "time": time.time()}
        write_whole(self.path, json.dumps(facts))

    def check(self) -> None:
        """Raise SupersededError where another start has claimed the folder since."""
        owner = self.owner()
        if not owner:
            raise SupersededError(f"{self.path}: is gone, so nobody may write there; was the run folder removed?")
        # By token, not by process: after a node failure the same number may be another process.
        if owner["token"] != self.token:
            by = f"job {owner['job']}, restart {owner['restart']}" if owner.get("job") else f"pid {owner.get('pid')}"
            raise SupersededError(
                f"{self.path.parent}: belongs to another start by now ({by} on {owner.get('host')}); this one stops and "
                "writes nothing more into it"
            )

    def owner(self) -> dict[str, Any]:
        """What owner.json says; empty where there is none.

        Raises:
            TrainingError: it could not be read for some seconds.
        """
        for left in reversed(range(_TRIES)):
            try:
                found = json.loads(self.path.read_text(encoding="utf-8"))
                if not isinstance(found, dict) or "token" not in found:
                    raise ValueError("it names no owner")
                return found
            except FileNotFoundError:
                return {}
            except (OSError, ValueError) as error:  # a file server in trouble
                if not left:
                    raise TrainingError(f"{self.path}: cannot be read ({error})") from None
                time.sleep(1)
        raise AssertionError
