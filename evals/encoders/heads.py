"""Heads of an ordinary ViT as units: what each adds to the class token, taken through the last norm and the projection.

The class token before `ln_post` is a sum: the input of the chosen blocks, the output of each of their heads, their
biases, and their MLPs. With the norm's mean and deviation fixed, the rest of the tower is linear, so the encoding is
the sum of the heads' shares and a rest (Gandelsman et al. 2024, arXiv 2310.05916, equations 4 to 8). Only direct shares
count: effects of a head through later blocks belong to these.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparo_train.core.errors import ConfigError

from .encoder import Encoder, TwoTowerEncoder


class HeadsEncoder(TwoTowerEncoder):
    """Encoder of images to (n, (U + 1) * D): the shares of the heads of the last blocks, first block first, and the rest. Texts are unchanged.

    Args:
        inner: an encoder around open_clip's vision transformer that is pooled by its class token.
        layers: number of its last blocks.
    """

    def __init__(self, inner: TwoTowerEncoder, layers: int):
        super().__init__(inner.model, inner.mean.flatten().tolist(), inner.std.flatten().tolist(), inner.label)
        self.inner, self.transform, self.image_size = inner, inner.transform, inner.image_size
        self.precision, self.decoding = inner.precision, inner.decoding
        self._layers, self._visual = layers, inner.model.visual
        self.slots = layers * _blocks(self._visual)[0].attn.num_heads + 1

    @property
    def architecture(self) -> str:
        return f"{self.inner.architecture} heads of the last {self._layers} blocks"

    @property
    def weights(self) -> str:
        return self.inner.weights

    @property
    def text_weights(self) -> str:
        return self.inner.text_weights

    def text(self, captions: Sequence[str], batch: int | None = None) -> Tensor:
        return self.inner.text(captions, batch)

    @torch.inference_mode()
    def encode(self, pixels: Tensor) -> Tensor:
        with self.autocast():
            shares, total = self._shares(self.normalize(pixels))
        visual = self._visual
        norm = visual.ln_post
        # LayerNorm with fixed mean and deviation is linear; its bias belongs to no head.
        deviation = (total.float().var(-1, unbiased=False, keepdim=True) + norm.eps).sqrt()
        # The rest is everything else, so that all units together are exactly the encoding.
        shares = torch.cat([shares, (total - shares.sum(1))[:, None]], dim=1).float()
        # The norm's mean is linear, too, and is subtracted from each share separately.
        shares = (shares - shares.mean(-1, keepdim=True)) / deviation[:, None] * norm.weight
        shares[:, -1] += norm.bias
        return (shares if visual.proj is None else shares @ visual.proj.float()).flatten(1)

    def _shares(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return what each head added to the class token (n, U, width), and the class token itself (n, width)."""
        visual, shares = self._visual, []
        blocks = _blocks(visual)
        # Run the tower's own steps, so that shares belong to the exact values that it computes.
        x = visual._embeds(x)
        for number, block in enumerate(blocks):
            if number >= len(blocks) - self._layers:
                shares.append(_head_outputs(block, x))
            x = block(x)
        return torch.cat(shares, dim=1), x[:, 0]


def _head_outputs(block: Any, x: Tensor) -> Tensor:
    """Return (n, heads, width): the heads' outputs at the class token, without the output's bias."""
    attention, h = block.attn, block.ln_1(x)
    heads, width = attention.num_heads, h.shape[-1]
    q, k, v = F.linear(h, attention.in_proj_weight, attention.in_proj_bias).unflatten(-1, (3, heads, -1)).unbind(2)
    # At the class token only: outputs at other tokens act through later blocks, so they are not direct shares.
    weight = torch.einsum("nhd,nthd->nht", q[:, 0] * q.shape[-1] ** -0.5, k).softmax(-1)
    read = torch.einsum("nht,nthd->nhd", weight, v)
    out = attention.out_proj.weight.view(width, heads, -1)
    return block.ls_1(torch.einsum("nhd,whd->nhw", read, out))


def _blocks(visual: Any) -> list[Any]:
    return list(visual.transformer.resblocks)


def make_heads(encoder: Encoder, layers: int) -> HeadsEncoder:
    """Return the heads of an encoder. Raises `ConfigError` if its image tower is not an ordinary ViT, or has fewer blocks."""
    visual: Any = getattr(encoder.model, "visual", None)
    pooled = getattr(visual, "pool_type", "") == "tok" and getattr(visual, "attn_pool", None) is None
    from open_clip.transformer import VisionTransformer  # imported here, because every task imports this module

    plain = isinstance(visual, VisionTransformer) and getattr(visual, "read_by", None) is None and pooled
    if not isinstance(encoder, TwoTowerEncoder) or not plain:
        raise ConfigError(
            f"--units heads: {encoder.label} is not supported. Use a CLIP whose image tower is open_clip's ordinary "
            "ViT, pooled by its class token."
        )
    blocks = _blocks(visual)
    # Shares are computed from the attention's own matrices, so fused or separate projections are not supported.
    ordinary = all(isinstance(b.attn, nn.MultiheadAttention) and b.attn.in_proj_weight is not None for b in blocks)
    ordinary = ordinary and getattr(visual.transformer, "batch_first", True)
    if not ordinary or not 0 < layers <= len(blocks):
        raise ConfigError(
            f"--head-layers {layers}: {encoder.label} has only {len(blocks)} blocks of ordinary attention"
        )
    return HeadsEncoder(encoder, layers)


class SelectedHeads(TwoTowerEncoder):
    """Encodings of an ordinary ViT from the shares of some heads and the rest."""

    def __init__(self, heads: HeadsEncoder, head_ids: list[int]):
        inner = heads.inner
        label = f"{inner.label} heads {','.join(map(str, head_ids))}"
        super().__init__(inner.model, inner.mean.flatten().tolist(), inner.std.flatten().tolist(), label)
        self.heads, self.head_ids = heads, head_ids
        self.transform, self.image_size, self.precision = inner.transform, inner.image_size, inner.precision
        self.decoding = inner.decoding

    @property
    def architecture(self) -> str:
        # A hash, because hundreds of heads would make a name that is too long for file systems.
        digest = hashlib.sha256(repr(self.head_ids).encode()).hexdigest()
        return f"{self.heads.architecture} chosen {digest}"

    @property
    def text_weights(self) -> str:
        return self.heads.text_weights

    def text(self, captions: Sequence[str], batch: int | None = None) -> Tensor:
        return self.heads.text(captions, batch)

    def sum_heads(self, encodings: Tensor) -> Tensor:
        """Sum the shares (n, (U + 1) * D) of the chosen heads and the rest, to (n, D)."""
        shares = encodings.unflatten(-1, (self.heads.slots, -1))
        return shares[:, [*self.head_ids, self.heads.slots - 1]].sum(1)

    def to_store(self) -> tuple[Encoder, Callable[[Tensor], Tensor] | None]:
        return self.heads, self.sum_heads

    def encode(self, pixels: Tensor) -> Tensor:
        return self.sum_heads(self.heads.encode(pixels))
