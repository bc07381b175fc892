"""Linear information bottleneck of the paper (App. B.2): standard CLIP with few values, and an affine map to more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from ...core.config import field
from ..readout import Placement, ReadOut, Slots, TwinReadOut


class LinearBottleneckReadOut(TwinReadOut):
    """m -> M on both towers; the paper has 64 -> 512 and 512 -> 4096."""

    kind: Literal["linear_bottleneck"] = field("linear_bottleneck", "Kind of the readout: an entry of sparo.readouts.")
    reads_cls: ClassVar[bool] = True
    bottleneck_dim: int = field(64, "Width m to which CLS and EOS tokens are projected.", gt=0)
    width: int = field(512, "Width M of an encoding.", gt=0)

    @property
    def placement(self) -> Placement:
        return Placement(normalize=False)

    def shape(self, embed_dim: int) -> tuple[int, int]:
        return 1, self.width

    def module(self, dim: int, embed_dim: int) -> LinearBottleneck:
        return LinearBottleneck(dim, self.bottleneck_dim, self.width)

    @classmethod
    def infer(cls, weights: Mapping[str, Tensor], replaced: int) -> dict[str, Any]:
        width, narrow = weights["bottleproj.weight"].shape
        return {"bottleneck_dim": narrow, "width": width}


class LinearBottleneck(ReadOut):
    """One slot: the image's class token, or a text's last readable token, through `proj` (d, m) and `bottleproj` (M, m)."""

    def __init__(self, dim: int, narrow: int, width: int):
        super().__init__()
        self.slots, self.width = 1, width
        self.proj = nn.Parameter(dim**-0.5 * torch.randn(dim, narrow))
        self.bottleproj = nn.Linear(narrow, width)

    def forward(self, tokens: Tensor, keep: Tensor | None = None, *, need_attention: bool = False) -> Slots:
        """Read one slot from tokens (B, N, d); attention is one at the token that is read."""
        batch, length, _ = tokens.shape
        # The last readable token of a text is EOS; the first of an image is its class token.
        at = torch.zeros(batch, dtype=torch.int64, device=tokens.device) if keep is None else keep.sum(dim=1) - 1
        read = tokens[torch.arange(batch, device=tokens.device), at]
        # Not one_hot, which torch.export only supports for captions of one length.
        places = torch.arange(length, device=tokens.device)
        attention = (places == at[:, None])[:, None].float() if need_attention else None
        return Slots(self.bottleproj(read @ self.proj)[:, None], attention)
