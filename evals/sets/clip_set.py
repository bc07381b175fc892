"""Episodes to score on: their first frames, and whose every pixel is; tars in the layout of evaluation sets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from sparo_train.core.errors import BadSampleError, DataError
from sparo_train.data.video.episode import Episode

from .base import sha256
from .object_facts import object_annotations
from .wds import WdsSet


class ClipSet(WdsSet):
    """ROOT/test/nshards.txt and ROOT/test/0.tar … of episodes; facts are their label maps (T, H, W).

    Args:
        frames: so many of every episode, from its first; None: all of the first one's, which all others have to have.
        conditioning_slots: where above 0, the first frame's labels come behind its images as one more, and have to be below it.

    Raises:
        DataError: files that are missing.
    """

    def __init__(self, root: str | Path, frames: int | None, split: str = "test", conditioning_slots: int = 0):
        super().__init__(root, "clips", split)
        self.conditioning_slots = conditioning_slots
        self._alike, self.frames = frames is None, frames if frames is not None else len(self._episode(0)[2])

    def read(self, number: int) -> tuple[str, Any, np.ndarray]:
        """Key, images of the frames, and labels."""
        key, where, episode = self._episode(number)
        if len(episode) < self.frames:
            raise DataError(
                f"{where}: has {len(episode)} frames, and {self.frames} are scored; set frames: {len(episode)} or less, or take it out"
            )
        if self._alike and len(episode) > self.frames:
            raise DataError(
                f"{where}: has {len(episode)} frames, and the first sample {self.frames}; set frames: {self.frames} or less"
            )
        try:
            images = [episode.picture(t) for t in range(self.frames)]
            labels = [episode.labels(t) for t in range(self.frames)]
        except BadSampleError as bad:
            raise DataError(f"{where}: {bad}; scores need every frame: repair it, or take it out") from None
        sizes = {(image.height, image.width) for image in images} | {t.shape for t in labels}
        if len(sizes) > 1:
            raise DataError(
                f"{where}: frames and masks of unequal size ({', '.join(f'{w} x {h}' for h, w in sorted(sizes))})"
            )
        if self.conditioning_slots:
            if (most := int(labels[0].max())) >= self.conditioning_slots:
                raise DataError(
                    f"{where}: its first frame has object {most}, and the model has {self.conditioning_slots} slots for the ground and what is told; "
                    "score a model with more of them, or take it out"
                )
            # As one more image, so that it is cut and scaled by the same steps.
            images.append(Image.fromarray(labels[0].astype(np.uint8)))
        return key, images, np.stack(labels)

    def identity(self) -> str:
        return sha256("clips", str(self.frames), super().identity())

    def _episode(self, number: int) -> tuple[str, str, Episode]:
        storage, ordinal = self.at(number)
        key = f"number {ordinal}"
        try:
            key, fields = storage.read(ordinal)
            return key, f"{storage.url}: sample {key}", Episode(fields, pixel_range=None)  # mapped by the encoder
        except BadSampleError as bad:
            raise DataError(
                f"{storage.url}: sample {key}: {bad}; scores need every sample: repair it, or take it out"
            ) from None


class ObjectClipSet(ClipSet):
    """The same, whose facts say of the objects what the episode's json does (`object_annotations`)."""

    def read(self, number: int) -> tuple[str, Any, Any]:
        key, images, _ = super().read(number)
        _, where, episode = self._episode(number)
        return key, images, object_annotations(episode, self.frames, where)

    def identity(self) -> str:
        return sha256("objects", super().identity())
