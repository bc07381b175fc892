"""Weighted k-nearest-neighbour classification as scored by DINO (Wu et al. 2018; eval_knn.py), in bounded memory and exact.

Similarities are computed in blocks and only the best k of every query are kept, so memory limits neither the number of
queries nor that of the bank's rows. Ties go to the lower row, whatever the blocks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .result import Result, wilson
from .zeroshot import class_recall

# Queries and rows whose similarities are in memory at once: 4 MiB on a CPU, which with the rows is at most the memory that the
# official evaluation uses, and 512 MiB on a GPU, because smaller blocks take longer to launch than to compute.
_CPU_BLOCK, _GPU_BLOCK = (128, 8192), (2048, 65536)
_MAX_LOG_VOTE = 80.0  # exp(88.7) is the largest number of fp32
_SAME_ENCODING_TOLERANCE = 1e-6  # largest rounding error of the cosine of an encoding with itself


class Nearest(NamedTuple):
    """Best rows of a bank for each query, best first: `similarity` (m, k) fp32 and `row` (m, k) int64."""

    similarity: Tensor
    row: Tensor


def find_nearest(
    queries: Tensor,
    bank: Tensor | Iterable[Tensor],
    k: int,
    first_row: int = 0,
    block: tuple[int, int] | None = None,
    groups: tuple[Tensor, Tensor] | None = None,
) -> Nearest:
    """Return the k rows of `bank` with the largest cosine to each query.

    Args:
        queries: (m, D), any float dtype.
        bank: (n, D), any float dtype, or its rows in pieces, each released after use; a memory map is read
            once, block by block.
        k: at most n are returned.
        first_row: the number of the bank's first row, if it is part of a larger one.
        groups: numbers of the groups of queries (m,) and of all rows of the bank; a row of the query's own group has the
            similarity -inf. None: every row counts.
        block: queries and rows whose similarities are stored at once; None: a size that suits the device.
    """
    block = block or choose_block(queries.device)
    parts = [F.normalize(q.float(), dim=-1) for q in queries.split(block[0])]
    nearest_parts: list[Nearest | None] = [None] * len(parts)
    buffer = queries.new_empty(
        0, dtype=torch.float32
    )  # one buffer for all blocks, because new pages cost a fifth of the product
    for piece in [bank] if isinstance(bank, Tensor) else bank:
        for rows in piece.split(block[1]):
            rows = normalize_rows(rows, queries.device)
            for number, q in enumerate(parts):
                if buffer.numel() < len(q) * len(rows):
                    buffer = buffer.new_empty(len(q) * len(rows))
                product = torch.mm(q, rows.T, out=buffer[: len(q) * len(rows)].view(len(q), len(rows)))
                if groups is not None:
                    asked = groups[0][number * block[0] : number * block[0] + len(q)]
                    of_rows = groups[1][first_row : first_row + len(rows)]
                    product.masked_fill_(asked.to(q.device)[:, None] == of_rows.to(q.device), -torch.inf)
                best, before = select_best(product, k, first_row), nearest_parts[number]
                nearest_parts[number] = best if before is None else merge([before, best], k)
            first_row += len(rows)
    if any(part is None for part in nearest_parts) or not parts:
        empty = queries.new_zeros(len(queries), 0, dtype=torch.float32)
        return Nearest(empty, empty.long())
    whole = [part for part in nearest_parts if part is not None]
    return Nearest(torch.cat([p.similarity for p in whole]), torch.cat([p.row for p in whole]))


def choose_block(device: torch.device) -> tuple[int, int]:
    """Return how many queries and rows of the bank are compared at once on a device."""
    return _CPU_BLOCK if device.type == "cpu" else _GPU_BLOCK


def normalize_rows(rows: Tensor, device: torch.device) -> Tensor:
    """Normalize fp32 rows like `F.normalize`, without a second copy of converted rows."""
    converted = rows.to(device).float()  # moved first: a GPU converts faster, and half as many bytes travel
    norm = torch.linalg.vector_norm(converted, dim=1, keepdim=True).clamp_min_(1e-12)
    return converted / norm if converted is rows else converted.div_(norm)


def merge(parts: Sequence[Nearest], k: int) -> Nearest:
    """Merge the best k of several parts of a bank, in the order of their rows."""
    similarity, row = torch.cat([p.similarity for p in parts], 1), torch.cat([p.row for p in parts], 1)
    order = similarity.sort(dim=1, descending=True, stable=True).indices[:, :k]
    return Nearest(similarity.gather(1, order), row.gather(1, order))


def select_best(table: Tensor, k: int, first: int) -> Nearest:
    """Return the k largest of every row (m, n), ties to the lower column; columns are counted from `first`."""
    k = min(k, table.shape[1])
    value, row = _largest(table, min(k + 1, table.shape[1]))
    # Take one more than needed, which shows whether the last one ties.
    if value.shape[1] > k:
        tied = (value[:, k - 1] == value[:, k]).nonzero().flatten()  # topk may keep any of them
        value, row = value[:, :k].clone(), row[:, :k].clone()
        if len(tied):
            ordered = table[tied].sort(dim=1, descending=True, stable=True)
            value[tied], row[tied] = ordered.values[:, :k], ordered.indices[:, :k]
    # Sort by row first, then stably by value, so that the lower row comes first among ties.
    row, by_row = row.sort(dim=1)
    value, order = value.gather(1, by_row).sort(dim=1, descending=True, stable=True)
    return Nearest(value, row.gather(1, order) + first)


def _largest(table: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Compute `topk` of long rows: the k groups with the largest maxima contain the k largest values (of ties, some)."""
    n = table.shape[1]
    group_size = math.isqrt(n // max(1, k)) // 2
    if group_size < 3:
        return table.topk(k, dim=1)
    # Groups of one size if possible; the remainder is processed one by one.
    size = next((s for s in range(group_size, 2 * group_size) if n % s == 0), group_size)
    groups = n // size
    top_groups = _maxima(table[:, : size * groups], size, groups).topk(k, dim=1, sorted=False).indices
    columns = (top_groups[:, None] + groups * torch.arange(size, device=table.device)[:, None]).flatten(1)
    if n % size:
        rest = torch.arange(size * groups, n, device=table.device)
        columns = torch.cat([columns, rest.expand(len(table), -1)], dim=1)
    value, place = table.gather(1, columns).topk(k, dim=1)
    return value, columns.gather(1, place)


def _maxima(table: Tensor, size: int, groups: int) -> Tensor:
    """Return (m, groups) maxima over the columns that are equal modulo `groups`; a transposed table is read in memory order."""
    if table.stride(1) == 1:
        return table.unflatten(1, (size, groups)).amax(dim=1)
    return table.T.unflatten(0, (size, groups)).amax(dim=0).T.contiguous()


def predictions(
    neighbours: Nearest,
    labels: Tensor,
    classes: int,
    k: int,
    temperature: float,
    top: int = 5,
    class_weights: Tensor | None = None,
) -> Tensor:
    """Return classes by the summed weights exp(similarity / T) of the k nearest, best first: (m, top); ties go to the lower class.

    Votes are multiplied by `class_weights` (classes,) if given.
    """
    k = min(k, neighbours.row.shape[1])
    # In parts that fit into the cache: sorting the votes of all queries for all classes at once would take most of the time.
    part = choose_block(neighbours.row.device)[0]
    best = [
        _vote(similarity, row, labels, classes, temperature, class_weights)[:, : min(top, classes)].clone()
        for similarity, row in zip(
            neighbours.similarity[:, :k].split(part), neighbours.row[:, :k].split(part), strict=True
        )
    ]
    chosen = torch.cat(best)
    chosen[neighbours.similarity[:, 0] == -torch.inf] = -1  # nothing could vote, so it counts as wrong
    return chosen


def _vote(
    similarity: Tensor, row: Tensor, labels: Tensor, classes: int, temperature: float, class_weights: Tensor | None
) -> Tensor:
    """Return all classes for some queries, best first."""
    # exp() of a cosine over a small temperature is infinite in fp32. Otherwise unchanged, as in eval_knn.py.
    if 1 / temperature + math.log(max(1, similarity.shape[1])) > _MAX_LOG_VOTE:
        similarity = similarity - similarity[:, :1]
    weights = (similarity / temperature).exp()
    if class_weights is not None:
        weights = weights * class_weights[labels[row]]
    # Sum at the labels' positions, because a table of one-hot labels would be larger by the number of classes.
    votes = weights.new_zeros(len(weights), classes).scatter_add_(1, labels[row], weights)
    return votes.sort(dim=1, descending=True, stable=True).indices


def score(
    neighbours: Nearest,
    bank_labels: Tensor,
    labels: Tensor,
    classes: int,
    ks: Sequence[int],
    temperature: float,
    headline: int,
    balanced: bool = False,
) -> Result:
    """Score acc1 and acc5 per k of queries with `labels` (m,), whose neighbours are in a bank with `bank_labels` (n,).

    Votes are counted on the device of `neighbours`; labels may be anywhere.

    `mean_per_class_recall` is that of k = `headline`. `counts["same_encoding"]` is the number of queries that have the
    same encoding as a row of the bank, which reveals a test set that overlaps the training set. As in eval_knn.py, acc5
    counts the best min(5, k) classes. With `balanced`, a vote is divided by the number of images of its class in the bank.
    """
    metrics, predicted, labels = {}, {}, labels.cpu()
    bank_labels = bank_labels.to(neighbours.row.device)
    weights = None
    if balanced:  # a class with few images in the bank has as many votes in all as any other
        weights = 1 / torch.bincount(bank_labels, minlength=classes).clamp(min=1).to(neighbours.similarity.dtype)
    for k in ks:
        best = predictions(neighbours, bank_labels, classes, k, temperature, class_weights=weights).cpu()
        predicted[f"predicted_k{k}"], right = best.numpy(), best == labels[:, None]
        metrics[f"acc1_k{k}"] = right[:, 0].double().mean().item()
        if classes > 5:
            metrics[f"acc5_k{k}"] = right[:, : min(5, k)].any(dim=1).double().mean().item()
    intervals = {name: wilson(value, len(labels)) for name, value in metrics.items()}
    # For the headline's k only, because compare pairs one value per sample.
    right = torch.from_numpy(predicted[f"predicted_k{headline}"][:, 0]) == labels
    predicted["right"] = right.numpy()
    hits = torch.bincount(labels, weights=right.double(), minlength=classes)
    metrics["mean_per_class_recall"], intervals["mean_per_class_recall"] = class_recall(hits, labels)
    options: dict[str, Any] = {"temperature": temperature, "normalised": "the encoding as a whole"}
    options |= {"balanced": True} if balanced else {}
    counts = {
        "largest_class": int(torch.bincount(labels).max()),
        "same_encoding": int((neighbours.similarity[:, 0] > 1 - _SAME_ENCODING_TOLERANCE).sum()),
    }
    return Result("knn", len(labels), f"acc1_k{headline}", metrics, 1 / classes, intervals, options, counts, predicted)
