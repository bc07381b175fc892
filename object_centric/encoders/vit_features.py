"""Patch tokens of timm's ViT, trained with the slots or loaded with them."""

from __future__ import annotations

from typing import Literal, Self

import torch
from pydantic import model_validator
from torch import Tensor, nn

from sparo_train.core.config import Frozen, field

_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's, with which DINO and DINOv2 were trained


class VitFeaturesConfig(Frozen):
    """timm's VisionTransformer with a class token, biases and LayerNorms with eps 1e-6, for images in 0..1."""

    kind: Literal["vit"] = field("vit", "Kind of the image encoder: an entry of sparo.slot_encoders.")
    width: int = field(384, "Token width.", gt=0)
    blocks: int = field(12, "Transformer blocks.", gt=0, le=256)
    heads: int = field(6, "Attention heads.", gt=0)
    hidden: int | None = field(None, "Hidden units of the MLPs. Default: four times width.", gt=0, examples=[768])
    patch: int = field(16, "Patch side in pixels.", gt=0)
    pretrain_grid_size: int = field(
        14,
        "Grid size, in patches per side, for which positions were learned. Positions are interpolated for other sizes.",
        gt=0,
    )
    registers: int = field(0, "Number of register tokens (DINOv2).", ge=0)
    class_pos_embed: bool = field(True, "The class token has a position embedding (not in DINOv2 with registers).")
    layer_scale: bool = field(False, "Use LayerScale (DINOv2).")
    final_norm: bool = field(
        True, "Return the tokens after the last norm. false: return the tokens before the last norm (DINOSAUR)."
    )
    input_scale: float = field(
        1.0,
        "Factor by which images are resized first, with bicubic interpolation (0.875: from 256 to 224 pixels).",
        gt=0,
        le=1,
    )

    @model_validator(mode="after")
    def _check_heads(self) -> Self:
        if self.width % self.heads:
            raise ValueError(f"heads={self.heads} does not divide width={self.width}")
        return self

    def side(self, image_size: int) -> int:
        """Return the number of patches per side. Raises `ValueError` if patches do not fit the image's size."""
        input_size = int(image_size * self.input_scale)
        if input_size % self.patch:
            raise ValueError(
                f"encoder.patch={self.patch}: does not divide image_size={image_size}"
                + (f" times encoder.input_scale={self.input_scale}" if self.input_scale != 1 else "")
            )
        return input_size // self.patch

    def cost(self, image_size: int) -> int:
        """Return the number of values that the blocks keep for an image."""
        return self.side(image_size) ** 2 * self.width * self.blocks * 12

    def build(self) -> nn.Module:
        return VitFeatures(self)


class VitFeatures(nn.Module):
    """Encoder of images (b, 3, S, S) in 0..1 to features (b, s, s, width)."""

    mean: Tensor
    std: Tensor

    def __init__(self, config: VitFeaturesConfig):
        super().__init__()
        from timm.models.vision_transformer import (
            VisionTransformer,
        )  # imports in a second, and configs are made without it

        self.config, c = config, config
        self.vit = VisionTransformer(
            img_size=c.pretrain_grid_size * c.patch,
            patch_size=c.patch,
            embed_dim=c.width,
            depth=c.blocks,
            num_heads=c.heads,
            mlp_ratio=(c.hidden or 4 * c.width) / c.width,
            init_values=1e-5 if c.layer_scale else None,
            reg_tokens=c.registers,
            no_embed_class=not c.class_pos_embed,
            final_norm=c.final_norm,
            # For images of another size than the positions were learned for, timm interpolates them in each forward.
            dynamic_img_size=True,
            num_classes=0,
            global_pool="",
        )
        self.register_buffer("mean", torch.tensor(_MEAN).view(3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(_STD).view(3, 1, 1), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        x = (images - self.mean) / self.std
        if self.config.input_scale != 1:
            x = nn.functional.interpolate(x, scale_factor=self.config.input_scale, mode="bicubic")
        tokens = self.vit.forward_features(x)[:, self.vit.num_prefix_tokens :]
        side = x.shape[-1] // self.config.patch
        return tokens.unflatten(1, (side, side))
