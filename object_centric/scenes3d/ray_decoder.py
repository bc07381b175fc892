"""What decoders of rays give, and how many rays are drawn at once, so that memory has a bound."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .rays import Rays


class RenderedRays(NamedTuple):
    """colours (n, R, 3).  shares (n, R, K + E): of each slot, then of what is no slot's, whose sum is one or less.  depth (n, R): distance
    along the ray, None where nothing says it."""

    colours: Tensor
    shares: Tensor
    depth: Tensor | None


class RayDecoder(nn.Module, ABC):
    """Slots (n, K, D) and rays to what is drawn.

    `others`: names of layers behind the slots' in `shares`.  `max_activations`: floats that one call may write; more rays are drawn in turns.
    """

    others: tuple[str, ...] = ()
    max_activations = 1 << 27  # half a GB of fp32

    @abstractmethod
    def numbers(self, slots: int) -> int:
        """Floats that a ray writes, for estimates."""

    @abstractmethod
    def render(self, slots: Tensor, rays: Rays, slot_cache: Any) -> RenderedRays:
        """All of these rays at once; `slot_cache`: of `prepared`."""

    def max_rays(self, slots: Tensor) -> int:
        """Rays of every row that are drawn at once."""
        return max(1, self.max_activations // max(1, self.numbers(slots.shape[1]) * len(slots)))

    def precompute(self, slots: Tensor) -> Any:
        """What all rays of the slots share; default: nothing."""
        return None

    @abstractmethod
    def render_per_slot(self, slots: Tensor, rays: Rays) -> Tensor:
        """Every slot on white, as if there were no other where a decoder can say that, else by its share: (n, R, K, 3) colours."""

    def forward(self, slots: Tensor, rays: Rays) -> RenderedRays:
        """All rays, in turns of as many as `max_activations` allows; with gradients, what a turn writes is made again in backward where there
        are several."""
        slot_cache, count = self.precompute(slots), rays.origins.shape[1]
        num_chunks = -(-count // self.max_rays(slots))
        if num_chunks <= 1:
            return self.render(slots, rays, slot_cache)
        parts, chunk_size = [], -(-count // num_chunks)  # turns of one size: the largest is what memory has to hold
        for begin in range(0, count, chunk_size):
            chunk = rays.chunk(begin, begin + chunk_size)
            # Backward begins with the last turn, and nothing else is held then: that one need not be made again.
            if torch.is_grad_enabled() and begin + chunk_size < count:
                # The draws of a ray come with it, so there is no random state to keep.
                parts.append(
                    checkpoint(self.render, slots, chunk, slot_cache, use_reentrant=False, preserve_rng_state=False)
                )
            else:
                parts.append(self.render(slots, chunk, slot_cache))
        return RenderedRays(*(None if table[0] is None else torch.cat(table, 1) for table in zip(*parts, strict=True)))  # type: ignore[arg-type]
