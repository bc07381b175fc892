"""Slot attention as a readout of CLIP's and DINO's towers, the rival that the SPARO paper names in Sec. 2.

Slots compete for the tokens and are updated over several iterations, while each slot of SPARO attends once, on its own.
Initial slots are learned, one per slot, so that a slot has the same meaning for all images and texts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from torch import Tensor

from sparo_train.core.config import field
from sparo_train.models.readout import Placement, ReadOut, Slots, TwinReadOut

from .slot_attention import SlotAttention
from .slot_config import SlotAttentionConfig


class SlotAttentionReadOut(TwinReadOut):
    """Slot attention on both towers."""

    kind: Literal["slot_attention"] = field("slot_attention", "Kind of the readout: an entry of sparo.readouts.")
    inference_note: ClassVar[str] = "3 iterations, which shapes do not show"
    slots: int = field(64, "Number of slots, L.", gt=0)
    slot_width: int = field(64, "Width of a slot, V, and of queries, keys and values.", gt=0)
    iterations: int = field(3, "Number of iterations; all use the same weights.", gt=0, le=100)
    mlp_width: int = field(128, "Hidden units of the residual MLP after each update. 0: no MLP.", ge=0)
    replace_last_block: bool = field(
        True, "Replace the last Transformer block by the readout, as readout.kind=sparo does."
    )
    attend_cls: bool = field(True, "Let slots read the image's class token, too.")
    normalize: bool = field(True, "Scale every slot to the same norm (Eq. 2 of the SPARO paper).")

    @property
    def placement(self) -> Placement:
        return Placement(int(self.replace_last_block), attend_cls=self.attend_cls, normalize=self.normalize)

    def shape(self, embed_dim: int) -> tuple[int, int]:
        return self.slots, self.slot_width

    def module(self, dim: int, embed_dim: int) -> SlotAttentionPool:
        sizes = {"slots": self.slots, "width": self.slot_width, "iterations": self.iterations}
        config = SlotAttentionConfig.model_validate(
            {"preset": "sa", "slot_init": "learned", "mlp_width": self.mlp_width, **sizes}
        )
        return SlotAttentionPool(config, dim)

    @classmethod
    def infer(cls, weights: Mapping[str, Tensor], replaced: int) -> dict[str, Any]:
        slots, width = weights["grouping.initial_slots"].shape
        mlp = weights.get("grouping.rounds.0.mlp.0.weight")
        return {
            "slots": slots,
            "slot_width": width,
            "mlp_width": 0 if mlp is None else len(mlp),
            "replace_last_block": bool(replaced),
        }


class SlotAttentionPool(ReadOut):
    """L slots of V values, from `SlotAttention`."""

    adamw_only_parameters = SlotAttention.adamw_only_parameters

    def __init__(self, config: SlotAttentionConfig, dim: int):
        super().__init__()
        self.slots, self.width = config.slots, config.width
        self.grouping = SlotAttention(config, dim)

    def forward(self, tokens: Tensor, keep: Tensor | None = None, *, need_attention: bool = False) -> Slots:
        """Read slots (B, L, V) from tokens (B, N, d); attention (B, L, N) sums to one over the tokens of each slot."""
        out = self.grouping(tokens, keep=keep)
        # Other readouts return weights of tokens, while slot attention returns the share of each slot in a token.
        attention = out.attention / out.attention.sum(-1, keepdim=True).clamp(min=1e-12) if need_attention else None
        return Slots(out.slots, attention)
