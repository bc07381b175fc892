"""Options of `sparo eval` for programs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch

from sparo_train.core.errors import ConfigError, did_you_mean
from sparo_train.core.files import cache_folder
from sparo_train.models.weight_files.weights import weights_sha256

from ..encoders.encoder import Precision
from ..encoders.selection import describe_selection, read_selection
from ..feature_store.features import Storage


@dataclass(frozen=True)
class EvalOptions:
    """Options of `sparo eval` besides checkpoints and tasks.

    Attributes:
        features: folder of the feature store; None: features are not stored.
        results: folder of result lines and predictions; None: the run folder of a run if `write_to_run`, otherwise nowhere.
        device: device on which a checkpoint is loaded; without an index, each rank on a machine takes its own. An
            encoder that is already loaded stays where it is.
        part: (i, n): only encode the i-th of n shares.
        slots: slots of the image's encoding to use, or the file of a selection.
    """

    model: str | None = None
    features: Path | None = None
    storage: Storage = "fp32"
    precision: Precision = "fp32"
    device: str = "cpu"
    limit: int | None = None
    results: Path | None = None
    part: tuple[int, int] | None = None
    write_to_run: bool = False
    slots: tuple[int, ...] | Path | None = None

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise ConfigError(f"limit: must be at least 1, got {self.limit}. Correct it.")
        if self.precision not in get_args(Precision):
            raise ConfigError(f"precision: {did_you_mean(str(self.precision), get_args(Precision))}")
        for name in ("features", "results", "slots"):
            if isinstance(place := getattr(self, name), str):
                object.__setattr__(self, name, Path(place))

    def selection_facts(self) -> dict[str, Any]:
        """Return the selected units, for results: a selection file may be written again later."""
        if not isinstance(self.slots, Path):
            return {"units": "slots", "chosen": list(self.slots or ())}
        selection = read_selection(self.slots)
        mask = {"mask_sha256": weights_sha256({"mask": torch.tensor(selection.mask)})} if selection.mask else {}
        return {"units": selection.units, "chosen": list(selection.chosen), "method": selection.method, **mask}

    @property
    def slots_named(self) -> str:
        """Describe the slots in a few words, for names and titles."""
        if isinstance(self.slots, Path):
            return f"of {self.slots}: {describe_selection(read_selection(self.slots))}"
        return ranges(self.slots or ())


def features_folder() -> Path:
    """Return the default folder of features."""
    return Path(os.environ.get("SPARO_FEATURES") or cache_folder() / "features")


def ranges(numbers: Sequence[int]) -> str:
    """Format ascending numbers as a user types them: 0,3,8-15."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
