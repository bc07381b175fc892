"""Clusters: descriptions of where jobs run, in YAML and changed by options of the command line."""

from __future__ import annotations

import os
import re
import subprocess
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from sparo_train.core.config import Frozen, field, resolve
from sparo_train.core.errors import ConfigError, SparoError, did_you_mean
from sparo_train.core.recipe.layers import Tree, load_recipe
from sparo_train.core.recipe.recipe_yaml import parse_yaml
from sparo_train.core.world import whole_number

from .. import config_folders
from .sbatch_options import translated
from .slurm import ask

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
    constraint: str | None = field(None, "Features that nodes must have.")
    nodelist: str | None = field(None, "Nodes to use.")
    exclude: str | None = field(None, "Nodes not to use.")
    exclusive: bool = field(False, "Allocate whole nodes.")
    job_name: str | None = field(None, "Name of the job in the queue. Default: the name of the run.")
    nodes: int = field(1, "Number of nodes.", gt=0)
    gpus_per_node: int = field(0, "GPUs per node.", ge=0)
    gpu_type: str | None = field(None, "GPU type, for clusters that require one, for example h100.")
    tasks_per_node: int | None = field(None, "Ranks per node. Default: one per GPU, or one without GPUs.", gt=0)
    starter: Literal["srun", "torchrun"] = field(
        "srun", "srun starts every rank; torchrun runs once per node and starts the ranks of the node."
    )
    cpus_per_task: int | None = field(None, "CPU cores per rank.", gt=0)
    mem_gb: float | None = field(None, "Memory per node in GB.", gt=0)
    time: str | int = field("24:00:00", "Time limit as SLURM writes it: 30 (minutes), 24:00:00, 2-12:00:00.")
    signal_seconds: int = field(
        120, "Seconds before the time limit at which the job receives the signal to save.", gt=0
    )
    idle_restarts: int = field(
        3, "Largest number of consecutive restarts without a new checkpoint. After that, the job fails.", ge=0
    )
    max_restarts: int = field(
        200, "Largest number of restarts of one job. After that, the job fails; `resubmit` starts another one.", ge=0
    )
    max_hours: float | None = field(
        None, "Largest number of hours that the starts of one job may take together. Default: no limit.", gt=0
    )
    gpu_hour_cost: float | None = field(
        None, "Cost of one GPU for an hour (of one rank, without GPUs), in any currency, for `--dry-run`.", ge=0
    )
    setup: tuple[str, ...] = field((), "Shell lines before the job: module load …, conda activate ….")
    python: str | None = field(
        None, "Python interpreter, as a shell command. Default: the interpreter that runs `sparo launch`."
    )
    srun_args: tuple[str, ...] = field((), "Further arguments of srun: --container-image=….")
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
                f"sbatch.gres: requests {number} GPU(s) per node, but gpus_per_node={given}. Remove one of them."
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
    def _one_machine(self) -> ClusterConfig:
        if self.kind not in ("slurm", "allocation") and self.nodes > 1:
            raise ValueError(f"nodes={self.nodes}: {self.kind} is one machine. Use a SLURM cluster.")
        if self.kind == "allocation" and self.starter == "torchrun":
            raise ValueError("starter=torchrun: srun starts the ranks in an allocation. Remove it.")
        # Do not ignore it silently, because a missing `module load` would be searched for in the job.
        if self.kind not in ("slurm", "allocation") and self.setup:
            raise ValueError(
                f"setup: applies to SLURM only; {self.kind} jobs inherit the environment of this shell. Set it up there."
            )
        if self.kind == "debug" and self.ranks > 1:
            raise ValueError(
                f"kind=debug: starts only one rank, in this process, got {self.ranks}. Use kind=local for several ranks."
            )
        # A signal at the very start would save nothing, repeatedly.
        if self.kind == "slurm" and 60 * minutes(self.time) <= self.signal_seconds:
            raise ValueError(f"signal_seconds={self.signal_seconds}: must be below the time limit {self.time}")
        return self

    def margin_warning(self) -> str:
        """Return a warning if the time limit leaves no time for training between start and signal; empty otherwise."""
        needed = self.signal_seconds + _SAVE_SECONDS + _START_SECONDS
        if self.kind != "slurm" or 60 * minutes(self.time) >= needed:
            return ""
        return (
            f"--time {self.time}: leaves less than {_SAVE_SECONDS} s for training between the start (about "
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


def cluster_folders() -> list[Path]:
    """Return the folders with cluster files: ./configs/clusters, the user's own, and those shipped with sparo."""
    # The project's own clusters come first, so that a checkout determines them for all its users.
    own = Path(os.environ.get("XDG_CONFIG_HOME", Path.home() / ".config")) / "sparo/clusters"
    return [Path("configs/clusters"), own, *(folder / "clusters" for folder in config_folders())]


def load_cluster(name: str, options: Sequence[str] = ()) -> ClusterConfig:
    """Return the cluster with a name (or in a YAML file), changed by `--key value` options.

    Raises:
        ConfigError: no such cluster, or an unknown option; the message lists the valid ones.
    """
    path = Path(name)
    if path.suffix not in (".yaml", ".yml"):
        paths = [folder / f"{name}.yaml" for folder in cluster_folders() if (folder / f"{name}.yaml").is_file()]
        if not paths:
            cluster_names = {p.stem for folder in cluster_folders() if folder.is_dir() for p in folder.glob("*.yaml")}
            raise ConfigError(
                f"--cluster {name}: {did_you_mean(name, cluster_names)} A cluster is a file configs/clusters/NAME.yaml or "
                f"{cluster_folders()[1]}/NAME.yaml (docs/guides/clusters.md)"
            )
        path = paths[0]
    tree = with_options(load_recipe(path), options)
    return resolve(ClusterConfig, allocated(tree) if tree.get("kind") == "allocation" else tree, str(path))


def allocated(tree: Tree, environment: Mapping[str, str] | None = None) -> Tree:
    """Return a cluster's keys with the nodes, GPUs and tasks of the allocation of this shell, where they are not set.

    Raises:
        ConfigError: this shell is not in an allocation, or more nodes are wanted than it has.
    """
    env = os.environ if environment is None else environment
    if "SLURM_JOB_ID" not in env:
        raise ConfigError(
            "--cluster allocation: this shell is not in an allocation of SLURM. Run `salloc --nodes 2` first, or use "
            "another --cluster."
        )
    nodes = whole_number(env, "SLURM_JOB_NUM_NODES", 1)
    if int(tree.get("nodes", nodes)) > nodes:
        raise ConfigError(f"--nodes {tree['nodes']}: the allocation {env['SLURM_JOB_ID']} has {nodes} node(s).")
    keys: Tree = {"nodes": nodes}
    if gpus := _allocated_gpus(env, nodes):
        keys["gpus_per_node"] = gpus
    elif "SLURM_NTASKS_PER_NODE" in env:
        keys["tasks_per_node"] = whole_number(env, "SLURM_NTASKS_PER_NODE", 1)
    if "SLURM_CPUS_PER_TASK" in env:
        keys["cpus_per_task"] = whole_number(env, "SLURM_CPUS_PER_TASK", 1)
    return {**keys, **tree}


def _allocated_gpus(env: Mapping[str, str], nodes: int) -> int:
    """Return the GPUs per node of an allocation, from its variables or from SLURM's description of the job; 0 without any."""
    count = env.get("SLURM_GPUS_PER_NODE", env.get("SLURM_GPUS_ON_NODE", "")).rpartition(":")[2]  # h100:4 or 4
    if count.isdecimal():
        return int(count)
    try:
        job = ask("scontrol", "show", "job", "-o", env["SLURM_JOB_ID"])
    except (SparoError, subprocess.CalledProcessError):
        return 0
    if match := re.search(r"TresPerNode=\S*?gpu(?::[A-Za-z]\w*)?[:=](\d+)", job):
        return int(match[1])
    total = re.search(r"\bgres/gpu=(\d+)", job)
    return int(total[1]) // nodes if total else 0


def with_options(base: Tree, options: Sequence[str]) -> Tree:
    """Apply options such as `--nodes 2 --mem-gb=8 --exclusive --environment.NAME value` to a cluster's keys; lists and mappings are extended."""
    tree: Tree = dict(base)
    rest = list(options)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        key, dot, inner = name.replace("-", "_").partition(".")
        # From the name as typed, because a variable's name may contain underscores and dashes.
        inner = name.partition(".")[2]
        if not word.startswith("--") or key not in ClusterConfig.model_fields:
            option_names = ", ".join("--" + name.replace("_", "-") for name in ClusterConfig.model_fields)
            suggestion = (
                did_you_mean(key, ClusterConfig.model_fields) if word.startswith("--") else "an option begins with --"
            )
            suggestion = suggestion if suggestion.startswith(("did", "an")) else ""
            raise ConfigError(
                f"{word}: not an option of clusters; {suggestion} The options are {option_names}".replace("  ", " ")
            )
        kinds = _value_types(key)
        if not equals:
            # A flag only takes the next word if that is a value, because it may be the next option.
            if bool in kinds and (not rest or rest[0] not in ("true", "false")):
                value = "true"
            elif rest:
                value = rest.pop(0)
            else:
                raise ConfigError(f"{word}: a value is required")
        parsed: Any = parse_yaml(value, word)
        if (
            key == "sbatch"
            and value not in ("true", "false")
            and (isinstance(parsed, bool) or not isinstance(parsed, int))
        ):
            parsed = value  # yes, 1.5 and others are values of sbatch, in its spelling
        # `--account 0123` is a string, but YAML would read a number.
        if str in kinds and not isinstance(parsed, str) and not (int in kinds and isinstance(parsed, int)):
            parsed = value
        # Extend instead of replacing, because a cluster's own `module load` lines are still needed.
        if tuple in kinds:
            parsed = [*tree.get(key, []), value]
        if dict in kinds:
            if not dot:
                raise ConfigError(f"{word}: expected --{name}.NAME value")
            parsed = {**tree.get(key, {}), inner: str(value) if key == "environment" else parsed}
        tree[key] = parsed
    return tree


_FLAGS = ("exclusive",)  # options without a value


def split_options(arguments: Sequence[str], others: bool = False) -> tuple[list[str], list[str]]:
    """Split arguments into those that are not options of clusters, and those that are, also in sbatch's spelling.

    `others`: unknown options belong to the first part, and have no spelling of sbatch.
    """
    plain: list[str] = []
    options: list[str] = []
    rest = list(arguments) if others else translated(arguments, tuple(ClusterConfig.model_fields), _FLAGS)
    while rest:
        word = rest.pop(0)
        key = word.removeprefix("--").partition("=")[0].partition(".")[0].replace("-", "_")
        if not word.startswith("--") or (others and key not in ClusterConfig.model_fields):
            plain.append(word)
            continue
        options.append(word)
        flag = key in ClusterConfig.model_fields and bool in _value_types(key)
        if "=" not in word and rest and (not flag or rest[0] in ("true", "false")):
            options.append(rest.pop(0))
    return plain, options


def _value_types(key: str) -> set[Any]:
    """Return the plain types that a key's values may have."""
    annotation = ClusterConfig.model_fields[key].annotation
    parts = (
        typing.get_args(annotation) if typing.get_origin(annotation) not in (tuple, dict, Literal) else (annotation,)
    )
    return {typing.get_origin(part) or part for part in parts or (annotation,)}


def options_help() -> str:
    """Return one line per key, for `--help`."""
    return "\n\n".join(
        f"--{name.replace('_', '-')}  {field.description}" for name, field in ClusterConfig.model_fields.items()
    )
