"""A causal binder, frame by frame as they come: what earlier frames gave is kept, so that a new one costs its own slots alone."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .inverted_attention import Tokens, inverted_attention
from .parallel_binder import BinderBlock, ParallelBinder


class _BlockCache(NamedTuple):
    """Of a block, its last w frames. weighted_sum (b, w, R, in), total (b, w, R): what its slots took of each, where they ask all of them the
    same.  slots: (b, K, w, D) as attention across time gets them."""

    weighted_sum: Tensor
    total: Tensor
    slots: Tensor


class BinderStream:
    """Slots of a video without an end.

    Args:
        binder: causal.  window: a frame's slots see so many of the last ones, itself among them; None: as many as the binder's own,
            or all, which are kept then.
            Equal to the binder with that `window` on all frames at once.

    Raises:
        ValueError: a binder that looks ahead, or whose slots of all times compete.
    """

    def __init__(self, binder: ParallelBinder, window: int | None = None):
        binder_config = binder.config.binder
        assert binder_config is not None
        # What is kept must not change when a later frame comes.
        if (
            not binder_config.causal
            or binder_config.softmax_scope == "clip"
            or not binder_config.inverted
            or binder_config.interaction == "joint"
        ):
            raise ValueError(
                "slots of a stream: binder.causal=true, softmax_scope=time, inverted=true, interaction=decoupled; "
                "others change with later frames, or are not kept"
            )
        self.binder, self.window = binder, window or binder_config.context_frames
        self._caches: list[_BlockCache | None] = [None] * len(binder.blocks)
        self._tokens: Tokens | None = None  # (b, w * N, in) of the last frames, in a ring
        self._count = 0  # frames that came

    @torch.no_grad()
    def push(self, tokens: Tensor, noise: Tensor | None = None) -> Tensor:
        """Tokens (b, N, in_width) of the next frame to its slots (b, K, D); `noise` as the binder's, the same for every frame."""
        new_tokens = Tokens(*(table[:, 0] for table in self.binder.standardize(tokens[:, None])))
        slots = self.binder.norm(self.binder.init_slots(noise, len(tokens)))[:, None]
        # Before the blocks: a frame sees itself.
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
        depends_on_age = heads > 1 or block.binder.temporal_decay  # frames count by how far they are
        queries, offset = block.queries(block.norm_slots(slots))
        if shared_slots and not depends_on_age:
            # The first block asks the same of every frame, whose answers are kept.
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
        """Of several heads, or shares that fade, which weigh frames by how far they are: one frame of the ring after another."""
        assert self._tokens is not None
        frames = Tokens(*(table.unflatten(1, (num_frames, -1)) for table in self._tokens))
        # The ring's oldest frame stands behind the newest once it is full.
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
        """A new frame in the place of the oldest."""
        tokens_per_frame, number = new_tokens.x.shape[1], self._count
        self._count += 1
        if self._tokens is None:
            self._tokens = Tokens(*(table.clone() for table in new_tokens))
        elif self.window is None or number < self.window:
            self._tokens = Tokens(*(torch.cat(pair, 1) for pair in zip(self._tokens, new_tokens, strict=True)))
        else:
            # In place: a ring needs no copy of what stays.
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
    """As the tokens of one time."""
    return Tokens(*(table[:, None] for table in tokens))
