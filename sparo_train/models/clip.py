"""CLIP with three read-outs on open_clip's own blocks: EOS/CLS token, global average pooling, SPARO.

State-dict names are those of open_clip's `CustomTextCLIP` (`visual.*`, `text.*`, `logit_scale`) with the SPARO
modules at `visual.sparo.*` and `text.sparo.*`, so a run's weights load in open_clip without renaming.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from open_clip.transformer import LayerNorm, LayerNormFp32, QuickGELU, TextTransformer, VisionTransformer
from torch import Tensor, nn
from torch.nn import functional as F

from .clip_config import ClipConfig, GapReadOut, SparoReadOut
from .patches import patchify
from .readouts import Slots, normalize_slots
from .sparo import Sparo


class _SparoTower(nn.Module):
    """Shared by both SPARO towers: the module, and slots of one norm."""

    sparo: Sparo

    def _read(self, tokens: Tensor, keep: Tensor | None, need_attention: bool) -> Slots:
        return normalize_slots(self.sparo(tokens, keep, need_attention=need_attention))


class VisionTower(VisionTransformer):
    """open_clip's ViT with its patch convolution written as the matrix product it is (stride = kernel size).

    Same parameters, same function; the convolution's weight gradient alone is a tenth of a ViT-B/32 step on a CPU.
    Patch dropout (Li et al. 2023, FLIP) may be given from outside, so that it depends on the sample and on nothing else.
    """

    def forward(self, x: Tensor, patches: Tensor | None = None) -> Tensor:
        """Pixels (B, 3, H, W) -> (B, output_dim); `patches` (B, K) int64: the patches to look at, in place of a random draw."""
        pooled, _ = self._pool(self.transformer(self._embeds(x, patches)))
        return pooled if self.proj is None else pooled @ self.proj

    def _embeds(self, x: Tensor, patches: Tensor | None = None) -> Tensor:
        pixels = patchify(x, self.conv1.kernel_size[0])
        where = self.positional_embedding[1:]
        if patches is not None:
            pixels = pixels.gather(1, patches[..., None].expand(-1, -1, pixels.shape[2]))
            where = where[patches]
        x = F.linear(pixels, self.conv1.weight.flatten(1), self.conv1.bias)
        start = (self.class_embedding.to(x.dtype) + self.positional_embedding[0].to(x.dtype)).expand(len(x), 1, -1)
        x = torch.cat([start, x + where.to(x.dtype)], dim=1)
        return self.ln_pre(x if patches is not None else self.patch_dropout(x))


class SparoVisionTower(_SparoTower, VisionTower):
    """open_clip's ViT with `ln_post` on every token (CLS included) and SPARO in place of pooling and projection."""

    def __init__(self, readout: SparoReadOut, layers: int, **kwargs: Any):
        VisionTower.__init__(self, layers=layers - readout.replace_last_block, output_dim=1, **kwargs)
        self.proj = None
        self.sparo = _sparo(readout, kwargs["width"])
        self.output_dim = readout.slots * readout.slot_width

    def slots(self, image: Tensor, need_attention: bool = False) -> Slots:
        """Normalised slots of images (B, 3, H, W); attention (B, L, 1 + H*W/p^2), CLS first."""
        tokens = self.ln_post(self.transformer(self._embeds(image)))
        return self._read(tokens, None, need_attention)

    def _pool(self, x: Tensor) -> tuple[Tensor, Tensor]:
        tokens = self.ln_post(x)
        return self._read(tokens, None, False).flat(), tokens[:, 1:]

    def lock(self, unlocked_groups: int = 0, freeze_bn_stats: bool = False) -> None:
        """Freeze all but the last `unlocked_groups` groups; SPARO with `ln_post` is the last one."""
        stem = [self.conv1, self.class_embedding, self.positional_embedding, self.ln_pre]
        _lock(
            self,
            [stem, *([b] for b in self.transformer.resblocks), [self.ln_post, self.sparo]],
            unlocked_groups,
        )


class GapVisionTower(VisionTower):
    """open_clip's ViT, pooled as in the paper's GAP baseline: mean over all tokens with CLS, then `ln_post`."""

    def _pool(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.ln_post(x.mean(dim=1)), x[:, 1:]


class TextTower(TextTransformer):
    """open_clip's text transformer that also takes batches cut to their longest caption.

    Under the causal mask a position never sees later ones, so cutting behind the last EOS changes no result.
    """

    def _embeds(self, text: Tensor) -> tuple[Tensor, Tensor | None]:
        x, mask = super()._embeds(text)
        return x, None if mask is None else mask[: x.shape[1], : x.shape[1]]


class SparoTextTower(_SparoTower, TextTower):
    """Text transformer with `ln_final` on every token and SPARO that attends up to and including EOS."""

    def __init__(self, readout: SparoReadOut, layers: int, **kwargs: Any):
        kwargs["output_dim"] = None
        TextTower.__init__(
            self, layers=layers - readout.replace_last_block, pool_type="none", proj_type="none", **kwargs
        )
        self.sparo = _sparo(readout, kwargs["width"])
        self.output_dim = readout.slots * readout.slot_width

    def slots(self, text: Tensor, need_attention: bool = False) -> Slots:
        """Normalised slots of token ids (B, T); attention (B, L, T), zero behind EOS."""
        x, mask = self._embeds(text)
        return self._read(self.ln_final(self.transformer(x, attn_mask=mask)), up_to_eos(text), need_attention)

    def forward(self, text: Tensor) -> Tensor:
        return self.slots(text).flat()

    def forward_intermediates(self, text: Tensor, *args: Any, **kwargs: Any) -> dict[str, Any]:
        out = super().forward_intermediates(text, *args, **kwargs)
        tokens = out.get("text_features")  # pool_type none: all tokens behind ln_final
        if isinstance(tokens, Tensor):
            out["text_features"] = self._read(tokens, up_to_eos(text), False).flat()
        return out

    def lock(self, unlocked_layers: int = 0, freeze_layer_norm: bool = True) -> None:
        stem = [self.token_embedding, self.positional_embedding]
        _lock(
            self,
            [stem, *([b] for b in self.transformer.resblocks), [self.ln_final, self.sparo]],
            unlocked_layers,
        )


def _unit(features: Tensor) -> Tensor:
    """Norm one, computed in fp32 (fp64 stays)."""
    return F.normalize(features.to(torch.promote_types(features.dtype, torch.float32)), dim=-1)


def up_to_eos(text: Tensor) -> Tensor:
    """(B, T) bool: True up to and including EOS, which has the largest id of CLIP's vocabulary."""
    positions = torch.arange(text.shape[1], device=text.device)
    return positions[None, :] <= text.argmax(dim=-1, keepdim=True)


class Clip(nn.Module):
    """Two towers and a temperature, with open_clip's calling conventions.

    Args:
        config: the model.
        cast_dtype: fp16/bf16 weights want LayerNorms that compute in fp32 (open_clip's rule); None otherwise.
    """

    def __init__(self, config: ClipConfig, cast_dtype: torch.dtype | None = None):
        super().__init__()
        self.config = config
        self.visual = build_vision(config, cast_dtype)
        self.text = build_text(config, cast_dtype)
        self.logit_scale = nn.Parameter(torch.ones([]) * config.init_logit_scale)
        bias = config.init_logit_bias
        self.logit_bias = None if bias is None else nn.Parameter(torch.ones([]) * bias)
        self.context_length, self.vocab_size = config.text.context_length, config.text.vocab_size

    def encode_image(self, image: Tensor, normalize: bool = False, patches: Tensor | None = None) -> Tensor:
        """(B, 3, H, W) normalised pixels (of `patches` (B, K) only) -> (B, width). SPARO encodings have norm one either way."""
        features = self.visual(image, patches)
        return _unit(features) if normalize else features

    def encode_text(self, text: Tensor, normalize: bool = False) -> Tensor:
        """(B, T) token ids -> (B, width)."""
        features = self.text(text)
        return _unit(features) if normalize else features

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.encode_image(image, True), self.encode_text(text, True), self.logit_scale.exp()

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.visual.set_grad_checkpointing(enable)
        self.text.set_grad_checkpointing(enable)


def build_vision(config: ClipConfig, cast_dtype: torch.dtype | None = None) -> VisionTower:
    """The image tower of `config`."""
    v = config.vision
    common: dict[str, Any] = {
        "image_size": v.image_size,
        "patch_size": v.patch_size,
        "width": v.width,
        "layers": v.layers,
        "heads": v.width // v.head_width,
        "mlp_ratio": v.mlp_ratio,
        "patch_dropout": v.patch_dropout,
        **_layers(config, cast_dtype),
    }
    if isinstance(config.readout, SparoReadOut):
        return SparoVisionTower(config.readout, **common)
    tower = GapVisionTower if isinstance(config.readout, GapReadOut) else VisionTower
    return tower(output_dim=config.embed_dim, **common)


def build_text(config: ClipConfig, cast_dtype: torch.dtype | None = None) -> TextTower:
    """The text tower of `config`."""
    t = config.text
    common: dict[str, Any] = {**t.model_dump(), **_layers(config, cast_dtype)}
    if isinstance(config.readout, SparoReadOut):
        return SparoTextTower(config.readout, **common)
    return TextTower(output_dim=config.embed_dim, **common)


def _layers(config: ClipConfig, cast_dtype: torch.dtype | None) -> dict[str, Any]:
    low = cast_dtype in (torch.float16, torch.bfloat16)
    return {
        "act_layer": QuickGELU if config.quick_gelu else nn.GELU,
        "norm_layer": LayerNormFp32 if low else LayerNorm,
    }


def _sparo(readout: SparoReadOut, dim: int) -> Sparo:
    r = readout
    return Sparo(dim, r.slots, r.slot_width, r.head_width, r.grp_size, r.share_kv)


def _lock(tower: nn.Module, groups: Sequence[Sequence[nn.Module | nn.Parameter]], unlocked: int) -> None:
    tower.requires_grad_(False)
    for group in groups[max(0, len(groups) - unlocked) :]:
        for part in group:
            part.requires_grad_(True)
