"""One rank of a job: `python -m launch.cli.node FOLDER LIMITS ARGUMENTS…`. Every start leaves a record in FOLDER/jobs."""

from __future__ import annotations

import os
import platform
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sparo_train.core.disk.rundir import Attempt, RunLease
from sparo_train.core.errors import ConfigError, LostRankError, SparoError, StoppedError, SupersededError
from sparo_train.core.world import find_world, whole_number

from ..jobs.job import GPUS, LOCAL_AGAIN, RestartLimits, mark, stop_until_training
from ..jobs.records import RESTART_LIMIT, Records, current_attempt
from ..views.terminal import console
from .main import app
from .process import call, leave


def perform(arguments: Sequence[str], folder: str, limits: RestartLimits) -> int:
    """Run `sparo ARGUMENTS` on this rank, record its start and end, and return the exit code."""
    records, attempt_info, rank, start_time = Records(Path(folder)), current_attempt(), find_world().rank, time.time()
    sys.argv = ["sparo", *arguments]
    # Before loading anything: a job that fails at its start fails every time, and would be restarted forever.
    if stuck := _stuck_reason(records, attempt_info, limits, arguments[0] == "train"):
        if rank == 0:
            console.print_line(f"error: {stuck}")
            failure = {"rank": 0, "code": 3, "kind": RESTART_LIMIT, "message": stuck}
            records.add("failures", {**attempt_info, **failure})  # torchrun's job restarts without a record
            records.add("starts", {**attempt_info, "end": 3, "stuck": stuck, "reason": stuck, "step": records.step()})
        mark("failed")
        # Rank 0 alone ends with a code: srun would end it before it has written the reason.
        return 3 if rank == 0 else 0
    if rank == 0:
        records.add("starts", {**attempt_info, "step": records.step()})
    code, error = call(_with_gpu_check(app), arguments)
    if error is not None and not isinstance(error, SparoError):
        traceback.print_exception(error)
    if _may_write(Path(folder), start_time) and not isinstance(error, SupersededError):
        try:
            _record_end(records, attempt_info, rank, code, error)
        except OSError as problem:  # a full disk must not hide the error that ended this start
            console.print_line(f"the end of this job could not be recorded: {problem}")
    again = "SUBMITIT_LOCAL_JOB_ID" in os.environ and isinstance(error, StoppedError) and error.signal == "SIGUSR2"
    if again:
        return LOCAL_AGAIN
    if "SLURM_PROCID" in os.environ and "TORCHELASTIC_RUN_ID" not in os.environ and _other_rank_reports(rank, error):
        return 0
    return code


def _other_rank_reports(rank: int, error: Exception | None) -> bool:
    """Return whether another rank records this end. srun would end that rank, while it writes, as soon as this one has a code."""
    return (rank > 0 and isinstance(error, StoppedError)) or getattr(error, "repeated", False)


def _with_gpu_check(program: Callable[[list[str]], Any]) -> Callable[[list[str]], Any]:
    """Return the command, after a check that torch finds a GPU if the job requested one. Without it, training would use the CPU."""
    num_gpus = whole_number(os.environ, GPUS, 0)

    def run(arguments: list[str]) -> Any:
        if num_gpus and arguments[0] in ("train", "eval", "launch"):
            import torch

            if not torch.accelerator.device_count():
                raise ConfigError(
                    f"--gpus-per-node: the job asked for {num_gpus} GPU(s), but torch {torch.__version__} on "
                    f"{platform.node()} sees none. Install a CUDA build of torch there, or launch with --gpus-per-node 0."
                )
        return program(arguments)

    return run


def _record_end(records: Records, attempt_info: dict[str, Any], rank: int, code: int, error: Exception | None) -> None:
    # A mark for the batch script, first, because it must not be lost: the other ranks were fine, and end without a message.
    if isinstance(error, LostRankError):
        mark("lost")
    elif code and not isinstance(error, StoppedError):
        mark("failed")
    reason = "finished" if code == 0 else f"code {code}"
    if isinstance(error, StoppedError):
        reason = error.signal
    elif error is not None:
        kind = type(error).__name__
        reason = f"{kind}: {str(error)[:1000]}"
        if not getattr(error, "repeated", False):
            records.add(
                "failures", {**attempt_info, "rank": rank, "code": code, "kind": kind, "message": str(error)[:2000]}
            )
    if rank == 0:
        records.add("starts", {**attempt_info, "end": code, "reason": reason, "step": records.step()})


def _stuck_reason(
    records: Records, attempt_info: dict[str, Any], limits: RestartLimits, has_checkpoints: bool = True
) -> str | None:
    """Return why the job must not be restarted again, or None. All ranks agree, because this start's own record is ignored."""
    earlier = range(limits.first, attempt_info["restart"])
    lines = [s for s in records.starts(attempt_info["job"]) if s["restart"] in earlier]
    starts, step, idle = [s for s in lines if "end" not in s], records.step(), 0
    if len(starts) > limits.restarts:
        return _limit_reason(records, f"{len(starts) - 1} restarts", f"max_restarts={limits.restarts}")
    if limits.hours is not None and (hours := _hours(lines, limits.start_hours)) >= limits.hours:
        return _limit_reason(records, f"{hours:.1f} hours", f"max_hours={limits.hours:g}")
    # From the newest back to the last start that came further than the one before it.
    for start in reversed(starts):
        if has_checkpoints and start["step"] < step:
            break
        idle += 1
    if idle <= limits.idle:
        return None
    failed = [f for f in records.failures(attempt_info["job"]) if f["kind"] != RESTART_LIMIT]
    ends = [s["reason"] for s in lines if "end" in s]
    last = ends[-1] if ends else "no rank could say why: killed, or out of memory"
    if failed:
        last = f"rank {failed[-1]['rank']} on {failed[-1]['node']}: {failed[-1]['message']}"
    return (
        f"{records.folder}: {idle} starts in a row brought no checkpoint beyond step {step} (idle_restarts={limits.idle}); "
        f"not started again. The last ended with: {last}"
    )


def _limit_reason(records: Records, used: str, limit: str) -> str:
    return (
        f"{records.folder}: the job used {used} ({limit}) and came to step {records.step()}; not started again. "
        f"`sparo launch resubmit {records.folder}` starts another job."
    )


def _hours(lines: Sequence[dict[str, Any]], most: float) -> float:
    """Return the hours that starts took together; one without an end ended before the next one began, and took at most `most`."""
    total = 0.0
    for number, line in enumerate(lines):
        if "end" in line:
            continue
        later = [other["time"] for other in lines[number + 1 :]]
        total += min(most, (later[0] - line["time"]) / 3600 if later else most)
    return total


def _may_write(folder: Path, start_time: float) -> bool:
    """Return whether this process may run: False if a later attempt has claimed the folder."""
    owner, attempt = RunLease(folder, "").owner(), Attempt.from_environment()
    # Restarts are numbered within a job; between jobs only their times give the order.
    if owner.get("job") == attempt.job:
        return owner.get("restart", 0) <= attempt.restart
    return owner.get("time", 0.0) < start_time


if __name__ == "__main__":
    stop_until_training()
    leave(perform(sys.argv[3:], sys.argv[1], RestartLimits.parse(sys.argv[2])))
