"""Mean of the newest checkpoints of a run (`sparo export --average last:N`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from sparo_train.core.disk.checkpoint_store import CheckpointStore
from sparo_train.core.errors import CheckpointError, ConfigError
from sparo_train.models.weight_files.weights import refuse_non_finite

from ..encoders.loading import run_weights


def newest_checkpoints(folder: Path, step: Path, average: str) -> list[Path]:
    """Return the newest N complete checkpoints up to `step`, oldest first."""
    word, _, count = average.partition(":")
    if word != "last" or not count.isdecimal() or not int(count):
        raise ConfigError(f"--average {average}: expected last:N, as in last:5")
    checkpoints = [path for _, path in sorted(CheckpointStore(folder / "checkpoints").steps().items())]
    # Up to the named step, because the mean must not include later ones.
    checkpoints = checkpoints[
        : 1 + next((i for i, path in enumerate(checkpoints) if path.name == step.name), len(checkpoints))
    ]
    if len(checkpoints) < int(count):
        raise ConfigError(
            f"--average {average}: {folder} has only {len(checkpoints)} complete checkpoint(s) up to {step.name}. "
            "Use a smaller number. To keep more checkpoints in further training, set checkpoint.keep_last."
        )
    return checkpoints[-int(count) :]


def mean_weights(steps: Sequence[Path]) -> dict[str, Tensor]:
    """Return the mean of checkpoints' weights, summed in double precision; tensors of integers come from the last one."""
    newest = run_weights(steps[-1])
    if len(steps) == 1:
        return newest
    # NaN in one checkpoint would make the mean NaN.
    refuse_non_finite(newest, str(steps[-1]))
    # fp64, because in bf16 the fifth checkpoint would be rounded away.
    total = {name: t.double() for name, t in newest.items() if t.is_floating_point()}
    for step in steps[:-1]:
        weights = run_weights(step)
        refuse_non_finite(weights, str(step))
        if {name: t.shape for name, t in weights.items()} != {name: t.shape for name, t in newest.items()}:
            raise CheckpointError(
                f"{step} and {steps[-1]} have tensors with different names or shapes, which cannot be averaged"
            )
        for name, t in weights.items():
            if name in total:
                total[name] += t
    return newest | {name: (t / len(steps)).to(newest[name].dtype) for name, t in total.items()}
