"""Progress of a run from its files: heartbeat, metrics, checkpoints. Nothing waits for a node, which may hang."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparo_train.core.disk.metrics import read_tail, straggler

from ..jobs.fanout import FanOut
from ..jobs.records import Records


@dataclass(frozen=True)
class RunProgress:
    """Progress of a training, or of a fan-out in elements.

    Attributes:
        step, total: steps done and planned.
        phase: activity now; empty if no start of this job has reported one.
        rate: samples per second.
        eta: seconds left.
        checkpoint: newest step that is saved.
        metric: newest score or loss, as text.
        straggler: a rank that is slower than the others.
    """

    step: int = 0
    total: int | None = None
    phase: str = ""
    rate: float | None = None
    eta: float | None = None
    checkpoint: int | None = None
    metric: str = ""
    straggler: str = ""


def read_progress(folder: Path, since: float) -> RunProgress:
    """Return the progress of a folder.

    Args:
        folder: of a run or a fan-out.
        since: start of the job as Unix time; older records do not show its phase and speed.
    """
    if (folder / "plan.json").exists():
        fan = FanOut(folder)
        return RunProgress(len(fan.elements) - len(fan.missing_elements()), len(fan.elements))
    records = Records(folder)
    beat = records.heartbeat()
    step, total = _to_integer(beat.get("step")) or 0, _to_integer(beat.get("total"))
    time = beat.get("time", since)
    fresh = bool(beat) and isinstance(time, int | float) and time >= since
    newest = read_tail(folder / "metrics.jsonl", ("train", "eval"))
    train = newest.get("train", {})
    rate, eta, slow = None, None, ""
    speed, samples = train.get("samples_per_second"), train.get("samples")
    if fresh and train.get("step") and isinstance(speed, int | float) and isinstance(samples, int | float):
        step, rate, slow = max(train["step"], step), speed, straggler(train)
        if total is not None and speed > 0:
            # By samples, because the batch size may grow.
            eta = (total - step) * (samples / train["step"]) / speed
    phase = str(beat.get("phase", "")) if fresh else ""
    return RunProgress(step, total, phase, rate, eta, records.step() or None, _metric(newest), slow)


def _to_integer(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _metric(newest: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the first score of the newest evaluation, such as `zeroshot acc1 0.412`, otherwise the loss."""
    for task, scores in newest.get("eval", {}).items():
        if isinstance(scores, Mapping):
            for name, value in scores.items():
                if isinstance(value, int | float):
                    return f"{task} {name} {value:.3f}"
    loss = newest.get("train", {}).get("loss")
    return f"loss {loss:.4g}" if isinstance(loss, int | float) else ""
