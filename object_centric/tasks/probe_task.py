"""`task: slot_probe`, `task: scene_probe`: linear probes of positions, velocities and attributes from slots of videos, or of posed scenes.

Probes do not depend on the order of slots.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np
from torch import Tensor

from evals.encoders.encoder import Encoder
from evals.encoders.pixels import Pixels
from evals.feature_store.feature_table import View
from evals.sets.base import EvalSet, Transform
from evals.sets.task_config import TaskConfig
from evals.sets.view_set import ObjectClipSet, ObjectViewSet
from evals.suite.scoring import Scoring, attach_data_info
from evals.suite.task import Task
from evals.tasks.objects import slot_probe
from evals.tasks.result import Result
from sparo_train.core.config import field
from sparo_train.core.errors import DataError

from .scene_encoder import EveryView
from .video_task import EveryFrame, window_incompatibility

_MIN_EPISODES = 4  # episodes: two to fit probes, two to score them


class ObjectProbeConfig(TaskConfig):
    """Keys of both probes."""

    root: str = field(..., "Folder of the data set.", examples=["data/movi_a/clips"])
    split: str = field("test", "Split to use. Probes are fitted on every second episode and scored on the other half.")
    frames: int | None = field(
        None, "Use only this many frames of every episode, from its start. Default: all.", gt=0, examples=[6]
    )
    context_frames: int | None = field(
        None,
        "Number of frames from which the slots of a frame are computed: the frame itself and those directly "
        "before it. Has the same meaning as context_frames of the task video_masks.",
        gt=0,
        examples=[6],
    )
    restarts: int = field(
        10, "Number of random initial assignments of slots to objects; the best result is used.", gt=0, le=1000
    )
    ridge: float = field(1e-3, "Ridge penalty of every probe, relative to the mean square of slots.", ge=0)
    floor: bool = field(True, "Also score an untrained model, as a baseline; its metrics are named floor_*.")
    limit: int | None = field(None, "Use only this many episodes, evenly spaced.", gt=0, examples=[500])
    workers: int = field(2, "Processes that decode frames.", ge=0, le=256)


class SlotProbeTaskConfig(ObjectProbeConfig):
    """Episodes whose JSON contains their objects' positions (`sparo data movi-like`, MOVi's)."""

    task: Literal["slot_probe"] = field("slot_probe", "Kind of the task: an entry of sparo.tasks.")


class SceneProbeTaskConfig(ObjectProbeConfig):
    """Scenes whose JSON contains their objects' positions (`sparo data scenes3d`)."""

    task: Literal["scene_probe"] = field("scene_probe", "Kind of the task: an entry of sparo.tasks.")
    num_context_views: int | None = field(
        None,
        "Number of cameras whose views give the slots. The first cameras are used. Default: as many as in training.",
        gt=0,
        examples=[3],
    )


class ProbeInput(NamedTuple):
    """Input of a probe: a set with `object_annotations`, preprocessing of its samples, and slots (n, T, K, D)."""

    source: EvalSet
    transform: Transform
    name: str
    slots: Callable[[Tensor], Tensor]
    options: dict[str, Any]


def _clip_probe_input(encoder: Any, task: SlotProbeTaskConfig) -> ProbeInput:
    num_hint_slots = encoder.slots if encoder.conditional else 0
    source = ObjectClipSet(task.root, task.frames, task.split, num_hint_slots)
    transform = EveryFrame(encoder.transform, encoder.conditional)
    # Slots whose hints contain positions are marked, because their positions are given, not predicted.
    options = {"trained_frames": encoder.trained_frames, "conditional": encoder.conditional}
    return ProbeInput(source, transform, "clips", lambda video: encoder.clip_slots(video, task.context_frames), options)


def _scene_probe_input(encoder: Any, task: SceneProbeTaskConfig) -> ProbeInput:
    num_context_views = task.num_context_views or encoder.trained_views
    source = ObjectViewSet(task.root, task.frames, num_context_views, task.split)
    name = f"scenes, {num_context_views} shown"
    return ProbeInput(
        source,
        EveryView(encoder.transform),
        name,
        lambda posed: encoder.scene_slots(posed, task.context_frames),
        {"shown": num_context_views, "trained_shown": encoder.trained_views, "trained_frames": encoder.trained_frames},
    )


def run_probe(scoring: Scoring, task: Any, make_probe_input: Callable[[Any, Any], ProbeInput]) -> Result:
    """Return the scores of `evals/tasks/objects/slot_probe.py`, also of an untrained model of the same kind.

    Episodes with more objects than slots are skipped and counted.
    """
    encoder: Any = scoring.encoder
    encoders = {"": encoder, **({"floor_": encoder.untrained()} if task.floor else {})}
    results: dict[str, Result] = {}
    for prefix, one in encoders.items():
        results[prefix] = _score_encoder(scoring._replace(encoder=one), one, task, make_probe_input(one, task))
    result = results[""]._replace(task=task.task)
    if "floor_" in results:
        floor = results["floor_"]
        result = result._replace(
            metrics={**result.metrics, **{f"floor_{name}": value for name, value in floor.metrics.items()}},
            intervals={**result.intervals, **{f"floor_{name}": value for name, value in floor.intervals.items()}},
        )
    return result


def _score_encoder(scoring: Scoring, encoder: Encoder, task: ObjectProbeConfig, probe_input: ProbeInput) -> Result:
    source = probe_input.source if task.limit is None else probe_input.source.limit_to(task.limit)
    assert isinstance(encoder.transform, Pixels)

    def encode(batch: Tensor) -> Tensor:
        return probe_input.slots(batch).float().flatten(1).cpu()

    # Name the effective value: by default, a binder sees as many times as in training, which its weights do not show.
    window = task.context_frames or probe_input.options["trained_frames"]
    view = View(f"slots of {probe_input.name}, window {window}", encode)
    (features,) = scoring.features([source], task.workers, probe_input.transform, view)

    def score() -> Result:
        rows = (row.numpy() for block in features.blocks(64) for row in block)
        clips = [_clip(row, fact, encoder.slots) for row, fact in zip(rows, features.facts, strict=True)]
        usable = [clip for clip in clips if 0 < clip.position.shape[1] <= encoder.slots]
        if len(usable) < _MIN_EPISODES:
            raise DataError(
                f"{source.root}: probes need at least {_MIN_EPISODES} episodes with 1 to {encoder.slots} objects, got "
                f"{len(usable)} of {len(clips)}"
            )
        # Use annotations that every clip has, because copies of MOVi differ.
        numbers, words = (set.intersection(*(set(getattr(c, what)) for c in usable)) for what in ("numbers", "words"))
        usable = [
            c._replace(
                numbers={n: v for n, v in sorted(c.numbers.items()) if n in numbers},
                words={n: v for n, v in sorted(c.words.items()) if n in words},
            )
            for c in usable
        ]
        result = slot_probe.score(usable[::2], usable[1::2], task.restarts, 0, task.ridge)
        counts = {**result.counts, "clips": len(clips), "left_out": len(clips) - len(usable)}
        return result._replace(counts=counts, predictions={})

    options = {
        "frames": features.facts[0]["frames"],
        "window": task.context_frames,
        "slots": encoder.slots,
        **probe_input.options,
    }
    return attach_data_info(scoring.ranks.rank0_broadcast(score), features, source, options)


def _clip(row: np.ndarray, fact: dict[str, Any], slots: int) -> slot_probe.ProbedClip:
    times = fact["frames"]
    return slot_probe.ProbedClip(
        row.reshape(times, slots, -1),
        np.asarray(fact["position"], float).reshape(times, -1, 3),
        {name: np.asarray(table, float).reshape(times, len(table[0]), -1) for name, table in fact["numbers"].items()},
        fact["words"],
    )


def _check(source: EvalSet, task: ObjectProbeConfig) -> None:
    """Raise `DataError` before training if the set is missing or too small."""
    source.check()
    count = min(len(source), task.limit or len(source))
    if count < _MIN_EPISODES:
        raise DataError(f"{source.root}: has {count} usable episode(s), but probes need at least {_MIN_EPISODES}")


SLOT_PROBE = Task(
    SlotProbeTaskConfig,
    lambda scoring, task: run_probe(scoring, task, _clip_probe_input),
    lambda task: _check(ObjectClipSet(task.root, task.frames, task.split), task),
    needs=("clips",),
    facts="objects of clips",
    incompatibility=lambda task, encoder: window_incompatibility(task.context_frames, encoder),
)

SCENE_PROBE = Task(
    SceneProbeTaskConfig,
    lambda scoring, task: run_probe(scoring, task, _scene_probe_input),
    lambda task: _check(ObjectViewSet(task.root, task.frames, task.num_context_views, task.split), task),
    needs=("views",),
    facts="objects of scenes",
    incompatibility=lambda task, encoder: window_incompatibility(task.context_frames, encoder),
)
