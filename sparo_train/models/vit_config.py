"""What an image backbone of DINO is: a ViT by the official names, and what is read out of it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from ..core.config import Frozen
from ..core.errors import did_you_mean

IMAGENET_MEAN = (0.485, 0.456, 0.406)  # of pixels in 0..1
IMAGENET_STD = (0.229, 0.224, 0.225)
DROP_RANGE = 1 << 24  # the numbers that decide dropped paths are below it; fp32 holds them all

# Width, depth and heads by the official DINO names; the patch size is a key of its own.
ARCHS: dict[str, dict[str, Any]] = {
    "vit_tiny": {"width": 192, "depth": 12, "heads": 3},
    "vit_small": {"width": 384, "depth": 12, "heads": 6},
    "vit_base": {"width": 768, "depth": 12, "heads": 12},
}


class ClsReadOut(Frozen):
    """DINO as published: the CLS token behind the last block and `norm`."""

    kind: Literal["cls"] = "cls"


class SparoImageReadOut(Frozen):
    """SPARO in place of the last block (Sec. 3.4; L = V = 64 in Sec. 4.3). What the paper leaves open is a key.

    norm_first: `norm` on all tokens before the read-out, as CLIP+SPARO has it; false reads the blocks' output.
    attend_cls: the CLS token is one of the positions that slots attend to.
    normalize: every slot to one norm before the head, as CLIP+SPARO has it; the paper changes nothing about the head.
    """

    kind: Literal["sparo"]
    slots: int = Field(default=64, gt=0)
    slot_width: int = Field(default=64, gt=0)
    head_width: int = Field(default=64, gt=0)
    grp_size: int = Field(default=1, gt=0)
    share_kv: bool = True
    replace_last_block: bool = True
    norm_first: bool = True
    attend_cls: bool = True
    normalize: bool = False


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
    readout: Annotated[ClsReadOut | SparoImageReadOut, Field(discriminator="kind")] = ClsReadOut()

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
        r = self.readout
        if self.image_size % self.patch_size:
            raise ValueError(f"patch_size={self.patch_size} does not divide image_size={self.image_size}")
        if self.width % self.heads:
            raise ValueError(f"heads={self.heads} does not divide width={self.width}")
        if isinstance(r, SparoImageReadOut) and r.slots % r.grp_size:
            raise ValueError(f"readout.grp_size={r.grp_size} does not divide readout.slots={r.slots}")
        if self.blocks < 1:
            raise ValueError("readout.replace_last_block needs a depth of at least two")
        return self

    @property
    def blocks(self) -> int:
        """Transformer blocks there are."""
        return self.depth - (isinstance(self.readout, SparoImageReadOut) and self.readout.replace_last_block)

    @property
    def out_width(self) -> int:
        """Numbers in one encoding."""
        r = self.readout
        return r.slots * r.slot_width if isinstance(r, SparoImageReadOut) else self.width
