"""Slots that go from frame to frame: a corrector that sees a frame, and a predictor of the next (Kipf et al. 2022, Section 3)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..encoders.transformer import TransformerConfig
from ..grouping.slot_attention import GroupingOutput, SlotAttention
from ..grouping.slot_config import SlotAttentionConfig


class FrameStep(nn.Module):
    """One frame: tokens (b, N, F) and slots (b, K, D) to corrected slots, attention (b, K, N), and what the next frame begins with."""

    def __init__(self, grouping: SlotAttentionConfig, predictor: TransformerConfig | None, in_width: int):
        super().__init__()
        self.corrector = SlotAttention(grouping, in_width)
        self.predictor = nn.Identity() if predictor is None else predictor.build(grouping.width)

    def forward(
        self, tokens: Tensor, noise: Tensor | None, state: Tensor | None, num_iterations: int | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`state` None: the first frame, whose slots begin as the corrector's own do.  `num_iterations`: rounds in place of the corrector's."""
        slots, attention = self.corrector(tokens, noise, state, num_iterations)
        return slots, attention, self.predictor(slots)


class RecurrentSlots(nn.Module):
    """Tokens (b, T, N, F) to slots (b, T, K, D) and attention (b, T, K, N), one frame after another.

    `checkpointed`: what a frame's step writes is made again in backward, so that memory does not grow with it.

    Args:
        first_iterations: rounds of a video's first frame in place of the corrector's; None: as many.
    """

    checkpointed = False

    def __init__(
        self,
        grouping: SlotAttentionConfig,
        predictor: TransformerConfig | None,
        in_width: int,
        first_iterations: int | None = None,
    ):
        super().__init__()
        self.first_iterations = first_iterations
        self.step = FrameStep(grouping, predictor, in_width)

    def units(self) -> list[nn.Module]:
        """What an engine wraps one by one."""
        return [self.step]

    def forward(self, tokens: Tensor, noise: Tensor | None = None, hint: Tensor | None = None) -> GroupingOutput:
        """`hint` (b, K, D): slots that the first frame begins with in place of the corrector's own."""
        return self.run_with_state(tokens, noise, hint=hint)[0]

    def run_with_state(
        self, tokens: Tensor, noise: Tensor | None = None, state: Tensor | None = None, hint: Tensor | None = None
    ) -> tuple[GroupingOutput, Tensor]:
        """The same, and what the frame behind the last begins with; `state` (b, K, D): what an earlier part of the video was left with."""
        slots, attentions = [], []
        num_iterations, state = (self.first_iterations, hint) if state is None else (None, state)
        for frame in tokens.unbind(1):
            if self.checkpointed and torch.is_grad_enabled():
                frame_slots, attention, state = checkpoint(
                    self.step, frame, noise, state, num_iterations, use_reentrant=False
                )  # type: ignore[misc]
            else:
                frame_slots, attention, state = self.step(frame, noise, state, num_iterations)
            # Of the first frame alone.
            num_iterations = None
            slots.append(frame_slots)
            attentions.append(attention)
        assert state is not None
        return GroupingOutput(torch.stack(slots, 1), torch.stack(attentions, 1)), state
