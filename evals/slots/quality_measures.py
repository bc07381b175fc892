"""What the slots of one checkpoint are like on a set of images: a row of the quality table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sparo_train.core.errors import ConfigError, DataError

from ..encoders.encoder import Encoder
from ..feature_store.features import FeatureStore
from ..sets.base import EvalSet, batched, read_batches
from .quality import effective_number, monosemanticity, redundancy, sharpness, similarity
from .units import Units

_ATTENTION_IMAGES = 512  # images whose attention is looked at


class Quality(NamedTuple):
    """redundancy: mean CKA of two slots, 0..1.  effective: number of slots in effect, 1..L.  image_sharpness: median over slots.

    meaning: mean MonoSemanticity score of the encoding's numbers, and `meaning_of_units` (U,) of each unit's; `alike`: the score of
    a neuron that fires for all images alike. None where there is no attention, no second encoder.
    """

    label: str
    n: int
    units: int
    redundancy: float
    effective: float
    image_sharpness: float | None
    sharpness_of_units: list[float]
    meaning: float | None
    meaning_of_units: list[float]
    alike: float | None


def quality_of(
    label: str, units: Units, source: EvalSet, store: FeatureStore, by: Encoder | None, workers: int = 0
) -> Quality:
    """A checkpoint's row.

    Args:
        by: an encoder whose cosines say how alike two images are; it should have nothing to do with the one that is looked at.

    Raises:
        DataError: fewer than two images, of which nothing can be said to repeat.
    """
    if len(source) < 2:
        raise DataError(f"{source.root}: has {len(source)} image(s); slots are compared over two at least")
    features = store.images(units.encoder, source, workers=workers)
    assert features is not None
    rows = features.in_memory()
    slots = units.images(rows)
    # Over all images: what repeats in a few need not repeat in the set.
    alike = similarity(slots)
    sharp = _image_sharpness(units.encoder, source, workers)
    meaning, base = None, None
    if by is not None:
        reference_features = store.images(by, source, workers=workers)
        assert reference_features is not None
        embeddings = reference_features.in_memory()
        # Number by number, as the score is of neurons; a unit's is the mean of its own.
        meaning = monosemanticity(slots.flatten(1), embeddings).view(units.number, -1)
        base = _mean_cosine(embeddings)
    return Quality(
        label,
        len(rows),
        units.number,
        redundancy(alike),
        effective_number(alike),
        None if sharp is None else float(sharp.median()),
        [] if sharp is None else sharp.tolist(),
        None if meaning is None else float(meaning.mean()),
        [] if meaning is None else meaning.mean(1).tolist(),
        base,
    )


def _mean_cosine(embeddings: Tensor) -> float:
    e = torch.nn.functional.normalize(embeddings.double(), dim=-1)
    n = len(e)
    # Of all pairs without those of an image and itself, whose cosine is one.
    return float((e.sum(0).square().sum() - n) / (n * (n - 1)))


def _image_sharpness(encoder: Encoder, source: EvalSet, workers: int) -> Tensor | None:
    """(L,) each slot's mean over the first images; None where an encoder shows no attention."""
    show: Any = getattr(encoder, "image_slots", None)
    if show is None or encoder.slots < 2:
        return None
    sharpness_per_batch = [
        sharpness(show(images).attention.float().cpu()) for images in _images(encoder, source, workers)
    ]
    return torch.cat(sharpness_per_batch).mean(0)


def _images(encoder: Encoder, source: EvalSet, workers: int) -> Iterator[list[np.ndarray]]:
    """Some images as the model takes them, evenly spaced over the set."""
    count = min(_ATTENTION_IMAGES, len(source))
    numbers = [i * len(source) // count for i in range(count)]
    for batch in read_batches(source, encoder.transform, batched(numbers, 32), workers):
        yield list(batch.pixels.permute(0, 2, 3, 1).numpy())


def refuse_same(encoder: Encoder, by: Encoder) -> None:
    """Raise `ConfigError` where a checkpoint would judge itself."""
    # What two images have in common would be what the slots say of them. Pixels have no weights to compare.
    if encoder.weights == by.weights and by.weights != "none":
        raise ConfigError(
            f"--reference {by.label}: is the checkpoint that is looked at; name one of another kind, or pixels:32"
        )
