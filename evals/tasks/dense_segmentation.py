"""Segmentation without training: classes of pixels by the similarity of patches to texts, or to patches with known classes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F


def window_starts(length: int, window: int, stride: int) -> list[int]:
    """Return where windows begin; the last one is moved back so that it ends at `length`."""
    last = max(length - window, 0)
    return [*range(0, last, stride), last]


def over_windows(parts: Sequence[Tensor], corners: Sequence[tuple[int, int]], size: tuple[int, int]) -> Tensor:
    """Return the mean (Q, H, W) of maps (Q, h, w) that begin at `corners` (row, column); every pixel must be covered."""
    total = parts[0].new_zeros(parts[0].shape[0], *size)
    count = parts[0].new_zeros(size)
    for part, (row, column) in zip(parts, corners, strict=True):
        area = (slice(row, row + part.shape[1]), slice(column, column + part.shape[2]))
        total[:, area[0], area[1]] += part
        count[area] += 1
    return total / count


def classify(
    similarity: Tensor, class_of_query: Tensor, classes: int, scale: float, threshold: float | None = None
) -> Tensor:
    """Return the class of each pixel, (H, W) int64, from similarities (Q, H, W).

    A class has the largest probability of its queries, after a softmax over all queries (as in SCLIP's evaluation).

    Args:
        similarity: cosines of pixels and queries.
        class_of_query: (Q,) number of the class that a query is a name of.
        classes: number of classes.
        scale: factor before the softmax.
        threshold: pixels whose largest probability is lower get class 0; None: none.
    """
    probabilities = (scale * similarity.float()).softmax(dim=0)
    best = probabilities.new_zeros(classes, *similarity.shape[1:])
    index = class_of_query.to(best.device)[:, None, None].expand_as(probabilities)
    best.scatter_reduce_(0, index, probabilities, "amax")
    value, predicted = best.max(dim=0)
    return predicted if threshold is None else predicted.where(value >= threshold, 0)


def enlarge(maps: Tensor, size: tuple[int, int]) -> Tensor:
    """Enlarge maps (Q, h, w) bilinearly."""
    return F.interpolate(maps[None].float(), size, mode="bilinear", align_corners=False)[0]


def patch_labels(masks: Tensor, side: int, classes: int, ignore: int | None) -> Tensor:
    """Return the share of each class among the counted pixels of patches, fp32 (n, side * side, classes); zeros if none is counted.

    Args:
        masks: class numbers (n, S, S); S is a multiple of `side`.
        side: patches per row.
        classes: number of classes.
        ignore: value of pixels that are not counted; None: all are.
    """
    patch = masks.shape[1] // side
    # (n, side, patch, side, patch) to (n, side * side, patch * patch)
    pixels = masks.unflatten(2, (side, patch)).unflatten(1, (side, patch)).transpose(2, 3).flatten(3).flatten(1, 2)
    counted = torch.ones_like(pixels, dtype=torch.bool) if ignore is None else pixels != ignore
    shares = torch.zeros(*pixels.shape[:2], classes)
    shares.scatter_add_(2, pixels.where(counted, 0).long(), counted.float())
    return shares / shares.sum(-1, keepdim=True).clamp(min=1)


def vote(similarity: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """Return the mean label (m, C) of neighbours, weighted by the softmax of cosine / temperature (Balažević et al. 2023).

    Args:
        similarity: (m, k), cosines of the neighbours.
        labels: (m, k, C), their shares of classes.
        temperature: of the softmax.
    """
    weights = (similarity.float() / temperature).softmax(dim=1)
    return torch.einsum("mk,mkc->mc", weights, labels.float())
