"""Interface of ray decoders, and the decoder that renders every slot at every ray and mixes them by softmax."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Annotated, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from sparo_train.core.config import between, field

from .rays import RayEmbeddingConfig, Rays


class RenderedRays(NamedTuple):
    """Rendered rays.

    Attributes:
        colours: (n, R, 3).
        shares: (n, R, K + E), of each slot and then of the parts that are not slots; their sum is at most one.
        depth: (n, R), distance along the ray; None if the decoder has none.
    """

    colours: Tensor
    shares: Tensor
    depth: Tensor | None


class RayDecoder(nn.Module, ABC):
    """Decoder of slots (n, K, D) and rays.

    Attributes:
        others: names of layers after the slots' in `shares`.
        max_activations: number of values that one call may write; more rays are rendered in chunks.
    """

    others: tuple[str, ...] = ()
    max_activations = 1 << 27  # half a GB of fp32

    @abstractmethod
    def numbers(self, slots: int) -> int:
        """Return the number of values that a ray writes, for estimates."""

    @abstractmethod
    def render(self, slots: Tensor, rays: Rays, slot_cache: Any) -> RenderedRays:
        """Render these rays at once; `slot_cache` is from `precompute`."""

    def max_rays(self, slots: Tensor) -> int:
        """Return the number of rays per row that are rendered at once."""
        return max(1, self.max_activations // max(1, self.numbers(slots.shape[1]) * len(slots)))

    def precompute(self, slots: Tensor) -> Any:
        """Compute what all rays of the slots share; default: nothing."""
        return None

    @abstractmethod
    def render_per_slot(self, slots: Tensor, rays: Rays) -> Tensor:
        """Render every slot on white, alone if a decoder can, otherwise by its share: (n, R, K, 3) colours."""

    def forward(self, slots: Tensor, rays: Rays) -> RenderedRays:
        """Render all rays, in chunks that respect `max_activations`; with gradients, backward recomputes chunks if there are several."""
        slot_cache, count = self.precompute(slots), rays.origins.shape[1]
        num_chunks = -(-count // self.max_rays(slots))
        if num_chunks <= 1:
            return self.render(slots, rays, slot_cache)
        parts, chunk_size = [], -(-count // num_chunks)  # chunks of one size, because the largest determines the memory
        for begin in range(0, count, chunk_size):
            chunk = rays.chunk(begin, begin + chunk_size)
            # Backward begins with the last chunk, when nothing else is stored, so that one is not recomputed.
            if torch.is_grad_enabled() and begin + chunk_size < count:
                # Random numbers are part of the rays, so no random state needs restoring.
                parts.append(
                    checkpoint(self.render, slots, chunk, slot_cache, use_reentrant=False, preserve_rng_state=False)
                )
            else:
                parts.append(self.render(slots, chunk, slot_cache))
        return RenderedRays(*(None if table[0] is None else torch.cat(table, 1) for table in zip(*parts, strict=True)))  # type: ignore[arg-type]


class RayBroadcastConfig(RayEmbeddingConfig):
    """An MLP of a ray and a slot."""

    kind: Literal["broadcast"] = field("broadcast", "Kind of the ray decoder: an entry of sparo.ray_decoders.")
    hidden: Annotated[tuple[int, ...], between(1, 1 << 16)] = field(
        (1536, 1536, 1536), "Hidden units of each layer. The default is OSRT's.", min_length=1
    )
    bounded: bool = field(False, "Apply a sigmoid to colours.")
    max_activations: int = field(
        1 << 27,
        "Maximum number of activations, in floats, of all rays that are rendered at once. If a batch of rays "
        "would exceed it, the rays are rendered in parts, which bounds memory.",
        gt=0,
    )

    def build(self, width: int) -> RayDecoder:
        return RayBroadcast(self, width)


class RayBroadcast(RayDecoder):
    """Decoder that renders every slot at every ray and mixes them by a softmax."""

    def __init__(self, config: RayBroadcastConfig, width: int):
        super().__init__()
        self.config, c = config, config
        self.max_activations = c.max_activations
        # Split the first layer: the rays' part is computed once for all slots, the slots' part once for all rays.
        self.of_ray, self.of_slot = nn.Linear(c.embed_width, c.hidden[0]), nn.Linear(width, c.hidden[0], bias=False)
        layers = [m for a, b in zip(c.hidden, c.hidden[1:], strict=False) for m in (nn.Linear(a, b), nn.ReLU())]
        self.layers = nn.Sequential(nn.ReLU(), *layers, nn.Linear(c.hidden[-1], 4))

    def numbers(self, slots: int) -> int:
        return 2 * slots * sum(self.config.hidden)

    def precompute(self, slots: Tensor) -> Tensor:
        return self.of_slot(slots)

    def decode_slots(self, rays: Rays, slot_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Return colours (n, R, K, 3) and shares (n, R, K) of slots."""
        c = self.config
        output = self.layers(self.of_ray(c.embed(rays))[:, :, None] + slot_cache[:, None])
        # In fp32 at least before the softmax, because rounding would split a ray between slots that almost tie.
        output = output.to(torch.promote_types(output.dtype, torch.float32))
        colours = output[..., 1:]
        return colours.sigmoid() if c.bounded else colours, F.softmax(output[..., 0], dim=-1)

    def render(self, slots: Tensor, rays: Rays, slot_cache: Tensor) -> RenderedRays:
        colours, shares = self.decode_slots(rays, slot_cache)
        return RenderedRays((colours * shares[..., None]).sum(-2), shares, None)

    def render_per_slot(self, slots: Tensor, rays: Rays) -> Tensor:
        colours, shares = self.decode_slots(rays, self.precompute(slots))
        return colours * shares[..., None] + 1 - shares[..., None]
