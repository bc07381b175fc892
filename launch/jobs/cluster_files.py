"""Cluster files, options of the command line that change them, and the allocation of a shell."""

from __future__ import annotations

import os
import re
import subprocess
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from sparo_train.core.config import resolve
from sparo_train.core.errors import ConfigError, SparoError, did_you_mean
from sparo_train.core.recipe.layers import Tree, load_recipe
from sparo_train.core.recipe.recipe_yaml import parse_yaml
from sparo_train.core.world import whole_number

from .. import config_folders
from .clusters import ClusterConfig
from .sbatch_options import translate_options
from .slurm import ask


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
    return resolve(ClusterConfig, add_allocation(tree) if tree.get("kind") == "allocation" else tree, str(path))


def add_allocation(tree: Tree, environment: Mapping[str, str] | None = None) -> Tree:
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
    requested = tree.get("nodes")
    if isinstance(requested, int) and requested > nodes:  # another type is refused with the other keys
        raise ConfigError(f"--nodes {requested}: the allocation {env['SLURM_JOB_ID']} has {nodes} node(s).")
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
    rest = list(arguments) if others else translate_options(arguments, tuple(ClusterConfig.model_fields), _FLAGS)
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
