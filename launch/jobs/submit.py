"""Submission of jobs through submitit: to SLURM, to processes of this machine, or in this process."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from sparo_train.core.errors import ConfigError, SparoError

from .clusters import ClusterConfig, minutes
from .job import Element, Job
from .local_jobs import environment, submit_local
from .slurm import (
    NO_CONFIGURATION,
    NoSlurmError,
    SlurmAwayError,
    is_away,
    partitions,
    retry_while_away,
    without_configuration,
)

# MASTER_ADDR is the address by which SLURM reaches the first node (or its name), and MASTER_PORT a port there on which
# nothing listens, below the ephemeral ports. The trap keeps bash alive through a pre-emption's SIGTERM. Since SLURM
# 22.05, srun takes the processors of a rank from a separate variable.
_MEET = """\
trap : TERM USR1 USR2
[ -z "${SLURM_CPUS_PER_TASK:-}" ] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=$(scontrol show node "$MASTER_ADDR" -o | tr ' ' '\\n' | sed -n 's/^NodeAddr=//p')
MASTER_ADDR=${address:-$MASTER_ADDR}
for try in $(seq 0 31); do
  MASTER_PORT=$((20000 + (SLURM_JOB_ID + try * 367) % 12000))
  (exec 3<>"/dev/tcp/127.0.0.1/$MASTER_PORT") 2>/dev/null || break
done
export MASTER_ADDR MASTER_PORT"""

# Restart if the job was saved after a signal (75), ended by one before its handlers were installed (140, 143), killed
# (137: out of memory, or by the srun of an earlier start on a node that returned, for which our step has the same
# number), if a rank was lost, or if a node never started it. Only while the job is running (not if it was cancelled)
# and has not been restarted.
_AGAIN = """\
code=$?
restart=${SLURM_RESTART_COUNT:-0}
mark=JOBS/.$SLURM_JOB_ID-$restart
job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID} # of an array this element alone
job=${job:-$SLURM_JOB_ID}
again=no
[[ " 75 137 140 143 " != *" $code "* ]] || again=yes
[ ! -e "$mark.lost" ] || again=yes
[ $code -eq 0 ] || [ -e "$mark.started" ] || [ "$restart" -ge 3 ] || again=yes
rm -f "$mark".*
for try in $(seq 60); do
  [ $again = yes ] || break
  case "$(scontrol show job "$job" -o 2>/dev/null) " in
    *" JobState=RUNNING "*" Restarts=$restart "*) scontrol requeue "$job" && trap - TERM && exec sleep 60 ;;
    *" JobState="*) break ;;
  esac
  sleep 5
done
exit $code"""


# Shell lines around a job's srun: where its ranks meet, and whether the job restarts. They run in the batch script on
# the job's first node, outside of any container, because SLURM's commands are available there.
def lines_before(setup: tuple[str, ...], environment: Mapping[str, str], code: Path) -> list[str]:
    """Return the lines before srun: the cluster's own, its variables, the snapshot's path, and where the ranks meet."""
    exports = [f"export {name}={shlex.quote(value)}" for name, value in environment.items()]
    path = f"export PYTHONPATH={shlex.quote(str(code))}${{PYTHONPATH:+:$PYTHONPATH}}"
    # Without the last one, `python -m` would search the folder of the launch, perhaps a checkout, before the snapshot.
    return [*setup, *exports, path, "export PYTHONSAFEPATH=1", *_MEET.splitlines()]


def lines_after(jobs: Path) -> list[str]:
    """Return the lines after srun; `jobs` contains the marks that ranks leave (`launch.jobs.job.mark`)."""
    return _AGAIN.replace("JOBS", shlex.quote(str(jobs))).splitlines()


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

# Arguments of sbatch that sparo sets, and what to use instead.
_OWN_ARGUMENTS = {
    "signal": "--signal-seconds",
    "output": "`sparo launch logs`",
    "error": "`sparo launch logs`",
    "open-mode": "nothing: logs are appended to after a restart",
    "job-name": "name=",
    "nodes": "--nodes",
    "ntasks-per-node": "--tasks-per-node or --gpus-per-node",
    "time": "--time",
    "array": "a sweep (key=[a,b] or --seeds)",
    "ntasks": "--nodes and --tasks-per-node",
    "cpus-per-task": "--cpus-per-task",
    "gpus-per-node": "--gpus-per-node and --gpu-type",
    "gpus": "--gpus-per-node and --gpu-type",
    "gpus-per-task": "--gpus-per-node and --gpu-type",
    "dependency": "--after",
    "wait": "nothing: `sparo launch status` shows when it ends",
    "wrap": "nothing: sparo writes the script",
    "chdir": "nothing: a job runs in the folder from which it was launched",
    **{name: f"--{name}" for name in ("partition", "account", "qos", "constraint", "nodelist", "exclude", "exclusive")},
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
    if cluster.kind != "slurm":
        if dependency:
            raise ConfigError(f"--after: {cluster.kind} has no queue. Wait for the other run, or use SLURM.")
        return submit_local(submitit, cluster, elements, jobs, code, parallel or 1, _job)
    executor = _executor(submitit, cluster, jobs, name, code)
    executor.update_parameters(slurm_array_parallelism=parallel or len(elements), slurm_dependency=dependency)
    job = _job(cluster, ())
    # One call for all, because elements of an array start alike, and SLURM limits how many run at once.
    calls = [replace(job, elements=(element,)) for element in elements]
    job_ids: list[str] = []

    def call() -> str:
        with _cleanup_on_failure(jobs):
            try:
                with environment({}):
                    job_ids.extend(job.job_id for job in executor.submit_array(calls))
            except (submitit.core.utils.FailedJobError, submitit.core.utils.FailedSubmissionError) as error:
                raise _submission_error(str(error)) from None
        return ""

    retry_while_away(call, _PATIENCE)
    return job_ids


def _executor(submitit: Any, cluster: ClusterConfig, jobs: Path, name: str, code: Path) -> Any:
    """Return submitit's SLURM executor with everything that a cluster's description contains."""
    torchrun = cluster.starter == "torchrun"
    try:
        executor = submitit.AutoExecutor(
            folder=jobs, cluster="slurm", slurm_max_num_timeout=10**9, slurm_python=cluster.python
        )
    except RuntimeError:
        raise NoSlurmError(
            "srun: not found on this machine. Launch from a node of the cluster, or use --cluster local."
        ) from None
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
        slurm_additional_parameters=_extra_parameters(cluster),
        **{
            f"slurm_{key}": getattr(cluster, key)
            for key in ("partition", "account", "qos", "constraint", "nodelist", "exclude")
        },
    )
    # submitit's default, which sites that require wckeys refuse. AutoExecutor does not accept None.
    executor._executor.update_parameters(wckey=None)
    return executor


def _extra_parameters(cluster: ClusterConfig) -> dict[str, str | int | bool]:
    """Return arguments of sbatch that submitit does not know, or that replace its own."""
    # Relative paths of a recipe refer to the folder of the launch, on every node.
    parameters: dict[str, str | int | bool] = {"requeue": True, "chdir": str(Path.cwd())}
    if cluster.gpu_type and cluster.gpus_per_node:
        parameters["gpus_per_node"] = f"{cluster.gpu_type}:{cluster.gpus_per_node}"
    for argument, value in cluster.sbatch.items():
        name = argument.replace("_", "-")
        option = _OWN_ARGUMENTS.get(name)
        if name == "gres" and "gpu" in str(value):  # otherwise the job would not know its GPUs
            option = _OWN_ARGUMENTS["gpus"]
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


def _job(cluster: ClusterConfig, elements: tuple[Element, ...]) -> Job:
    torchrun = cluster.starter == "torchrun" and cluster.ranks > 1
    visible = None if cluster.gpus_per_node else os.environ.get("CUDA_VISIBLE_DEVICES", "all")
    job = Job(elements, str(Path.cwd()), cluster.idle_restarts, cluster.nodes, cluster.ranks_per_node, torchrun)
    job = replace(job, gpus=cluster.gpus_per_node)
    return replace(job, visible=visible if cluster.kind == "local" else None)


def _submitit() -> Any:
    try:
        import submitit
    except ImportError:
        raise ConfigError("sparo launch needs submitit. pip install -e '.[slurm]' in sparo's checkout.") from None
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
            path.unlink(missing_ok=True)
        raise
