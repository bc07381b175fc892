"""Submission of jobs through submitit: to SLURM, to processes of this machine, or in this process."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from sparo_train.core.errors import ConfigError, SparoError

from .clusters import ClusterConfig, minutes
from .job import Element, Job, RestartLimits
from .local_jobs import environment, submit_local
from .records import current_attempt
from .sbatch_options import INSTEAD, OWN
from .script import lines_after, lines_before
from .slurm import (
    NO_CONFIGURATION,
    NoSlurmError,
    SlurmAwayError,
    is_away,
    partitions,
    retry_while_away,
    without_configuration,
)

logger = logging.getLogger(__name__)

_PATIENCE = 180.0  # seconds that SLURM's controller may be down while we submit
# Messages with which sbatch refuses, and the remedy.
_REFUSALS = {
    "invalid partition": "--partition: is not available to you; known partitions: {partitions}",
    "Invalid account": "--account (or --partition, --qos) is not yours; list yours with `sacctmgr show assoc user=$USER`",
    "Invalid qos": "--qos is not yours; list yours with `sacctmgr show assoc user=$USER format=account,qos`",
    "QOSMaxSubmitJobPerUserLimit": "your queue has as many jobs as the qos allows. Wait, or submit fewer",
    "AssocMaxSubmitJobLimit": "the account's queue has as many jobs as allowed. Wait, or submit fewer",
    "Job violates accounting/QOS policy": "a limit of the account or qos (jobs in the queue, time, or size); list them with `sacctmgr show qos`",
    "Requested time limit is invalid": "--time is longer than the partition allows, or missing",
    "Requested node configuration is not available": "no nodes have that many GPUs, processors or that much memory: --gpus-per-node, --cpus-per-task, --mem-gb",
    "More processors requested than permitted": "more processors than the nodes have: --cpus-per-task, --tasks-per-node",
    "Memory specification can not be satisfied": "--mem-gb is more than the nodes have",
    "Invalid feature specification": "--constraint names a feature that no node has",
    "Invalid node name": "--nodelist or --exclude names a node that does not exist",
    "Invalid generic resource": "--gpus-per-node: this partition has no such GPUs",
    "Invalid wckey": "this site requires a wckey: --sbatch.wckey NAME",
    "mutually exclusive": "memory is given twice: --mem-gb and an --sbatch.mem… argument, or SBATCH_MEM… in the environment",
    "unrecognized option": "an --sbatch.NAME is not an argument of this sbatch",
    "Invalid job array specification": "more runs than an array may have here (MaxArraySize); launch fewer at once",
    "Job dependency problem": "--after names a job that does not exist",
    "group not permitted to use this partition": "--partition is not open to your group; known are: {partitions}",
    "Requested reservation is invalid": "--sbatch.reservation does not exist, or is not yours",
    "Node count specification invalid": "--nodes: more nodes than the partition has or allows",
}

_MEMORY = ("mem", "mem-per-cpu", "mem-per-gpu")


def submit(
    cluster: ClusterConfig,
    elements: Sequence[Element],
    jobs: Path,
    name: str,
    code: Path,
    parallel: int | None,
    dependency: str | None,
) -> list[str]:
    """Submit elements, several as one array; return the job of each.

    Args:
        cluster, elements, name: cluster, elements and name of the job.
        jobs: folder of logs and of submitit's files.
        code: the snapshot that runs.
        parallel: elements that run at a time (default: SLURM all, this machine one).
        dependency: in sbatch's syntax, `afterok:12`.

    Raises:
        ConfigError: submitit is missing, or the cluster refuses the job; nothing was submitted.
        NoSlurmError: this machine has no SLURM.
        SlurmAwayError: SLURM did not answer for minutes; nothing was submitted.
    """
    submitit = _submitit()
    jobs = jobs.resolve()
    jobs.mkdir(parents=True, exist_ok=True)
    if cluster.kind == "allocation":
        if dependency:
            raise ConfigError(
                "--after: not supported with --cluster allocation, where runs start immediately. Wait for the other "
                "run, or submit to a cluster's queue."
            )
        return [current_attempt()["job"]] * len(elements)  # `run_in_allocation` starts them
    if cluster.kind != "slurm":
        if dependency:
            raise ConfigError(f"--after: {cluster.kind} has no queue. Wait for the other run, or use SLURM.")
        return submit_local(submitit, cluster, elements, jobs, code, parallel or 1, _job)
    if shutil.which("srun") is None or shutil.which("sbatch") is None:
        raise NoSlurmError(
            "srun: not found on this machine. Launch from a node of the cluster, or use --cluster local."
        )
    executor = _executor(submitit, cluster, jobs, name, code)
    executor.update_parameters(array_parallelism=parallel or len(elements), dependency=dependency)
    job = _job(cluster, ())
    # One call for all, because elements of an array start alike, and SLURM limits how many run at once.
    calls = [replace(job, elements=(element,)) for element in elements]
    job_ids: list[str] = []

    def call() -> str:
        with _cleanup_on_failure(jobs):
            try:
                with environment({}):
                    job_ids.extend(job.job_id for job in executor.submit_array(calls))
            except KeyboardInterrupt:
                # sbatch may have submitted the job before it ended.
                logger.warning(
                    "interrupted during the submission, so a job may be queued that the run folder does not know. `squeue --me` lists "
                    "it; cancel it with scancel before you launch again."
                )
                raise
            except (submitit.core.utils.FailedJobError, submitit.core.utils.FailedSubmissionError) as error:
                raise _submission_error(str(error)) from None
        return ""

    retry_while_away(call, _PATIENCE)
    return job_ids


def _executor(submitit: Any, cluster: ClusterConfig, jobs: Path, name: str, code: Path) -> Any:
    """Return submitit's SLURM executor with everything that a cluster's description contains."""

    class Executor(submitit.SlurmExecutor):
        """It can also write its script on a machine without SLURM, for `--dry-run`."""

        @classmethod
        def affinity(cls) -> int:
            return 2

    if "%" in str(jobs):
        raise ConfigError(
            f"{jobs}: contains %, which SLURM replaces in the names of log files. Choose a folder without % (name=, out= or --name)."
        )
    torchrun = cluster.starter == "torchrun"
    executor = Executor(folder=jobs, max_num_timeout=10**9, python=cluster.python)
    executor.update_parameters(
        job_name=cluster.job_name or name,
        nodes=cluster.nodes,
        ntasks_per_node=1 if torchrun else cluster.ranks_per_node,
        cpus_per_task=cluster.cpus_per_task and cluster.cpus_per_task * (cluster.ranks_per_node if torchrun else 1),
        gpus_per_node=None if cluster.gpu_type or cluster.gpus_by_gres else cluster.gpus_per_node or None,
        mem=_memory(cluster.mem_gb),
        time=minutes(cluster.time),
        signal_delay_s=cluster.signal_seconds,
        setup=lines_before(cluster, executor.python, code, jobs, Path.cwd()),
        teardown=lines_after(),
        # Otherwise, ranks wait for one that failed before it joined.
        srun_args=["--kill-on-bad-exit=1", *cluster.srun_args],
        exclusive=cluster.exclusive or None,
        additional_parameters=_extra_parameters(cluster),
        wckey=None,  # sites that require wckeys refuse submitit's default
        **{key: getattr(cluster, key) for key in ("partition", "account", "qos", "constraint", "nodelist", "exclude")},
    )
    return executor


def _memory(gigabytes: float | None) -> str | None:
    """Return memory as SLURM writes it, which takes whole numbers only."""
    if gigabytes is None:
        return None
    return f"{int(gigabytes)}GB" if gigabytes == int(gigabytes) else f"{int(gigabytes * 1024)}MB"


def batch_script(cluster: ClusterConfig, jobs: Path, name: str, code: Path, parallel: int | None, count: int) -> str:
    """Return the script that `submit` would send to SLURM, for `count` elements."""
    executor = _executor(_submitit(), cluster, jobs, name, code)
    if count > 1:
        executor.parameters |= {"map_count": count, "array_parallelism": parallel or count}
    return executor._make_submission_file_text(executor._submitit_command_str, "")


def _extra_parameters(cluster: ClusterConfig) -> dict[str, str | int | bool]:
    """Return arguments of sbatch that submitit does not know, or that replace its own."""
    # Relative paths of a recipe refer to the folder of the launch, on every node.
    parameters: dict[str, str | int | bool] = {"requeue": True, "chdir": str(Path.cwd())}
    if cluster.gpu_type and cluster.gpus_per_node and not cluster.gpus_by_gres:
        parameters["gpus_per_node"] = f"{cluster.gpu_type}:{cluster.gpus_per_node}"
    for argument, value in cluster.sbatch.items():
        name = argument.replace("_", "-")
        option = OWN.get(name) or INSTEAD.get(name)
        if option is not None:
            raise ConfigError(f"--sbatch.{argument}: sparo sets it itself, got {value}. Use {option}.")
        if len(name) == 1:
            raise ConfigError(
                f"--sbatch.{argument}: is the short form of an argument, got {value}. Write its long name."
            )
        if name in _MEMORY and value is not False and cluster.mem_gb is not None:
            raise ConfigError(
                f"--sbatch.{argument}: memory is given twice, got {value} and --mem-gb {cluster.mem_gb:g}. Remove one of them."
            )
        parameters[name.replace("-", "_")] = value
    if parameters.get("no_requeue"):
        parameters["requeue"] = False
    return {name: value for name, value in parameters.items() if value is not False}


def restart_limits(cluster: ClusterConfig) -> RestartLimits:
    """Return when a job of this cluster is not started again."""
    return RestartLimits(cluster.idle_restarts, cluster.max_restarts, cluster.max_hours, minutes(cluster.time) / 60)


def _job(cluster: ClusterConfig, elements: tuple[Element, ...]) -> Job:
    torchrun = cluster.starter == "torchrun" and cluster.ranks > 1
    visible = None if cluster.gpus_per_node else os.environ.get("CUDA_VISIBLE_DEVICES", "all")
    job = Job(elements, str(Path.cwd()), restart_limits(cluster), cluster.nodes, cluster.ranks_per_node, torchrun)
    job = replace(job, gpus=cluster.gpus_per_node)
    return replace(job, visible=visible if cluster.kind == "local" else None)


def _submitit() -> Any:
    try:
        import submitit
    except ImportError:
        raise ConfigError("sparo launch needs submitit. Run `pip install -e '.[slurm]'` in sparo's checkout.") from None
    return submitit


def _submission_error(text: str) -> SparoError:
    """Convert sbatch's message to an error with a remedy."""
    # Sites print their own text around it.
    sbatch_lines = [line for line in text.splitlines() if line.startswith("sbatch:")] or text.strip().splitlines()[-1:]
    short = " ".join(line.removeprefix("sbatch: ").removeprefix("error: ") for line in sbatch_lines)
    if "timed out" in text:
        return SparoError(
            f"sbatch: {short}. The job may be in the queue all the same; check `squeue --me` before you launch again."
        )
    if NO_CONFIGURATION in text:
        return NoSlurmError(without_configuration("sbatch"))
    if is_away(text):
        return SlurmAwayError(
            f"sbatch: SLURM's controller does not answer, so nothing was submitted ({short}). Try again later."
        )
    for sign, remedy in _REFUSALS.items():
        if sign.lower() in text.lower():
            return ConfigError(f"sbatch refused the job ({short}); {remedy.format(partitions=partitions() or 'none')}")
    return ConfigError(f"sbatch refused the job: {short}")


@contextmanager
def _cleanup_on_failure(folder: Path) -> Iterator[None]:
    """Remove submitit's files of a submission that failed."""
    before = set(folder.iterdir())
    try:
        yield
    except BaseException:
        for path in set(folder.iterdir()) - before:
            # Not the logs and records of other jobs in this folder.
            if path.suffix in (".pkl", ".sh"):
                path.unlink(missing_ok=True)
        raise
