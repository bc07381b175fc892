"""The baseline of Singh et al. (2024, B.5): a Transformer over all tokens of all frames, whose output is pooled in squares to slots."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ..encoders.transformer import TransformerConfig
from .slot_attention import GroupingOutput
from .slot_config import SlotAttentionConfig

_OCTAVES = 8  # initialization of the embedding of a frame's number


class PooledTransformer(nn.Module):
    """Grouping of features (b, T, N, in_width) to slots (b, T, K, D), where sqrt(K) divides sqrt(N).

    `attention` (b, T, K, N) assigns each token to the slot of its square, the same for all frames. With `checkpointed`,
    backward recomputes the Transformer.
    """

    checkpointed = False

    def __init__(self, config: SlotAttentionConfig, in_width: int):
        super().__init__()
        assert config.pooled is not None
        p = config.pooled
        self.slots, self.project = config.slots, nn.Linear(in_width, config.width)
        self.time = nn.Linear(2 * _OCTAVES, config.width)
        inner = TransformerConfig(
            blocks=p.blocks, heads=p.heads, mlp_width=4 * config.width, norm="pre", ln_eps=config.ln_eps, last_norm=True
        )
        self.blocks = inner.build(config.width)

    def units(self) -> list[nn.Module]:
        """Return the modules that an engine wraps one by one."""
        return [self.blocks]

    def forward(self, features: Tensor, noise: Tensor | None = None) -> GroupingOutput:
        """Return slots; `noise` is ignored, because nothing is sampled."""
        b, times, tokens = features.shape[:3]
        side, squares = math.isqrt(tokens), math.isqrt(self.slots)
        number = torch.arange(times, device=features.device, dtype=torch.float32)[:, None]
        angles = number * math.pi / 2.0 ** torch.arange(_OCTAVES, device=features.device)
        # The number of the frame in the clip, so that clips of any length have the same embeddings.
        when = self.time(torch.cat([angles.sin(), angles.cos()], -1).to(self.time.weight.dtype))
        x = (self.project(features) + when[:, None]).flatten(1, 2)
        again = self.checkpointed and torch.is_grad_enabled()
        x = checkpoint(self.blocks, x, use_reentrant=False) if again else self.blocks(x)
        planes = x.view(b * times, side, side, -1).permute(0, 3, 1, 2)
        pooled = F.avg_pool2d(planes, side // squares).flatten(2).transpose(1, 2)
        place = torch.arange(side, device=x.device) // (side // squares)
        owner = (place[:, None] * squares + place).flatten()
        own = (owner == torch.arange(self.slots, device=x.device)[:, None]).to(x.dtype)
        return GroupingOutput(pooled.unflatten(0, (b, times)), own.expand(b, times, -1, -1))
