"""Trained slot models of videos as encoders: masks of clips, of any length; an image is a clip of one frame."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from evals.encoders.encoder import ClipsEncoder
from sparo_train.core.errors import ConfigError
from sparo_train.models.slots import Slots

from ..decoders.broadcast import Decoded
from ..encoders.convnet import grid
from ..video.video_autoencoder import VideoAutoencoder
from .slot_encoder import Parts, SlotEncoder, shared

_FRAMES = 64  # that are drawn at once


class VideoEncoder(SlotEncoder, ClipsEncoder):
    """A model of videos that draws its slots.

    Args:
        trained_frames: how long the clips of its training were.
    """

    def __init__(self, model: Any, signed: bool, trained_frames: int, label: str = ""):
        super().__init__(model, signed, label)
        self.trained_frames = trained_frames

    @torch.inference_mode()
    def seen(self, pixels: Tensor) -> Any:
        """Images (n, 3, S, S) as clips of one frame."""
        with self.autocast():
            return self.model(self.normalised(pixels)[:, None], self.noise.to(self.device).expand(len(pixels), -1, -1))

    def image_slots(self, pixels: Sequence[np.ndarray]) -> Slots:
        """Slots and where they draw, for pictures: (n, K, S * S), each slot's shares of the pixels, brought to a sum of one."""
        found = self.seen(self.stacked(pixels))
        return Slots(found.slots[:, 0].float(), shared(found.decoded.masks))

    @torch.inference_mode()
    def clip_slots(self, video: Tensor, window: int | None = None) -> Tensor:
        """(n, T, 3, S, S) uint8 -> (n, T, K, D). `window`: see `clips`; a binder has those of its training's clips where none is given.

        Raises:
            ConfigError: a window for slots that go from frame to frame.
        """
        binder = self.model.config.grouping.binder
        if binder is None and window is not None:
            raise ConfigError(
                f"window={window}: is of a binder; slots that go from frame to frame have seen all of the earlier ones"
            )
        slots = []
        for clip in video:  # one by one, as its neighbours must not decide what fits into memory
            tokens = torch.cat([self._tokens(part) for part in clip.split(_FRAMES)])
            slots.append(self._grouped(tokens[None], None if binder is None else window or self.trained_frames))
        return torch.cat(slots)

    @torch.inference_mode()
    def clip_parts(self, video: Tensor, window: int | None = None) -> list[Parts]:
        """What each clip's frames are drawn as, for pictures: one for each, of its T frames."""
        return [self.parts_of(self._drawn(slots)) for slots in self.clip_slots(video, window)]

    @torch.inference_mode()
    def clips(self, video: Tensor, window: int | None = None) -> Tensor:
        rows = []
        for clip in video:
            (slots,) = self.clip_slots(clip[None], window)
            labels, errors = [], []
            for frames, own in zip(clip.split(_FRAMES), slots.split(_FRAMES), strict=True):
                decoded = self._drawn(own)
                shares = self.brought(decoded.masks)
                labels.append(shares.argmax(1).float().masked_fill(~shares.isfinite().all(1), torch.nan))
                errors.append(self.error_of(decoded, self._target(frames))[:, 0])
            rows.append(torch.cat([torch.cat(labels).flatten(), torch.cat(errors)]))
        return torch.stack(rows)

    def _tokens(self, frames: Tensor) -> Tensor:
        with self.autocast():
            return self.model.tower.tokens(self.normalised(frames))[0]

    def _target(self, frames: Tensor) -> Tensor:
        pixels = self.normalised(frames)
        if self.draws == "pixels":
            return pixels
        with self.autocast():
            return self.model.tower.encoder(pixels).permute(0, 3, 1, 2).float()

    def _grouped(self, tokens: Tensor, window: int | None) -> Tensor:
        """Tokens (1, T, N, F) to slots; of a window, each frame's from its last `window` frames."""
        noise = self.noise.to(self.device).expand(1, -1, -1)
        with self.autocast():
            grouping = self.model.tower.grouping
            if window is None or tokens.shape[1] <= window:
                return grouping(tokens, noise).slots
            slots = [grouping(tokens[:, :window], noise).slots]
            for end in range(window + 1, tokens.shape[1] + 1):
                slots.append(grouping(tokens[:, end - window : end], noise).slots[:, -1:])
            return torch.cat(slots, 1)

    def _drawn(self, slots: Tensor) -> Decoded:
        decoder = self.model.decoder
        with self.autocast():
            return decoder(slots, grid(decoder.side, self.device))


def video_encoder(objective: VideoAutoencoder) -> VideoEncoder:
    """The model that is trained."""
    return VideoEncoder(objective.model, objective.config.signed, objective.config.frames.count)
