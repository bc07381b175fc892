"""Metrics of a run: metrics.jsonl, copied to tensorboard and wandb."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ..errors import ConfigError, TrainingError
from ..files import write_whole

if TYPE_CHECKING:  # programs that only read records do not need it
    import numpy as np

SCORES = ("task", "metric", "score")
RESERVED = {"kind", "step"}  # keys of every record


_SLOW = 0.2  # share by which a rank is slower before it is reported


class Sample(NamedTuple):
    """An image (H, W, 3) uint8 as the model receives it, and its caption (empty if it has none)."""

    pixels: np.ndarray
    caption: str


class Mirror(Protocol):
    """Destination that copies the content of metrics.jsonl."""

    def add(self, numbers: Mapping[str, float], step: int) -> None: ...
    def samples(self, samples: Sequence[Sample], step: int) -> None: ...
    def scores(self, rows: Sequence[tuple[str, str, float]], step: int) -> None: ...
    def close(self) -> None: ...


class Tensorboard:
    """Tensorboard files in RUN/tensorboard: scalars, images under `samples/…`, and a text table of scores."""

    def __init__(self, folder: Path, after_step: int):
        from torch.utils.tensorboard.writer import SummaryWriter  # imports in a second, so only where it is used

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
    """Run of Weights & Biases, which is continued under its name when the run is resumed."""

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
    """Writer of `metrics.jsonl` that copies numbers to tensorboard (and to wandb, if configured).

    Args:
        folder: the run folder.
        after_step: drop records of later steps first, because a resumed run repeats them.
        wandb: a project name, or None; needs the `wandb` extra.
        guard: called before every write; raises if this process may not write any more.
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
        except ConfigError:  # not installed: a mistake in the recipe
            raise
        except Exception as error:  # third-party loggers can fail in many ways, which must not end the run
            logger.warning(
                f"log.{name}: could not be started ({type(error).__name__}: {error}). The run continues without {name}."
            )

    def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """Write one record, `{"kind": kind, "step": step, **values}`; non-finite numbers become strings."""
        record = {"kind": kind, "step": step, **values}
        self._guard()
        try:
            self._file.write(json.dumps(_plain(record)) + "\n")
            # Flush, because other programs follow the file during the run.
            self._file.flush()
        except OSError as error:
            raise TrainingError(
                f"{self.path}: cannot be written ({error}). Free space, then run the same command again."
            ) from None
        # Last, so that a failing copy cannot cost the record.
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
        """Show the model's first input, if there is a destination for images; `make` may fail."""
        if not self._loggers:
            return
        try:
            found = make()
        except Exception as error:  # batches of plug-ins may have any form; the destinations stay in use
            logger.warning(
                f"log.samples: the first batch could not be shown ({type(error).__name__}: {error}). The run continues."
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
            except Exception as error:  # as in `__init__`
                del self._loggers[name]
                logger.warning(
                    f"log.{name}: metrics could not be written ({type(error).__name__}: {error}). The run continues without {name}."
                )


def read(path: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """Return the records of a JSON-lines file, of one kind if given; a line cut off by a full disk is skipped."""
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


def read_tail(path: Path, kinds: Sequence[str], size: int = 65536) -> dict[str, dict[str, Any]]:
    """Return the newest record of each kind that the last `size` bytes of metrics.jsonl contain."""
    try:
        with path.open("rb") as stream:
            end = stream.seek(0, 2)
            stream.seek(max(0, end - size))
            # The first line is cut off, unless these are all bytes.
            lines = stream.read().split(b"\n")[1 if end > size else 0 :]
    except OSError:
        return {}
    newest: dict[str, dict[str, Any]] = {}
    for line in reversed(lines):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict) and record.get("kind") in kinds and isinstance(record.get("step"), int):
            newest.setdefault(record["kind"], record)
        if len(newest) == len(kinds):
            break
    return newest


def straggler(record: Mapping[str, Any]) -> str:
    """Return which rank is much slower than the fastest, from a `train` record; empty if none is."""
    spread, rank = record.get("step_spread"), record.get("slowest_rank")
    if isinstance(spread, int | float) and isinstance(rank, int | float) and spread >= _SLOW:
        return f"rank {rank:.0f} is {spread:.0%} slower than the fastest"
    return ""


def rewind(path: Path, step: int) -> None:
    """Keep the records up to `step`; a resumed run writes the later ones again."""
    if path.exists():
        records = [r for r in read(path) if isinstance(r.get("step"), int) and r["step"] <= step]
        write_whole(path, "".join(json.dumps(r) + "\n" for r in records))


def _flat(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Flatten values by one level; deeper ones (bad samples by shard) are not plotted."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from ((f"{key}/{inner}", v) for inner, v in value.items())
        else:
            yield key, value


def _plain(value: Any) -> Any:
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # a number of numpy or torch
        value = value.item()
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
