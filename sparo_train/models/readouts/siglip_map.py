"""SigLIP's pooling head, MAP (Zhai et al. 2023; big_vision's MAPHead), with timm's module."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from timm.layers.attention_pool import AttentionPoolLatent
from torch import Tensor, nn

from ...core.config import field
from ...core.errors import ConfigError
from ..readout import Placement, ReadOut, Slots, TwinReadOut


class MapReadOut(TwinReadOut):
    """One learned query, multi-head attention over normed tokens, and a residual MLP; then the tower's projection.

    SigLIP's image tower has no class token and no projection after the head. Ours has both, so that any two towers can
    be combined.
    """

    kind: Literal["map"] = field("map", "Kind of the readout: an entry of sparo.readouts.")
    inference_note: ClassVar[str] = "class token attended and heads of 64 numbers, which shapes do not show"
    head_width: int = field(64, "Width of an attention head. Must divide the width of each pooled tower.", gt=0)
    mlp_ratio: float = field(4.0, "Width of the MLP relative to the tower's width.", gt=0)
    attend_cls: bool = field(True, "Let the query attend to the image's class token, too.")
    text: bool = field(False, "Also pool texts by attention. false: use the EOS token.")

    @property
    def placement(self) -> Placement:
        return Placement(attend_cls=self.attend_cls, normalize=False, projected=True, text=self.text)

    def shape(self, embed_dim: int) -> tuple[int, int]:
        return 1, embed_dim

    def module(self, dim: int, embed_dim: int) -> MapHead:
        if dim % self.head_width:
            raise ConfigError(f"readout.head_width={self.head_width} does not divide a tower's width of {dim}")
        return MapHead(dim, dim // self.head_width, self.mlp_ratio)

    @classmethod
    def infer(cls, weights: Mapping[str, Tensor], replaced: int) -> dict[str, Any]:
        hidden, width = weights["attn_pool.mlp.fc1.weight"].shape
        return {"mlp_ratio": hidden / width}


class MapHead(ReadOut):
    """One slot with as many values as a token. Parameters are named as in timm's SigLIP below `attn_pool`."""

    def __init__(self, dim: int, heads: int, mlp_ratio: float):
        super().__init__()
        self.slots, self.width = 1, dim
        norm = functools.partial(nn.LayerNorm, eps=1e-6)
        self.attn_pool = AttentionPoolLatent(dim, num_heads=heads, mlp_ratio=mlp_ratio, norm_layer=norm)  # type: ignore[arg-type]

    def forward(self, tokens: Tensor, keep: Tensor | None = None, *, need_attention: bool = False) -> Slots:
        """Read one slot from tokens (B, N, d); attention (B, 1, N) is the mean over heads."""
        mask = None if keep is None else keep[:, None, None, :]
        values = self.attn_pool(tokens, attn_mask=mask)[:, None]
        # timm's module returns no attention, so it is recomputed if it is needed.
        return Slots(values, self._attention(tokens, mask) if need_attention else None)

    def _attention(self, tokens: Tensor, mask: Tensor | None) -> Tensor:
        pool, (batch, length, _) = self.attn_pool, tokens.shape
        query = pool.q(pool.latent).view(1, 1, pool.num_heads, pool.head_dim).transpose(1, 2)
        key = pool.kv(tokens).view(batch, length, 2, pool.num_heads, pool.head_dim)[:, :, 0].transpose(1, 2)
        scores = (query * pool.scale @ key.transpose(-2, -1)).float()
        scores = scores if mask is None else scores.masked_fill(~mask, -torch.inf)
        return scores.softmax(-1).mean(dim=1)
