"""What SLURM says about jobs, through its own commands, and what is asked of it."""

from __future__ import annotations

import logging
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sparo_train.core.errors import SparoError

logger = logging.getLogger(__name__)

ACTIVE = {
    "PENDING",
    "CONFIGURING",
    "RUNNING",
    "COMPLETING",
    "SUSPENDED",
    "REQUEUED",
    "REQUEUE_HOLD",
    "RESIZING",
    "STOPPED",
    "STAGE_OUT",
}
UNKNOWN = "UNKNOWN"
NO_CONFIGURATION = "configuration source"
# What SLURM's reasons ask of a user (squeue's manual page, "JOB REASON CODES").
REASONS = {
    "Priority": "others are first",
    "Resources": "waits for nodes to become free",
    "BeginTime": "held for a moment after a requeue, or until the time it asked for",
    "Dependency": "waits for another job",
    "DependencyNeverSatisfied": "the job it waits for failed; cancel this one, mend that one, launch again",
    "PartitionConfig": "asks for more than the partition has or allows; see `scontrol show partition`",
    "PartitionNodeLimit": "asks for more nodes than the partition allows",
    "PartitionTimeLimit": "--time is longer than the partition allows",
    "PartitionDown": "the partition is down",
    "PartitionInactive": "the partition is inactive",
    "ReqNodeNotAvail": "a node that it needs is drained, down or reserved",
    "Reservation": "waits for a reservation",
    "AssocGrpCPUMinutesLimit": "the account's processor hours are used up",
    "AssocGrpGRES": "the account's GPUs are all in use",
    "AssocMaxJobsLimit": "the account may not run more jobs at once",
    "QOSMaxJobsPerUserLimit": "you may not run more jobs at once in this qos",
    "QOSMaxGRESPerUser": "you may not use more GPUs at once in this qos",
    "QOSMaxWallDurationPerJobLimit": "--time is longer than the qos allows",
    "QOSTimeLimit": "the qos has used up its time",
    "JobHeldUser": "held; `scontrol release` lets it go",
    "JobHeldAdmin": "held by an administrator",
    "JobArrayTaskLimit": "as many of the array run as --parallel allows",
    "NodeDown": "a node of it is down",
    "BadConstraints": "no node has what --constraint or the other options ask for",
    "InvalidAccount": "the account is not valid",
    "InvalidQOS": "the qos is not valid",
    "launch failed requeued held": "could not be started on its nodes and is held; `scontrol release` tries again",
}


class NoSlurmError(SparoError):
    """This machine has no SLURM, or its commands do not know of one."""


class SlurmAwayError(SparoError):
    """SLURM's controller does not answer."""


@dataclass(frozen=True)
class JobState:
    """A job (or one element of an array) as SLURM sees it. `elapsed` as SLURM writes it, `reason` explained."""

    state: str = UNKNOWN
    reason: str = ""
    nodes: str = ""
    elapsed: str = ""

    @property
    def active(self) -> bool:
        return self.state in ACTIVE


def ask(*command: str, seconds: float = 60) -> str:
    """The output of one of SLURM's commands.

    Raises:
        NoSlurmError: no such command here, or one without a configuration.
        SlurmAwayError: no controller answers.
        subprocess.CalledProcessError: it answered, and refused.
    """
    if shutil.which(command[0]) is None:
        raise NoSlurmError(f"{command[0]}: no such command on this machine; launch from a node of the cluster")
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=True).stdout
    except subprocess.TimeoutExpired:
        raise SlurmAwayError(
            f"{command[0]} did not answer within {seconds:g} s; SLURM's controller may be away"
        ) from None
    except subprocess.CalledProcessError as error:
        # Before `is_away`: its words hold both signs, and waiting would not help.
        if NO_CONFIGURATION in error.stderr:
            raise NoSlurmError(without_configuration(command[0])) from None
        if is_away(error.stderr):
            raise SlurmAwayError(
                f"{command[0]}: SLURM's controller does not answer; running jobs go on, try again in a minute ({_last(error.stderr)})"
            ) from None
        raise


def without_configuration(command: str) -> str:
    """Why a command of SLURM's found no cluster, and what to do."""
    return (
        f"{command}: SLURM is installed and not configured here; set SLURM_CONF, or launch from a node of the cluster"
    )


def is_away(text: str) -> bool:
    """Whether a command's words mean that no controller answered."""
    signs = (
        "Unable to contact slurm controller",
        "Connection refused",
        "Socket timed out",
        "Connection timed out",
    )
    return any(sign in text for sign in signs)


def retry_while_away(call: Callable[[], str], seconds: float) -> str:
    """`call` again until SLURM's controller is back, at most for so many seconds."""
    end = time.monotonic() + seconds
    while True:
        try:
            return call()
        except SlurmAwayError as error:
            if time.monotonic() > end:
                raise
            logger.warning(f"{error}; trying again")
            time.sleep(min(5.0, max(0.1, end - time.monotonic())))


def states(jobs: Sequence[str]) -> dict[str, JobState]:
    """What SLURM knows of these jobs; an array's id gives all of its elements, as `12_0`.

    squeue first: it alone knows that a job whose node failed waits to be started anew. Then the accounting, where there is one.
    """
    job_ids = sorted(set(jobs))
    if not job_ids:
        return {}
    job_states: dict[str, JobState] = {}
    try:
        out = ask("squeue", "-r", "-h", "--states=all", "-j", ",".join(job_ids), "-o", "%i|%T|%r|%N|%M")
    except subprocess.CalledProcessError:  # it has forgotten them
        out = ""
    for line in out.splitlines():
        job, state, reason, nodes, elapsed = line.split("|")[:5]
        job_states[job] = JobState(state, explain_reason(reason), nodes, elapsed)
    # An array is asked for by its number and answers by its elements.
    bases = {job.partition("_")[0] for job in job_states}
    missing = [job for job in job_ids if job not in job_states and job not in bases]
    return job_states | (_accounting_states(missing) if missing else {})


def _accounting_states(jobs: Sequence[str]) -> dict[str, JobState]:
    """What the accounting knows of jobs that the controller has forgotten; nothing where there is no accounting."""
    try:
        out = ask("sacct", "-X", "-n", "-P", "-j", ",".join(jobs), "-o", "JobID,State,NodeList,Elapsed")
    except (SparoError, subprocess.CalledProcessError):
        return {}
    job_states = {}
    for line in out.splitlines():
        job, state, nodes, elapsed = line.split("|")[:4]
        # `CANCELLED by 1000`.
        job_states[job] = JobState(state.split()[0], "", nodes if nodes != "None assigned" else "", elapsed)
    return job_states


def explain_reason(reason: str) -> str:
    """SLURM's reason with what it means: `Resources: waits for nodes to become free`."""
    key = reason.strip().strip("()").partition(",")[0]
    if key in ("", "None"):
        return ""
    meaning = REASONS.get(key)
    return f"{reason.strip()}: {meaning}" if meaning else reason.strip()


def cancel(job: str) -> None:
    """End a job, or take it out of the queue; nothing where it has ended."""
    try:
        ask("scancel", job)
    except subprocess.CalledProcessError as error:
        if not any(over in error.stderr for over in ("Invalid job id", "already completing or completed")):
            raise SparoError(f"scancel {job}: {_last(error.stderr)}") from None


def partitions() -> str:
    """Names of the partitions, for a message; empty where SLURM does not answer."""
    try:
        return ", ".join(dict.fromkeys(ask("sinfo", "-h", "-o", "%R").split()))
    except (SparoError, subprocess.CalledProcessError):
        return ""


def _last(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return lines[-1] if lines else "no message"
