"""One rank of a job: `python -m launch.cli.node FOLDER IDLE_RESTARTS ARGUMENTS…`. Every start leaves a record in FOLDER/jobs."""

from __future__ import annotations

import os
import platform
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sparo_train.core.disk.owner import Claim, Start
from sparo_train.core.errors import ConfigError, LostRankError, SparoError, StoppedError, SupersededError
from sparo_train.core.world import find_world, whole_number

from ..jobs.job import GPUS, LOCAL_AGAIN, mark, stop_until_training
from ..jobs.records import Records, here
from ..views.terminal import console
from .main import app
from .process import call, leave


def perform(arguments: Sequence[str], folder: str, idle_restarts: int) -> int:
    """`sparo ARGUMENTS` on this rank, with records of its start and end; returns the exit code."""
    records, place, rank, begun = Records(Path(folder)), here(), find_world().rank, time.time()
    sys.argv = ["sparo", *arguments]
    # Before anything is loaded: what fails at its start fails there every time, and a queue would go on for ever.
    stuck = _stuck(records, place, idle_restarts) if arguments[0] == "train" else None  # others have no checkpoints
    if stuck:
        if rank == 0:
            console.line_of(f"error: {stuck}")
            records.add("starts", {**place, "end": 3, "stuck": stuck, "reason": stuck, "step": records.step()})
        return 3
    if rank == 0:
        records.add("starts", {**place, "step": records.step()})
    code, error = call(_on_gpus(app), arguments)
    if error is not None and not isinstance(error, SparoError):
        traceback.print_exception(error)
    if _may_write(Path(folder), begun) and not isinstance(error, SupersededError):
        _note_end(records, place, rank, code, error)
    again = "SUBMITIT_LOCAL_JOB_ID" in os.environ and isinstance(error, StoppedError) and error.signal == "SIGUSR2"
    return LOCAL_AGAIN if again else code


def _on_gpus(program: Callable[[list[str]], Any]) -> Callable[[list[str]], Any]:
    """Return the program behind a check that torch sees a GPU where the job asked for some: it would train on the CPU otherwise."""
    asked = whole_number(os.environ, GPUS, 0)

    def run(arguments: list[str]) -> Any:
        if asked and arguments[0] in ("train", "eval", "launch"):
            import torch

            if not torch.cuda.device_count():
                raise ConfigError(
                    f"--gpus-per-node: torch {torch.__version__} on {platform.node()} sees no GPU, got a job that asked for {asked}. "
                    "Install a CUDA build of torch there, or launch with --gpus-per-node 0."
                )
        return program(arguments)

    return run


def _note_end(records: Records, place: dict[str, Any], rank: int, code: int, error: Exception | None) -> None:
    reason = "finished" if code == 0 else f"code {code}"
    if isinstance(error, StoppedError):
        reason = error.signal
    elif error is not None:
        kind = type(error).__name__
        reason = f"{kind}: {str(error)[:1000]}"
        if not getattr(error, "repeated", False):
            records.add("failures", {**place, "rank": rank, "code": code, "kind": kind, "message": str(error)[:2000]})
    # A mark for whoever starts the job again: the others were well, and go on without a word.
    if isinstance(error, LostRankError):
        mark("lost")
    if rank == 0:
        records.add("starts", {**place, "end": code, "reason": reason, "step": records.step()})


def _stuck(records: Records, place: dict[str, Any], idle_restarts: int) -> str | None:
    """Why this start is one too many; the same on every rank, because this start's own record does not count."""
    starts = records.starts(place["job"])
    step, idle = records.step(), 0
    # From the newest back, to the last one that came further than the one before it.
    for start in reversed([s for s in starts if "end" not in s and s["restart"] < place["restart"]]):
        if start["step"] < step:
            break
        idle += 1
    if idle <= idle_restarts:
        return None
    failed = records.failures(place["job"])
    ends = [s["reason"] for s in starts if "end" in s]
    last = ends[-1] if ends else "no rank could say why: killed, or out of memory"
    if failed:
        last = f"rank {failed[-1]['rank']} on {failed[-1]['node']}: {failed[-1]['message']}"
    return (
        f"{records.folder}: {idle} starts in a row brought no checkpoint beyond step {step} (idle_restarts={idle_restarts}); "
        f"not started again. The last ended with: {last}"
    )


def _may_write(folder: Path, begun: float) -> bool:
    """False where the folder was claimed by a later start: this process is the remains of a lost one."""
    owner, start = Claim(folder, "").owner(), Start.here()
    # Within a job restarts are numbered; between jobs only their times tell which was later.
    if owner.get("job") == start.job:
        return owner.get("restart", 0) <= start.restart
    return owner.get("time", 0.0) < begun


if __name__ == "__main__":
    stop_until_training()
    leave(perform(sys.argv[3:], sys.argv[1], int(sys.argv[2])))
