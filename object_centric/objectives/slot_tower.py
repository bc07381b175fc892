"""Tower of slot models (encoder, position embeddings, slot attention), and examples for slot models of images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

import numpy as np
import torch
from pydantic import model_validator
from torch import Tensor, nn

from sparo_train.core.config import Frozen, field
from sparo_train.core.errors import ConfigError
from sparo_train.core.registries import SLOT_ENCODERS
from sparo_train.core.registry import FromRegistry
from sparo_train.data.examples.image_transforms import eval_pixels, flip, planes, train_pixels
from sparo_train.data.examples.samples import decode_for_training, image_bytes
from sparo_train.data.read.loader import Examples, OnStage, ignore_stage
from sparo_train.data.sources.base import DataConfig, Source

from ..encoders.convnet import ConvNetConfig, grid
from ..encoders.transformer import TransformerConfig
from ..grouping.invariant import FrameConfig, InvariantSlotAttention
from ..grouping.parallel_binder import ParallelBinder
from ..grouping.set_refinement import SetRefinement
from ..grouping.slot_attention import ACTIVATIONS, SlotAttention, lecun_normal_
from ..grouping.slot_config import SlotAttentionConfig

_UNSUPPORTED_WITH_FRAMES = (
    "heads", "softmax_over", "renorm", "gradient", "layers", "gru_on_normed", "out_proj", "mlp_last", "kv", "transport", "activation", "binder",
    "qk_norm", "ground"
)  # fmt: skip


_POSITION_AWARE_ENCODERS = ("frozen", "tokens", "vit")  # encoders whose features contain positions


class SlotTowerConfig(Frozen):
    """Parts of a tower, and how they are combined."""

    embeds_tokens: ClassVar[bool] = False  # whether the model provides the features of encoder.kind=tokens
    accepts_hint: ClassVar[bool] = False  # whether the tower is for videos, which may have hints for initial slots

    image_size: int = field(64, "Image side in pixels.", gt=0, le=4096)
    encoder: Annotated[Any, FromRegistry(SLOT_ENCODERS, default="conv")] = field(
        ConvNetConfig(), "Encoder from pixels to features: an entry of sparo.slot_encoders."
    )
    features: int = field(
        64, "Width of the features that slot attention receives. An MLP maps the encoder's output to this width.", gt=0
    )
    hidden: int | None = field(
        None,
        "Hidden units of the MLP that maps features to slots' inputs. Default: the encoder's width.",
        gt=0,
        examples=[64],
    )
    activation: Literal["relu", "gelu"] = field("relu", "Activation of the MLP that maps features to slots' inputs.")
    position_init: Literal["torch", "lecun", "glorot"] = field(
        "torch",
        "Initialization of the linear layer for positions. torch: PyTorch's default. lecun: LeCun normal and zero "
        "biases, for coordinates in -1..1 (SAVi, ISA). glorot: Xavier uniform and zero biases (Locatello et al. 2020, STEVE).",
    )
    transformer: TransformerConfig | None = field(
        None,
        "Transformer over the features of an image, after the feature MLP (SAVi++). Default: none.",
        examples=[{"preset": "savi++"}],
    )
    grouping: SlotAttentionConfig = field(SlotAttentionConfig(), "Slot attention from features to slots.")
    frame: FrameConfig | None = field(
        None,
        "Give every slot a position and a scale, and express the positions of tokens relative to the slot. This is "
        "translation-equivariant (T-SA) or translation- and scale-equivariant (TS-SA) slot attention. Default: "
        "plain slot attention.",
    )

    @model_validator(mode="after")
    def _check_combination(self) -> Self:
        if self.image_size < 1 or self.encoder.side(self.image_size) < 1:
            raise ValueError(
                f"image_size={self.image_size}: too small, because encoder.kind={self.encoder.kind} leaves no features"
            )
        if self.encoder.kind == "tokens" and not self.embeds_tokens:
            raise ValueError("encoder.kind=tokens: needs objective.kind=slate, which has a dVAE")
        if self.transformer is not None:
            self.transformer.refuse_width(self.features, "transformer")
            if self.frame is not None:
                raise ValueError(
                    "transformer: cannot be combined with slots that have reference frames (the key `frame`), because "
                    "self-attention mixes positions. Set frame or transformer to null."
                )
        if self.grouping.slot_init == "given" and not self.accepts_hint:
            raise ValueError(
                "grouping.slot_init=given: slots start from objects of a video's first frame (the block `hint`). "
                "Only objective.kind=video_slots and video_slate support this. Use `learned` or `gaussian`."
            )
        if self.grouping.pooled is not None and not self.accepts_hint:
            raise ValueError(
                "grouping.preset=pooled: applies only to videos (objective.kind=video_slots). Use another preset."
            )
        if self.grouping.idspn is not None and (self.accepts_hint or self.frame is not None):
            raise ValueError(
                "grouping.preset=idspn: supports neither videos nor reference frames (the key `frame`). Use another preset, or remove the key `frame`."
            )
        if self.position_init != "torch" and (self.frame is not None or self.encoder.kind in _POSITION_AWARE_ENCODERS):
            raise ValueError(
                f"position_init={self.position_init}: this tower has no linear layer for positions, because its "
                "encoder adds positions itself, or because its slots have reference frames (the key `frame`). "
                "Remove position_init."
            )
        if self.frame is None:
            return self
        g, plain = self.grouping, SlotAttentionConfig(renorm="sum")
        for option in _UNSUPPORTED_WITH_FRAMES:
            if getattr(g, option) != getattr(plain, option):
                raise ValueError(
                    f"grouping.{option}={getattr(g, option)}: slots with reference frames (the key `frame`) support {getattr(plain, option)} only"
                )
        if not g.mlp_width or g.gru == "none" or g.qkv != g.width:
            raise ValueError(
                "grouping: slots with reference frames (the key `frame`) need mlp_width, a gru, and qkv_width=width. Use preset=isa."
            )
        return self

    @property
    def noise(self) -> tuple[int, int]:
        """Return the shape of an image's noise: initial slots, and values that break ties between them."""
        tokens = self.encoder.side(self.image_size) ** 2
        return self.grouping.slots, self.grouping.noise_width(tokens) + (4 if self.frame else 0)


def refuse_signed(signed: bool, model: SlotTowerConfig) -> None:
    """Raise `ValueError` if pixels in -1..1 would go into an encoder that was trained on another range."""
    if signed and model.encoder.kind in ("frozen", "vit"):
        raise ValueError(
            f"signed: encoder.kind={model.encoder.kind} takes pixels in 0..1 and normalizes them itself. Set signed: false."
        )


@torch.no_grad()
def _init_position(layer: nn.Linear, scheme: str) -> None:
    """Initialize the projection of (x, y, 1 - x, 1 - y).

    SAVi and ISA project (x, y) in [-1, 1] with flax's lecun_normal: opposite weights on the four coordinates are that function.
    """
    if scheme == "lecun":
        signed = layer.weight.new_empty(len(layer.weight), 2)
        lecun_normal_(signed)
        layer.weight.copy_(torch.cat([signed, -signed], dim=1))
    elif scheme == "glorot":
        nn.init.xavier_uniform_(layer.weight)
    if scheme != "torch":
        nn.init.zeros_(layer.bias)


class TowerOutput(NamedTuple):
    """Output of a tower.

    Attributes:
        slots: (b, K, D).
        attention: (b, K, s, s).
        frames: positions and scales (b, K, 2) of slots that have them.
        features: (b, s, s, C), output of the encoder.
    """

    slots: Tensor
    attention: Tensor
    frames: tuple[Tensor, Tensor] | None
    features: Tensor


class SlotTower(nn.Module):
    """Tower for images (b, 3, S, S), and standard normal noise (b, *config.noise)."""

    def __init__(self, config: SlotTowerConfig):
        super().__init__()
        self.config, c = config, config
        wide = c.encoder.width
        self.encoder = c.encoder.build()
        # An encoder that supports another image size (frozen.py).
        if (fit_to := getattr(self.encoder, "fit_to", None)) is not None:
            fit_to(c.image_size)
        # x, y and their distances to the opposite edge (Locatello et al. 2020); frames have their own positions.
        self.position = (
            nn.Linear(4, wide) if c.frame is None and c.encoder.kind not in _POSITION_AWARE_ENCODERS else None
        )
        if self.position is not None:
            _init_position(self.position, c.position_init)
        self.norm = nn.LayerNorm(wide, eps=c.grouping.ln_eps)
        hidden = c.hidden or wide
        self.project = nn.Sequential(
            nn.Linear(wide, hidden), ACTIVATIONS[c.activation](), nn.Linear(hidden, c.features)
        )
        # After all other initialization, so that models without it keep their initial weights.
        self.grouping = self.build_grouping()
        self.transformer = None if c.transformer is None else c.transformer.build(c.features)

    def build_grouping(self) -> Any:
        """Return the module that groups tokens into slots."""
        c = self.config
        if c.frame is not None:
            return InvariantSlotAttention(c.grouping, c.frame, c.features)
        if c.grouping.idspn is not None:
            return SetRefinement(c.grouping, c.features)
        return (SlotAttention if c.grouping.binder is None else ParallelBinder)(c.grouping, c.features)

    def tokens(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tokens that slots group, (b, s * s, F), and the encoder's features (b, s, s, C)."""
        features = self.encoder(images)
        self._check_features(features, images.shape[-1])
        side, positioned_features = features.shape[1], features
        if self.position is not None:
            coords = (grid(side, features).flip(-1) + 1) / 2
            positioned_features = features + self.position(torch.cat([coords, 1 - coords], dim=-1)).unflatten(
                0, (side, side)
            )
        tokens = self.project(self.norm(positioned_features.flatten(1, 2)))
        return tokens if self.transformer is None else self.transformer(tokens), features

    def _check_features(self, features: Tensor, size: int) -> None:
        """Raise `ConfigError` if a plug-in's encoder returns another shape than its configuration says."""
        kind, wide = self.config.encoder.kind, self.config.encoder.width
        side = self.config.encoder.side(size) if size == self.config.image_size else features.shape[1]
        if features.shape[1:] != (side, side, wide):
            raise ConfigError(
                f"objective.model.encoder.kind={kind}: expected features (b, {side}, {side}, {wide}) by its side() and width, "
                f"got {tuple(features.shape)}. Correct the encoder."
            )

    def forward(self, images: Tensor, noise: Tensor) -> Any:
        tokens, features = self.tokens(images)
        side, frames = features.shape[1], None
        if self.config.frame is None:
            slots, attention = self.grouping(tokens, noise)
        else:
            slots, positions, scales, attention = self.grouping(tokens, grid(side, tokens), noise)
            frames = positions, scales
        return TowerOutput(slots, attention.unflatten(-1, (side, side)), frames, features)


class SlotExamples(Examples):
    """Images, and the noise for initial slots, from the sample's own random stream.

    Images without random crops (`crop_scale: [1, 1]`) are cropped as in evaluation, even if they are not square.
    """

    def __init__(self, config: DataConfig, model: SlotTowerConfig):
        self.config, self.image_size, self.noise = config, model.image_size, model.noise

    def prepare(
        self, fields: dict[str, bytes], source: Source, rng: np.random.Generator, on_stage: OnStage = ignore_stage
    ) -> Any:
        c, size = self.config, self.image_size
        picture = decode_for_training(image_bytes(fields, source.config.image_keys), c, size)
        on_stage("decode")
        if c.crop_scale == (1.0, 1.0):
            pixels = eval_pixels(picture, size)
            pixels = flip(pixels) if c.hflip > 0 and rng.random() < c.hflip else pixels
        else:
            pixels = train_pixels(picture, size, c.crop_scale, c.hflip, rng)
        noise = rng.standard_normal(self.noise, dtype=np.float32)
        on_stage("augment")
        return planes(pixels), noise

    def stack(self, examples: Sequence[Any]) -> dict[str, Tensor]:
        names = ("image", "noise")
        return {
            name: torch.from_numpy(np.stack(column))
            for name, column in zip(names, zip(*examples, strict=True), strict=True)
        }
