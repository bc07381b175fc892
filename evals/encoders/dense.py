"""Encodings of single patches in the space of the texts, from an image tower that pools its tokens."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparo_train.models.readout import read_slots

LastBlock = Literal["standard", "values", "correlative"]


class DenseEncoder:
    """Capability of an `Encoder` with an image tower `model.visual`, whose patches can be compared with texts."""

    model: Any
    normalize: Callable[[Tensor], Tensor]
    autocast: Callable[[], AbstractContextManager[Any]]

    @property
    def encodes_patches(self) -> bool:
        """Return whether its tower is one that `dense_patches` supports."""
        return has_dense_patches(self.model.visual)

    @torch.inference_mode()
    def dense(self, pixels: Tensor, last_block: LastBlock = "standard") -> Tensor:
        """Return encodings of patches, fp32 (n, P, D), row by row, for (n, 3, S, S) uint8; see `dense_patches`."""
        with self.autocast():
            return dense_patches(self.model.visual, self.normalize(pixels), last_block).float()


def has_dense_patches(visual: nn.Module) -> bool:
    """Return whether `dense_patches` supports an image tower: open_clip's vision transformer, with its pooling or a readout."""
    from open_clip.transformer import VisionTransformer  # imports in seconds, which encoders without texts do not need

    return isinstance(visual, VisionTransformer) and getattr(visual, "attn_pool", None) is None


def dense_patches(visual: Any, pixels: Tensor, last_block: LastBlock = "standard") -> Tensor:
    """Return the encoding of every patch, (n, P, D), not normalised, row by row.

    Each patch is encoded as the tower would encode an image whose last block produced only this token: a readout reads
    it alone; otherwise norm and projection are applied to it.

    Args:
        visual: an image tower for which `has_dense_patches` is true.
        pixels: normalised pixels (n, 3, H, W).
        last_block: attention in the last block. standard: unchanged; values: every token attends to itself only
            (MaskCLIP; Zhou et al. 2022); correlative: softmax of queries with queries plus that of keys with keys
            (SCLIP; Wang et al. 2024).
    """
    hidden = last_tokens(visual, pixels, last_block)
    prefix = getattr(visual, "prefix", 1)
    patches = hidden[:, prefix:]
    readout = None if getattr(visual, "read_by", None) is None else getattr(visual, visual.read_by)
    # Flair's readout needs a text; its patches are compared with texts before they are pooled.
    if readout is None or visual.read_by == "flair":
        encoded = visual.ln_post(patches)
    else:
        # A readout that excludes the first tokens gets copies of the patch before it.
        alone = patches.reshape(-1, 1, patches.shape[-1]).expand(-1, 1 if visual.place.attend_cls else prefix + 1, -1)
        slots = read_slots(readout, visual.place, visual.ln_post, alone, None, False, prefix)
        encoded = slots.flat().unflatten(0, patches.shape[:2])
    return encoded if visual.proj is None else encoded @ visual.proj


def last_tokens(visual: Any, pixels: Tensor, last_block: LastBlock) -> Tensor:
    """Return the tokens after the last block, (n, N, d), with its attention replaced unless `last_block` is standard."""
    block = visual.transformer.resblocks[-1]
    captured: dict[str, Tensor] = {}

    def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        captured["input"] = args[0] if args else kwargs["q_x"]

    def after(_module: nn.Module, _args: Any, output: Tensor) -> None:
        captured["output"] = output

    hooks = [block.register_forward_pre_hook(before, with_kwargs=True), block.register_forward_hook(after)]
    try:
        visual(pixels)
    finally:
        for hook in hooks:
            hook.remove()
    batch_first = getattr(visual.transformer, "batch_first", True)
    output, inputs = (captured[name] if batch_first else captured[name].transpose(0, 1) for name in ("output", "input"))
    return output if last_block == "standard" else _forward_block(block, inputs, last_block)


def _forward_block(block: Any, x: Tensor, last_block: LastBlock) -> Tensor:
    """Return the output (n, N, d) of a block of open_clip with another attention."""
    attention: nn.MultiheadAttention = block.attn
    q, k, v = F.linear(block.ln_1(x), attention.in_proj_weight, attention.in_proj_bias).chunk(3, dim=-1)
    mixed = v
    if last_block == "correlative":
        heads = [part.unflatten(-1, (attention.num_heads, -1)).transpose(1, 2) for part in (q, k, v)]
        scale = heads[0].shape[-1] ** -0.5
        weights = torch.stack([(part @ part.mT * scale).softmax(dim=-1) for part in heads[:2]]).sum(0)
        mixed = (weights @ heads[2]).transpose(1, 2).flatten(2)
    x = x + block.ls_1(attention.out_proj(mixed))
    return x + block.ls_2(block.mlp(block.ln_2(x)))


@torch.inference_mode()
def slot_similarity(attention: Tensor, slots: Tensor, texts: Tensor) -> Tensor:
    """Return the part of each patch in the similarity of image and text, (n, P, Q).

    The part of a patch is the sum over slots of its attention times the slot's similarity, divided by the mean attention
    of a token, so that the mean over all tokens is the similarity of the whole image.

    Args:
        attention: (n, L, P), attention of slots to patches; over all tokens it sums to one.
        slots: (n, L, V), the image's unit-norm encoding by slot.
        texts: (Q, L, V), unit-norm encodings of texts by slot.
    """
    similarity = torch.einsum("nlv,qlv->nlq", slots, texts)
    return attention.shape[-1] * torch.einsum("nlp,nlq->npq", attention, similarity)
