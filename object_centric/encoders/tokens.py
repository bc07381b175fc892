"""Tokens of a discrete VAE in place of features, which SLATE groups; the model that has the VAE makes them."""

from __future__ import annotations

from typing import Literal

from torch import nn

from sparo_train.core.config import Frozen, field

from ..decoders.dvae import PATCH


class TokensConfig(Frozen):
    kind: Literal["tokens"] = field("tokens", "Entry of sparo.slot_encoders.")
    width: int = field(192, "Width of embedded tokens. Must equal the decoder's.", gt=0)

    def side(self, image_size: int) -> int:
        """Tokens per side."""
        return image_size // PATCH

    def cost(self, image_size: int) -> int:
        """Numbers that are kept for an image: the embedded tokens."""
        return self.side(image_size) ** 2 * self.width

    def build(self) -> nn.Module:
        """What takes embedded tokens (b, s, s, width) as they are."""
        return nn.Identity()
