"""`sparo launch train`: from a recipe to jobs, each with a run folder that contains all it needs."""

from __future__ import annotations

import json
import logging
import os
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
from sparo_train.data.read.loader import number_of_streams
from sparo_train.train.dry_run import meta_objective
from sparo_train.train.run_config import RunConfig

from .allocation import is_training, run_in_allocation
from .clusters import ClusterConfig
from .job import Element
from .local_jobs import local_alive
from .plan import LaunchPlan
from .records import Records, launch_lock, sweep_runs
from .slurm import states
from .snapshot import Snapshot, take_snapshot
from .submit import submit
from .sweep import record_sweep

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
    home, name = (runs[0].folder, runs[0].name) if len(runs) == 1 else (sweep, sweep.name)
    # Until the submission is recorded, because another launch of a run must find it.
    with launch_lock([_folder(folder) for folder in (home, *(run.folder for run in runs))]):
        for run in runs:
            refuse_busy(run.folder)
            # Check all runs first, because half of a sweep in the queue is worse than none.
            RunDir(run.folder).refuse_changes(run)
        remaining = [run for run in runs if len(runs) == 1 or not Records(run.folder).is_finished()]
        for run in runs:
            if run not in remaining:
                logger.info(f"{run.folder}: already finished, so it is not submitted again")
        code = take_snapshot(_folder(home / "code"))
        fresh = [run.folder / "config.yaml" for run in remaining if not (run.folder / "config.yaml").exists()]
        elements = [_prepare(run, home) for run in remaining]
        try:
            jobs = submit_and_record(launch_options, elements, home, name, code) if elements else []
        except SparoError:  # refused by SLURM: a corrected recipe may use the folder
            for path in fresh:
                path.unlink(missing_ok=True)
            raise
        if home == sweep and len(runs) > 1:
            record_sweep(home, [os.path.relpath(run.folder, home.parent) for run in runs])
    if launch_options.cluster.kind == "allocation":
        run_in_allocation(launch_options.cluster, elements, code.path)
    return [(run.folder, job) for run, job in zip(remaining, jobs, strict=True)]


def plan_train(runs: Sequence[RunConfig], launch_options: LaunchOptions, sweep: Path) -> LaunchPlan:
    """Return what `launch_train` would submit, after the same checks. Writes nothing."""
    for run in runs:
        resolved = resolve_for_ranks(run, launch_options.cluster)
        refuse_busy(run.folder)
        RunDir(run.folder).refuse_changes(resolved)
    home, name = (runs[0].folder, runs[0].name) if len(runs) == 1 else (sweep, sweep.name)
    remaining = [str(run.folder) for run in runs if len(runs) == 1 or not Records(run.folder).is_finished()]
    return LaunchPlan(tuple(remaining), launch_options.cluster, name, home)


def _prepare(run: RunConfig, home: Path) -> Element:
    """Write a run's recipe to its folder; return the job's element that trains it."""
    folder = run.folder
    code = folder / "code"
    if code.is_symlink() and not code.exists():  # its folder was moved
        code.unlink()
    if folder != home and not code.exists():
        # The runs of a sweep share one copy of the code.
        code.symlink_to(os.path.relpath(home / "code", folder))
    RunDir(folder).describe(run)
    return Element(("train", str(folder / "config.yaml")), str(folder))


def submit_and_record(
    launch_options: LaunchOptions, elements: Sequence[Element], home: Path, name: str, code: Snapshot
) -> list[str]:
    """Submit elements and record the submission in each one's folder, once per folder; return the jobs."""
    if warning := launch_options.cluster.margin_warning():
        logger.warning(warning)
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
    number_of_streams(run.data, run.batch_size, ranks)
    if run.epochs is None:  # otherwise the length depends on the data, which only the nodes may see
        run.total_steps(0)
    # What would end every job: nothing to train, or incompatible tasks.
    try:
        check_recipe_compatible(run, meta_objective(run))
    except CheckpointError:
        pass  # weights that only exist on the cluster are checked there
    except SparoError:
        raise
    except Exception as error:  # a plug-in's model may need memory to be built
        logger.warning(
            f"{run.name}: the model could not be checked before the launch ({error}); the job will report problems"
        )
    # Written into the recipe, so that ranks that do not find each other fail instead of training alone.
    changes = [f"world_size={ranks}"]
    if ranks > 1 and ENGINES.get(run.engine.kind).one_process:
        logger.info(f"{run.name}: uses engine.kind=ddp instead of {run.engine.kind}, for {ranks} ranks")
        # Keys that ddp lacks apply to a single process only.
        ddp_fields = ENGINES.get("ddp").config.model_fields
        engine_config = {key: value for key, value in run.engine.model_dump(mode="json").items() if key in ddp_fields}
        changes.append("engine=" + json.dumps({**engine_config, "kind": "ddp"}))
    tree: dict[str, Any] = parse_yaml(dump(run), run.name)
    return resolve(RunConfig, override(tree, changes), run.name)


def refuse_busy(folder: Path) -> None:
    """Raise ConfigError if a job of this folder is queued or running."""
    submissions = Records(folder).submissions()
    # Two jobs of one folder would keep taking it from each other.
    jobs = {
        kind: [job for s in submissions if s["cluster"]["kind"] == kind for job in s["jobs"]]
        for kind in ("slurm", "allocation")
    }
    busy = {
        job: "RUNNING"
        for s in submissions
        if s["cluster"]["kind"] == "local"
        for job in s["jobs"]
        if local_alive(job, s["logs"])
    }
    busy |= {job: "RUNNING" for job in jobs["allocation"] if is_training(Records(folder), job)}
    if jobs["slurm"]:
        found = states(jobs["slurm"], accounting=False)
        busy |= {job: state.state for job, state in found.items() if state.active}
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
    for folder in [run for place in folders for run in sweep_runs(place) or [place]]:
        last = Records(folder).last_submission()
        if last is None:
            raise ConfigError(f"--after {folder}: no job was submitted there")
        if last["cluster"]["kind"] != "slurm":
            raise ConfigError(f"--after {folder}: its job does not run on SLURM, so SLURM cannot wait for it")
        job_states = list(states(last["jobs"]).values())
        ends = [s for job in last["jobs"] for s in Records(folder).starts(job) if "end" in s]
        # SLURM forgets a job after minutes, but the folder records how it ended.
        if not job_states and not (ends and ends[-1]["end"] == 0):
            raise ConfigError(
                f"--after {folder}: SLURM no longer knows the job of this run, and the job did not finish. Run `sparo launch resubmit {folder}` first."
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
        raise ConfigError(
            f"out: {path} cannot be created as a run folder ({error}). Set `out` to another folder."
        ) from None
    return path
