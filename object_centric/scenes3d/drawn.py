"""What decoders of rays give, and how many rays are drawn at once, so that memory has a bound."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .rays import Rays


class DrawnRays(NamedTuple):
    """colours (n, R, 3).  shares (n, R, K + E): of each slot, then of what is no slot's, whose sum is one or less.  depth (n, R): distance
    along the ray, None where nothing says it."""

    colours: Tensor
    shares: Tensor
    depth: Tensor | None


class RayDecoder(nn.Module, ABC):
    """Slots (n, K, D) and rays to what is drawn.

    `others`: names of layers behind the slots' in `shares`.  `most_numbers`: floats that one call may write; more rays are drawn in turns.
    """

    others: tuple[str, ...] = ()
    most_numbers = 1 << 27  # half a GB of fp32

    @abstractmethod
    def numbers(self, slots: int) -> int:
        """Floats that a ray writes, for estimates."""

    @abstractmethod
    def drawn(self, slots: Tensor, rays: Rays, told: Any) -> DrawnRays:
        """All of these rays at once; `told`: of `prepared`."""

    def most_rays(self, slots: Tensor) -> int:
        """Rays of every row that are drawn at once."""
        return max(1, self.most_numbers // max(1, self.numbers(slots.shape[1]) * len(slots)))

    def prepared(self, slots: Tensor) -> Any:
        """What all rays of the slots share; default: nothing."""
        return None

    @abstractmethod
    def alone(self, slots: Tensor, rays: Rays) -> Tensor:
        """Every slot on white, as if there were no other where a decoder can say that, else by its share: (n, R, K, 3) colours."""

    def forward(self, slots: Tensor, rays: Rays) -> DrawnRays:
        """All rays, in turns of as many as `most_numbers` allows; with gradients, what a turn writes is made again in backward where there
        are several."""
        told, count = self.prepared(slots), rays.origins.shape[1]
        turns = -(-count // self.most_rays(slots))
        if turns <= 1:
            return self.drawn(slots, rays, told)
        parts, step = [], -(-count // turns)  # turns of one size: the largest is what memory has to hold
        for begin in range(0, count, step):
            own = rays.chunk(begin, begin + step)
            # Backward begins with the last turn, and nothing else is held then: that one need not be made again.
            if torch.is_grad_enabled() and begin + step < count:
                # The draws of a ray come with it, so there is no random state to keep.
                parts.append(checkpoint(self.drawn, slots, own, told, use_reentrant=False, preserve_rng_state=False))
            else:
                parts.append(self.drawn(slots, own, told))
        return DrawnRays(*(None if table[0] is None else torch.cat(table, 1) for table in zip(*parts, strict=True)))  # type: ignore[arg-type]
