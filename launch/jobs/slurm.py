"""States of jobs from SLURM's own commands, and requests to SLURM."""

from __future__ import annotations

import logging
import re
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
    "RESV_DEL_HOLD",
    "REQUEUE_FED",
    "SPECIAL_EXIT",
    "SIGNALING",
}
UNKNOWN = "UNKNOWN"
_ELAPSED = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)")
NO_CONFIGURATION = "configuration source"
# Explanations of SLURM's reasons (squeue's manual page, "JOB REASON CODES").
REASONS = {
    "Priority": "other jobs have a higher priority",
    "Resources": "waits for nodes to become free",
    "BeginTime": "delayed for a moment after a requeue, or until its requested begin time",
    "Dependency": "waits for another job",
    "DependencyNeverSatisfied": "the job it waits for failed; cancel this one, repair the other, launch again",
    "PartitionConfig": "requests more than the partition has or allows; see `scontrol show partition`",
    "PartitionNodeLimit": "requests more nodes than the partition allows",
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
    "JobHeldUser": "held; release it with `scontrol release`",
    "JobHeldAdmin": "held by an administrator",
    "JobArrayTaskLimit": "the array may not have more elements running (--parallel)",
    "NodeDown": "one of its nodes is down",
    "BadConstraints": "no node has what --constraint or the other options ask for",
    "InvalidAccount": "the account is not valid",
    "InvalidQOS": "the qos is not valid",
    "launch failed requeued held": "could not be started on its nodes and is held; retry with `scontrol release`",
}


class NoSlurmError(SparoError):
    """This machine has no SLURM, or its commands are not configured."""


class SlurmAwayError(SparoError):
    """SLURM's controller does not answer."""


@dataclass(frozen=True)
class JobState:
    """State of a job (or of one element of an array) in SLURM.

    Attributes:
        reason: SLURM's reason with an explanation.
        elapsed: time since this start, as SLURM prints it.
        start: start of a running job, or SLURM's estimate for one that waits; empty if unknown.
    """

    state: str = UNKNOWN
    reason: str = ""
    nodes: str = ""
    elapsed: str = ""
    start: str = ""

    @property
    def active(self) -> bool:
        return self.state in ACTIVE

    @property
    def elapsed_seconds(self) -> float | None:
        """Return the seconds since this start of the job; None if SLURM does not say."""
        match = _ELAPSED.fullmatch(self.elapsed)
        if match is None:
            return None
        days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
        return ((24 * days + hours) * 60 + minutes) * 60 + seconds


def ask(*command: str, seconds: float = 60) -> str:
    """Return the output of one of SLURM's commands.

    Raises:
        NoSlurmError: the command is not installed here, or not configured.
        SlurmAwayError: no controller answers.
        subprocess.CalledProcessError: SLURM answered with an error.
    """
    if shutil.which(command[0]) is None:
        raise NoSlurmError(f"{command[0]}: not found on this machine. Launch from a node of the cluster.")
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=True).stdout
    except subprocess.TimeoutExpired:
        raise SlurmAwayError(
            f"{command[0]}: no answer within {seconds:g} s. SLURM's controller may be down; try again later."
        ) from None
    except subprocess.CalledProcessError as error:
        # Before `is_away`, because its message matches both, and waiting would not help.
        if NO_CONFIGURATION in error.stderr:
            raise NoSlurmError(without_configuration(command[0])) from None
        if is_away(error.stderr):
            raise SlurmAwayError(
                f"{command[0]}: SLURM's controller does not answer ({last_line(error.stderr)}). Running jobs continue; try again in a minute."
            ) from None
        raise


def without_configuration(command: str) -> str:
    """Explain why a command of SLURM found no cluster, and what to do."""
    return (
        f"{command}: SLURM is installed but not configured here. Set SLURM_CONF, or launch from a node of the cluster."
    )


def is_away(text: str) -> bool:
    """Return whether a command's message means that no controller answered."""
    signs = (
        "Unable to contact slurm controller",
        "Connection refused",
        "Socket timed out",
        "Connection timed out",
    )
    return any(sign in text for sign in signs)


def retry_while_away(call: Callable[[], str], seconds: float) -> str:
    """Repeat `call` until SLURM's controller is back, for at most `seconds`."""
    end = time.monotonic() + seconds
    while True:
        try:
            return call()
        except SlurmAwayError as error:
            if time.monotonic() > end:
                raise
            logger.warning(f"{error}; trying again")
            time.sleep(min(5.0, max(0.1, end - time.monotonic())))


def states(jobs: Sequence[str], accounting: bool = True) -> dict[str, JobState]:
    """Return SLURM's states of these jobs; an array's id gives all of its elements, as `12_0`.

    squeue first, because only it knows that a job whose node failed waits for a restart; then the accounting, if there
    is one, for jobs that have ended.
    """
    job_ids = sorted(set(jobs))
    if not job_ids:
        return {}
    job_states: dict[str, JobState] = {}
    try:
        out = ask("squeue", "-r", "-h", "--states=all", "-j", ",".join(job_ids), "-o", "%i|%T|%r|%N|%M|%S")
    except subprocess.CalledProcessError as error:
        if "Invalid job id" not in error.stderr:  # which means that SLURM has forgotten them
            raise SlurmAwayError(f"squeue: {last_line(error.stderr)}. The states of jobs are unknown.") from None
        out = ""
    for line in out.splitlines():
        job, state, reason, nodes, elapsed, start = line.split("|")[:6]
        job_states[job] = JobState(state, explain_reason(reason), nodes, elapsed, "" if start == "N/A" else start)
    # An array is queried by its number and answers with its elements.
    bases = {job.partition("_")[0] for job in job_states}
    missing = [job for job in job_ids if job not in job_states and job not in bases]
    return job_states | (_accounting_states(missing) if missing and accounting else {})


def _accounting_states(jobs: Sequence[str]) -> dict[str, JobState]:
    """Return the accounting's states of jobs that the controller has forgotten; empty without accounting."""
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
    """Return SLURM's reason with an explanation: `Resources: waits for nodes to become free`."""
    key = reason.strip().strip("()").partition(",")[0]
    if key in ("", "None"):
        return ""
    meaning = REASONS.get(key)
    return f"{reason.strip()}: {meaning}" if meaning else reason.strip()


def running_steps(job: str) -> set[str]:
    """Return the numbers of the steps of a job that are running, as `12.3`; empty if SLURM does not answer."""
    try:
        return set(ask("squeue", "-h", "-s", "-j", job, "-o", "%i").split())
    except (SparoError, subprocess.CalledProcessError):
        return set()


def cancel(jobs: Sequence[str]) -> None:
    """End jobs, or remove them from the queue; nothing happens to those that have ended."""
    _scancel(*jobs)


def send_signal(jobs: Sequence[str], name: str) -> None:
    """Send a signal, such as USR1, to the ranks of jobs."""
    _scancel(f"--signal={name}", *jobs)


def _scancel(*words: str) -> None:
    try:
        ask("scancel", *words)
    except subprocess.CalledProcessError as error:
        # Without a message, the job ended just now.
        if error.stderr.strip() and not any(
            over in error.stderr for over in ("Invalid job id", "already completing or completed")
        ):
            raise SparoError(f"scancel {' '.join(words)}: {last_line(error.stderr)}") from None


def partitions() -> str:
    """Return the names of the partitions, for a message; empty if SLURM does not answer."""
    try:
        return ", ".join(dict.fromkeys(ask("sinfo", "-h", "-o", "%R").split()))
    except (SparoError, subprocess.CalledProcessError):
        return ""


def last_line(text: str) -> str:
    """Return the last line of a program's messages that is not empty."""
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return lines[-1] if lines else "no message"
