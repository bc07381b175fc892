"""Search for images that are alike in some slots and different in the others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_NUM_BEST = 10  # images that match a query most
DIFFERENT = 0.25  # default weight of the difference in other slots


class Match(NamedTuple):
    """An image by number, its cosine with the query in the chosen slots, and in the other slots (0 without others)."""

    image: int
    alike: float
    rest: float


def search_slots(
    blocks: Iterable[Tensor],
    query: Tensor,
    slots: Sequence[int],
    different: float,
    count: int,
    without: int | None = None,
) -> list[Match]:
    """Return the `count` images with the highest `alike - different * max(rest, 0)`, best first.

    `alike` is the cosine of image and query over the concatenated chosen slots, `rest` that over all other slots. Time
    is linear in the number of images; memory is that of one block.

    Args:
        blocks: encodings (b, U, d) of the images, in order.
        query: (U, d) encoding of an image or a text.
        slots: chosen slots.
        different: weight of `rest`.
        count: number of results.
        without: number of an image that is left out, such as the query itself.
    """
    chosen = torch.zeros(len(query), dtype=torch.bool)
    chosen[list(slots)] = True
    best: list[tuple[float, Match]] = []
    begin = 0
    for block in blocks:
        alike, rest = _cosine(block, query, chosen), _cosine(block, query, ~chosen)
        score = alike - different * rest.clamp(min=0)
        if without is not None and begin <= without < begin + len(block):
            score[without - begin] = -torch.inf
        top = score.argsort(descending=True, stable=True)[:count].tolist()
        best += [
            (float(score[i]), Match(begin + i, float(alike[i]), float(rest[i]))) for i in top if begin + i != without
        ]
        best = sorted(best, key=lambda one: -one[0])[:count]
        begin += len(block)
    return [match for _, match in best]


class TextRanking(NamedTuple):
    """Each unit's share (U,) of what sets matching images apart, which sum to 1, and its dot products (n, U) with the query."""

    parts: Tensor
    shares: Tensor


def rank_for_text(vectors: Tensor, query: Tensor) -> TextRanking:
    """Rank units by their part of the difference between the ten images that match a query most and all images.

    Args:
        vectors: (n, U, d) encodings of the images.
        query: (U, d), a text's encoding minus that of an empty text.
    """
    shares = torch.einsum("nud,ud->nu", vectors, query)
    # At most half of few images, or the best would be compared with themselves.
    best = min(_NUM_BEST, max(1, len(shares) // 2))
    top = shares.sum(1).argsort(descending=True, stable=True)[:best]
    # Minus the mean image, so that a unit which agrees with everything finds nothing.
    parts = shares[top].mean(0) - shares.mean(0)
    return TextRanking(parts / parts.sum().clamp(min=1e-12), shares)


def _cosine(block: Tensor, query: Tensor, slots: Tensor) -> Tensor:
    if not slots.any():
        return torch.zeros(len(block))
    part, target = block[:, slots].flatten(1), query[slots].flatten()
    norms = part.norm(dim=1) * target.norm()
    return (part @ target) / norms.clamp(min=1e-12)
