"""What a run reports: metrics.jsonl first, tensorboard and wandb beside it."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from ..errors import ConfigError, TrainingError
from ..files import write_whole

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
                "log.wandb: wandb is not installed. Run pip install -e '.[wandb]' in the checkout of sparo, or set log.wandb=null."
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


logger = logging.getLogger(__name__)


class MetricsLog:
    """Appends records to `metrics.jsonl` and mirrors their numbers to tensorboard (and wandb, where asked).

    Args:
        folder: the run folder.
        after_step: records of later steps are dropped first (a resumed run replays them).
        wandb: a project name, or None; needs the `wandb` extra.
        guard: called before every write; raises where this process may not write any more.
        say: told once where tensorboard or wandb fails; the run goes on without it.
    """

    def __init__(
        self,
        folder: Path,
        after_step: int = 0,
        wandb: str | None = None,
        tensorboard: bool = True,
        guard: Callable[[], None] = lambda: None,
    ):
        self.path, self._guard = folder / "metrics.jsonl", guard
        rewind(self.path, after_step)
        self._file = self.path.open("a", encoding="utf-8")
        self._loggers: dict[str, Mirror] = {}
        if tensorboard:
            self._start_logger("tensorboard", lambda: Tensorboard(folder, after_step))
        if wandb is not None:
            self._start_logger("wandb", lambda: Wandb(wandb, folder))

    def _start_logger(self, name: str, make: Callable[[], Mirror]) -> None:
        try:
            self._loggers[name] = make()
        except ConfigError:  # not installed: a mistake of the recipe
            raise
        except Exception as error:  # a library that only reports may fail in any way, and may not end a run
            logger.warning(
                f"log.{name}: cannot be started ({type(error).__name__}: {error}). The run continues without it."
            )

    def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """Write one record: `{"kind": kind, "step": step, **values}`; non-finite numbers become strings."""
        record = {"kind": kind, "step": step, **values}
        self._guard()
        try:
            self._file.write(json.dumps(_plain(record)) + "\n")
            # Others follow the file while the run goes on.
            self._file.flush()
        except OSError as error:
            raise TrainingError(
                f"{self.path}: cannot be written ({error}). Free space, then run the same command again."
            ) from None
        # Only now: what only mirrors must not cost the record.
        numbers = {f"{kind}/{k}": v for k, v in _flat(values) if isinstance(v, int | float)}
        self._for_each_logger(lambda mirror: mirror.add(numbers, step))
        if kind == "eval":
            rows = [
                (task, name, float(v))
                for task, scores in values.items()
                if isinstance(scores, Mapping)
                for name, v in _flat(scores)
            ]
            self._for_each_logger(lambda mirror: mirror.scores(rows, step))

    def samples(self, make: Callable[[], Sequence[Sample]]) -> None:
        """Show what the model is given first, where there is anything to show it in; `make` may fail."""
        if not self._loggers:
            return
        try:
            found = make()
        except Exception as error:  # a plug-in's batches may hold anything; the mirrors have done nothing wrong
            logger.warning(
                f"log.samples: cannot be shown ({type(error).__name__}: {error}). The run continues without them."
            )
            return
        self._for_each_logger(lambda mirror: mirror.samples(found, 0))

    def close(self) -> None:
        self._file.close()
        self._for_each_logger(lambda mirror: mirror.close())

    def _for_each_logger(self, call: Callable[[Mirror], None]) -> None:
        for name, mirror in list(self._loggers.items()):
            try:
                call(mirror)
            except Exception as error:  # as above
                del self._loggers[name]
                logger.warning(
                    f"log.{name}: cannot be written ({type(error).__name__}: {error}). The run continues without it."
                )


def read(path: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """Records of a file with a JSON object per line, of one kind if given; a line torn by a full disk is left out."""
    records = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if not isinstance(record, dict):
            continue
        if kind is None or (record.get("kind") == kind and isinstance(record.get("step"), int)):
            records.append(record)
    return records


def rewind(path: Path, step: int) -> None:
    """Keep the records up to `step`; a resumed run writes the later ones again."""
    if path.exists():
        records = [r for r in read(path) if isinstance(r.get("step"), int) and r["step"] <= step]
        write_whole(path, "".join(json.dumps(r) + "\n" for r in records))


def _flat(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Values and those one level below; what is deeper (bad samples by shard) makes no curves."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from ((f"{key}/{inner}", v) for inner, v in value.items())
        else:
            yield key, value


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
