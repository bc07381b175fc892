"""Configuration of CLIP models: towers, readout, and named backbones."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from ..core.config import Frozen, field
from ..core.errors import did_you_mean
from ..core.registries import READOUTS
from ..core.registry import FromRegistry

OPENAI_MEAN = (0.48145466, 0.4578275, 0.40821073)  # for pixels in 0..1, as in every published CLIP
OPENAI_STD = (0.26862954, 0.26130258, 0.27577711)


_INIT = "Initial weights of the tower: a run, a file, open_clip:NAME@FILE, timm:NAME@FILE, hf:FOLDER."
_FREEZE = (
    "Frozen parameters. true: the whole tower; blocks: all blocks and everything before them; a number "
    "n: the first n blocks and everything before them; false: none."
)
TRAINING = {"init_from", "freeze"}  # keys that do not change the tower itself


def _check_freeze(value: Any) -> Any:
    # Before the union is validated, because each of its members would report its own error.
    if value != "blocks" and not isinstance(value, bool) and not (isinstance(value, int) and value >= 0):
        raise ValueError("expected true, false, blocks, or a number of blocks")
    return value


Freeze = Annotated[bool | Literal["blocks"] | Annotated[int, Field(ge=0)], BeforeValidator(_check_freeze)]


class VisionConfig(Frozen):
    """Image tower: open_clip's ViT, or a vision transformer of timm."""

    image_size: int = field(224, "Image side in pixels.", gt=0, le=16384)
    patch_size: int = field(16, "Patch side in pixels. Must divide image_size.", gt=0)
    width: int = field(768, "Token width.", gt=0, le=65536)
    layers: int = field(12, "Transformer blocks, including those that a readout replaces.", gt=0, le=1000)
    head_width: int = field(64, "Width of an attention head. Must divide width.", gt=0)
    mlp_ratio: float = field(4.0, "Width of a block's MLP relative to `width`.", gt=0)
    patch_dropout: float = field(0.0, "Share of patches dropped during training.", ge=0, lt=1)
    timm_model_name: str | None = field(
        None,
        "Name of a timm vision transformer to use instead of CLIP's tower. Its sizes replace image_size, patch_size, width, layers and heads.",
        examples=["vit_small_patch16_224"],
    )
    timm_model_kwargs: dict[str, bool | int | float | str] = field(
        {}, "Further arguments of timm.create_model.", examples=[{"embed_dim": 128, "depth": 4, "num_heads": 4}]
    )
    init_from: str | None = field(None, _INIT, examples=["open_clip:ViT-B-32@weights.safetensors"])
    freeze: Freeze = field(False, _FREEZE)

    @model_validator(mode="before")
    @classmethod
    def _fill_timm_sizes(cls, value: Any) -> Any:
        if not isinstance(value, dict) or not isinstance(value.get("timm_model_name"), str):
            return value
        sizes = {key: own for key, own in _timm_sizes(value)._asdict().items() if key in cls.model_fields}
        for key, own in sizes.items():
            if value.get(key, own) != own:
                raise ValueError(f"{key}={value[key]}: timm's {value['timm_model_name']} has {own}. Remove the key.")
        return value | sizes

    @model_validator(mode="after")
    def _check_timm(self) -> VisionConfig:
        if self.timm_model_name is None and self.timm_model_kwargs:
            raise ValueError("timm_model_kwargs: needs timm_model_name")
        if (
            self.timm_model_name is not None
            and self.freeze is False
            and (norm := _timm_sizes(self.model_dump()).batch_norm)
        ):
            # Ranks and micro-batches would normalize over their own batches, and averaged weights have other
            # statistics.
            raise ValueError(
                f"timm_model_name={self.timm_model_name}: normalizes over the batch ({norm}), so losses would depend on ranks and "
                "micro-batches. Set freeze: blocks, or name a tower without BatchNorm."
            )
        if self.timm_model_name is not None and self.patch_dropout:
            raise ValueError(f"patch_dropout={self.patch_dropout}: is not supported by timm's towers. Remove it.")
        return self

    @property
    def tokens(self) -> int:
        if self.timm_model_name is not None:
            return _timm_sizes(self.model_dump()).tokens
        return (self.image_size // self.patch_size) ** 2 + 1

    @property
    def unused_keys(self) -> set[str]:
        """Return the keys that do not change the tower itself."""
        return TRAINING if self.timm_model_name else TRAINING | {"timm_model_name", "timm_model_kwargs"}

    @property
    def patches_after_dropout(self) -> int:
        """Return the number of patches that `patch_dropout` keeps (rounded as in open_clip)."""
        return max(1, int((self.tokens - 1) * (1 - self.patch_dropout)))


def _timm_sizes(vision: Mapping[str, Any]) -> Any:
    from .timm_tower import infer_sizes  # timm is imported only for recipes that name it

    kwargs = vision.get("timm_model_kwargs", {})
    plain = isinstance(kwargs, Mapping) and all(isinstance(v, bool | int | float | str) for v in kwargs.values())
    if not plain or not isinstance(vision.get("image_size", 0), int):
        raise ValueError(
            "timm_model_kwargs, image_size: values in timm_model_kwargs must be numbers, strings or booleans; "
            f"image_size must be a whole number; got {kwargs} and {vision.get('image_size')}. Correct the value that "
            "has another type."
        )
    return infer_sizes(vision["timm_model_name"], vision.get("image_size"), kwargs)


class TextConfig(Frozen):
    """Text tower: open_clip's Transformer."""

    context_length: int = field(77, "Maximum tokens of a caption, including start and end.", gt=2, le=1 << 20)
    vocab_size: int = field(49408, "Vocabulary size. Default: CLIP's.", gt=0, le=1 << 24)
    width: int = field(512, "Token width.", gt=0, le=65536)
    heads: int = field(8, "Attention heads. Must divide width.", gt=0)
    layers: int = field(12, "Transformer blocks, including those that a readout replaces.", gt=0, le=1000)
    mlp_ratio: float = field(4.0, "Width of a block's MLP relative to `width`.", gt=0)
    init_from: str | None = field(None, _INIT, examples=["open_clip:ViT-B-32@weights.safetensors"])
    freeze: Freeze = field(False, _FREEZE)


# Backbones by open_clip's names: (vision, text, embed_dim). The Tiny ones are ours, for CPUs and 64-pixel images.
_TINY_TEXT = {"context_length": 32, "width": 128, "heads": 4, "layers": 4}
BACKBONES: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "ViT-B-16": ({"patch_size": 16}, {}, 512),
    "ViT-B-32": ({"patch_size": 32}, {}, 512),
    "ViT-S-16": ({"patch_size": 16, "width": 384}, {"width": 384, "heads": 6}, 384),
    "ViT-S-32": ({"patch_size": 32, "width": 384}, {"width": 384, "heads": 6}, 384),
    "ViT-L-14": ({"patch_size": 14, "width": 1024, "layers": 24}, {"width": 768, "heads": 12}, 768),
    "ViT-H-14": (
        {"patch_size": 14, "width": 1280, "layers": 32, "head_width": 80},
        {"width": 1024, "heads": 16, "layers": 24},
        1024,
    ),
    "ViT-g-14": (
        {"patch_size": 14, "width": 1408, "layers": 40, "head_width": 88, "mlp_ratio": 4.3637},
        {"width": 1024, "heads": 16, "layers": 24},
        1024,
    ),
    "ViT-Tiny-8": (
        {"image_size": 64, "patch_size": 8, "width": 128, "layers": 4, "head_width": 32},
        _TINY_TEXT,
        128,
    ),
    "ViT-Tiny-16": (
        {"image_size": 64, "patch_size": 16, "width": 192, "layers": 6, "head_width": 32},
        _TINY_TEXT,
        128,
    ),
}
TINY_SPARO = {
    "slots": 32,
    "slot_width": 32,
    "head_width": 32,
}  # no more parameters than the CLIP with the same backbone


class ClipConfig(Frozen):
    """A CLIP model. `backbone` fills `vision`, `text` and `embed_dim`; keys that are given as well take precedence.

    A readout with its own slot width does not use `embed_dim`: its encoding has slots * slot_width values.
    """

    # The sizes of images and captions are properties of the data, so they are kept.
    fills: ClassVar[dict[str, Any]] = {
        "backbone": {
            "embed_dim": None,
            "vision": dict.fromkeys(("patch_size", "width", "layers", "head_width", "mlp_ratio")),
            "text": dict.fromkeys(("width", "heads", "layers", "mlp_ratio")),
        }
    }

    backbone: str | None = field(
        None,
        "Model that sets the sizes of both towers: a model of open_clip, such as ViT-B-16, or one of our small models, "
        "ViT-Tiny-8 and ViT-Tiny-16. Default: the sizes given in model.vision and model.text.",
    )
    vision: VisionConfig = field(VisionConfig(), "Image tower.")
    text: TextConfig = field(TextConfig(), "Text tower.")
    embed_dim: int = field(
        512, "Width of an image or text encoding. Readouts that set their own width ignore it.", gt=0, le=65536
    )
    readout: Annotated[Any, FromRegistry(READOUTS, default="token")] = Field(
        default_factory=lambda: READOUTS.get("token")(),
        description="How tokens become an encoding: an entry of sparo.readouts.",
    )
    quick_gelu: bool = field(False, "Use OpenAI's approximation of GELU.")
    init_logit_scale: float = field(
        math.log(1 / 0.07), "Initial logit_scale, the natural logarithm of the factor on cosines."
    )
    init_logit_bias: float | None = field(
        None,
        "Initial logit_bias. SigLIP uses -10 with init_logit_scale=2.3026. Default: no bias, as is usual with "
        "the softmax loss.",
        examples=[-10.0],
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_backbone(cls, value: Any) -> Any:
        name = value.get("backbone") if isinstance(value, dict) else None
        if not isinstance(name, str):
            return value
        if name not in BACKBONES:
            raise ValueError(f"unknown backbone {name!r}; {did_you_mean(name, BACKBONES)}")
        vision, text, embed_dim = BACKBONES[name]
        if isinstance(value.get("vision"), Mapping) and value["vision"].get("timm_model_name") is not None:
            vision = {}  # the text tower's size by name, the image tower's size by timm's
        return {
            "embed_dim": embed_dim,
            **value,
            "vision": {**vision, **value.get("vision", {})},
            "text": {**text, **value.get("text", {})},
        }

    @model_validator(mode="after")
    def _check(self) -> ClipConfig:
        object.__setattr__(
            self, "readout", self.readout.resolve_defaults(normalize=True)
        )  # the resolved recipe contains all keys
        v, t, replaced = self.vision, self.text, self.readout.placement.replaced
        if v.image_size % v.patch_size:
            raise ValueError(f"vision.patch_size={v.patch_size} does not divide vision.image_size={v.image_size}")
        if v.width % v.head_width:
            raise ValueError(f"vision.head_width={v.head_width} does not divide vision.width={v.width}")
        if self.readout.reads_cls and v.timm_model_name and not _timm_sizes(v.model_dump()).has_cls:
            raise ValueError(
                f"readout.kind={self.readout.kind}: needs a class token, which timm's {v.timm_model_name} lacks. Set readout.kind=gap."
            )
        if t.width % t.heads:
            raise ValueError(f"text.heads={t.heads} does not divide text.width={t.width}")
        for name, tower in (("vision", v), ("text", t)):
            if not isinstance(tower.freeze, bool | str) and tower.freeze > tower.layers - replaced:
                raise ValueError(
                    f"{name}.freeze={tower.freeze}: exceeds the {tower.layers - replaced} blocks of the tower. Lower it."
                )
        if replaced >= min(v.layers, t.layers):
            raise ValueError(
                f"readout.kind={self.readout.kind}: replaces {replaced} block(s) of each tower "
                f"(readout.replace_last_block), so both towers need more layers than that, got vision.layers={v.layers} "
                f"and text.layers={t.layers}. Add layers."
            )
        return self

    @property
    def width(self) -> int:
        """Return the number of values in one encoding."""
        slots, slot_width = self.readout.shape(self.embed_dim)
        return slots * slot_width

    @property
    def slots(self) -> int:
        """Return L for encodings of (L, V) values; 1 without slots."""
        return self.readout.shape(self.embed_dim)[0]
