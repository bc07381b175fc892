"""FLAIR's text-conditioned pooling (Xiao et al., CVPR 2025): an image pooled by a text, in addition to its class token.

The class token and all patches go through the tower's projection. The encoding of a text is the query of multi-head
attention over the patches, which may also attend to nothing (a key and a value of zeros), with one LayerNorm each for
queries, keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from torch import Tensor, nn
from torch.nn import functional as F

from ...core.config import field
from ...core.errors import ConfigError
from ..readout import Placement, ReadOut, ReadOutConfig, ReadOutPair, Slots


class FlairReadOut(ReadOutConfig):
    """Class token of the image, whose patches texts can pool; texts keep EOS. Requires CLIP with loss.kind=sigmoid.

    `embed_dim` must be a multiple of `heads`.
    """

    kind: Literal["flair"] = field("flair", "Kind of the readout: an entry of sparo.readouts.")
    inference_note: ClassVar[str] = "8 attention heads, which shapes do not show"
    reads_cls: ClassVar[bool] = True
    conditioned: ClassVar[bool] = True
    heads: int = field(8, "Attention heads. Must divide embed_dim.", gt=0)

    @property
    def placement(self) -> Placement:
        return Placement(normalize=False, projected=True, text=False)

    def shape(self, embed_dim: int) -> tuple[int, int]:
        return 1, embed_dim

    def build(self, image_dim: int | None, text_dim: int | None, embed_dim: int) -> ReadOutPair:
        if embed_dim % self.heads:
            raise ConfigError(f"readout.heads={self.heads} does not divide embed_dim={embed_dim}")
        return ReadOutPair(None if image_dim is None else FlairPool(image_dim, embed_dim, self.heads), None)


class FlairPool(ReadOut):
    """The class token (B, 1, d) unchanged; `conditioned` pools projected patches by texts."""

    def __init__(self, dim: int, embed_dim: int, heads: int):
        super().__init__()
        self.slots, self.width, self.heads = 1, dim, heads
        self.attn = nn.MultiheadAttention(embed_dim, heads, batch_first=True, add_zero_attn=True)
        self.ln_q, self.ln_k, self.ln_v = (nn.LayerNorm(embed_dim) for _ in range(3))

    def forward(self, tokens: Tensor, keep: Tensor | None = None, *, need_attention: bool = False) -> Slots:
        attention = tokens.new_zeros(tokens.shape[0], 1, tokens.shape[1])
        attention[:, :, 0] = 1
        return Slots(tokens[:, :1], attention if need_attention else None)

    def conditioned(self, patches: Tensor, texts: Tensor) -> Tensor:
        """Pool projected patches (B, N, D) by projected texts (T, D), both before normalization, into (B, T, D)."""
        return pool_by_text(list(self.parameters()), self.heads, patches, texts)


def pool_by_text(own: Sequence[Tensor], heads: int, patches: Tensor, texts: Tensor) -> Tensor:
    """Compute `FlairPool.conditioned` with parameter values passed in order, because an engine may keep the parameters elsewhere."""
    in_weight, in_bias, out_weight, out_bias, *norms = own
    width = patches.shape[-1]
    q, k, v = (
        F.linear(F.layer_norm(x, (width,), norms[2 * i], norms[2 * i + 1]), weight, bias).unflatten(-1, (heads, -1))
        # Split in three as in torch's module, so that its weights load by name.
        for i, (x, weight, bias) in enumerate(
            zip((texts, patches, patches), in_weight.chunk(3), in_bias.chunk(3), strict=True)
        )
    )
    # The zero key scores zero, and its value adds nothing.
    k, v = (F.pad(x.transpose(1, 2), (0, 0, 0, 1)) for x in (k, v))
    read = F.scaled_dot_product_attention(q.transpose(0, 1).expand(patches.shape[0], -1, -1, -1), k, v)
    return F.linear(read.transpose(1, 2).flatten(2), out_weight, out_bias)
