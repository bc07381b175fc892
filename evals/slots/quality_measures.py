"""Measures of slots on a set of images: redundancy, effective number, sharpness, and monosemanticity."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from sparo_train.core.errors import ConfigError, DataError

from ..encoders.encoder import Encoder
from ..feature_store.features import FeatureStore
from ..sets.base import EvalSet, read_batches, split_batches
from .units import Units


def similarity(slots: Tensor) -> Tensor:
    """Return (L, L) fp64: linear CKA between slots over images (Kornblith et al. 2019, equation 3), 1 if one is a rotation of the other.

    Args:
        slots: (n, L, V).
    """
    x = (slots - slots.mean(0)).double().transpose(0, 1)  # (L, n, V)
    n, (count, _, width) = x.shape[1], x.shape
    if n > width:  # |X^T Y|^2 from the smaller of two matrices
        cross = torch.stack([(torch.matmul(x[i].T, x) ** 2).sum((1, 2)) for i in range(count)])
    else:
        grams = torch.matmul(x, x.transpose(1, 2)).flatten(1)
        cross = grams @ grams.T
    # A slot that is constant over images is similar to none.
    own = cross.diagonal().clamp(min=1e-300).sqrt()
    return cross / own[:, None] / own


def redundancy(alike: Tensor) -> float:
    """Return the mean similarity of two different slots."""
    count = len(alike)
    return float((alike.sum() - alike.diagonal().sum()) / (count * (count - 1)))


def effective_number(alike: Tensor) -> float:
    """Return exp of the entropy of the eigenvalues of `alike`/L: L without redundancy, 1 if all slots are equal (Roy & Vetterli 2007)."""
    # Rounding gives eigenvalues of -1e-17, which have no logarithm.
    values = torch.linalg.eigvalsh(alike / len(alike)).clamp(min=0)
    share = values / values.sum()
    return float(torch.exp(torch.special.entr(share).sum()))


def monosemanticity(activations: Tensor, embeddings: Tensor) -> Tensor:
    """Return (K,) fp64: the MonoSemanticity score of neurons (Pach et al. 2025, arXiv 2504.02821, Section 3.2).

    It is the mean cosine of two images' embeddings, each pair weighted by the product of a neuron's two activations,
    which are scaled to 0..1 over the images. A neuron that fires for one kind of image only has 1.

    Args:
        activations: (n, K).
        embeddings: (n, D), from an unrelated encoder.
    """
    low, high = activations.min(0).values, activations.max(0).values
    a = ((activations - low) / (high - low).clamp(min=1e-12)).double()
    e = F.normalize(embeddings.double(), dim=-1)
    # Over pairs of different images, without an n x n table: |sum a e|^2 contains each pair twice, and each image with
    # itself.
    own = a.square().sum(0)
    # A neuron that fires for a single image has no pairs, and scores 0.
    together = (a.T @ e).square().sum(-1) - own
    return together / (a.sum(0).square() - own).clamp(min=1e-12)


def sharpness(attention: Tensor, keep: Tensor | None = None) -> Tensor:
    """Return (n, L) in [0, 1]: one minus the entropy of attention (n, L, N) divided by its maximum; 1 is a single position.

    Args:
        attention: (n, L, N).
        keep: (n, N) bool, positions that may be attended; None: all.
    """
    places = torch.full((len(attention), 1), attention.shape[-1]) if keep is None else keep.sum(-1, keepdim=True)
    most = places.clamp(min=2).to(attention.dtype).log()
    return 1 - torch.special.entr(attention).sum(-1) / most


_ATTENTION_IMAGES = 512  # images whose attention is computed


class Quality(NamedTuple):
    """Quality of slots.

    Attributes:
        redundancy: mean CKA of two slots, 0..1.
        effective: effective number of slots, 1..L.
        image_sharpness: median over slots; None without attention.
        meaning, meaning_of_units: mean MonoSemanticity score of the encoding's values, and (U,) of each unit's; None
            without a reference encoder.
        alike: score of a neuron that fires equally for all images.
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


def measure_quality(
    label: str, units: Units, source: EvalSet, store: FeatureStore, by: Encoder | None, workers: int = 0
) -> Quality:
    """Compute the measures for a checkpoint.

    Args:
        label, units, source, store, workers: the checkpoint and the images.
        by: reference encoder whose cosines define the similarity of images; it should be unrelated to the checkpoint.

    Raises:
        DataError: fewer than two images, which cannot show redundancy.
    """
    if len(source) < 2:
        raise DataError(f"{source.root}: has {len(source)} image(s), but slots are compared over at least two")
    features = store.images(units.encoder, source, workers=workers)
    assert features is not None
    rows = features.in_memory()
    slots = units.images(rows)
    # Over all images, because a few may look redundant by chance.
    alike = similarity(slots)
    sharp = _image_sharpness(units.encoder, source, workers)
    meaning, base = None, None
    if by is not None:
        reference_features = store.images(by, source, workers=workers)
        assert reference_features is not None
        embeddings = reference_features.in_memory()
        # Value by value, because the score is defined for neurons; a unit's score is the mean of its values.
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
    # Over all pairs of different images, without the cosines of one.
    return float((e.sum(0).square().sum() - n) / (n * (n - 1)))


def _image_sharpness(encoder: Encoder, source: EvalSet, workers: int) -> Tensor | None:
    """Return (L,) each slot's mean over the first images; None if the encoder has no attention maps."""
    show: Any = getattr(encoder, "image_slots", None)
    if show is None or encoder.slots < 2:
        return None
    sharpness_per_batch = [
        sharpness(show(images).attention.float().cpu()) for images in _images(encoder, source, workers)
    ]
    return torch.cat(sharpness_per_batch).mean(0)


def _images(encoder: Encoder, source: EvalSet, workers: int) -> Iterator[list[np.ndarray]]:
    """Yield some images as the model takes them, evenly spaced over the set."""
    count = min(_ATTENTION_IMAGES, len(source))
    numbers = [i * len(source) // count for i in range(count)]
    for batch in read_batches(source, encoder.transform, split_batches(numbers, 32), workers):
        yield list(batch.pixels.permute(0, 2, 3, 1).numpy())


def refuse_same(encoder: Encoder, by: Encoder) -> None:
    """Raise `ConfigError` if a checkpoint is its own reference."""
    # Similarity of images would then be derived from the slots themselves. Pixels have no weights to compare.
    if encoder.weights == by.weights and by.weights != "none":
        raise ConfigError(
            f"--reference {by.label}: is the evaluated checkpoint itself. Name another checkpoint, or pixels:32 to compare with resized images."
        )
