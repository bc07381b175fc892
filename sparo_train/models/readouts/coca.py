"""CoCa's attentional pooler as in open_clip (Yu et al. 2022, Sec. 3.2): learned queries, multi-head attention, norm, projection."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from open_clip.transformer import AttentionalPooler
from torch import Tensor, nn

from ...core.config import field
from ...core.errors import ConfigError
from ..readout import Placement, ReadOut, Slots, TwinReadOut


class CocaReadOut(TwinReadOut):
    """open_clip's `attentional_pool` on the image tower, and optionally on the text tower. `embed_dim` must be a multiple of `heads`."""

    kind: Literal["coca"] = field("coca", "Kind of the readout: an entry of sparo.readouts.")
    inference_note: ClassVar[str] = "8 attention heads, which shapes do not show"
    queries: int = field(
        1,
        "Number of learned queries. Only the first query gives the encoding. open_clip's CoCa weights have 256 queries, "
        "because a text decoder reads the outputs of the others.",
        gt=0,
    )
    heads: int = field(8, "Attention heads. Must divide embed_dim.", gt=0)
    text: bool = field(False, "Also pool texts by learned queries. false: use the EOS token, as in CoCa.")

    @property
    def placement(self) -> Placement:
        return Placement(norm="nothing", normalize=False, text=self.text)

    def shape(self, embed_dim: int) -> tuple[int, int]:
        return 1, embed_dim

    def module(self, dim: int, embed_dim: int) -> CocaPool:
        if embed_dim % self.heads:
            raise ConfigError(f"readout.heads={self.heads} does not divide embed_dim={embed_dim}")
        return CocaPool(dim, embed_dim, self.queries, self.heads)

    @classmethod
    def infer(cls, weights: Mapping[str, Tensor], replaced: int) -> dict[str, Any]:
        queries, width = weights["attn_pool.query"].shape
        return {"queries": queries, "embed_dim": width}


class CocaPool(ReadOut):
    """One slot of `embed_dim` values. Parameters are named as in open_clip's image tower: `attn_pool.*`, `ln_post.*`, `proj`."""

    def __init__(self, dim: int, embed_dim: int, queries: int, heads: int):
        super().__init__()
        self.slots, self.width = 1, embed_dim
        self.attn_pool = AttentionalPooler(embed_dim, dim, n_head=heads, n_queries=queries)
        self.ln_post = nn.LayerNorm(embed_dim)
        self.proj = nn.Parameter(dim**-0.5 * torch.randn(embed_dim, embed_dim))

    def forward(self, tokens: Tensor, keep: Tensor | None = None, *, need_attention: bool = False) -> Slots:
        """Read one slot from tokens (B, N, d), not normed; attention (B, 1, N) is the mean over heads."""
        pooler = self.attn_pool
        x = pooler.ln_k(tokens)
        query = pooler.ln_q(pooler.query)[:1]  # outputs of other queries are not used
        read, attention = pooler.attn(
            query.expand(x.shape[0], -1, -1).to(x.dtype),
            x,
            x,
            # torch masks tokens that are not to be read; `keep` marks those that are.
            key_padding_mask=None if keep is None else ~keep,
            need_weights=need_attention,
        )
        return Slots(self.ln_post(read) @ self.proj, attention)
