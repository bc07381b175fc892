"""Handing jobs to submitit: SLURM, processes of this machine, or this process."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from sparo_train.core.errors import ConfigError, SparoError

from .batch import after as lines_after
from .batch import before as lines_before
from .clusters import ClusterConfig, minutes
from .job import Element, Job
from .slurm import NO_CONFIGURATION, NoSlurmError, SlurmAwayError, is_away, partitions, patiently, without_configuration

_PATIENCE = 180.0  # seconds that SLURM's controller may be away while we submit
# How sbatch refuses, and what to do about it.
_REFUSALS = {
    "invalid partition": "--partition: there is no such partition for you; known are: {partitions}",
    "Invalid account": "--account (or --partition, --qos) is not one of yours; `sacctmgr show assoc user=$USER` lists them",
    "Invalid qos": "--qos is not one of yours; `sacctmgr show assoc user=$USER format=account,qos` lists them",
    "QOSMaxSubmitJobPerUserLimit": "you have as many jobs in the queue as the qos allows; wait, or submit fewer",
    "AssocMaxSubmitJobLimit": "the account has as many jobs in the queue as it may; wait, or submit fewer",
    "Job violates accounting/QOS policy": "a limit of the account or qos: jobs in the queue, time, or size; `sacctmgr show qos` lists them",
    "Requested time limit is invalid": "--time is longer than the partition allows, or missing",
    "Requested node configuration is not available": "no nodes with so many GPUs, processors or so much memory: --gpus-per-node, --cpus-per-task, --mem-gb",
    "More processors requested than permitted": "more processors than the nodes have: --cpus-per-task, --tasks-per-node",
    "Memory specification can not be satisfied": "--mem-gb is more than the nodes have",
    "Invalid feature specification": "--constraint names a feature that no node has",
    "Invalid node name": "--nodelist or --exclude names a node that is not there",
    "Invalid generic resource": "--gpus-per-node: this partition has no such GPUs",
    "Node count specification invalid": "--nodes: more nodes than the partition has or allows",
}


def submit(
    cluster: ClusterConfig,
    elements: Sequence[Element],
    jobs: Path,
    name: str,
    code: Path,
    parallel: int | None,
    dependency: str | None,
    say: Callable[[str], None],
) -> list[str]:
    """Submit elements, several as one array; returns the job of each.

    Args:
        jobs: folder of logs and of submitit's files.
        code: the snapshot that runs.
        parallel: how many elements at a time (default: SLURM all, this machine one).
        dependency: in sbatch's words, `afterok:12`.

    Raises:
        ConfigError: submitit is missing, or the cluster refuses the job; nothing was submitted.
        NoSlurmError: this machine has no SLURM.
        SlurmAwayError: SLURM did not answer for minutes; nothing was submitted.
    """
    submitit = _submitit()
    jobs = jobs.resolve()
    jobs.mkdir(parents=True, exist_ok=True)
    if cluster.kind != "slurm":
        if dependency:
            raise ConfigError(f"--after: {cluster.kind} has no queue; wait for the other run, or use SLURM")
        return _submit_here(submitit, cluster, elements, jobs, code, parallel or 1)
    executor = _executor(submitit, cluster, jobs, name, code)
    executor.update_parameters(slurm_array_parallelism=parallel or len(elements), slurm_dependency=dependency)
    job = _job(cluster, ())
    # One call for all: elements of an array start alike, and SLURM holds how many run at once.
    calls = [replace(job, elements=(element,)) for element in elements]
    found: list[str] = []

    def call() -> str:
        with _nothing_left(jobs):
            try:
                found.extend(job.job_id for job in executor.submit_array(calls))
            except (submitit.core.utils.FailedJobError, submitit.core.utils.FailedSubmissionError) as error:
                raise _refusal(str(error)) from None
        return ""

    patiently(call, _PATIENCE, say)
    return found


def _executor(submitit: Any, cluster: ClusterConfig, jobs: Path, name: str, code: Path) -> Any:
    """submitit's for SLURM, with all that a cluster's description says."""
    torchrun = cluster.starter == "torchrun"
    try:
        executor = submitit.AutoExecutor(
            folder=jobs, cluster="slurm", slurm_max_num_timeout=10**9, slurm_python=cluster.python
        )
    except RuntimeError:
        raise NoSlurmError("no srun on this machine: launch from a node of the cluster, or --on local") from None
    executor.update_parameters(
        name=name,
        nodes=cluster.nodes,
        tasks_per_node=1 if torchrun else cluster.ranks_per_node,
        cpus_per_task=cluster.cpus_per_task and cluster.cpus_per_task * (cluster.ranks_per_node if torchrun else 1),
        gpus_per_node=None if cluster.gpu_type else cluster.gpus_per_node or None,
        mem_gb=cluster.mem_gb,
        timeout_min=minutes(cluster.time),
        slurm_signal_delay_s=cluster.signal_seconds,
        slurm_setup=lines_before(cluster.setup, cluster.environment, code),
        slurm_teardown=lines_after(jobs),
        slurm_srun_args=list(cluster.srun_args) or None,
        slurm_exclusive=cluster.exclusive or None,
        slurm_additional_parameters=_further(cluster),
        **{
            f"slurm_{key}": getattr(cluster, key)
            for key in ("partition", "account", "qos", "constraint", "nodelist", "exclude")
        },
    )
    return executor


def _submit_here(
    submitit: Any, cluster: ClusterConfig, elements: Sequence[Element], jobs: Path, code: Path, parallel: int
) -> list[str]:
    """On this machine: `parallel` lanes, each of which runs its elements one after another."""
    with socket.socket() as free:
        # The system names a port that nobody has; ranks of a lane meet there.
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # This machine has no queue: what waits, waits in a lane.
    lanes = [elements[lane::parallel] for lane in range(min(parallel, len(elements)))]
    found: dict[Element, str] = {}
    debug = cluster.kind == "debug"
    executor: Any = submitit.AutoExecutor(
        folder=jobs, cluster=cluster.kind, **({} if debug else {"local_python": cluster.python})
    )
    if not debug:
        executor.update_parameters(
            tasks_per_node=1 if cluster.starter == "torchrun" else cluster.ranks_per_node,
            gpus_per_node=cluster.gpus_per_node,
            timeout_min=minutes(cluster.time),
        )
    for number, lane in enumerate(lanes):
        job = replace(_job(cluster, tuple(lane)), port=port + number)
        # The snapshot goes first: the checkout may change while the job waits for its lane.
        path = f"{code}:{os.environ.get('PYTHONPATH', '')}".rstrip(":")
        with _environment({**cluster.environment, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}):
            submitted: Any = executor.submit(job)
            found |= dict.fromkeys(lane, str(submitted.job_id))
            if debug:
                submitted.result()  # it runs now
    return [found[element] for element in elements]


def _further(cluster: ClusterConfig) -> dict[str, str | int | bool]:
    """Arguments of sbatch that submitit has no name for, or that replace its own."""
    # Relative paths of a recipe mean the folder that it was launched from, on every node.
    found: dict[str, str | int | bool] = {"requeue": True, "chdir": str(Path.cwd())}
    if cluster.gpu_type and cluster.gpus_per_node:
        found["gpus_per_node"] = f"{cluster.gpu_type}:{cluster.gpus_per_node}"
    found |= {name.replace("-", "_"): value for name, value in cluster.sbatch.items()}
    return {name: value for name, value in found.items() if value is not False}


def local_alive(job: str) -> bool:
    """Whether submitit's controller of a local job runs."""
    try:
        return b"submitit.local._local" in Path(f"/proc/{int(job)}/cmdline").read_bytes()
    except (OSError, ValueError):
        return False


def end_local(job: str, patience: float = 60.0) -> None:
    """Ask a local job to save and end; kill what is left of it after `patience` seconds, as SLURM does after KillWait."""
    with suppress(OSError):  # it ended in between
        os.kill(int(job), signal.SIGTERM)
        end = time.monotonic() + patience
        while local_alive(job) and time.monotonic() < end:
            time.sleep(0.1)
        if local_alive(job):
            # Read before it is killed: afterwards they are nobody's children.
            ranks = Path(f"/proc/{job}/task/{job}/children").read_text().split()
            # The ranks outlive their controller, and hold the folder's lock.
            for pid in (job, *ranks):
                os.kill(int(pid), signal.SIGKILL)


def _job(cluster: ClusterConfig, elements: tuple[Element, ...]) -> Job:
    torchrun = cluster.starter == "torchrun" and cluster.ranks > 1
    visible = None if cluster.gpus_per_node else os.environ.get("CUDA_VISIBLE_DEVICES", "all")
    job = Job(elements, str(Path.cwd()), cluster.idle_restarts, cluster.nodes, cluster.ranks_per_node, torchrun)
    return replace(job, visible=visible if cluster.kind == "local" else None)


def _submitit() -> Any:
    try:
        import submitit
    except ImportError:
        raise ConfigError("sparo launch needs submitit: pip install -e '.[slurm]' in sparo's checkout") from None
    return submitit


def _refusal(text: str) -> SparoError:
    """sbatch's words as an error that says what to change."""
    # Sites print their own greetings around it.
    said = [line for line in text.splitlines() if line.startswith("sbatch:")] or text.strip().splitlines()[-1:]
    short = " ".join(line.removeprefix("sbatch: ").removeprefix("error: ") for line in said)
    if "timed out" in text:
        return SparoError(
            f"sbatch: {short}; the job may be in the queue all the same: see `squeue --me` before you launch again"
        )
    if NO_CONFIGURATION in text:
        return NoSlurmError(without_configuration("sbatch"))
    if is_away(text):
        return SlurmAwayError(f"sbatch: SLURM's controller does not answer; nothing was submitted ({short})")
    for sign, remedy in _REFUSALS.items():
        if sign.lower() in text.lower():
            return ConfigError(f"sbatch refused the job ({short}); {remedy.format(partitions=partitions() or 'none')}")
    return ConfigError(f"sbatch refused the job: {short}")


@contextmanager
def _nothing_left(folder: Path) -> Iterator[None]:
    """Remove what submitit wrote for a submission that failed."""
    before = set(folder.iterdir())
    try:
        yield
    except BaseException:
        for path in set(folder.iterdir()) - before:
            path.unlink(missing_ok=True)
        raise


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables for what is started inside."""
    old = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in old.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
