"""`sparo launch train`: from a recipe to jobs, each with a run folder that contains all it needs."""

from __future__ import annotations

import json
import logging
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evals.suite.task import check_recipe_compatible
from sparo_train.core.config import dump, resolve
from sparo_train.core.disk.rundir import RunDir
from sparo_train.core.errors import CheckpointError, ConfigError, SparoError
from sparo_train.core.recipe.layers import override
from sparo_train.core.recipe.recipe_yaml import parse_yaml
from sparo_train.core.registries import ENGINES
from sparo_train.data.read.loader import shared_streams
from sparo_train.train.dry_run import meta_objective
from sparo_train.train.run_config import RunConfig

from .clusters import ClusterConfig
from .job import Element
from .local_jobs import local_alive
from .records import Records
from .slurm import states
from .snapshot import Snapshot, take_snapshot
from .submit import submit

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LaunchOptions:
    """Options of a launch.

    Attributes:
        cluster_name: the cluster's name.
        cluster: its keys.
        parallel: elements that run at a time.
        after: run folders to wait for.
    """

    cluster_name: str
    cluster: ClusterConfig
    parallel: int | None = None
    after: tuple[Path, ...] = ()


def launch_train(runs: Sequence[RunConfig], launch_options: LaunchOptions, sweep: Path) -> list[tuple[Path, str]]:
    """Submit runs; several become one array, whose logs and code are in `sweep`. Return folders and jobs.

    Raises:
        ConfigError: a number of ranks that the recipe cannot use, a folder with another recipe or an active job, or a
            refusal of the cluster. Nothing was submitted then.
    """
    runs = [resolve_for_ranks(run, launch_options.cluster) for run in runs]
    for run in runs:
        refuse_busy(run.folder)
        # Check all runs first, because half of a sweep in the queue is worse than none.
        RunDir(run.folder).refuse_changes(run)
    home = runs[0].folder if len(runs) == 1 else sweep
    code = take_snapshot(_folder(home / "code"))
    elements = []
    for run in runs:
        folder = _folder(run.folder)
        if folder != home and not (folder / "code").exists():
            # A sweep's runs have the same code; each has a copy in its own folder.
            (folder / "code").symlink_to(home.resolve() / "code")
        RunDir(folder).describe(run)
        elements.append(Element(("train", str(folder / "config.yaml")), str(folder)))
    jobs = submit_and_record(launch_options, elements, home, runs[0].name if len(runs) == 1 else sweep.name, code)
    return [(run.folder, job) for run, job in zip(runs, jobs, strict=True)]


def submit_and_record(
    launch_options: LaunchOptions, elements: Sequence[Element], home: Path, name: str, code: Snapshot
) -> list[str]:
    """Submit elements and record the submission in each one's folder, once per folder; return the jobs."""
    dependency = after_jobs(launch_options.after)
    jobs = submit(launch_options.cluster, elements, home / "jobs", name, code.path, launch_options.parallel, dependency)
    facts = {
        "on": launch_options.cluster_name,
        "parallel": launch_options.parallel,
        "cluster": launch_options.cluster.model_dump(mode="json"),
        "command": shlex.join(sys.argv),
        "cwd": str(Path.cwd()),
        "logs": str((home / "jobs").resolve()),
        "name": name,
        # Record the versions, because the folder may be read in a year, after the checkout has changed.
        "code": str(code.path),
        "commit": code.commit,
        "changed": code.changed,
    }
    for folder in dict.fromkeys(element.folder for element in elements):
        folder_jobs = [(e.arguments, job) for e, job in zip(elements, jobs, strict=True) if e.folder == folder]
        jobs_here = list(dict.fromkeys(job for _, job in folder_jobs))
        if len(jobs_here) > 1 and launch_options.cluster.kind == "slurm":  # the number of the whole array
            jobs_here = list(dict.fromkeys(job.partition("_")[0] for job in jobs_here))
        submission = {"jobs": jobs_here, "arguments": [arguments for arguments, _ in folder_jobs]}
        Records(Path(folder)).add("submitted", {"folder": folder, **submission, **facts})
    return jobs


def resolve_for_ranks(run: RunConfig, cluster: ClusterConfig) -> RunConfig:
    """Adapt the recipe to a job's ranks: set `world_size`, and change an engine of one process to ddp."""
    ranks = cluster.ranks
    if run.world_size not in (None, ranks):
        raise ConfigError(
            f"world_size={run.world_size}: does not match the job, got {ranks} rank(s) ({cluster.nodes} node(s) with "
            f"{cluster.ranks_per_node} each). Change --nodes, --tasks-per-node or --gpus-per-node, or the key "
            "world_size."
        )
    # Refuse here what cannot be divided over these ranks, instead of in a job that waited for a day.
    shared_streams(run.data, run.batch_size, ranks)
    _refuse_untrainable(run)
    # Written into the recipe, so that ranks that do not find each other fail instead of training alone.
    changes = [f"world_size={ranks}"]
    if ranks > 1 and ENGINES.get(run.engine.kind).one_process:
        logger.info(f"{run.name}: engine.kind={run.engine.kind} -> ddp, for {ranks} ranks")
        # Keys that ddp lacks apply to a single process only.
        ddp_fields = ENGINES.get("ddp").config.model_fields
        engine_config = {key: value for key, value in run.engine.model_dump(mode="json").items() if key in ddp_fields}
        changes.append("engine=" + json.dumps({**engine_config, "kind": "ddp"}))
    tree: dict[str, Any] = parse_yaml(dump(run), run.name)
    return resolve(RunConfig, override(tree, changes), run.name)


def _refuse_untrainable(run: RunConfig) -> None:
    """Raise `ConfigError` for what would end every job of this recipe: nothing to train, or incompatible tasks."""
    try:
        check_recipe_compatible(run, meta_objective(run))
    except CheckpointError:
        pass  # weights that only exist on the cluster are checked there
    except SparoError:
        raise
    except Exception:
        pass  # a plug-in's model may need memory to be built; the job reports other problems


def refuse_busy(folder: Path) -> None:
    """Raise ConfigError if a job of this folder is queued or running."""
    last = Records(folder).last()
    if last is None:
        return
    # Two jobs of one folder would keep taking it from each other.
    busy = {job: "RUNNING" for job in last["jobs"] if last["cluster"]["kind"] == "local" and local_alive(job)}
    if last["cluster"]["kind"] == "slurm":
        busy = {job: state.state for job, state in states(last["jobs"]).items() if state.active}
    for job, state in busy.items():
        raise ConfigError(
            f"{folder}: job {job} is {state} there. Run `sparo launch cancel {folder}` first, or wait, or give another name=."
        )


def after_jobs(folders: Sequence[Path]) -> str | None:
    """Return sbatch's dependency on the last jobs of these folders; None if all of them are over.

    Raises:
        ConfigError: a folder without a job, or whose job failed.
    """
    waiting = []
    for folder in folders:
        last = Records(folder).last()
        if last is None:
            raise ConfigError(f"--after {folder}: no job was submitted there")
        if last["cluster"]["kind"] != "slurm":
            raise ConfigError(f"--after {folder}: its job does not run on SLURM, so SLURM cannot wait for it")
        job_states = list(states(last["jobs"]).values())
        ends = [s for job in last["jobs"] for s in Records(folder).starts(job) if "end" in s]
        # SLURM forgets a job after minutes, but the folder records how it ended.
        if not job_states and not (ends and ends[-1]["end"] == 0):
            raise ConfigError(
                f"--after {folder}: SLURM does not know its job any more, and it did not finish. Run `sparo launch resubmit {folder}` first."
            )
        if any(state.active for state in job_states):
            waiting += last["jobs"]
        # SLURM would let a job wait forever for one that never succeeds.
        elif any(state.state not in ("COMPLETED", "UNKNOWN") for state in job_states):
            bad = next(s.state for s in job_states if s.state != "COMPLETED")
            raise ConfigError(
                f"--after {folder}: its job {last['jobs'][0]} ended as {bad}. Run `sparo launch resubmit {folder}` first."
            )
    return "afterok:" + ":".join(waiting) if waiting else None


def _folder(path: Path) -> Path:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"out: {path} cannot be created as a run folder ({error}). Give another out.") from None
    return path
