"""Steps between the attentional pooler and SPARO: the ablation of the paper's Table 6 (Sec. 5.3), whose code was not released.

L queries of V values attend with one head each (with their own keys and values). Then, in this order:

    multi-head      heads are mixed by a matrix over all L*V values; separate heads are not
    LayerNorm       over all L*V values, or over the V values of every slot with shared parameters
    projection      a matrix over all L*V values, or over the V values of every slot with shared parameters

Multi-head without a slot-wise operation is the table's AttPool. It has no projection of queries, because the table's
numbers of parameters exclude one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from torch import Tensor, nn

from ...core.config import field
from ..readout import Placement, Slots, TwinReadOut
from ..separate_heads import SeparateHeads, optional_attention


class AttPoolReadOut(TwinReadOut):
    """AttPool of the paper's Table 6, and its rows up to SPARO, on both towers."""

    kind: Literal["attpool"] = field("attpool", "Kind of the readout: an entry of sparo.readouts.")
    inference_note: ClassVar[str] = "norms as without readout.normalize, which shapes do not show"
    slots: int = field(64, "Number of queries, L, each with its own head.", gt=0)
    slot_width: int = field(64, "Width of a slot and of a head, V.", gt=0)
    cross_attention: Literal["multi_head", "separate_head"] = field(
        "multi_head", "multi_head: an output projection mixes the heads. separate_head: the heads stay separate."
    )
    slot_layer_norm: bool = field(False, "Apply LayerNorm to each slot separately instead of to the whole encoding.")
    slot_projection: bool = field(False, "Project each slot separately instead of the whole encoding at once.")
    replace_last_block: bool = field(False, "Replace the last Transformer block by the readout.")
    normalize: bool | None = field(
        None,
        "Scale every slot to the same norm (Eq. 2 of the SPARO paper). Default (null): yes, if slot_layer_norm and slot_projection are set.",
        examples=[False],
    )

    @property
    def placement(self) -> Placement:
        return Placement(int(self.replace_last_block), normalize=bool(self.normalize))

    def resolve_defaults(self, normalize: bool) -> Self:
        if self.normalize is not None:
            return self
        # Slot-wise normalized encodings may be compared slot by slot; mixed encodings may not (Sec. 5.3).
        slot_wise = self.slot_layer_norm and self.slot_projection
        return self.model_copy(update={"normalize": normalize and slot_wise})

    def shape(self, embed_dim: int) -> tuple[int, int]:
        return self.slots, self.slot_width

    def module(self, dim: int, embed_dim: int) -> AttPool:
        mixed = self.cross_attention == "multi_head"
        return AttPool(dim, self.slots, self.slot_width, mixed, self.slot_layer_norm, self.slot_projection)

    @classmethod
    def infer(cls, weights: Mapping[str, Tensor], replaced: int) -> dict[str, Any]:
        _, slots, _, _, width = weights["q_emb"].shape
        return {
            "slots": slots,
            "slot_width": width,
            "cross_attention": "multi_head" if "out_proj.weight" in weights else "separate_head",
            "slot_layer_norm": len(weights["norm.weight"]) == width,
            "slot_projection": len(weights["proj.weight"]) == width,
            "replace_last_block": bool(replaced),
        }


class AttPool(SeparateHeads):
    """L heads, mixed or not, then LayerNorm and projection, each slot-wise or over all values.

    Args:
        dim: d, width of the tokens.
        slots, width: L and V.
        mixed: multi-head attention's `out_proj` follows.
        slot_norm, slot_proj: LayerNorm and projection act on V values instead of L*V.
    """

    def __init__(self, dim: int, slots: int, width: int, mixed: bool, slot_norm: bool, slot_proj: bool):
        super().__init__(dim, slots, width, share_kv=False)
        self.width, whole = width, slots * width
        normed, projected = (width if wise else whole for wise in (slot_norm, slot_proj))
        self.out_proj = nn.Linear(whole, whole) if mixed else None
        self.norm = nn.LayerNorm(normed)
        self.proj = nn.Linear(projected, projected)
        self.reset_heads()
        for linear in (self.out_proj, self.proj):
            if linear is not None:
                nn.init.zeros_(linear.bias)

    def forward(self, tokens: Tensor, keep: Tensor | None = None, *, need_attention: bool = False) -> Slots:
        """Read slots (B, L, V) from tokens (B, N, d); attention is that of each head, before mixing."""
        read, attention = self.attend(tokens, keep)
        return Slots(self._after(read), optional_attention(attention, need_attention))

    def plain(self, tokens: Tensor, keep: Tensor | None = None) -> Slots:
        """Compute the same result with keys and values of every token; slower."""
        read, attention = self.attend_plain(tokens, keep)
        return Slots(self._after(read), attention)

    def _after(self, read: Tensor) -> Tensor:
        if self.out_proj is not None:
            # This matrix over all L * V values is what separate heads omit.
            read = self.out_proj(read.flatten(1)).view_as(read)
        for step in (self.norm, self.proj):
            per_slot = step.weight.shape[-1] == self.width
            read = step(read) if per_slot else step(read.flatten(1)).view(read.shape[0], self.slots, self.width)
        return read
