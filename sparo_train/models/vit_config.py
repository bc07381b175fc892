"""Configuration of DINO's image backbone: a ViT by its official name, the variants of DINOv2 and DINOv3, and its readout."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from ..core.config import Frozen, field
from ..core.errors import did_you_mean
from ..core.registries import READOUTS
from ..core.registry import FromRegistry

IMAGENET_MEAN = (0.485, 0.456, 0.406)  # of pixels in 0..1
IMAGENET_STD = (0.229, 0.224, 0.225)
DROP_RANGE = 1 << 24  # upper bound of the integers that decide dropped paths; fp32 can represent all of them

# Width, depth and heads by the official names of DINO, DINOv2 and DINOv3; the patch size is a separate key.
ARCHS: dict[str, dict[str, Any]] = {
    "vit_tiny": {"width": 192, "depth": 12, "heads": 3},
    "vit_small": {"width": 384, "depth": 12, "heads": 6},
    "vit_base": {"width": 768, "depth": 12, "heads": 12},
    "vit_large": {"width": 1024, "depth": 24, "heads": 16},
    "vit_huge2": {"width": 1280, "depth": 32, "heads": 20},
    "vit_giant2": {"width": 1536, "depth": 40, "heads": 24},
    "vit_7b": {"width": 4096, "depth": 40, "heads": 32},
}


class VitConfig(Frozen):
    """A ViT with CLS token. `arch` fills width, depth and heads; keys that are given as well take precedence.

    The defaults are DINO's. DINOv2 has `layer_scale: 1.0e-5`, and with registers `registers: 4, interpolate_offset: 0,
    interpolate_antialias: true`; DINOv3 is like DINOv2 with registers, but has
    `positions: rope, norm_eps: 1.0e-5`.
    """

    fills: ClassVar[dict[str, Any]] = {
        "arch": dict.fromkeys(("width", "depth", "heads")),
        "timm_model_name": dict.fromkeys(("arch", "width", "depth", "heads", "patch_size", "drop_path", "weight_init")),
    }

    arch: str | None = field(
        None,
        "Official name of the backbone, which sets its sizes: vit_tiny, vit_small, vit_base, vit_large, "
        "vit_huge2, vit_giant2 or vit_7b.",
    )
    timm_model_name: str | None = field(
        None,
        "Name of a timm model (ResNet, ConvNeXt, Swin, ViT, …) to use instead of this ViT. The model sets width and patch_size (its stride).",
        examples=["convnext_nano"],
    )
    image_size: int = field(224, "Side of a (global) crop in pixels.", gt=0, le=16384)
    patch_size: int = field(16, "Patch side in pixels. Must divide image_size.", gt=0)
    bands: int = field(3, "Channels of an image.", gt=0, le=1024)
    width: int = field(384, "Token width.", gt=0, le=65536)
    depth: int = field(12, "Transformer blocks, including the one that a readout replaces.", gt=0, le=1000)
    heads: int = field(6, "Attention heads.", gt=0)
    mlp_ratio: float = field(4.0, "Width of a block's MLP relative to `width`.", gt=0)
    drop_path: float = field(
        0.1,
        "Stochastic depth rate of the student's last block. The rate increases linearly over the blocks, from 0 in the first, unless drop_path_uniform is set.",
        ge=0,
        lt=1,
    )
    drop_path_uniform: bool = field(False, "Use the rate of drop_path in all blocks, as DINOv2 does.")
    registers: int = field(0, "Register tokens, between the class token and the patches.", ge=0, le=1000)
    layer_scale: float | None = field(
        None,
        "LayerScale: initial value of the learned factors, one per channel, that scale each residual branch. Default: no factors.",
        examples=[1e-5],
        gt=0,
    )
    ffn_layer: Literal["mlp", "swiglu"] = field(
        "mlp",
        "MLP of each block: mlp (two layers with GELU), or swiglu (gated, as in the large models of DINOv2 and DINOv3).",
    )
    positions: Literal["learned", "rope"] = field(
        "learned", "Learned position embeddings, or DINOv3's rotary ones, which have no parameters."
    )
    rope_base: float = field(100.0, "For positions=rope: base of the periods of the rotary embeddings.", gt=1)
    norm_eps: float = field(1e-6, "Epsilon of the layer norms.", gt=0, lt=1)
    pre_norm: bool = field(
        False,
        "Apply a norm to the tokens before the first block, and use a patch embedding without bias, as in "
        "CLIP's image towers.",
    )
    quick_gelu: bool = field(False, "Use OpenAI's approximation of GELU, as in CLIP's original models.")
    interpolate_offset: float = field(
        0.1,
        "Number that is added to the size of the patch grid when learned positions are interpolated. DINO's code adds 0.1.",
        ge=0,
        lt=1,
    )
    interpolate_antialias: bool = field(False, "Use antialiasing when learned positions are interpolated.")
    weight_init: Literal["official", "xavier"] = field(
        "official",
        "official: normal distribution with standard deviation 0.02. xavier: Xavier-uniform, which trains narrow models better.",
    )
    readout: Annotated[Any, FromRegistry(READOUTS, default="cls")] = Field(
        default_factory=lambda: READOUTS.get("cls")(),
        description="How tokens become an encoding: an entry of sparo.readouts.",
    )

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, value: Any) -> Any:
        name = value.get("arch") if isinstance(value, dict) else None
        if isinstance(value, dict) and isinstance(value.get("timm_model_name"), str):
            return {**_timm_keys(value), **value}
        if not isinstance(name, str):
            return value
        if name not in ARCHS:
            raise ValueError(f"unknown arch {name!r}; {did_you_mean(name, ARCHS)}")
        return {**ARCHS[name], **value}

    @model_validator(mode="after")
    def _check(self) -> VitConfig:
        object.__setattr__(
            self, "readout", self.readout.resolve_defaults(normalize=False)
        )  # the resolved recipe contains all keys
        if self.readout.conditioned:
            raise ValueError(f"readout.kind={self.readout.kind}: needs texts, which DINO does not have. Use cls.")
        if self.timm_model_name is not None:
            return self._check_timm()
        if self.image_size % self.patch_size:
            raise ValueError(f"patch_size={self.patch_size} does not divide image_size={self.image_size}")
        if self.width % self.heads:
            raise ValueError(f"heads={self.heads} does not divide width={self.width}")
        if self.positions == "rope" and self.width // self.heads % 4:
            raise ValueError(
                f"positions=rope: needs a multiple of 4 channels per head, got width {self.width} and {self.heads} heads"
            )
        if self.blocks < 1:
            raise ValueError(f"readout.replace_last_block needs a depth of at least two (depth={self.depth})")
        return self

    def _check_timm(self) -> VitConfig:
        """Raise `ValueError` for keys of the ViT, which a model of timm does not have."""
        own = _timm_keys({"timm_model_name": self.timm_model_name, "image_size": self.image_size})
        allowed = {"timm_model_name", "image_size", "bands", "readout"}
        for key in type(self).model_fields.keys() - allowed:
            expected = own.get(key, type(self).model_fields[key].default)
            if getattr(self, key) != expected:
                raise ValueError(f"{key}={getattr(self, key)}: does not apply if timm_model_name is set. Remove {key}.")
        if self.readout.reads_cls and self.readout.kind != "cls":
            raise ValueError(
                f"readout.kind={self.readout.kind}: reads a class token, which is not available with "
                "timm_model_name. Use readout.kind=cls, which selects the model's own pooling if timm_model_name is "
                "set."
            )
        if self.readout.placement.replaced:
            raise ValueError(
                "readout.replace_last_block=true: a model of timm keeps all its blocks. Set readout.replace_last_block=false."
            )
        return self

    @property
    def blocks(self) -> int:
        """Return the number of transformer blocks."""
        return self.depth - self.readout.placement.replaced

    @property
    def mlp_width(self) -> int:
        """Return the hidden width of a block's MLP; of a gated one, that of each half."""
        hidden = int(self.width * self.mlp_ratio)
        return (int(hidden * 2 / 3) + 7) // 8 * 8 if self.ffn_layer == "swiglu" else hidden

    @property
    def out_width(self) -> int:
        """Return the number of values in one encoding."""
        slots, slot_width = self.readout.shape(self.width)
        if self.timm_model_name is not None and self.readout.reads_cls:
            return self._timm_facts.pooled
        return slots * slot_width

    @property
    def batch_norm(self) -> bool:
        """Return whether the backbone normalizes over the batch."""
        return self.timm_model_name is not None and self._timm_facts.batch_norm

    @property
    def _timm_facts(self) -> Any:
        return _timm_facts(str(self.timm_model_name), self.image_size)

    @property
    def slots(self) -> int:
        """Return L for encodings of (L, V) values; 1 without slots."""
        return self.readout.shape(self.width)[0]


def _timm_keys(tree: dict[str, Any]) -> dict[str, Any]:
    """Return the keys that timm_model_name fills."""
    facts = _timm_facts(tree["timm_model_name"], tree.get("image_size", VitConfig.model_fields["image_size"].default))
    return {"width": facts.width, "patch_size": facts.stride, "depth": 1, "heads": 1, "drop_path": 0.0}


def _timm_facts(name: str, size: int) -> Any:
    from .timm_backbone import backbone_facts  # builds the model, which other configs do not need

    return backbone_facts(name, size)
