"""`task: validation_loss`: a run's training loss on held-out samples."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import reduce
from hashlib import sha256
from typing import Any, Literal

import numpy as np
import torch

from sparo_train.core.accelerator import is_streaming
from sparo_train.core.config import field
from sparo_train.core.contracts import CoupledObjective, Progress
from sparo_train.core.errors import BadSampleError, DataError
from sparo_train.core.registries import METHODS
from sparo_train.core.rng import generator
from sparo_train.data.read.loader import Examples
from sparo_train.data.sources.base import Source, open_source
from sparo_train.data.sources.detect import source_config
from sparo_train.data.sources.fingerprint import fingerprint

from ..encoders.capabilities import TrainingRun
from ..encoders.encoder import Encoder
from ..sets.task_config import TaskConfig
from ..tasks.result import Result, bootstrap, percentiles
from .scoring import PartsMissingError, Scoring
from .task import Task


class LossTaskConfig(TaskConfig):
    """Shards as in training; images are center-cropped and not mirrored, other random numbers are drawn as in training, from `seed`."""

    task: Literal["validation_loss"] = field("validation_loss", "Kind of the task: an entry of sparo.tasks.")
    shards: str | tuple[str, ...] = field(
        ...,
        "Held-out samples: either shards, in the notation of data.sources.NAME.shards, or the path of a data set in "
        "another format of data.sources.",
        examples=["data/movi_small/clips/test"],
    )
    frames: int | None = field(
        None, "Number of frames per clip. Default: objective.frames.count of the run.", gt=0, le=100_000, examples=[12]
    )
    seed: int = field(0, "Random seed. It determines the first frame and the initial slots of a sample.", ge=0)
    limit: int | None = field(None, "Use only this many samples, evenly spaced.", gt=0, examples=[100])


def open_held_out(task: LossTaskConfig) -> Source:
    """Open its samples. Raises `DataError` or `ConfigError` if they are missing."""
    places = (task.shards,) if isinstance(task.shards, str) else task.shards
    return open_source("validation_loss", source_config(places), block="")


def _check(task: LossTaskConfig) -> None:
    open_held_out(task)


def run_validation_loss(scoring: Scoring, task: LossTaskConfig) -> Result:
    """Compute the mean of `Loss.total` over samples, each a separate batch, at the end of the run's schedules.

    Raises:
        DataError: no sample can be used, or a loss is not finite.
    """
    if scoring.part is not None and scoring.part[0]:
        raise PartsMissingError(
            f"{scoring.name}: cannot be divided into parts, because it stores no encodings. The process with part 0 scores the whole task."
        )
    encoder, source = scoring.encoder, open_held_out(task)
    assert encoder.trained is not None  # encoders with `loss`
    training_run = encoder.trained
    loss = {"loss": _loss_options(training_run), "frames": task.frames or _frames(training_run), "seed": task.seed}
    # The loss is part of the score's identity, because losses of different kinds cannot be ranked.
    identity_facts = {"samples": fingerprint([source]), **loss}
    data = sha256(json.dumps(identity_facts, sort_keys=True, default=str).encode()).hexdigest()

    def score() -> Result:
        skipped: dict[str, int] = {}
        loss_by_key = dict(_losses(encoder, training_run, source, task, skipped))
        if not loss_by_key:
            length = "" if task.frames is None else f" This task sets frames={task.frames}."
            raise DataError(
                f"{scoring.name}: no sample of {task.shards} can be used: {', '.join(skipped)}.{length} Use other samples or fewer frames."
            )
        loss_values = np.array(list(loss_by_key.values()))
        if not np.isfinite(loss_values).all():
            key = list(loss_by_key)[int(np.flatnonzero(~np.isfinite(loss_values))[0])]
            raise DataError(
                f"{task.shards}: the loss of sample {key} is not finite. Check the checkpoint and the sample."
            )
        result = score_losses(loss_values)
        options, counts = {**loss, "skipped": skipped, **result.options}, {"skipped": sum(skipped.values())}
        return result._replace(keys=tuple(loss_by_key), data=data, options=options, counts=counts)

    return scoring.ranks.rank0_broadcast(score)


def _losses(
    encoder: Encoder, training_run: TrainingRun, source: Source, task: LossTaskConfig, skipped: dict[str, int]
) -> Iterator[tuple[str, float]]:
    objective, examples = training_run.objective, _examples(training_run, task)
    own = training_run.config.data.sources.values()
    # The recipe determines which member is the image.
    image_source = source._replace(config=source.config.model_copy(update={"image_keys": next(iter(own)).image_keys}))
    total, count = source.samples, min(task.limit or source.samples, source.samples)
    # For a run in epochs or samples, only its plan knows the number of steps; at this large step every schedule has
    # ended.
    end = training_run.config.steps or 10**9
    # Other parts may be on another device if only the encoder was moved. The objective stays in evaluation mode, like
    # encoders; training resets it.
    objective.to(encoder.device).eval()
    # A forward may update buffers, which belong to the run.
    saved_buffers = [(b, b.clone()) for b in objective.buffers()]
    try:
        for number in (i * total // count for i in range(count)):
            key, fields = _sample(source, number)
            try:
                example = examples.prepare(fields, image_source, generator(task.seed, "validation", number))
            except BadSampleError as bad:
                skipped[str(bad)] = skipped.get(str(bad), 0) + 1
                continue
            batch = examples.finish(examples.stack([example]))
            batch = {name: table.to(encoder.device) for name, table in batch.items()}
            with torch.no_grad(), _forked_random_state(encoder.device), encoder.autocast():
                torch.manual_seed(task.seed)  # random numbers of a forward belong to the sample, too
                loss = objective(batch, Progress(max(end - 1, 0), end, 0))
            yield f"{number:08d}-{key}", float(loss.total)
    finally:
        for buffer, value in saved_buffers:
            buffer.copy_(value)


def _sample(source: Source, number: int) -> tuple[str, dict[str, bytes]]:
    for storage in source.storages:
        if number < len(storage):
            return storage.read(number)
        number -= len(storage)
    raise IndexError(number)


def _examples(training_run: TrainingRun, task: LossTaskConfig) -> Examples:
    config, data = training_run.config.objective, training_run.config.data
    if task.frames is not None:
        config = config.model_copy(update={"frames": config.frames.model_copy(update={"count": task.frames})})
    data = data.model_copy(update={"crop_scale": (1.0, 1.0), "hflip": 0.0})
    return METHODS.get(config.kind).examples(config, data)


def _loss_options(training_run: TrainingRun) -> dict[str, Any]:
    """Return what distinguishes one recipe's loss from another's: targets, and how errors are computed."""
    objective_config = training_run.config.objective.model_dump(mode="json")
    keys = METHODS.get(objective_config["kind"]).loss_keys
    if keys is None:
        return {key: value for key, value in objective_config.items() if key != "model"}
    options = {"kind": objective_config["kind"]}
    for key in keys:
        *above, last = key.split(".")
        options[last] = reduce(lambda block, part: block[part], above, objective_config)[last]
    return options


def _frames(training_run: TrainingRun) -> int | None:
    frames = getattr(training_run.config.objective, "frames", None)
    return None if frames is None else frames.count


def _incompatibility(task: LossTaskConfig, encoder: Encoder) -> str | None:
    training_run = encoder.trained
    assert training_run is not None  # encoders with `loss`
    kind = training_run.config.objective.kind
    if (
        isinstance(training_run.objective, CoupledObjective)
        or next(iter(training_run.objective.ema_pairs()), None) is not None
    ):
        return (
            f"task=validation_loss: the loss of objective.kind={kind} depends on whole batches, or on a changing teacher, so single "
            "samples have none. Use another task."
        )
    if task.frames is not None and _frames(training_run) is None:
        return f"frames={task.frames}: applies to clips, which objective.kind={kind} does not have. Remove it."
    if _examples(training_run, task.model_copy(update={"frames": None})).reads_model:
        return "task=validation_loss: objective.cache trains on cached tokens, which held-out samples lack. Use another task."
    return None


VALIDATION_LOSS = Task(LossTaskConfig, run_validation_loss, _check, needs=("loss",), incompatibility=_incompatibility)


def score_losses(losses: np.ndarray) -> Result:
    """Return the mean of losses (n,) with an interval that resamples samples. Smaller is better; chance is undefined."""
    table = losses.astype(np.float64)[:, None]
    draws = bootstrap(table, np.ones_like(table))
    return Result(
        "validation_loss",
        len(losses),
        "loss",
        {"loss": float(table.mean())},
        0.0,
        {"loss": percentiles(draws[:, 0])},
        {"mean": "over samples"},
        predictions={"loss": losses.astype(np.float32)},
    )


def _forked_random_state(device: torch.device) -> AbstractContextManager[None]:
    """Return a context that restores the random states of the CPU and of the device."""
    if not is_streaming(device):
        return torch.random.fork_rng(devices=[])
    return torch.random.fork_rng(devices=[device], device_type=device.type)
