"""Run folder: resolved recipe, command, environment and metrics, and the lease that allows one writer at a time."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import json
import os
import platform
import shlex
import sys
import time
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any

from ..config import Frozen, differences, dump, resolve, resumable_keys
from ..errors import ConfigError, SupersededError, TrainingError
from ..files import read_text, write_whole
from ..recipe.layers import Tree
from ..recipe.recipe_yaml import parse_yaml
from ..world import whole_number
from .metrics import read

_TRIES = 10


@dataclass(frozen=True)
class Attempt:
    """One start of training: its SLURM job and how often that job was restarted, if there is one."""

    token: str
    job: str | None = None
    restart: int = 0

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Attempt:
        """Return the attempt that this process belongs to."""
        env = os.environ if environment is None else environment
        return cls(uuid.uuid4().hex[:12], env.get("SLURM_JOB_ID"), whole_number(env, "SLURM_RESTART_COUNT", 0))

    def supersedes(self, other: Mapping[str, Any]) -> bool:
        """Return True if SLURM restarted the same job: processes of `other` may then write no more."""
        return self.job is not None and self.job == other.get("job") and self.restart > other.get("restart", 0)


class RunLease:
    """Right of one start to write to a folder.

    Args:
        folder: the run folder.
        token: identifies the start, on every rank.
    """

    def __init__(self, folder: Path, token: str):
        self.path, self.token = folder / "owner.json", token

    def acquire(self, start: Attempt) -> None:
        """Make `start` the owner, whoever was the owner before."""
        facts = {"token": start.token, "job": start.job, "restart": start.restart}
        facts |= {"host": os.environ.get("SLURMD_NODENAME", platform.node()), "pid": os.getpid(), "time": time.time()}
        write_whole(self.path, json.dumps(facts))

    def check(self) -> None:
        """Raise SupersededError if another start has claimed the folder since."""
        owner = self.owner()
        if not owner:
            raise SupersededError(
                f"{self.path}: does not exist any more, so this process stops writing. Was the run folder removed?"
            )
        # Compare tokens, not processes: after a node failure, another process may have the same number.
        if owner["token"] != self.token:
            by = f"job {owner['job']}, restart {owner['restart']}" if owner.get("job") else f"pid {owner.get('pid')}"
            raise SupersededError(
                f"{self.path.parent}: was taken over by a process that started later ({by} on {owner.get('host')}). "
                "This older process stops and writes nothing more into the folder."
            )

    def owner(self) -> dict[str, Any]:
        """Return the content of owner.json; empty if it does not exist.

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
            except (OSError, ValueError) as error:  # a file server with problems
                if not left:
                    raise TrainingError(f"{self.path}: cannot be read ({error})") from None
                time.sleep(1)
        raise AssertionError


class RunDir:
    """Paths and files of one run; holds a lock while training writes to it."""

    def __init__(self, path: Path):
        self.path = path
        self.config = path / "config.yaml"
        self.checkpoints = path / "checkpoints"
        self.lease = RunLease(path, "")
        self._lock: IO[str] | None = None

    def open_for_training(self, config: Frozen, patience: float = 20.0) -> str:
        """Create the folder, or check that it belongs to the same recipe, and claim it. Returns the token of the claim.

        Args:
            config: the resolved recipe.
            patience: seconds that processes of an earlier start of the same SLURM job get to notice this one.

        Raises:
            ConfigError: the folder contains a run of another recipe; the message lists the differences.
            TrainingError: another process is training in it.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"out: {self.path} cannot be used as a run folder ({error}). Choose another folder."
            ) from None
        attempt = Attempt.from_environment()
        self._take_lock(attempt, patience)
        self.refuse_changes(config)
        self.join(attempt.token)
        self.lease.acquire(attempt)
        self.describe(config)
        return attempt.token

    def describe(self, config: Frozen) -> None:
        """Write the recipe, the command and the environment to an existing folder."""
        self._write("config.yaml", dump(config))
        with (self.path / "command.txt").open("a", encoding="utf-8") as stream:
            # Append, so that every start has its line.
            stream.write(shlex.join(sys.argv) + "\n")
        self.write_environment(with_device=False)

    def write_environment(self, with_device: bool = True) -> dict[str, Any]:
        """Write `environment` to an existing folder, and return it."""
        facts = environment(with_device)
        self._write("environment.json", json.dumps(facts, indent=1))
        return facts

    def join(self, token: str) -> None:
        """Share the claim of the rank that opened the folder."""
        self.lease = RunLease(self.path, token)

    def write_heartbeat(self, **facts: Any) -> None:
        """Rewrite heartbeat.json with the time, the process and its activity. A full disk is ignored, as other writes report it.

        Raises:
            SupersededError: another start owns the folder.
        """
        self.lease.check()
        with contextlib.suppress(OSError):
            self._write(
                "heartbeat.json",
                json.dumps({"time": time.time(), "pid": os.getpid(), "host": platform.node(), **facts}),
            )

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _write(self, name: str, text: str) -> None:
        write_whole(self.path / name, text)

    def _take_lock(self, attempt: Attempt, patience: float) -> None:
        self._lock = (self.path / ".lock").open("w")
        if self._try_lock():
            return
        # The scheduler knows that the other process is gone; a user who starts twice does not.
        if not attempt.supersedes(self.lease.owner()):
            self.close()
            raise TrainingError(
                f"{self.path}: another process is training in this folder. Wait for it, or set another name=."
            )
        # SLURM restarted this job, so the process that still holds the lock is disconnected. It stops when it sees the
        # claim. If it is suspended, it cannot see it, but its next write is refused.
        self.lease.acquire(attempt)
        end = time.monotonic() + patience
        while not self._try_lock() and time.monotonic() < end:
            time.sleep(0.2)

    def _try_lock(self) -> bool:
        assert self._lock is not None
        try:  # not flock, because loader workers would inherit it and outlive a kill
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    def _has_no_progress(self) -> bool:
        """Return whether a start ended before its first record and no job is pending, so that nothing is lost by starting over."""
        if not self.lease.owner() or (self.path / "jobs").exists() or read(self.path / "metrics.jsonl"):
            return False
        return not any(self.checkpoints.glob("step-*"))

    def refuse_changes(self, config: Frozen) -> None:
        """Raise ConfigError, with the differences, if the folder contains a run of another recipe."""
        if self.config.exists() and not self._has_no_progress():
            old = parse_yaml(read_text(self.config), str(self.config))
            if not isinstance(old, dict):
                raise ConfigError(
                    f"{self.config}: has no keys. Copy the recipe from a checkpoint's meta.json into this file, or remove the file."
                )
            self.refuse_other_recipe(config, old, self.config)

    def refuse_other_recipe(self, config: Frozen, old: Tree, origin: Path) -> None:
        """Raise ConfigError, with the differences, if `old`, the recipe of a file or checkpoint, is not that of this run."""
        new: Tree = parse_yaml(dump(config), "the recipe")
        try:  # in the form of this version, with today's defaults for missing keys
            before = resolve(type(config), old, str(origin), stored=True)
        except ConfigError:
            before = config  # written by a version whose keys no longer exist: compare it as it is
        else:
            old = parse_yaml(dump(before), str(origin))
        diff_lines = differences(old, new)
        changed_blocks = [line.partition(".kind:")[0] for line in diff_lines if ".kind:" in line]
        resumable = {*resumable_keys(before, changed_blocks), *resumable_keys(config, changed_blocks)}
        changed = [line for line in diff_lines if not _is_under(line.partition(":")[0], resumable)]
        if changed:
            raise ConfigError(
                f"{self.path if origin == self.config else origin}: contains a run of another recipe:\n  "
                + "\n  ".join(changed)
                + f"\n{self._remedy(changed, config)}"
            )

    def _remedy(self, changed: Sequence[str], config: Frozen) -> str:
        chosen = [choice.key for choice in getattr(config, "choices", ())]
        lengths = [key for key in getattr(type(config), "alternatives", ()) if key not in chosen]
        of_length = [line for line in changed if _is_under(line.partition(":")[0], lengths)]
        # What `auto` chooses may follow from the length, such as the warm-up.
        if of_length and all(_is_under(line.partition(":")[0], [*lengths, *chosen]) for line in changed):
            if all(_is_shorter(line) for line in of_length):
                return "The schedule depends on the length. Give a shorter run another name=, or score a checkpoint of this one."
            return (
                "The schedule depends on the length of the run. To continue from the weights of this run, start "
                "a new run, in which `steps` is the number of additional steps: "
                f"name=NEW steps=N start_from='{{checkpoint: {self.path}, optimizer: true}}'. Its learning rate warms up again."
            )
        if chosen and all(_is_under(line.partition(":")[0], chosen) for line in changed):
            return (
                "`auto` now chooses these values, because the images, the machine or the version of sparo is another one than at the start "
                f"of the run. If the images changed, restore them or use another name=. Otherwise continue with `sparo train {self.config}`."
            )
        return "Use another name=, undo the change, or remove the folder."


def _is_shorter(change: str) -> bool:
    """Return whether a line of `differences` has two numbers, the second less than the first."""
    before, _, after = change.partition(": ")[2].partition(" -> ")
    try:
        return float(after) < float(before)
    except ValueError:
        return False


def _is_under(key: str, prefixes: Collection[str]) -> bool:
    """Return whether a key is one of these, or below one."""
    return any(key == prefix or key.startswith(f"{prefix}.") for prefix in prefixes)


@cache  # reading the metadata of all packages takes 30 ms, and every task records it
def package_versions() -> Mapping[str, str]:
    """Return the versions of the packages that a run's results depend on."""
    packages = (
        "torch",
        "torchvision",
        "open_clip_torch",
        "timm",
        "numpy",
        "pillow",
        "webdataset",
        "safetensors",
        "sparo",
    )
    versions = {}
    for name in packages:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "unknown"
    return versions


def environment(with_device: bool = True) -> dict[str, Any]:
    """Return versions and machine, as recorded for runs and results.

    Args:
        with_device: name the GPU, if there is one, which initialises it; False: name the CPU.
    """
    import torch  # imported here: `sparo launch status` reads run folders, and torch imports in two seconds

    return {
        "python": platform.python_version(),
        "machine": machine_name(with_device),
        "threads": torch.get_num_threads(),
        "packages": package_versions(),
    }


def machine_name(with_device: bool = True) -> str:
    """Return the machine's name, such as `NVIDIA H200` or `Intel(R) Xeon(R) Processor, 2 cores`."""
    from ..accelerator import available_device, device_name

    if with_device and (name := device_name(available_device())):
        return name
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [
            line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")
        ]
        model = names[0] if names else model
    return f"{model}, {os.cpu_count()} cores"
