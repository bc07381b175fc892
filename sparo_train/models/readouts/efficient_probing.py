"""Efficient probing: multi-query cross-attention without projections of queries and keys (Psomas et al., ICLR 2026).

    a_j = softmax_n(x_n . q_j / sqrt(d))        y_j = V_j sum_n a_jn x_n

Every query attends to the tokens themselves and reads its own rows of one value projection. It is SPARO without K_l and
W.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...core.config import field
from ..readout import Placement, ReadOut, Slots, TwinReadOut


class EfficientReadOut(TwinReadOut):
    """EP on every tower. As published, an encoding is one vector, so slots are not normalized individually."""

    kind: Literal["ep"] = field("ep", "Kind of the readout: an entry of sparo.readouts.")
    inference_note: ClassVar[str] = "class token not attended, which shapes do not show"
    slots: int = field(32, "Number of learned queries.", gt=0)
    slot_width: int = field(
        24, "Width of each query's output. As published: the tower's width divided by the number of slots.", gt=0
    )
    attend_cls: bool = field(False, "Let queries attend to the image's class token, too.")
    normalize: bool = field(False, "Scale every slot to the same norm (Eq. 2 of the SPARO paper).")

    @property
    def placement(self) -> Placement:
        return Placement(attend_cls=self.attend_cls, normalize=self.normalize)

    def shape(self, embed_dim: int) -> tuple[int, int]:
        return self.slots, self.slot_width

    def module(self, dim: int, embed_dim: int) -> EfficientPool:
        return EfficientPool(dim, self.slots, self.slot_width)

    @classmethod
    def infer(cls, weights: Mapping[str, Tensor], replaced: int) -> dict[str, Any]:
        slots = weights["query"].shape[1]
        return {"slots": slots, "slot_width": len(weights["v.weight"]) // slots}


class EfficientPool(ReadOut):
    """L slots of V values: `query` (1, L, d), `v.weight` (L*V, d)."""

    adamw_only_parameters = ("v.weight",)

    def __init__(self, dim: int, slots: int, width: int):
        super().__init__()
        self.slots, self.width = slots, width
        self.query = nn.Parameter(torch.randn(1, slots, dim) * 0.02)
        self.v = nn.Linear(dim, slots * width, bias=False)

    def forward(self, tokens: Tensor, keep: Tensor | None = None, *, need_attention: bool = False) -> Slots:
        """Read slots (B, L, V) from tokens (B, N, d)."""
        mask = None if keep is None else keep[:, None, :]
        # The parameters themselves are the queries: one set for all samples, expanded without a copy.
        query = self.query.expand(tokens.shape[0], -1, -1).to(tokens.dtype)
        # Pool tokens before projecting them: V_j of a mean is the mean of V_j.
        if torch.compiler.is_exporting():  # ONNX has no attention without heads
            pooled = self._attention(tokens, mask).to(tokens.dtype) @ tokens
        else:
            pooled = F.scaled_dot_product_attention(query, tokens, tokens, attn_mask=mask)
        value = self.v.weight.view(self.slots, self.width, -1).to(pooled.dtype)
        values = torch.einsum("bld,lvd->blv", pooled, value)
        return Slots(values, self._attention(tokens, mask) if need_attention else None)

    def plain(self, tokens: Tensor, keep: Tensor | None = None) -> Slots:
        """Compute the same result as published, with values of every token for each query, which reads only its own; slower."""
        scores = self.query @ tokens.transpose(1, 2) * tokens.shape[-1] ** -0.5
        scores = scores if keep is None else scores.masked_fill(~keep[:, None, :], -torch.inf)
        attention = scores.softmax(-1)
        values = self.v(tokens).unflatten(2, (self.slots, self.width))
        return Slots(torch.einsum("bln,bnlv->blv", attention, values), attention)

    def _attention(self, tokens: Tensor, mask: Tensor | None) -> Tensor:
        scores = (self.query.to(tokens.dtype) @ tokens.transpose(1, 2)).float() * tokens.shape[-1] ** -0.5
        return (scores if mask is None else scores.masked_fill(~mask, -torch.inf)).softmax(-1)
