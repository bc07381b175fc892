"""Trained slot models of videos as encoders: slots and masks of clips of any length; an image is a clip of one frame."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from evals.encoders.capabilities import ClipsEncoder, DrawingEncoder
from sparo_train.core.errors import ConfigError
from sparo_train.models.readout import Slots

from ..decoders.broadcast import DecoderOutput
from ..encoders.convnet import grid
from ..grouping.slot_attention import GroupingOutput
from ..video.video_autoencoder import VideoAutoencoder
from ..video.video_slate import VideoSlate
from ..video.video_tower import TimedTower, TimedTowerConfig
from .slot_encoder import Decomposition, MaskingEncoder, SlotEncoder, normalize_masks

_FRAMES = 64  # frames that are decoded at once


class TimedEncoder(MaskingEncoder, ClipsEncoder):
    """Encoder of a model of videos.

    If slots have hints, a clip has a fourth plane with object numbers; only its first frame is used.

    Args:
        trained_frames: length of the clips in training.
    """

    def __init__(self, model: Any, signed: bool, trained_frames: int, label: str = ""):
        super().__init__(model, signed, label)
        self.trained_frames = trained_frames

    frame_scores = ()

    @property
    def conditional(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.model.config.hint is not None

    @property
    def windowed(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        grouping = self.model.config.grouping
        return grouping.binder is not None or grouping.pooled is not None

    @abstractmethod
    def compute_soft_masks(self, output: GroupingOutput) -> tuple[Tensor, DecoderOutput | None]:
        """Return the masks (n, K, s, s) of n frames with slots (n, K, D) and attention (n, K, N), and the decoded output."""

    @abstractmethod
    def to_decomposition(self, output: GroupingOutput) -> Decomposition:
        """Convert decoded output, for pictures."""

    def reconstruction_errors(self, decoded: DecoderOutput | None, frames: Tensor) -> Tensor:
        """Return the mean squared error (n,) of every frame's reconstruction in 0..1; -1 if it does not reconstruct pixels."""
        return torch.full((len(frames),), -1.0, device=self.device)

    def generation_errors(self, output: GroupingOutput, frames: Tensor) -> Tensor:
        """Return the same (n,) for frames that are generated token by token."""
        raise ConfigError(
            f"{self.label}: decodes all of a frame at once, not token by token, so it cannot generate frames. Remove "
            "generate_frames."
        )

    @torch.inference_mode()
    def clip_groups(self, video: Tensor, window: int | None = None) -> list[GroupingOutput]:
        """Yield slots (T, K, D) and attention (T, K, N) of each clip in (n, T, 3, S, S) uint8, or with four planes.

        Args:
            video: the clips.
            window: number of context frames of a binder, see `clips`; None: the length of training clips.

        Raises:
            ConfigError: a window for slots that are carried from frame to frame, or missing hints.
        """
        if not self.windowed and window is not None:
            raise ConfigError(
                f"context_frames={window}: only a binder can use a limited number of earlier frames, and this model has no binder. "
                "Remove context_frames."
            )
        if self.conditional and video.shape[2] != 4:
            raise ConfigError(
                "slots of this model start from the objects in the first frame, but the clips have no masks. Give clips with masks."
            )
        outputs = []
        for clip in video:  # one by one, so that memory does not depend on the batch
            # By frames instead of clips, so that the decoded part has a bound for any T.
            tokens = torch.cat([self._tokens(part) for part in clip[:, :3].split(_FRAMES)])
            hint = clip[None, 0, 3].to(self.device) if self.conditional else None
            outputs.append(
                self._group_slots(tokens[None], hint, (window or self.trained_frames) if self.windowed else None)
            )
        return outputs

    def clip_slots(self, video: Tensor, window: int | None = None) -> Tensor:
        """Return slots (n, T, K, D), see `clip_groups`."""
        return torch.stack([output.slots for output in self.clip_groups(video, window)])

    def untrained(self) -> TimedEncoder:
        """Return the same model with the initial weights of seed 0."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = type(self.model)(self.model.config).to(self.device).eval()
        made = type(self)(model, bool(self.mean.flatten()[0]), self.trained_frames, f"{self.label}, untrained")
        made.precision = self.precision
        return made

    def decompose_clips(self, video: Tensor, window: int | None = None) -> list[Decomposition]:
        """Yield the decoded frames of each clip, for pictures."""
        return [self.to_decomposition(output) for output in self.clip_groups(video, window)]

    @torch.inference_mode()
    def clips(self, video: Tensor, window: int | None = None, generated: bool = False) -> Tensor:
        rows = []
        for clip, clip_output in zip(video, self.clip_groups(video, window), strict=True):
            labels, errors = [], []
            for frames, *own in zip(*(table.split(_FRAMES) for table in (clip[:, :3], *clip_output)), strict=True):
                output = GroupingOutput(*own)
                soft_masks, decoded = self.compute_soft_masks(output)
                soft_masks = self.upsample_masks(soft_masks)
                labels.append(soft_masks.argmax(1).float().masked_fill(~soft_masks.isfinite().all(1), torch.nan))
                errors.append(
                    self.generation_errors(output, frames) if generated else self.reconstruction_errors(decoded, frames)
                )
            rows.append(torch.cat([torch.cat(labels).flatten(), torch.cat(errors)]))
        return torch.stack(rows)

    def encode_stills(self, pixels: Tensor) -> GroupingOutput:
        """Encode images (n, 3, S, S) as clips of one frame."""
        return GroupingOutput(
            *(torch.cat(tables) for tables in zip(*self.clip_groups(pixels[:, None], None), strict=True))
        )

    def encode(self, pixels: Tensor) -> Tensor:
        return self.encode_stills(pixels).slots.float().flatten(1)

    def soft_masks(self, pixels: Tensor) -> Tensor:
        return self.upsample_masks(self.compute_soft_masks(self.encode_stills(pixels))[0])

    def decompose(self, pixels: Tensor) -> Decomposition:
        return self.to_decomposition(self.encode_stills(pixels))

    def image_slots(self, pixels: Sequence[np.ndarray]) -> Slots:
        """Return slots and their masks for pictures: (n, K, s * s), normalized per slot to a sum of one."""
        output = self.encode_stills(self.stack(pixels))
        return Slots(output.slots.float(), normalize_masks(self.compute_soft_masks(output)[0]))

    def _tokens(self, frames: Tensor) -> Tensor:
        with self.autocast():
            return self.model.frame_tokens(self.normalize(frames))

    def _group_slots(self, tokens: Tensor, hint: Tensor | None, window: int | None) -> GroupingOutput:
        """Group tokens (1, T, N, F); with a window, each frame's slots depend on its last `window` frames."""
        noise = self.noise.to(self.device).expand(1, -1, -1)
        with self.autocast():
            tower = self.model.tower
            if window is None or tokens.shape[1] <= window:
                outputs = [tower.group_tokens(tokens, noise, hint)]
            else:
                outputs = [tower.group_tokens(tokens[:, :window], noise, hint)]
                # Recompute each window from scratch, as in training, so that a frame never sees more than that.
                for end in range(window + 1, tokens.shape[1] + 1):
                    last = tower.group_tokens(tokens[:, end - window : end], noise, hint)
                    outputs.append(GroupingOutput(*(table[:, -1:] for table in last)))
        return GroupingOutput(*(torch.cat(tables, 1)[0] for tables in zip(*outputs, strict=True)))


class VideoEncoder(TimedEncoder, DrawingEncoder):
    """Encoder of a model that reconstructs from slots."""

    masks_are = SlotEncoder.masks_are

    @property
    def draws(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        target = self.model.config.target
        return f"features of {self.model.tower.encoder.identity}" if target == "features" else target

    @property
    def frame_scores(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        # PSNR applies to pixels in 0..1; flow has no error here, because frames do not contain it.
        return {"pixels": ("mse", "psnr"), "features": ("mse",)}.get(self.model.config.target, ())

    @property
    def numbers(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.model.config.target_side**2 * self.model.config.target_channels

    @torch.inference_mode()
    def compute_soft_masks(self, output: GroupingOutput) -> tuple[Tensor, DecoderOutput | None]:
        decoder = self.model.decoder
        with self.autocast():
            decoded = decoder(output.slots, grid(decoder.side, output.slots))
        return decoded.masks, decoded

    def to_decomposition(self, output: GroupingOutput) -> Decomposition:
        soft_masks, decoded = self.compute_soft_masks(output)
        assert decoded is not None
        if self.draws == "pixels":
            return Decomposition(
                self.upsample_masks(soft_masks), self.denormalize(decoded.image), self.denormalize(decoded.slot_images)
            )
        if self.draws.startswith("flow"):  # its colours, without depth
            return Decomposition(
                self.upsample_masks(soft_masks), decoded.image[:, :3].float(), decoded.slot_images[:, :, :3].float()
            )
        return Decomposition(self.upsample_masks(soft_masks), None, None)

    def reconstruction_errors(self, decoded: DecoderOutput | None, frames: Tensor) -> Tensor:
        if decoded is None or not self.frame_scores:
            return super().reconstruction_errors(decoded, frames)
        pixels = self.normalize(frames)
        if self.draws != "pixels":
            with self.autocast():
                pixels = self.model.tower.encoder(pixels).permute(0, 3, 1, 2).float()
        residual = decoded.image.float() - pixels
        # In -1..1, a pixel's error is twice that in 0..1.
        return (residual * self.std if self.draws == "pixels" else residual).square().flatten(1).mean(1)

    @torch.inference_mode()
    def squared_error(self, pixels: Tensor) -> Tensor:
        if not self.frame_scores:
            raise ConfigError(
                f"model.target={self.draws}: reconstruction errors need {self.draws}, which a single image does not have. Score clips (task: video_masks)."
            )
        return self.reconstruction_errors(self.compute_soft_masks(self.encode_stills(pixels))[1], pixels)[:, None]


class TimedGroupingEncoder(TimedEncoder):
    """Encoder of a video tower without a decoder, whose masks are attention."""

    masks_are = "slots' attention, bilinear"

    def compute_soft_masks(self, output: GroupingOutput) -> tuple[Tensor, DecoderOutput | None]:
        side = self.model.config.encoder.side(self.image_size)
        return output.attention.unflatten(-1, (side, side)), None

    def to_decomposition(self, output: GroupingOutput) -> Decomposition:
        return Decomposition(self.upsample_masks(self.compute_soft_masks(output)[0]), None, None)


class TowerModel(nn.Module):
    """Video tower in the form of a model that a `TimedEncoder` takes."""

    def __init__(self, config: TimedTowerConfig):
        super().__init__()
        self.config, self.tower = config, TimedTower(config)

    def frame_tokens(self, frames: Tensor) -> Tensor:
        """Return the tokens that slots group, (n, s * s, F), of frames (n, 3, S, S)."""
        return self.tower.tokens(frames)[0]


class VideoSlateEncoder(TimedGroupingEncoder):
    """Encoder of a model that predicts tokens, whose pictures are generated from slots."""

    generates = True

    @torch.inference_mode()
    def to_decomposition(self, output: GroupingOutput) -> Decomposition:
        return Decomposition(
            self.upsample_masks(self.compute_soft_masks(output)[0]), self._generate_frames(output), None
        )

    @torch.inference_mode()
    def generation_errors(self, output: GroupingOutput, frames: Tensor) -> Tensor:
        return (self._generate_frames(output) - frames.to(self.device) / 255).square().flatten(1).mean(1)

    def _generate_frames(self, output: GroupingOutput) -> Tensor:
        """Generate frames (n, 3, S, S) in 0..1; NaN if no token is valid."""
        with self.autocast():
            frames = torch.cat([self.model.generate(some) for some in output.slots.split(_FRAMES)])
        return frames.float().clamp(0, 1)


def video_encoder(objective: VideoAutoencoder) -> VideoEncoder:
    """Return the encoder of a trained objective."""
    return VideoEncoder(objective.model, objective.config.signed, objective.config.frames.count)


def video_slate_encoder(objective: VideoSlate) -> VideoSlateEncoder:
    """Return the encoder of a trained objective."""
    return VideoSlateEncoder(objective.model, False, objective.config.frames.count)
