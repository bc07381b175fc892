"""Selectable units of an encoding: SPARO's slots, equal parts of any encoding, or heads of an ordinary ViT.

A score is a dot product, and a dot product is the sum over units; this package works with these summands.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from torch import Tensor
from torch.nn import functional as F

from sparo_train.core.errors import ConfigError

from ..encoders.encoder import Encoder, TextEncoder
from ..encoders.heads import make_heads

Kind = Literal["slots", "parts", "heads"]
KINDS: tuple[Kind, ...] = ("slots", "parts", "heads")


class Units(NamedTuple):
    """Units of an encoder.

    Attributes:
        kind: kind of the units.
        number: U, selectable units.
        encoder: encoder whose encodings contain them one after another.
        rest: 1 if they are followed by a part that belongs to no unit and is always used (heads), otherwise 0.
    """

    kind: Kind
    number: int
    encoder: Encoder
    rest: int = 0

    def images(self, rows: Tensor) -> Tensor:
        """Reshape encodings (b, W), or (b, L, D) with separate slots, to (b, U + rest, d) with unit norm as a whole."""
        whole = rows.float().flatten(1).unflatten(-1, (self.number + self.rest, -1))
        # One factor per image: the norm of the encoder's output, not that of the concatenated pieces.
        total = whole.sum(1) if self.kind == "heads" else whole.flatten(1)
        return whole / total.norm(dim=-1).clamp(min=1e-12)[:, None, None]

    def texts(self, rows: Tensor) -> Tensor:
        """Reshape unit-norm encodings (m, D) of texts to (m, U, d), or to (m, 1, D) if each unit is compared with the whole text."""
        unit = F.normalize(rows.float(), dim=-1)
        return unit[:, None] if self.kind == "heads" else unit.unflatten(-1, (self.number, -1))


def make_units(encoder: Encoder, kind: Kind = "slots", parts: int | None = None, layers: int = 4) -> Units:
    """Return the units of an encoder.

    Args:
        encoder, kind: encoder and kind of units.
        parts: number of equal parts of an encoding (`kind="parts"`; the paper's baseline, Section 5.2).
        layers: number of last layers whose heads are units (`kind="heads"`).

    Raises:
        ConfigError: the encoder has no such units.
    """
    if kind == "heads":
        heads_encoder = make_heads(encoder, layers)
        return Units(kind, heads_encoder.slots - 1, heads_encoder, 1)
    if kind == "parts":
        if parts is None or not 1 < parts <= encoder.width or encoder.width % parts:
            raise ConfigError(
                f"--parts {parts}: must be at least 2 and a divisor of {encoder.width}, the width of an encoding of {encoder.label}"
            )
        return Units(kind, parts, encoder)
    if encoder.slots < 2:
        raise ConfigError(
            f"{encoder.label} has no slots, or only one. Use a model with a readout of several slots (readout.kind=sparo). "
            "Commands with the option --units also accept `parts` and `heads`."
        )
    return Units(kind, encoder.slots, encoder)


def get_text_tower(units: Units) -> TextEncoder:
    """Return the text tower for the units. Raises `ConfigError` if there is none."""
    if not isinstance(units.encoder, TextEncoder):
        raise ConfigError(
            f"{units.encoder.label} has no text tower, which is needed here. Without one, use `sparo slots select` with a task of kind knn."
        )
    return units.encoder
