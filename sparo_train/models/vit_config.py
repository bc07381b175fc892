"""What an image backbone of DINO is: a ViT by the official names, and what is read out of it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from ..core.config import Frozen
from ..core.errors import did_you_mean
from ..core.plugins import Open
from ..core.tables import READOUTS

IMAGENET_MEAN = (0.485, 0.456, 0.406)  # of pixels in 0..1
IMAGENET_STD = (0.229, 0.224, 0.225)
DROP_RANGE = 1 << 24  # the numbers that decide dropped paths are below it; fp32 holds them all

# Width, depth and heads by the official DINO names; the patch size is a key of its own.
ARCHS: dict[str, dict[str, Any]] = {
    "vit_tiny": {"width": 192, "depth": 12, "heads": 3},
    "vit_small": {"width": 384, "depth": 12, "heads": 6},
    "vit_base": {"width": 768, "depth": 12, "heads": 12},
}


class VitConfig(Frozen):
    """A ViT with CLS token and learned positions. `arch` fills width, depth and heads; keys given beside it win.

    drop_path: of the last block; the first has none and those between are spaced evenly (student only).
    init: the official normal of 0.02, which suits widths of hundreds, or xavier-uniform for narrow models.
    """

    arch: str | None = None
    image_size: int = Field(default=224, gt=0)
    patch_size: int = Field(default=16, gt=0)
    width: int = Field(default=384, gt=0)
    depth: int = Field(default=12, gt=0)
    heads: int = Field(default=6, gt=0)
    mlp_ratio: float = Field(default=4.0, gt=0)
    drop_path: float = Field(default=0.1, ge=0, lt=1)
    init: Literal["official", "xavier"] = "official"
    readout: Annotated[Any, Open(READOUTS, default="cls")] = Field(default_factory=lambda: READOUTS.row("cls")())

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, value: Any) -> Any:
        name = value.get("arch") if isinstance(value, dict) else None
        if not isinstance(name, str):
            return value
        if name not in ARCHS:
            raise ValueError(f"unknown arch {name!r}; {did_you_mean(name, ARCHS)}")
        return {**ARCHS[name], **value}

    @model_validator(mode="after")
    def _check(self) -> VitConfig:
        object.__setattr__(
            self, "readout", self.readout.resolved(normalize=False)
        )  # the resolved recipe says all of it
        if self.image_size % self.patch_size:
            raise ValueError(f"patch_size={self.patch_size} does not divide image_size={self.image_size}")
        if self.width % self.heads:
            raise ValueError(f"heads={self.heads} does not divide width={self.width}")
        if self.blocks < 1:
            raise ValueError(f"readout.replace_last_block needs a depth of at least two (depth={self.depth})")
        return self

    @property
    def blocks(self) -> int:
        """Transformer blocks there are."""
        return self.depth - self.readout.placement.replaced

    @property
    def out_width(self) -> int:
        """Numbers in one encoding."""
        slots, slot_width = self.readout.shape(self.width)
        return slots * slot_width

    @property
    def slots(self) -> int:
        """L of an encoding of (L, V) numbers; 1 without slots."""
        return self.readout.shape(self.width)[0]
