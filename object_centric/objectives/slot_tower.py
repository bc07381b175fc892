"""Tower of slot models: an encoder, position embeddings and slot attention; and the examples on which slot models of images are trained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

import numpy as np
import torch
from pydantic import model_validator
from torch import Tensor, nn

from sparo_train.core.config import Frozen, field
from sparo_train.core.registries import SLOT_ENCODERS
from sparo_train.core.registry import FromRegistry
from sparo_train.data.examples.image_transforms import eval_pixels, train_pixels
from sparo_train.data.examples.samples import decode_image, image_bytes
from sparo_train.data.read.loader import Examples, OnStage, ignore_stage
from sparo_train.data.read.sources import DataConfig, Source

from ..encoders.convnet import ConvNetConfig, grid
from ..encoders.transformer import TransformerConfig
from ..grouping.invariant import FrameConfig, InvariantSlotAttention
from ..grouping.parallel_binder import ParallelBinder
from ..grouping.slot_attention import ACTIVATIONS, SlotAttention, lecun_normal_
from ..grouping.slot_config import SlotAttentionConfig

_UNSUPPORTED_WITH_FRAMES = (
    "heads", "softmax_over", "renorm", "gradient", "layers", "gru_on_normed", "out_proj", "mlp_last", "kv", "transport", "activation", "binder",
    "qk_norm", "ground"
)  # fmt: skip


_POSITION_AWARE_ENCODERS = ("frozen", "tokens", "vit")  # encoders whose features know where they stand


class SlotTowerConfig(Frozen):
    """Which parts, and how they are put together."""

    embeds_tokens: ClassVar[bool] = False  # whether the model that has the tower makes features of encoder.kind=tokens
    accepts_hint: ClassVar[bool] = False  # whether it is of videos, which may tell slots what to begin as

    image_size: int = field(64, "Image side in pixels.", gt=0, le=4096)
    encoder: Annotated[Any, FromRegistry(SLOT_ENCODERS, default="conv")] = field(
        ConvNetConfig(), "Encoder from pixels to features: an entry of sparo.slot_encoders."
    )
    features: int = field(64, "Width of the features that slots group, after an MLP on the encoder's output.", gt=0)
    hidden: int | None = field(None, "Hidden units of that MLP. Default: the encoder's width.", gt=0, examples=[64])
    activation: Literal["relu", "gelu"] = field("relu", "Activation of that MLP.")
    position_init: Literal["torch", "lecun", "glorot"] = field(
        "torch",
        "Initialization of the projection of positions: lecun for two signed coordinates (SAVi, ISA), glorot with "
        "zero biases (SA-2020, STEVE), or PyTorch's.",
    )
    transformer: TransformerConfig | None = field(
        None,
        "Transformer over the features of an image, after that MLP (SAVi++). Default: none.",
        examples=[{"preset": "savi++"}],
    )
    grouping: SlotAttentionConfig = field(SlotAttentionConfig(), "Slot attention from features to slots.")
    frame: FrameConfig | None = field(
        None, "Slots with their own positions and scales: T-SA, TS-SA. Default: plain slot attention."
    )

    @model_validator(mode="after")
    def _check_combination(self) -> Self:
        if self.image_size < 1 or self.encoder.side(self.image_size) < 1:
            raise ValueError(f"image_size={self.image_size}: encoder.kind={self.encoder.kind} leaves nothing of it")
        if self.encoder.kind == "tokens" and not self.embeds_tokens:
            raise ValueError("encoder.kind=tokens: is of objective.kind=slate, which has a dVAE to make some")
        if self.transformer is not None:
            self.transformer.refuse_width(self.features, "transformer")
            if self.frame is not None:
                raise ValueError(
                    "transformer: features that see each other are of no place, which a frame shifts; set frame or transformer to null"
                )
        if self.grouping.slot_init == "given" and not self.accepts_hint:
            raise ValueError(
                "grouping.slot_init=given: is of videos with a hint (objective.kind=video_slots); use learned or gaussian"
            )
        if self.grouping.pooled is not None and not self.accepts_hint:
            raise ValueError("grouping.preset=pooled: is of videos (objective.kind=video_slots)")
        if self.position_init != "torch" and (self.frame is not None or self.encoder.kind in _POSITION_AWARE_ENCODERS):
            raise ValueError(
                f"position_init={self.position_init}: this tower projects no positions; frames and ViTs have their own. Remove it."
            )
        if self.frame is None:
            return self
        g, plain = self.grouping, SlotAttentionConfig(renorm="sum")
        for option in _UNSUPPORTED_WITH_FRAMES:
            if getattr(g, option) != getattr(plain, option):
                raise ValueError(
                    f"grouping.{option}={getattr(g, option)}: slots with frames have {getattr(plain, option)} alone"
                )
        if not g.mlp_width or g.gru == "none" or g.qkv != g.width:
            raise ValueError(
                "grouping: slots with frames need mlp_width and a gru, and qkv_width=width; preset=isa has them"
            )
        return self

    @property
    def noise(self) -> tuple[int, int]:
        """Shape of what an image draws: its first slots, and what breaks ties between them."""
        tokens = self.encoder.side(self.image_size) ** 2
        return self.grouping.slots, self.grouping.noise_width(tokens) + (4 if self.frame else 0)


def refuse_signed(signed: bool, model: SlotTowerConfig) -> None:
    """Raise `ValueError` where pixels in -1..1 would go into an encoder that was trained on others."""
    if signed and model.encoder.kind in ("frozen", "vit"):
        raise ValueError(
            f"signed: encoder.kind={model.encoder.kind} takes pixels in 0..1 and scales them as it was trained; set signed: false"
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
    """slots (b, K, D); attention (b, K, s, s); frames: positions and scales (b, K, 2) of slots that have some.
    features: (b, s, s, C), as the encoder gave them."""

    slots: Tensor
    attention: Tensor
    frames: tuple[Tensor, Tensor] | None
    features: Tensor


class SlotTower(nn.Module):
    """Images (b, 3, S, S), and standard normal noise (b, *config.noise)."""

    def __init__(self, config: SlotTowerConfig):
        super().__init__()
        self.config, c = config, config
        wide = c.encoder.width
        self.encoder = c.encoder.build()
        # One that has positions of another size (frozen.py).
        if (fit_to := getattr(self.encoder, "fit_to", None)) is not None:
            fit_to(c.image_size)
        # x, y and what is left of them to the other edge (Locatello et al. 2020); frames bring positions of their own.
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
        # Behind all that draws weights before it: models without one begin as they did.
        self.grouping = self.build_grouping()
        self.transformer = None if c.transformer is None else c.transformer.build(c.features)

    def build_grouping(self) -> Any:
        """What makes slots of tokens."""
        c = self.config
        if c.frame is not None:
            return InvariantSlotAttention(c.grouping, c.frame, c.features)
        return (SlotAttention if c.grouping.binder is None else ParallelBinder)(c.grouping, c.features)

    def tokens(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """What slots group (b, s * s, F), and the encoder's features (b, s, s, C)."""
        features = self.encoder(images)
        side, positioned_features = features.shape[1], features
        if self.position is not None:
            coords = (grid(side, features).flip(-1) + 1) / 2
            positioned_features = features + self.position(torch.cat([coords, 1 - coords], dim=-1)).unflatten(
                0, (side, side)
            )
        tokens = self.project(self.norm(positioned_features.flatten(1, 2)))
        return tokens if self.transformer is None else self.transformer(tokens), features

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
    """Images, and the noise that their slots begin from, drawn with the sample's own stream.

    Images that are not cropped at random (`crop_scale: [1, 1]`) are cut as evaluation cuts them, also where they are not square.
    """

    def __init__(self, config: DataConfig, model: SlotTowerConfig):
        self.config, self.image_size, self.noise = config, model.image_size, model.noise

    def prepare(
        self, fields: dict[str, bytes], source: Source, rng: np.random.Generator, on_stage: OnStage = ignore_stage
    ) -> Any:
        c, size = self.config, self.image_size
        image = decode_image(
            image_bytes(fields, source.config.image_keys), 2 * size if c.scaled_decoding else None, c.pixel_range
        )
        on_stage("decode")
        if c.crop_scale == (1.0, 1.0):
            pixels = eval_pixels(image, size)
            pixels = pixels[:, ::-1] if c.hflip > 0 and rng.random() < c.hflip else pixels
        else:
            pixels = train_pixels(image, size, c.crop_scale, c.hflip, rng)
        noise = rng.standard_normal(self.noise, dtype=np.float32)
        on_stage("augment")
        return np.ascontiguousarray(pixels.transpose(2, 0, 1)), noise

    def stack(self, examples: Sequence[Any]) -> dict[str, Tensor]:
        names = ("image", "noise")
        return {
            name: torch.from_numpy(np.stack(column))
            for name, column in zip(names, zip(*examples, strict=True), strict=True)
        }
