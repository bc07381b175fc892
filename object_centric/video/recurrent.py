"""Slots that go from frame to frame: a corrector that sees a frame, and a predictor of the next (Kipf et al. 2022, Section 3)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sparo_train.core.config import Frozen, setting

from ..grouping.slot_attention import Grouped, SlotAttention
from ..grouping.slot_config import SlotAttentionConfig


class PredictorConfig(Frozen):
    """A Transformer over the slots of a frame, to what those of the next begin as."""

    blocks: int = setting(1, "of the Transformer", gt=0, le=100)
    heads: int = setting(4, "of its attention", gt=0)
    mlp_width: int = setting(256, "hidden units of its perceptrons", gt=0)
    norm: Literal["post", "pre"] = setting(
        "post", "LayerNorms behind each branch (SAVi), or before it (STEVE, videosaur)"
    )
    ln_eps: float = setting(1e-6, "eps of every LayerNorm", gt=0)

    def build(self, width: int) -> nn.Module:
        """Slots (b, K, D) to slots."""
        block = nn.TransformerEncoderLayer(
            width,
            self.heads,
            self.mlp_width,
            0.0,
            layer_norm_eps=self.ln_eps,
            batch_first=True,
            norm_first=self.norm == "pre",
        )
        # torch's fused path of nested tensors is of padded texts; slots are never padded.
        return nn.TransformerEncoder(block, self.blocks, enable_nested_tensor=False)


class FrameStep(nn.Module):
    """One frame: tokens (b, N, F) and slots (b, K, D) to corrected slots, attention (b, K, N), and what the next frame begins with."""

    def __init__(self, grouping: SlotAttentionConfig, predictor: PredictorConfig | None, in_width: int):
        super().__init__()
        self.corrector = SlotAttention(grouping, in_width)
        self.predictor = nn.Identity() if predictor is None else predictor.build(grouping.width)

    def forward(self, tokens: Tensor, noise: Tensor | None, state: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """`state` None: the first frame, whose slots begin as the corrector's own do."""
        slots, attention = self.corrector(tokens, noise, state)
        return slots, attention, self.predictor(slots)


class RecurrentSlots(nn.Module):
    """Tokens (b, T, N, F) to slots (b, T, K, D) and attention (b, T, K, N), one frame after another.

    `checkpointed`: what a frame's step writes is made again in backward, so that memory does not grow with it.
    """

    checkpointed = False

    def __init__(self, grouping: SlotAttentionConfig, predictor: PredictorConfig | None, in_width: int):
        super().__init__()
        self.step = FrameStep(grouping, predictor, in_width)

    def units(self) -> list[nn.Module]:
        """What an engine wraps one by one."""
        return [self.step]

    def forward(self, tokens: Tensor, noise: Tensor | None = None, state: Tensor | None = None) -> Grouped:
        """`state` (b, K, D): what an earlier part of the video was left with, see `carried`."""
        return self.carried(tokens, noise, state)[0]

    def carried(
        self, tokens: Tensor, noise: Tensor | None = None, state: Tensor | None = None
    ) -> tuple[Grouped, Tensor]:
        """The same, and what the frame behind the last begins with."""
        slots, attentions = [], []
        for frame in tokens.unbind(1):
            if self.checkpointed and torch.is_grad_enabled():
                own, attention, state = checkpoint(self.step, frame, noise, state, use_reentrant=False)  # type: ignore[misc]
            else:
                own, attention, state = self.step(frame, noise, state)
            slots.append(own)
            attentions.append(attention)
        assert state is not None
        return Grouped(torch.stack(slots, 1), torch.stack(attentions, 1)), state
