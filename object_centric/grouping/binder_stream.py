"""A causal binder, frame by frame as they come: what earlier frames gave is kept, so that a new one costs its own slots alone."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .binder import BinderBlock, ParallelBinder
from .binding import Tokens, bound


class _Past(NamedTuple):
    """Of a block, its last w frames. taken (b, w, R, in), total (b, w, R): what its slots took of each, where they ask all of them the
    same.  slots: (b, K, w, D) as attention across time gets them."""

    taken: Tensor
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
        made = binder.config.binder
        assert made is not None
        # What is kept must not change when a later frame comes.
        if not made.causal or made.competes == "clip" or not made.inverted or made.interaction == "joint":
            raise ValueError(
                "slots of a stream: binder.causal=true, competes=time, inverted=true, interaction=decoupled; "
                "others change with later frames, or are not kept"
            )
        self.binder, self.window = binder, window or made.window
        self._past: list[_Past | None] = [None] * len(binder.blocks)
        self._tokens: Tokens | None = None  # (b, w * N, in) of the last frames, in a ring
        self._count = 0  # frames that came

    @torch.no_grad()
    def push(self, tokens: Tensor, noise: Tensor | None = None) -> Tensor:
        """Tokens (b, N, in_width) of the next frame to its slots (b, K, D); `noise` as the binder's, the same for every frame."""
        fresh = Tokens(*(table[:, 0] for table in self.binder.standardised(tokens[:, None])))
        slots = self.binder.norm(self.binder.first(noise, len(tokens)))[:, None]
        # Before the blocks: a frame sees itself.
        self._keep(fresh)
        for number, block in enumerate(self.binder.blocks):
            assert isinstance(block, BinderBlock)
            slots, self._past[number] = self._step(block, slots, fresh, self._past[number], alike=number == 0)
        return slots[:, 0]

    def _step(
        self, block: BinderBlock, slots: Tensor, fresh: Tokens, past: _Past | None, alike: bool
    ) -> tuple[Tensor, _Past]:
        heads, one = block.config.heads, fresh.x.shape[1]
        aged = heads > 1 or block.binder.fades  # frames count by how far they are
        queries, offset = block.queries(block.norm_slots(slots))
        if alike and not aged:
            # The first block asks the same of every frame, whose answers are kept.
            taken, total, *_ = bound(queries, offset, _alone(fresh), None, "all")
            if past is not None:
                taken, total = (
                    self._last(torch.cat(pair, 1), 1) for pair in ((past.taken, taken), (past.total, total))
                )
            update = block.values(taken.sum(1, keepdim=True), total.sum(1, keepdim=True))
        else:
            assert self._tokens is not None
            held = self._tokens.x.shape[1] // one
            taken, total = (
                self._asked(block, queries, offset, held)
                if aged
                else bound(queries, offset, _alone(self._tokens), None, "all")[:2]
            )
            update = block.values(taken, total)
        slots = slots + update
        normed = block.norm_time(slots).transpose(1, 2)
        normed = normed if past is None else self._last(torch.cat([past.slots, normed], 2), 2)
        apart = torch.arange(1 - normed.shape[2], 1, device=normed.device)
        among = block.biases(apart)[heads : heads + block.binder.heads, None]
        slots = slots + block.across_time(normed, among, last=True).transpose(1, 2)
        return block.rest(slots), _Past(taken, total, normed)

    def _asked(self, block: BinderBlock, queries: Tensor, offset: Tensor, held: int) -> tuple[Tensor, Tensor]:
        """Of several heads, or shares that fade, which weigh frames by how far they are: one frame of the ring after another."""
        assert self._tokens is not None
        frames = Tokens(*(table.unflatten(1, (held, -1)) for table in self._tokens))
        # The ring's oldest frame stands behind the newest once it is full.
        ages = (self._count - 1 - torch.arange(held, device=frames.x.device)) % held
        told = block.biases(-ages).repeat_interleave(block.config.slots, 0)  # (all heads * K, held)
        rows = queries.shape[2]
        bias = told[:rows]
        weight = told[-rows:].exp() if block.binder.fades else torch.ones_like(bias)
        found = [
            bound(queries, offset + bias[:, i], Tokens(*(table[:, i : i + 1] for table in frames)), None, "all")
            for i in range(held)
        ]
        taken = sum(f.taken * weight[:, i, None] for i, f in enumerate(found))
        total = sum(f.total * weight[:, i] for i, f in enumerate(found))
        assert isinstance(taken, Tensor) and isinstance(total, Tensor)
        return taken, total

    def _keep(self, fresh: Tokens) -> None:
        """A new frame in the place of the oldest."""
        one, number = fresh.x.shape[1], self._count
        self._count += 1
        if self._tokens is None:
            self._tokens = Tokens(*(table.clone() for table in fresh))
        elif self.window is None or number < self.window:
            self._tokens = Tokens(*(torch.cat(pair, 1) for pair in zip(self._tokens, fresh, strict=True)))
        else:
            # In place: a ring needs no copy of what stays.
            at = number % self.window * one
            for table, new in zip(self._tokens, fresh, strict=True):
                table[:, at : at + one] = new

    def _last(self, table: Tensor, dim: int) -> Tensor:
        return (
            table
            if self.window is None
            else table.narrow(dim, max(table.shape[dim] - self.window, 0), min(table.shape[dim], self.window))
        )


def _alone(tokens: Tokens) -> Tokens:
    """As the tokens of one time."""
    return Tokens(*(table[:, None] for table in tokens))
