"""`sparo launch train`: from a recipe to jobs, each with a run folder that holds all it needs."""

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
    """How a launch was asked for.

    cluster_name: the cluster's name.  cluster: its block.  parallel: elements at a time.  after: run folders to wait for.
    """

    cluster_name: str
    cluster: ClusterConfig
    parallel: int | None = None
    after: tuple[Path, ...] = ()


def launch_train(runs: Sequence[RunConfig], launch_options: LaunchOptions, sweep: Path) -> list[tuple[Path, str]]:
    """Submit runs; several become one array whose logs and code are in `sweep`. Returns folders and jobs.

    Raises:
        ConfigError: ranks that the recipe cannot use, a folder with another recipe or with a job that is not over, or a
            refusal of the cluster. Nothing was submitted then.
    """
    runs = [resolve_for_ranks(run, launch_options.cluster) for run in runs]
    for run in runs:
        refuse_busy(run.folder)
        # All runs first: half of a sweep in the queue is worse than none.
        RunDir(run.folder).refuse_changes(run)
    home = runs[0].folder if len(runs) == 1 else sweep
    code = take_snapshot(_folder(home / "code"))
    elements = []
    for run in runs:
        folder = _folder(run.folder)
        if folder != home and not (folder / "code").exists():
            # A sweep's runs have the same code; each finds it in its own folder.
            (folder / "code").symlink_to(home.resolve() / "code")
        RunDir(folder).describe(run)
        elements.append(Element(("train", str(folder / "config.yaml")), str(folder)))
    jobs = submit_and_record(launch_options, elements, home, runs[0].name if len(runs) == 1 else sweep.name, code)
    return [(run.folder, job) for run, job in zip(runs, jobs, strict=True)]


def submit_and_record(
    launch_options: LaunchOptions, elements: Sequence[Element], home: Path, name: str, code: Snapshot
) -> list[str]:
    """Submit elements and record it in each one's folder, once per folder; returns the jobs."""
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
        # With what ran: a folder is found again in a year, and the checkout has moved on.
        "code": str(code.path),
        "commit": code.commit,
        "changed": code.changed,
    }
    for folder in dict.fromkeys(element.folder for element in elements):
        folder_jobs = [(e.arguments, job) for e, job in zip(elements, jobs, strict=True) if e.folder == folder]
        jobs_here = list(dict.fromkeys(job for _, job in folder_jobs))
        if len(jobs_here) > 1 and launch_options.cluster.kind == "slurm":  # a whole array is called by its number
            jobs_here = list(dict.fromkeys(job.partition("_")[0] for job in jobs_here))
        submission = {"jobs": jobs_here, "arguments": [arguments for arguments, _ in folder_jobs]}
        Records(Path(folder)).add("submitted", {"folder": folder, **submission, **facts})
    return jobs


def resolve_for_ranks(run: RunConfig, cluster: ClusterConfig) -> RunConfig:
    """The recipe for a job's ranks: `world_size` says how many there have to be, and one process's engine becomes ddp."""
    ranks = cluster.ranks
    if run.world_size not in (None, ranks):
        raise ConfigError(
            f"world_size={run.world_size}: {cluster.nodes} node(s) of {cluster.ranks_per_node} rank(s) are {ranks}; "
            "change --nodes, --tasks-per-node or --gpus-per-node, or the key"
        )
    # What cannot be dealt out over these ranks is refused here, not by a job that waited for a day.
    shared_streams(run.data, run.batch_size, ranks)
    _refuse_untrainable(run)
    # Written into the recipe, so that ranks that do not find each other end at once instead of training alone.
    changes = [f"world_size={ranks}"]
    if ranks > 1 and ENGINES.get(run.engine.kind).one_process:
        logger.info(f"{run.name}: engine.kind={run.engine.kind} -> ddp, for {ranks} ranks")
        # What ddp has no key for was of the one process alone.
        ddp_fields = ENGINES.get("ddp").config.model_fields
        engine_config = {key: value for key, value in run.engine.model_dump(mode="json").items() if key in ddp_fields}
        changes.append("engine=" + json.dumps({**engine_config, "kind": "ddp"}))
    tree: dict[str, Any] = parse_yaml(dump(run), run.name)
    return resolve(RunConfig, override(tree, changes), run.name)


def _refuse_untrainable(run: RunConfig) -> None:
    """Raise `ConfigError` for what every job of this recipe would end with: nothing to train, or tasks that do not fit."""
    try:
        check_recipe_compatible(run, meta_objective(run))
    except CheckpointError:
        pass  # weights that lie on the cluster alone are looked at there
    except SparoError:
        raise
    except Exception:
        pass  # a stranger's model may need memory to be made; what else is wrong with it, the job says


def refuse_busy(folder: Path) -> None:
    """Raise ConfigError where a job of this folder is queued or running."""
    last = Records(folder).last()
    if last is None:
        return
    # Two jobs of one folder would take turns in taking it from each other.
    busy = {job: "RUNNING" for job in last["jobs"] if last["cluster"]["kind"] == "local" and local_alive(job)}
    if last["cluster"]["kind"] == "slurm":
        busy = {job: state.state for job, state in states(last["jobs"]).items() if state.active}
    for job, state in busy.items():
        raise ConfigError(
            f"{folder}: job {job} is {state} in it; `sparo launch cancel {folder}` first, or wait, or give another name="
        )


def after_jobs(folders: Sequence[Path]) -> str | None:
    """sbatch's dependency on the last jobs of these folders; None where all of them are over.

    Raises:
        ConfigError: a folder without a job, or whose job failed.
    """
    waiting = []
    for folder in folders:
        last = Records(folder).last()
        if last is None:
            raise ConfigError(f"--after {folder}: no job was launched there")
        if last["cluster"]["kind"] != "slurm":
            raise ConfigError(f"--after {folder}: its job is not SLURM's, so SLURM cannot wait for it")
        job_states = list(states(last["jobs"]).values())
        ends = [s for job in last["jobs"] for s in Records(folder).starts(job) if "end" in s]
        # SLURM forgets a job after minutes; the folder remembers how it ended.
        if not job_states and not (ends and ends[-1]["end"] == 0):
            raise ConfigError(
                f"--after {folder}: SLURM has forgotten its job, which has not finished; `sparo launch resubmit {folder}` first"
            )
        if any(state.active for state in job_states):
            waiting += last["jobs"]
        # SLURM would let a job wait for ever for one that never ends well.
        elif any(state.state not in ("COMPLETED", "UNKNOWN") for state in job_states):
            bad = next(s.state for s in job_states if s.state != "COMPLETED")
            raise ConfigError(
                f"--after {folder}: its job {last['jobs'][0]} ended as {bad}; `sparo launch resubmit {folder}` first"
            )
    return "afterok:" + ":".join(waiting) if waiting else None


def _folder(path: Path) -> Path:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"out: {path} cannot be made a run folder ({error})") from None
    return path
