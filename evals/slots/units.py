"""What can be chosen of an encoding: SPARO's slots, equal parts of any encoding, or heads of an ordinary ViT.

A score is a dot product, and a dot product is the sum of its units' shares; everything in this package works on these shares.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from torch import Tensor
from torch.nn import functional as F

from sparo_train.core.errors import ConfigError

from ..encoders.encoder import Encoder, TextEncoder
from ..encoders.heads import heads_of

Kind = Literal["slots", "parts", "heads"]
KINDS: tuple[Kind, ...] = ("slots", "parts", "heads")


class Units(NamedTuple):
    """The units of an encoder.

    kind: what they are.  number: U, those that can be chosen.  encoder: whose encodings hold them one after another.
    rest: 1 where what belongs to no unit follows them and is always there (heads), else 0.
    """

    kind: Kind
    number: int
    encoder: Encoder
    rest: int = 0

    def images(self, rows: Tensor) -> Tensor:
        """Encodings (b, W), or (b, L, D) with slots apart, to (b, U + rest, d), as a whole of norm one."""
        whole = rows.float().flatten(1).unflatten(-1, (self.number + self.rest, -1))
        # One factor per image: the norm of what the encoder gives, not of its pieces side by side.
        total = whole.sum(1) if self.kind == "heads" else whole.flatten(1)
        return whole / total.norm(dim=-1).clamp(min=1e-12)[:, None, None]

    def texts(self, rows: Tensor) -> Tensor:
        """Encodings (m, D) of texts, each of norm one, to (m, U, d), or to (m, 1, D) where all units meet the whole of it."""
        unit = F.normalize(rows.float(), dim=-1)
        return unit[:, None] if self.kind == "heads" else unit.unflatten(-1, (self.number, -1))


def units_of(encoder: Encoder, kind: Kind = "slots", parts: int | None = None, layers: int = 4) -> Units:
    """The units of an encoder.

    Args:
        parts: into how many equal parts an encoding is cut (`kind="parts"`; the paper's baseline, Section 5.2).
        layers: of an ordinary ViT, the last ones whose heads are units (`kind="heads"`).

    Raises:
        ConfigError: an encoder that has no such units.
    """
    if kind == "heads":
        heads_encoder = heads_of(encoder, layers)
        return Units(kind, heads_encoder.slots - 1, heads_encoder, 1)
    if kind == "parts":
        if parts is None or not 1 < parts <= encoder.width or encoder.width % parts:
            raise ConfigError(
                f"--parts {parts}: encodings of {encoder.label} have {encoder.width} numbers; name how many equal parts to cut them into"
            )
        return Units(kind, parts, encoder)
    if encoder.slots < 2:
        raise ConfigError(
            f"{encoder.label} has no slots; use a model with a read-out (readout.kind=sparo), or --units parts or heads"
        )
    return Units(kind, encoder.slots, encoder)


def texts_of(units: Units) -> TextEncoder:
    """The text tower beside the units. Raises `ConfigError` where there is none."""
    if not isinstance(units.encoder, TextEncoder):
        raise ConfigError(f"{units.encoder.label} encodes images alone; choose its units by --task a knn task")
    return units.encoder
