"""Tower of video slot models: frames are encoded one by one, and slots are carried from frame to frame or bound over all frames."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal, NamedTuple, Self

import torch
from pydantic import model_validator
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from sparo_train.core.config import Frozen, field

from ..encoders.convnet import ConvNetConfig
from ..encoders.transformer import TransformerConfig
from ..grouping.parallel_binder import ParallelBinder
from ..grouping.pooled import PooledTransformer
from ..grouping.slot_attention import GroupingOutput, SlotAttention
from ..grouping.slot_config import SlotAttentionConfig
from ..objectives.slot_tower import SlotTower, SlotTowerConfig


class FrameStep(nn.Module):
    """One frame: tokens (b, N, F) and slots (b, K, D) to corrected slots, attention (b, K, N), and the initial slots of the next frame."""

    def __init__(self, grouping: SlotAttentionConfig, predictor: TransformerConfig | None, in_width: int):
        super().__init__()
        self.corrector = SlotAttention(grouping, in_width)
        self.predictor = nn.Identity() if predictor is None else predictor.build(grouping.width)

    def forward(
        self, tokens: Tensor, noise: Tensor | None, state: Tensor | None, num_iterations: int | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Process a frame. `state` None: the first frame, with the corrector's own initial slots. `num_iterations` overrides the corrector's."""
        slots, attention = self.corrector(tokens, noise, state, num_iterations)
        return slots, attention, self.predictor(slots)


class RecurrentSlots(nn.Module):
    """Slots (b, T, K, D) and attention (b, T, K, N) of tokens (b, T, N, F), frame by frame.

    With `checkpointed`, backward recomputes a frame's step, so that memory does not grow with it.

    Args:
        first_iterations: iterations of a video's first frame; None: the corrector's.
    """

    checkpointed = False

    def __init__(
        self,
        grouping: SlotAttentionConfig,
        predictor: TransformerConfig | None,
        in_width: int,
        first_iterations: int | None = None,
    ):
        super().__init__()
        self.first_iterations = first_iterations
        self.step = FrameStep(grouping, predictor, in_width)

    def units(self) -> list[nn.Module]:
        """Return the modules that an engine wraps one by one."""
        return [self.step]

    def forward(self, tokens: Tensor, noise: Tensor | None = None, hint: Tensor | None = None) -> GroupingOutput:
        """Process a video; `hint` (b, K, D) are initial slots of the first frame instead of the corrector's own."""
        return self.run_with_state(tokens, noise, hint=hint)[0]

    def run_with_state(
        self, tokens: Tensor, noise: Tensor | None = None, state: Tensor | None = None, hint: Tensor | None = None
    ) -> tuple[GroupingOutput, Tensor]:
        """Process a video and also return the initial slots of the frame after the last; `state` (b, K, D) comes from an earlier part."""
        slots, attentions = [], []
        num_iterations, state = (self.first_iterations, hint) if state is None else (None, state)
        for frame in tokens.unbind(1):
            if self.checkpointed and torch.is_grad_enabled():
                frame_slots, attention, state = checkpoint(
                    self.step, frame, noise, state, num_iterations, use_reentrant=False
                )  # type: ignore[misc]
            else:
                frame_slots, attention, state = self.step(frame, noise, state, num_iterations)
            # For the first frame only.
            num_iterations = None
            slots.append(frame_slots)
            attentions.append(attention)
        assert state is not None
        return GroupingOutput(torch.stack(slots, 1), torch.stack(attentions, 1)), state


class HintConfig(Frozen):
    """Hints: object number k of the first frame is slot k, and slot 0 is the background, whose hint is zeros."""

    annotation: Literal["boxes", "centres", "masks"] = field(
        "boxes",
        "First-frame annotation from which an object's slot is initialized: boxes (top, left, bottom, right in "
        "0..1), centres (of boxes), or masks.",
    )
    hidden: int = field(256, "Hidden units of the MLP that computes initial slots from the annotation.", gt=0)
    encoder: ConvNetConfig = field(
        ConvNetConfig(channels=(32, 32, 32, 32), strides=(2, 2, 2, 2)),
        "Convolutional network that encodes each mask, for annotation=masks.",
    )

    def build(self, slots: int, width: int, image_size: int) -> nn.Module:
        """Return the module from label maps (b, S, S) to slots (b, K, D)."""
        return Hint(self, slots, width, image_size)


class Hint(nn.Module):
    """Initial slots (b, K, D) from label maps (b, S, S) of first frames. The hint of an object that is not visible is zeros, like the background's."""

    def __init__(self, config: HintConfig, slots: int, width: int, image_size: int):
        super().__init__()
        self.config, self.slots = config, slots
        in_widths = {"boxes": 4, "centres": 2, "masks": config.encoder.width * config.encoder.side(image_size) ** 2}
        self.mask_encoder = config.encoder.build() if config.annotation == "masks" else None
        self.mlp = nn.Sequential(
            nn.Linear(in_widths[config.annotation], config.hidden), nn.ReLU(), nn.Linear(config.hidden, width)
        )

    def forward(self, labels: Tensor) -> Tensor:
        c = self.config
        if c.annotation == "masks":
            assert self.mask_encoder is not None
            # The background's hint is zeros, like that of a missing object.
            masks = F.one_hot(labels.long(), self.slots).movedim(-1, 1).to(self.mlp[0].weight.dtype)  # type: ignore[union-attr, arg-type]
            # The background has no box in SAVi's data, and a box would be learned as an object's.
            masks = masks * (torch.arange(self.slots, device=labels.device) > 0)[:, None, None]
            mask_features = self.mask_encoder(masks.flatten(0, 1)[:, None].expand(-1, 3, -1, -1))
            return self.mlp(mask_features.flatten(1)).unflatten(0, (len(labels), self.slots))
        boxes = boxes_from_labels(labels, self.slots)
        coordinates = boxes if c.annotation == "boxes" else (boxes[..., :2] + boxes[..., 2:]) / 2
        return self.mlp(coordinates)


def boxes_from_labels(labels: Tensor, slots: int) -> Tensor:
    """Return (b, K, 4) fp32 boxes of label maps (b, S, S): top, left, bottom, right of each number's pixels in 0..1; zeros for 0 and missing ones."""
    side = labels.shape[-1]
    masks = labels[:, None] == torch.arange(slots, device=labels.device)[:, None, None]
    ends = []
    for axis in (3, 2):  # rows that contain it, then columns
        line = masks.any(axis)
        first = line.float().argmax(-1)
        # After the last pixel, so that a box of one pixel has a size.
        last = side - line.flip(-1).float().argmax(-1)
        ends.append((first, last))
    (top, bottom), (left, right) = ends
    boxes = torch.stack([top, left, bottom, right], -1).float() / side
    visible = masks.flatten(2).any(-1) & (torch.arange(slots, device=labels.device) > 0)
    return boxes * visible[..., None]


class TimedTowerConfig(SlotTowerConfig):
    """Recurrent slots (SAVi and its variants), or with `grouping.binder` slots that bind all times at once (PSB)."""

    accepts_hint: ClassVar[bool] = True

    predictor: TransformerConfig | None = field(
        None,
        "Transformer over slots that predicts the initial slots of the next frame. Default: slots are carried over unchanged.",
        examples=[{"preset": "savi"}],
    )
    hint: HintConfig | None = field(
        None,
        "Annotation of a clip's first frame. With grouping.slot_init=given, it initializes the slots. Default: none.",
        examples=[{"annotation": "boxes"}],
    )
    first_iterations: int | None = field(
        None,
        "Iterations for a clip's first frame, instead of grouping.iterations (videosaur, SlotContrast). Default: the "
        "value of grouping.iterations.",
        gt=0,
        le=1000,
        examples=[3],
    )

    @model_validator(mode="after")
    def _check_time_options(self) -> Self:
        if self.frame is not None:
            raise ValueError(
                "frame: positions and scales of slots are supported for images only. Remove the key `frame`."
            )
        if self.grouping.transport is not None:
            raise ValueError("grouping.transport: applies to images only. Remove it.")
        if (self.predictor is not None or self.hint is not None) and (
            self.grouping.gradient == "last" and not self.grouping.straight_through
        ):
            raise ValueError(
                "grouping.gradient=last: no gradient would reach the predictor and the MLP of the hint. Set grouping.straight_through=true."
            )
        # A model of all times at once has no first frame, and no next one.
        at_once = self.grouping.binder is not None or self.grouping.pooled is not None
        if at_once and (self.predictor is not None or self.first_iterations is not None):
            raise ValueError(
                "predictor, first_iterations: do not apply to a binder or a pooled Transformer, because either one "
                "processes all frames at once. Set predictor and first_iterations to null."
            )
        if self.grouping.pooled is not None:
            side, squares = self.encoder.side(self.image_size), math.isqrt(self.grouping.slots)
            # Every slot pools its own square of features, so all squares need one size.
            if side % squares:
                raise ValueError(
                    f"grouping.slots={self.grouping.slots}: {side} x {side} features cannot be divided into {squares} x {squares} equal "
                    "squares. Set another number of slots."
                )
        if self.first_iterations is not None and self.grouping.layers == "own":
            raise ValueError(
                "first_iterations: cannot be set with grouping.layers=own, where each iteration has separate "
                "weights. Set first_iterations=null or grouping.layers=shared."
            )
        if (self.hint is None) != (self.grouping.slot_init != "given"):
            raise ValueError(
                f"hint, grouping.slot_init={self.grouping.slot_init}: a hint and slot_init=given can be used only together. "
                "Set both, or neither."
            )
        if self.grouping.gradient == "last" and not self.grouping.straight_through:
            raise ValueError(
                "grouping.gradient=last: no gradient would reach initial slots and predictor, which come before the last iteration. "
                "Set grouping.straight_through: true."
            )
        if self.predictor is not None:
            self.predictor.refuse_width(self.grouping.width, "predictor")
        return self


class TimedTowerOutput(NamedTuple):
    """Slots (b, T, K, D); attention (b, T, K, s, s); features (b * T, s, s, C), output of the encoder."""

    slots: Tensor
    attention: Tensor
    features: Tensor


class TimedTower(SlotTower):
    """Tower for videos (b, T, 3, S, S) and noise (b, *config.noise) that returns slots of every frame.

    `hint` (b, S, S): object number of every pixel in the first frame, for slots with hints.
    """

    config: TimedTowerConfig

    def __init__(self, config: TimedTowerConfig):
        super().__init__(config)
        c = config
        self.hint = None if c.hint is None else c.hint.build(c.grouping.slots, c.grouping.width, c.image_size)

    def build_grouping(self) -> Any:
        c = self.config
        if c.grouping.binder is not None:
            return ParallelBinder(c.grouping, c.features)
        if c.grouping.pooled is not None:
            return PooledTransformer(c.grouping, c.features)
        return RecurrentSlots(c.grouping, c.predictor, c.features, c.first_iterations)

    def forward(self, images: Tensor, noise: Tensor, hint: Tensor | None = None) -> TimedTowerOutput:
        # All frames at once, because nothing before the slots depends on time.
        tokens, features = self.tokens(images.flatten(0, 1))
        slots, attention = self.group_tokens(tokens.unflatten(0, images.shape[:2]), noise, hint)
        side = features.shape[1]
        return TimedTowerOutput(slots, attention.unflatten(-1, (side, side)), features)

    def group_tokens(self, tokens: Tensor, noise: Tensor, hint: Tensor | None) -> Any:
        """Group tokens (b, T, N, F) to slots. Raises `ValueError` if hints are required and missing."""
        if self.hint is None:
            return self.grouping(tokens, noise)
        if hint is None:
            raise ValueError(
                "hint: is missing, but these slots start from the objects of the first frame. Give the label map of the "
                "first frame (b, S, S)."
            )
        return self.grouping(tokens, noise, self.hint(hint))
