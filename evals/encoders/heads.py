"""Heads of an ordinary ViT as units: what each adds to the class token, taken through the last norm and the projection.

The class token before `ln_post` is a sum: what came before the chosen blocks, what each of their heads wrote, their biases, their
MLPs. With the norm's mean and deviation held at their values the rest of the tower is linear, so the encoding is the sum of the
heads' shares and one rest (Gandelsman et al. 2024, arXiv 2310.05916, equations 4 to 8). Only direct shares count: what a head does
through later blocks stays with them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparo_train.core.errors import ConfigError

from .encoder import Encoder, TwoTowerEncoder


class HeadsEncoder(TwoTowerEncoder):
    """Encodings (n, (U + 1) * D): the shares of the heads of the last blocks, first block first, and the rest. Texts as they were.

    Args:
        inner: an encoder around open_clip's vision transformer that is pooled by its class token.
        layers: how many of its last blocks.
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

    @cached_property
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
            shares, total = self._shares(self.normalised(pixels))
        visual = self._visual
        norm = visual.ln_post
        # LayerNorm with its mean and deviation held is linear; its bias belongs to no head.
        deviation = (total.float().var(-1, unbiased=False, keepdim=True) + norm.eps).sqrt()
        # The rest is what no head wrote, so that all units together are the encoding exactly.
        shares = torch.cat([shares, (total - shares.sum(1))[:, None]], dim=1).float()
        # The norm's mean is linear, too, and is taken from each share by itself.
        shares = (shares - shares.mean(-1, keepdim=True)) / deviation[:, None] * norm.weight
        shares[:, -1] += norm.bias
        return (shares if visual.proj is None else shares @ visual.proj.float()).flatten(1)

    def _shares(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """What each head wrote into the class token (n, U, width), and the class token itself (n, width)."""
        visual, shares = self._visual, []
        blocks = _blocks(visual)
        # By the tower's own steps, so that every share is of the very numbers that it computes.
        x = visual._embeds(x)
        for number, block in enumerate(blocks):
            if number >= len(blocks) - self._layers:
                shares.append(_written(block, x))
            x = block(x)
        return torch.cat(shares, dim=1), x[:, 0]


def _written(block: Any, x: Tensor) -> Tensor:
    """(n, heads, width): the heads' writes at the class token, without the output's bias."""
    attention, h = block.attn, block.ln_1(x)
    heads, width = attention.num_heads, h.shape[-1]
    q, k, v = F.linear(h, attention.in_proj_weight, attention.in_proj_bias).unflatten(-1, (3, heads, -1)).unbind(2)
    # At the class token alone: what other tokens read goes through later blocks, and is no direct share.
    weight = torch.einsum("nhd,nthd->nht", q[:, 0] * q.shape[-1] ** -0.5, k).softmax(-1)
    read = torch.einsum("nht,nthd->nhd", weight, v)
    out = attention.out_proj.weight.view(width, heads, -1)
    return block.ls_1(torch.einsum("nhd,whd->nhw", read, out))


def _blocks(visual: Any) -> list[Any]:
    return list(visual.transformer.resblocks)


def heads_of(encoder: Encoder, layers: int) -> HeadsEncoder:
    """The heads of an encoder. Raises `ConfigError` where its image tower is no ordinary ViT, or has fewer blocks."""
    visual: Any = getattr(encoder.model, "visual", None)
    pooled = getattr(visual, "pool_type", "") == "tok" and getattr(visual, "attn_pool", None) is None
    from open_clip.transformer import VisionTransformer  # here: every task asks this module what a choice of heads is

    plain = isinstance(visual, VisionTransformer) and getattr(visual, "read_by", None) is None and pooled
    if not isinstance(encoder, TwoTowerEncoder) or not plain:
        raise ConfigError(
            f"--units heads: {encoder.label} is no CLIP whose ViT is pooled by its class token (open_clip's ordinary one)"
        )
    blocks = _blocks(visual)
    # The shares are read out of the attention's own matrices: fused or separate ones are others.
    ordinary = all(isinstance(b.attn, nn.MultiheadAttention) and b.attn.in_proj_weight is not None for b in blocks)
    ordinary = ordinary and getattr(visual.transformer, "batch_first", True)
    if not ordinary or not 0 < layers <= len(blocks):
        raise ConfigError(f"--head-layers {layers}: {encoder.label} has {len(blocks)} blocks of ordinary attention")
    return HeadsEncoder(encoder, layers)


class SelectedHeads(TwoTowerEncoder):
    """An ordinary ViT's encodings made of these heads' shares and the rest alone."""

    def __init__(self, heads: HeadsEncoder, head_ids: list[int]):
        inner = heads.inner
        label = f"{inner.label} heads {','.join(map(str, head_ids))}"
        super().__init__(inner.model, inner.mean.flatten().tolist(), inner.std.flatten().tolist(), label)
        self.heads, self.head_ids = heads, head_ids
        self.transform, self.image_size, self.precision = inner.transform, inner.image_size, inner.precision
        self.decoding = inner.decoding

    @property
    def architecture(self) -> str:
        # Hashed, as hundreds of heads would make a name that no file system takes.
        digest = hashlib.sha256(repr(self.head_ids).encode()).hexdigest()
        return f"{self.heads.architecture} chosen {digest}"

    @property
    def text_weights(self) -> str:
        return self.heads.text_weights

    def text(self, captions: Sequence[str], batch: int | None = None) -> Tensor:
        return self.heads.text(captions, batch)

    def of(self, encodings: Tensor) -> Tensor:
        """The shares (n, (U + 1) * D) of all heads to the sum of the chosen and the rest, (n, D)."""
        shares = encodings.unflatten(-1, (self.heads.slots, -1))
        return shares[:, [*self.head_ids, self.heads.slots - 1]].sum(1)

    def stored(self) -> tuple[Encoder, Callable[[Tensor], Tensor] | None]:
        return self.heads, self.of

    def encode(self, pixels: Tensor) -> Tensor:
        return self.of(self.heads.encode(pixels))
