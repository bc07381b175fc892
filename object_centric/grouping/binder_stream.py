"""A causal binder on a stream of frames, with a cache of earlier frames, so that a new frame costs its own slots only."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .inverted_attention import Tokens, inverted_attention
from .parallel_binder import BinderBlock, ParallelBinder


class _BlockCache(NamedTuple):
    """Cache of a block's last w frames.

    Attributes:
        weighted_sum, total: (b, w, R, in) and (b, w, R), the values that the block's slots read from each frame, if all times send
            the same queries.
        slots: (b, K, w, D), inputs of attention across time.
    """

    weighted_sum: Tensor
    total: Tensor
    slots: Tensor


class BinderStream:
    """Slots of a video of unlimited length; equal to the binder with that `window` on all frames at once.

    Args:
        binder: a causal binder.
        window: number of last frames that a frame's slots depend on, including itself; None: the binder's own, or all,
            which are then kept.

    Raises:
        ValueError: the binder looks ahead, or slots of all times compete.
    """

    def __init__(self, binder: ParallelBinder, window: int | None = None):
        binder_config = binder.config.binder
        assert binder_config is not None
        # The cache must not depend on later frames.
        if (
            not binder_config.causal
            or binder_config.softmax_scope == "clip"
            or not binder_config.inverted
            or binder_config.interaction == "joint"
        ):
            raise ValueError(
                "binder: a stream needs causal=true, softmax_scope=time, inverted=true and interaction=decoupled. With "
                "other values, slots would depend on later frames, or could not be kept from frame to frame."
            )
        self.binder, self.window = binder, window or binder_config.context_frames
        self._caches: list[_BlockCache | None] = [None] * len(binder.blocks)
        self._tokens: Tokens | None = None  # (b, w * N, in) of the last frames, in a ring buffer
        self._count = 0  # number of frames received

    @torch.no_grad()
    def push(self, tokens: Tensor, noise: Tensor | None = None) -> Tensor:
        """Return slots (b, K, D) for tokens (b, N, in_width) of the next frame; `noise` as in the binder, the same for every frame."""
        new_tokens = Tokens(*(table[:, 0] for table in self.binder.standardize(tokens[:, None])))
        slots = self.binder.norm(self.binder.init_slots(noise, len(tokens)))[:, None]
        # Before the blocks, because a frame sees itself.
        self._store_tokens(new_tokens)
        for number, block in enumerate(self.binder.blocks):
            assert isinstance(block, BinderBlock)
            slots, self._caches[number] = self._step(
                block, slots, new_tokens, self._caches[number], shared_slots=number == 0
            )
        return slots[:, 0]

    def _step(
        self, block: BinderBlock, slots: Tensor, new_tokens: Tokens, cache: _BlockCache | None, shared_slots: bool
    ) -> tuple[Tensor, _BlockCache]:
        heads, tokens_per_frame = block.config.heads, new_tokens.x.shape[1]
        depends_on_age = heads > 1 or block.binder.temporal_decay  # distances between frames, for biases
        queries, offset = block.queries(block.norm_slots(slots))
        if shared_slots and not depends_on_age:
            # The first block has the same queries for every frame, so its results are cached.
            weighted_sum, total, *_ = inverted_attention(queries, offset, _as_single_frame(new_tokens), None, "all")
            if cache is not None:
                weighted_sum, total = (
                    self._crop_to_window(torch.cat(pair, 1), 1)
                    for pair in ((cache.weighted_sum, weighted_sum), (cache.total, total))
                )
            update = block.values(weighted_sum.sum(1, keepdim=True), total.sum(1, keepdim=True))
        else:
            assert self._tokens is not None
            num_frames = self._tokens.x.shape[1] // tokens_per_frame
            weighted_sum, total = (
                self._attend_frames(block, queries, offset, num_frames)
                if depends_on_age
                else inverted_attention(queries, offset, _as_single_frame(self._tokens), None, "all")[:2]
            )
            update = block.values(weighted_sum, total)
        slots = slots + update
        normed = block.norm_time(slots).transpose(1, 2)
        normed = normed if cache is None else self._crop_to_window(torch.cat([cache.slots, normed], 2), 2)
        time_offsets = torch.arange(1 - normed.shape[2], 1, device=normed.device)
        temporal_bias = block.biases(time_offsets)[heads : heads + block.binder.heads, None]
        slots = slots + block.across_time(normed, temporal_bias, last=True).transpose(1, 2)
        return block.mix_slots(slots), _BlockCache(weighted_sum, total, normed)

    def _attend_frames(
        self, block: BinderBlock, queries: Tensor, offset: Tensor, num_frames: int
    ) -> tuple[Tensor, Tensor]:
        """Attend frame by frame over the ring, for several heads or temporal decay, which weigh frames by their distance."""
        assert self._tokens is not None
        frames = Tokens(*(table.unflatten(1, (num_frames, -1)) for table in self._tokens))
        # Once the ring is full, its oldest frame comes after the newest.
        ages = (self._count - 1 - torch.arange(num_frames, device=frames.x.device)) % num_frames
        frame_biases = block.biases(-ages).repeat_interleave(block.config.slots, 0)  # (all heads * K, held)
        rows = queries.shape[2]
        bias = frame_biases[:rows]
        weight = frame_biases[-rows:].exp() if block.binder.temporal_decay else torch.ones_like(bias)
        frame_sums = [
            inverted_attention(
                queries, offset + bias[:, i], Tokens(*(table[:, i : i + 1] for table in frames)), None, "all"
            )
            for i in range(num_frames)
        ]
        weighted_sum = sum(f.weighted_sum * weight[:, i, None] for i, f in enumerate(frame_sums))
        total = sum(f.total * weight[:, i] for i, f in enumerate(frame_sums))
        assert isinstance(weighted_sum, Tensor) and isinstance(total, Tensor)
        return weighted_sum, total

    def _store_tokens(self, new_tokens: Tokens) -> None:
        """Replace the oldest frame by a new one."""
        tokens_per_frame, number = new_tokens.x.shape[1], self._count
        self._count += 1
        if self._tokens is None:
            self._tokens = Tokens(*(table.clone() for table in new_tokens))
        elif self.window is None or number < self.window:
            self._tokens = Tokens(*(torch.cat(pair, 1) for pair in zip(self._tokens, new_tokens, strict=True)))
        else:
            # In place, because a ring needs no copy of the other frames.
            at = number % self.window * tokens_per_frame
            for table, new in zip(self._tokens, new_tokens, strict=True):
                table[:, at : at + tokens_per_frame] = new

    def _crop_to_window(self, values: Tensor, dim: int) -> Tensor:
        return (
            values
            if self.window is None
            else values.narrow(dim, max(values.shape[dim] - self.window, 0), min(values.shape[dim], self.window))
        )


def _as_single_frame(tokens: Tokens) -> Tokens:
    """Return the tokens as those of a single time."""
    return Tokens(*(table[:, None] for table in tokens))
