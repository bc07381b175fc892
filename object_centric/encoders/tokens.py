"""Tokens of a discrete VAE instead of features, which SLATE groups; the model that contains the VAE computes them."""

from __future__ import annotations

from typing import Literal

from torch import nn

from sparo_train.core.config import Frozen, field

from ..decoders.dvae import PATCH


class TokensConfig(Frozen):
    """Embedded tokens of the discrete VAE, as in SLATE (Singh et al. 2022)."""

    kind: Literal["tokens"] = field("tokens", "Kind of the image encoder: an entry of sparo.slot_encoders.")
    width: int = field(192, "Width of embedded tokens. Must equal the width of the decoder.", gt=0)

    def side(self, image_size: int) -> int:
        """Return the number of tokens per side."""
        return image_size // PATCH

    def cost(self, image_size: int) -> int:
        """Return the number of values that are kept for an image: the embedded tokens."""
        return self.side(image_size) ** 2 * self.width

    def build(self) -> nn.Module:
        """Return a module that passes embedded tokens (b, s, s, width) on."""
        return nn.Identity()
