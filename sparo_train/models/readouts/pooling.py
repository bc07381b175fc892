"""Class token and EOS, as in the published CLIP and DINO, and the mean of the paper's GAP baseline."""

from __future__ import annotations

from typing import ClassVar, Literal

from torch import Tensor

from ...core.config import field
from ..readout import NoReadOut, Placement, ReadOut, Slots, TwinReadOut


class TokenReadOut(NoReadOut):
    """CLIP as published: the image's CLS token and the text's EOS token, each through a linear projection."""

    kind: Literal["token"] = field("token", "Kind of the readout: an entry of sparo.readouts.")
    inference_note: ClassVar[str] = "a mean over patches, gap, has the same shapes"


class ClsReadOut(NoReadOut):
    """DINO as published: the CLS token after the last block and `norm`."""

    kind: Literal["cls"] = field("cls", "Kind of the readout: an entry of sparo.readouts.")


class GapReadOut(TwinReadOut):
    """CLIP+GAP of the paper: mean over all image tokens, including CLS, then norm and projection. Texts are still pooled at EOS."""

    kind: Literal["gap"] = field("gap", "Kind of the readout: an entry of sparo.readouts.")
    patches_only: bool = field(False, "Exclude the class token from the mean (the paper's code includes it).")

    @property
    def placement(self) -> Placement:
        return Placement(norm="slots", attend_cls=not self.patches_only, normalize=False, projected=True, text=False)

    def shape(self, embed_dim: int) -> tuple[int, int]:
        return 1, embed_dim

    def module(self, dim: int, embed_dim: int) -> MeanPool:
        return MeanPool(dim)


class MeanPool(ReadOut):
    """One slot: the mean of the readable tokens."""

    def __init__(self, dim: int):
        super().__init__()
        self.slots, self.width = 1, dim

    def forward(self, tokens: Tensor, keep: Tensor | None = None, *, need_attention: bool = False) -> Slots:
        batch, length, _ = tokens.shape
        if keep is None:
            mean, weight = tokens.mean(dim=1, keepdim=True), tokens.new_full((batch, 1, length), 1 / length)
        else:
            # A product instead of a masked sum: padding must be finite, because it is multiplied by zero.
            weight = (keep / keep.sum(dim=1, keepdim=True)).to(tokens.dtype)[:, None]
            mean = weight @ tokens
        return Slots(mean, weight if need_attention else None)
