"""Encodings of a set with their keys and facts, read from memory maps part by part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..sets.base import Fact


class View(NamedTuple):
    """Which function of an encoder is stored: (n, 3, S, S) uint8 to (n, D); `name` says it all, its options included.

    measured: what is stored are labels, errors or distances, which are kept in fp32 whatever encodings are.
    """

    name: str
    encode: Callable[[Tensor], Tensor]
    measured: bool = False


class Features:
    """Encodings of a set with keys and facts, in parts that may be memory maps.

    Args:
        parts: (n_i, D), or (n_i, L, D) where slots are kept apart, fp32 or fp16.  keys, facts: one per row.
        of: what is done to rows (n, D) as they are read.
    """

    def __init__(
        self,
        parts: Sequence[np.ndarray],
        keys: Sequence[str],
        facts: Sequence[Fact],
        of: Callable[[Tensor], Tensor] | None = None,
    ):
        self.parts, self.keys, self.facts = list(parts), list(keys), list(facts)
        self._of = of or (lambda rows: rows)
        self._ends = list(accumulate(len(p) for p in self.parts))

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def width(self) -> int:
        """Numbers in one encoding."""
        return int(np.prod(self.parts[0].shape[1:]))

    def blocks(self, rows: int = 8192) -> Iterator[Tensor]:
        """fp32 (≤ rows, D), in order."""
        for part in self.parts:
            for begin in range(0, len(part), rows):
                yield self._of(_tensor(part[begin : begin + rows]))

    def in_memory(self) -> Tensor:
        """fp32 (n, D), all of them."""
        return torch.cat(list(self.blocks()))

    def rows(self, numbers: Tensor) -> Tensor:
        """fp32 rows by number, in the order asked."""
        out = torch.empty(len(numbers), *self.parts[0].shape[1:])
        part = torch.bucketize(numbers, torch.tensor(self._ends), right=True)
        for i in part.unique().tolist():
            here = (part == i).nonzero().flatten()
            local = numbers[here] - (self._ends[i - 1] if i else 0)
            out[here] = _tensor(self.parts[i][local.numpy()])
        return self._of(out)

    def share(self, rank: int, size: int) -> tuple[Features, int]:
        """The rank's consecutive parts, and the number of their first row."""
        first, last = (len(self.parts) * (rank + i) // size for i in (0, 1))
        begin, end = (self._ends[i - 1] if i else 0 for i in (first, last))
        return Features(self.parts[first:last], self.keys[begin:end], self.facts[begin:end], self._of), begin


def _tensor(array: np.ndarray) -> Tensor:
    return torch.from_numpy(np.array(array, dtype=np.float32))  # a copy: memory maps are read-only
