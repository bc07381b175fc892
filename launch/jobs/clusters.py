"""Clusters: descriptions of where jobs run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from sparo_train.core.config import Frozen, field

# The number of parts determines the meaning of each, because the text has no units.
_TIME = re.compile(r"(?:(?P<d>\d+)-)?(?P<a>\d+)(?::(?P<b>\d+))?(?::(?P<c>\d+))?")


class ClusterConfig(Frozen):
    """One cluster. Every key is also an option of `sparo launch`: `nodes: 2` is `--nodes 2`."""

    kind: Literal["slurm", "allocation", "local", "debug"] = field(
        "slurm",
        "Where jobs run. slurm: on a SLURM cluster; allocation: in the SLURM allocation of this shell (salloc), in the "
        "foreground; local: in processes on this machine; debug: inside the launching process.",
    )
    partition: str | None = field(None, "SLURM partition.")
    account: str | None = field(None, "Account to charge.")
    qos: str | None = field(None, "Quality of service.")
    constraint: str | None = field(None, "SLURM features that nodes must have (--constraint).")
    nodelist: str | None = field(None, "Nodes to use.")
    exclude: str | None = field(None, "Nodes not to use.")
    exclusive: bool = field(False, "Allocate whole nodes.")
    job_name: str | None = field(None, "Name of the job in the queue. Default: the name of the run.")
    nodes: int = field(1, "Number of nodes.", gt=0)
    gpus_per_node: int = field(0, "GPUs per node.", ge=0)
    gpu_type: str | None = field(None, "GPU type, for clusters that require one, for example h100.")
    tasks_per_node: int | None = field(None, "Ranks per node. Default: one per GPU, or one rank without GPUs.", gt=0)
    starter: Literal["srun", "torchrun"] = field(
        "srun", "Starter of ranks. srun: starts every rank; torchrun: runs once per node and starts the ranks there."
    )
    cpus_per_task: int | None = field(None, "CPU cores per rank.", gt=0)
    mem_gb: float | None = field(None, "Memory per node in GB.", gt=0)
    time: str | int = field("24:00:00", "Time limit as SLURM writes it: 30 (minutes), 24:00:00, 2-12:00:00.")
    signal_seconds: int = field(120, "Time between the signal to save and the job's time limit, in seconds.", gt=0)
    idle_restarts: int = field(
        3, "Largest number of consecutive restarts without a new checkpoint. After that, the job fails.", ge=0
    )
    max_restarts: int = field(
        200,
        "Largest number of restarts of one job. After that, the job fails; `sparo launch resubmit` submits a new one.",
        ge=0,
    )
    max_hours: float | None = field(
        None,
        "Limit on the total hours of a job, including all restarts. The job is not restarted after this limit. Default: no limit.",
        gt=0,
    )
    gpu_hour_cost: float | None = field(
        None,
        "Cost of one GPU (without GPUs: of one rank) per hour, in any currency. `--dry-run` estimates costs with it.",
        ge=0,
    )
    setup: tuple[str, ...] = field((), "Shell lines before the job: module load …, conda activate ….")
    python: str | None = field(
        None, "Python interpreter, as a shell command. Default: the interpreter that runs `sparo launch`."
    )
    srun_args: tuple[str, ...] = field((), "Further arguments for srun, as in --container-image=….")
    environment: dict[str, str] = Field(default_factory=dict, description="Environment variables of the job.")
    sbatch: dict[str, str | int | bool] = Field(default_factory=dict, description="Further arguments of sbatch.")

    @model_validator(mode="before")
    @classmethod
    def _gpus_from_gres(cls, tree: Any) -> Any:
        """Take the number of GPUs from `sbatch.gres`, for sites whose sbatch does not take --gpus-per-node."""
        if not isinstance(tree, dict) or (gpus := _gres_gpus(tree.get("sbatch"))) is None:
            return tree
        number, given = gpus, tree.get("gpus_per_node")
        if given not in (None, 0, number):
            raise ValueError(
                f"sbatch.gres: requests {number} GPU(s) per node, but gpus_per_node={given}. Remove sbatch.gres or gpus_per_node."
            )
        return {**tree, "gpus_per_node": number}

    @property
    def gpus_by_gres(self) -> bool:
        """Return whether `sbatch.gres` requests the GPUs."""
        return _gres_gpus(self.sbatch) is not None

    @model_validator(mode="after")
    def _refuse_line_ends(self) -> ClusterConfig:
        """Refuse line ends in values that become lines of the batch script; `setup` consists of shell lines."""
        for key, value in self:
            for text in _nested_strings(value):
                if key not in ("environment", "setup") and any(c in text for c in "\n\r\0"):
                    raise ValueError(
                        f"{key}: {text!r} has a line end, which the batch script does not allow. Remove it."
                    )
        return self

    @field_validator("environment")
    @classmethod
    def _names(cls, value: dict[str, str]) -> dict[str, str]:
        for name in value:
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
                raise ValueError(f"{name!r} is not the name of a variable. Use letters, digits and _.")
        return value

    @field_validator("time")
    @classmethod
    def _is_time(cls, value: str | int) -> str | int:
        minutes(value)
        return value

    @model_validator(mode="after")
    def _check_local(self) -> ClusterConfig:
        if self.kind not in ("slurm", "allocation") and self.nodes > 1:
            raise ValueError(f"nodes={self.nodes}: {self.kind} is one machine. Use a SLURM cluster.")
        if self.kind == "allocation" and self.starter == "torchrun":
            raise ValueError(
                "starter=torchrun: not supported with kind=allocation, where srun starts the ranks. Remove it."
            )
        # Do not ignore it silently, because a missing `module load` would be searched for in the job.
        if self.kind not in ("slurm", "allocation") and self.setup:
            raise ValueError(
                f"setup: applies to SLURM only; {self.kind} jobs inherit the environment of this shell. Run the "
                "commands of `setup` in this shell, and remove the key."
            )
        if self.kind == "debug" and self.ranks > 1:
            raise ValueError(
                f"kind=debug: starts one rank only (in this process), got {self.ranks}. Use kind=local for several ranks."
            )
        # A signal at the very start would save nothing, repeatedly.
        if self.kind == "slurm" and 60 * minutes(self.time) <= self.signal_seconds:
            raise ValueError(f"signal_seconds={self.signal_seconds}: must be below the time limit {self.time}")
        return self

    def margin_warning(self) -> str:
        """Return a warning if the time limit leaves no time for work between start and signal; empty otherwise."""
        needed = self.signal_seconds + _SAVE_SECONDS + _START_SECONDS
        if self.kind != "slurm" or 60 * minutes(self.time) >= needed:
            return ""
        return (
            f"--time {self.time}: leaves less than {_SAVE_SECONDS} s for work between the start (about "
            f"{_START_SECONDS} s) and the signal {self.signal_seconds} s before the limit. Set --time to {-(-needed // 60)} "
            "or more, or lower --signal-seconds."
        )

    @property
    def ranks_per_node(self) -> int:
        return self.tasks_per_node or max(1, self.gpus_per_node)

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node


_START_SECONDS = 60  # from the start of a job to its first step; containers and slow disks need more
_SAVE_SECONDS = 60


def _gres_gpus(sbatch: Any) -> int | None:
    """Return the number of GPUs per node in `sbatch.gres` (gpu, gpu:4, gpu:h100:4, nvme:1,gpu:2); None without GPUs.

    Raises:
        ValueError: it names GPUs, but no whole number of them.
    """
    text = str(sbatch.get("gres", "")) if isinstance(sbatch, dict) else ""
    counts = []
    for part in re.sub(r"\([^)]*\)", "", text).split(","):
        name, *rest = part.removeprefix("gres/").split(":")
        if name == "gpu":
            number = rest[-1] if rest and (len(rest) > 1 or rest[0].isdecimal()) else "1"
            if not number.isdecimal():
                raise ValueError(f"sbatch.gres={text}: the number of GPUs is not a whole number")
            counts.append(int(number))
    return sum(counts) if counts else None


def with_one_gpu(cluster: ClusterConfig) -> ClusterConfig:
    """Return the cluster with one rank, and at most one GPU, also if `sbatch.gres` requests them."""
    changes: dict[str, Any] = {
        "nodes": 1,
        "tasks_per_node": 1,
        "starter": "srun",
        "gpus_per_node": min(1, cluster.gpus_per_node),
    }
    if cluster.gpus_by_gres:
        # gpu, gpu:4, gpu:h100, gpu:h100:4 -> gpu:1, gpu:h100:1
        one = re.sub(
            r"\bgpu(:[A-Za-z]\w*)?(:\d+)?", lambda match: f"gpu{match[1] or ''}:1", str(cluster.sbatch["gres"])
        )
        changes["sbatch"] = {**cluster.sbatch, "gres": one}
    return cluster.model_copy(update=changes)


def _nested_strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        # Keys, too, because the name of an argument of sbatch is part of a line of the script.
        for pair in value.items():
            yield from _nested_strings(list(pair))
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _nested_strings(part)


def minutes(time: str | int) -> int:
    """Convert a SLURM time limit to minutes, rounded up: 90, "90:00" (minutes:seconds), "24:00:00", "2-12", "2-12:30:00".

    Raises:
        ValueError: anything else.
    """
    match = _TIME.fullmatch(str(time))
    if not match or (isinstance(time, int) and time <= 0):
        raise ValueError(f"{time!r} is not a time limit. Write minutes, HH:MM:SS or D-HH:MM:SS.")
    # SLURM reads one number as minutes, two as minutes and seconds, three as hours; after days they begin with hours.
    days, a, b, c = (int(match[name] or 0) for name in "dabc")
    if match["d"] is not None:
        seconds = 60 * (60 * (24 * days + a) + b) + c
    elif match["c"] is not None:
        seconds = 60 * (60 * a + b) + c
    else:
        seconds = 60 * a + b
    if not seconds:
        raise ValueError(f"time limit must be positive, got {time!r}")
    # Up, because rounding down would kill a job before its limit.
    return -(-seconds // 60)
