"""CLIP: two towers (`clip_towers.py`, or a timm model) and a temperature."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from open_clip.model import resize_pos_embed
from open_clip.transformer import LayerNorm, LayerNormFp32, QuickGELU
from torch import Tensor, nn
from torch.nn import functional as F

from ..core.logs import no_root_handler
from .clip_config import TRAINING, ClipConfig
from .clip_towers import TextTower, VisionTower, freeze
from .readout import ReadOut, ReadOutPair

if TYPE_CHECKING:
    from .timm_tower import TimmTower


def unit_norm(features: Tensor) -> Tensor:
    """Normalize to unit norm, computed in fp32 (fp64 stays)."""
    # In 16 bits, norms would differ in the third digit, and logits are multiplied by a hundred.
    return F.normalize(features.to(torch.promote_types(features.dtype, torch.float32)), dim=-1)


class Clip(nn.Module):
    """Two towers and a temperature, with open_clip's calling conventions.

    Args:
        config: the model.
        cast_dtype: fp16 or bf16 if weights have that dtype, which needs LayerNorms that compute in fp32 (open_clip's
            rule); else None.
    """

    def __init__(self, config: ClipConfig, cast_dtype: torch.dtype | None = None):
        super().__init__()
        self.config = config
        # Build readouts together only if necessary, because separate towers match the layout of open_clip's weights.
        pair = ReadOutPair(None, None)  # each tower builds its own, unless they share modules
        if config.readout.placement.shared:
            pair = config.readout.build(config.vision.width, config.text.width, config.embed_dim)
        self.visual = build_vision(config, cast_dtype, pair.image)
        self.text = build_text(config, cast_dtype, pair.text)
        # Stored as a logarithm, so that the scale stays positive whatever the optimizer does.
        self.logit_scale = nn.Parameter(torch.ones([]) * config.init_logit_scale)
        bias = config.init_logit_bias
        self.logit_bias = None if bias is None else nn.Parameter(torch.ones([]) * bias)
        self.context_length, self.vocab_size = config.text.context_length, config.text.vocab_size
        # Last, on finished towers, because freezing refers to the names of the blocks.
        freeze(self.visual, len(self.visual.resblocks), config.vision.freeze)
        freeze(self.text, len(self.text.resblocks), config.text.freeze)

    def encode_image(
        self,
        image: Tensor | None,
        normalize: bool = False,
        patches: Tensor | None = None,
        hidden: Tensor | None = None,
    ) -> Tensor:
        """Encode normalised pixels (B, 3, H, W), restricted to `patches` (B, K) if given, or the output of the tower's `hidden`, to (B, width).

        SPARO encodings have unit norm in either case.
        """
        features = self.visual(image, patches, hidden)
        return unit_norm(features) if normalize else features

    def encode_local(
        self, image: Tensor | None, patches: Tensor | None = None, hidden: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return unit-norm encodings (B, D) and the projected patches (B, N, D) that texts pool, for models with a conditioned readout."""
        tokens = self.visual(image, patches, hidden, local=True)
        return unit_norm(tokens[:, 0]), tokens[:, 1:]

    def pool_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of the pooling by texts, which the loss uses; empty if the readout is not conditioned."""
        readout = self.config.readout
        return list(self.visual.get_submodule(readout.kind).parameters()) if readout.conditioned else []

    def encode_text(self, text: Tensor, normalize: bool = False, hidden: Tensor | None = None) -> Tensor:
        """Encode token ids (B, T), with the output of the tower's `hidden` if given, to (B, width)."""
        features = self.text(text, hidden)
        return unit_norm(features) if normalize else features

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        # The scale itself, not its logarithm, because open_clip's callers multiply by the third value.
        return self.encode_image(image, True), self.encode_text(text, True), self.logit_scale.exp()

    def adapt_to_resolution(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Interpolate the positions in a CLIP's weights to this model's image size."""
        state = dict(weights)
        if isinstance(self.visual, VisionTower):
            with no_root_handler():
                resize_pos_embed(state, self, antialias=True)
        elif (name := "visual.trunk.pos_embed") in state:
            state[name] = self.visual.resize_pos_embed(state[name])
        return state

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.visual.set_grad_checkpointing(enable)
        self.text.set_grad_checkpointing(enable)


def build_vision(
    config: ClipConfig, cast_dtype: torch.dtype | None = None, module: ReadOut | None = None
) -> VisionTower | TimmTower:
    """Return the image tower of `config`; `module` is its readout if both towers' readouts were built together."""
    v = config.vision
    if v.timm_model_name is not None:
        place = (v.timm_model_name, v.image_size, v.timm_model_kwargs)
        from .timm_tower import TimmTower  # timm is imported only for its own towers

        return TimmTower(config.readout, config.embed_dim, *place, module)
    return VisionTower(
        config.readout,
        config.embed_dim,
        v.layers,
        module,
        image_size=v.image_size,
        patch_size=v.patch_size,
        width=v.width,
        heads=v.width // v.head_width,
        mlp_ratio=v.mlp_ratio,
        patch_dropout=v.patch_dropout,
        **_layers(config, cast_dtype),
    )


def build_text(config: ClipConfig, cast_dtype: torch.dtype | None = None, module: ReadOut | None = None) -> TextTower:
    """Return the text tower of `config`; `module` as in `build_vision`."""
    sizes = config.text.model_dump(exclude=TRAINING)
    return TextTower(config.readout, config.embed_dim, module=module, **sizes, **_layers(config, cast_dtype))


def _layers(config: ClipConfig, cast_dtype: torch.dtype | None) -> dict[str, Any]:
    low = cast_dtype in (torch.float16, torch.bfloat16)
    return {
        # OpenAI's released weights were trained with the sigmoid form; the exact GELU is another function.
        "act_layer": QuickGELU if config.quick_gelu else nn.GELU,
        "norm_layer": LayerNormFp32 if low else LayerNorm,
    }
