"""Where the numbers of a run can be seen, too: tensorboard and Weights & Biases, with the first images and the scores as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from ..errors import ConfigError

SCORES = ("task", "metric", "score")


class Sample(NamedTuple):
    """An image (H, W, 3) uint8 as the model gets it, and its caption, empty where it has none."""

    pixels: np.ndarray
    caption: str


class Mirror(Protocol):
    """Shows what metrics.jsonl holds."""

    def add(self, numbers: Mapping[str, float], step: int) -> None: ...
    def samples(self, samples: Sequence[Sample], step: int) -> None: ...
    def scores(self, rows: Sequence[tuple[str, str, float]], step: int) -> None: ...
    def close(self) -> None: ...


class Tensorboard:
    """RUN/tensorboard: numbers, images by `samples/…`, scores as a table among the texts."""

    def __init__(self, folder: Path, after_step: int):
        from torch.utils.tensorboard.writer import SummaryWriter  # a second to import: only where it is used

        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=after_step + 1)

    def add(self, numbers: Mapping[str, float], step: int) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def samples(self, samples: Sequence[Sample], step: int) -> None:
        for number, sample in enumerate(samples):
            self._writer.add_image(f"samples/{number}", sample.pixels, step, dataformats="HWC")
        captions = [f"{number}. {_cell(sample.caption)}" for number, sample in enumerate(samples) if sample.caption]
        if captions:
            self._writer.add_text("samples/captions", "\n".join(captions), step)

    def scores(self, rows: Sequence[tuple[str, str, float]], step: int) -> None:
        lines = [f"| {' | '.join(SCORES)} |", "|---|---|---|"]
        lines += [f"| {_cell(task)} | {_cell(metric)} | {score:.4f} |" for task, metric, score in rows]
        self._writer.add_text("eval/scores", "\n".join(lines), step)

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """A run of Weights & Biases, which goes on under its name when the run does."""

    def __init__(self, project: str, folder: Path):
        try:
            import wandb  # pyright: ignore[reportMissingImports]
        except ImportError:
            raise ConfigError(
                "log.wandb: wandb is not installed; pip install -e '.[wandb]' in sparo's checkout or set log.wandb=null"
            ) from None
        self._wandb = wandb
        self._run = wandb.init(project=project, name=folder.name, dir=str(folder), resume="allow", id=folder.name)

    def add(self, numbers: Mapping[str, float], step: int) -> None:
        self._run.log(dict(numbers), step=step)

    def samples(self, samples: Sequence[Sample], step: int) -> None:
        images = [self._wandb.Image(sample.pixels, caption=sample.caption) for sample in samples]
        self._run.log({"samples": images}, step=step)

    def scores(self, rows: Sequence[tuple[str, str, float]], step: int) -> None:
        self._run.log(
            {"eval/scores": self._wandb.Table(columns=list(SCORES), data=[list(row) for row in rows])}, step=step
        )

    def close(self) -> None:
        self._run.finish()


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").replace("<", "&lt;").split())
