"""Discrete bottleneck of the paper (App. B.2): Finite Discrete Tokens (Chen et al. 2023), as in the sparo-clip repository.

The tokens of both towers query one codebook. A code's score is its maximum over the tokens, sparsemax turns scores into
weights, and the encoding is the weighted sum of codes. Images use patches only. Text positions after EOS score zero
(the repository multiplies instead of masking), so no code of a text scores less. Here this also holds for captions
without such positions, so that their encoding is the same in every batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from ...core.config import field
from ..readout import Placement, ReadOut, ReadOutPair, Slots, TwinReadOut


class FdtReadOut(TwinReadOut):
    """FDT on both towers with one codebook."""

    kind: Literal["fdt"] = field("fdt", "Kind of the readout: an entry of sparo.readouts.")
    inference_note: ClassVar[str] = "scores over a temperature of 1000, which shapes do not show"
    codes: int = field(16384, "Number of codes in the codebook.", gt=0)
    width: int = field(512, "Width of a code and of an encoding.", gt=0)
    temperature: float = field(1000.0, "Number by which the scores of codes are divided before sparsemax.", gt=0)

    @property
    def placement(self) -> Placement:
        return Placement(norm="nothing", attend_cls=False, normalize=False, shared=True)

    def shape(self, embed_dim: int) -> tuple[int, int]:
        return 1, self.width

    def build(self, image_dim: int | None, text_dim: int | None, embed_dim: int) -> ReadOutPair:
        pair = super().build(image_dim, text_dim, embed_dim)
        if isinstance(pair.image, Fdt) and isinstance(pair.text, Fdt):
            pair.text.space_dict = pair.image.space_dict
        return pair

    def module(self, dim: int, embed_dim: int) -> Fdt:
        return Fdt(dim, self.codes, self.width, self.temperature)

    @classmethod
    def infer(cls, weights: Mapping[str, Tensor], replaced: int) -> dict[str, Any]:
        codes, width = weights["space_dict"].shape
        return {"codes": codes, "width": width}


class Fdt(ReadOut):
    """One slot: a convex combination of codes. `space_dict` (codes, width); `q_map` from tokens to queries."""

    adamw_only_parameters = ("space_dict",)

    def __init__(self, dim: int, codes: int, width: int, temperature: float):
        super().__init__()
        self.slots, self.width, self.temperature = 1, width, temperature
        self.space_dict = nn.Parameter(torch.randn(codes, width))
        self.q_map = nn.Sequential(
            nn.LayerNorm(dim), nn.Linear(dim, width), nn.GELU(), nn.LayerNorm(width), nn.Linear(width, width)
        )

    def forward(self, tokens: Tensor, keep: Tensor | None = None, *, need_attention: bool = False) -> Slots:
        """Read one slot from tokens (B, N, d), not normed. Each code selects its own tokens, so a single attention map does not exist (None)."""
        scores = self.q_map(tokens) @ self.space_dict.T * self.width**-0.5  # (B, N, codes)
        # Multiplied instead of masked, as published; see the module's docstring.
        best = scores.amax(dim=1) if keep is None else (scores * keep[..., None]).amax(dim=1).clamp(min=0)
        weights = sparsemax(best / self.temperature)
        return Slots((weights.to(self.space_dict.dtype) @ self.space_dict)[:, None])


def sparsemax(scores: Tensor) -> Tensor:
    """Return the nearest point of the simplex (Martins and Astudillo 2016, Alg. 1) over the last dimension, in fp32 at least.

    entmax's sparsemax stays in the dtype of its input: in bf16, weights over 16,384 words sum to 1 within 8e-3 (here:
    7e-7).
    """
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    falling, _ = scores.sort(dim=-1, descending=True)
    count = torch.arange(1, scores.shape[-1] + 1, device=scores.device)
    sums = falling.cumsum(dim=-1)
    # Number of largest scores that are above the threshold which they define.
    support_size = (1 + count * falling > sums).sum(dim=-1, keepdim=True)
    threshold = (sums.gather(-1, support_size - 1) - 1) / support_size
    return (scores - threshold).clamp(min=0)
