"""How frames are cut and scaled to the model's size: the same for a clip's pictures, masks, depth and flow."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from PIL import Image

from sparo_train.data.examples.image_transforms import Crop, eval_pixels, random_resized_crop_box, resized_crop


@dataclass(frozen=True)
class FrameTransform:
    """A square of `size` pixels a side.

    Args:
        box: what of a frame it shows; None: the middle, as evaluation cuts it.  flip: mirrored.
    """

    size: int
    box: Crop | None = None
    flip: bool = False

    @classmethod
    def sample(
        cls, size: int, frame: tuple[int, int], scale: tuple[float, float], hflip: float, rng: np.random.Generator
    ) -> FrameTransform:
        """One for all frames (width, height) of a clip: RandomResizedCrop's box, or the middle where `scale` is (1, 1)."""
        box = None if scale == (1.0, 1.0) else random_resized_crop_box(frame, scale, rng)
        return cls(size, box, hflip > 0 and bool(rng.random() < hflip))

    def picture(self, frame: np.ndarray) -> np.ndarray:
        """(H, W, 3) uint8 to (S, S, 3)."""
        return self._maybe_flip(self._resize(Image.fromarray(frame), Image.Resampling.BICUBIC))

    def labels(self, plane: np.ndarray) -> np.ndarray:
        """(H, W) numbers to (S, S) int32, by the nearest pixel: labels have no mean."""
        return self._maybe_flip(self._resize(Image.fromarray(plane.astype(np.int32)), Image.Resampling.NEAREST))

    def depth(self, plane: np.ndarray) -> np.ndarray:
        """(H, W) fp32 to (S, S)."""
        return self._maybe_flip(self._resize(Image.fromarray(plane), Image.Resampling.BILINEAR))

    def flow(self, plane: np.ndarray) -> np.ndarray:
        """(H, W, 2) rows and columns in pixels to (S, S, 2) in pixels of what is shown."""
        height, width = plane.shape[:2]
        if self.box is None:
            tall, wide = self.size / min(height, width), self.size / min(height, width)
        else:
            tall, wide = self.size / self.box.height, self.size / self.box.width
        rows, columns = self.depth(plane[..., 0].copy()), self.depth(plane[..., 1].copy())
        # Mirrored, what moved left moves right; rows stay.
        return np.stack([rows * tall, columns * (-wide if self.flip else wide)], axis=-1)

    def _resize(self, image: Image.Image, filter: Image.Resampling) -> np.ndarray:
        if self.box is None:
            return eval_pixels(image, self.size, filter=filter)
        return resized_crop(image, self.box, self.size, filter)

    def _maybe_flip(self, array: np.ndarray) -> np.ndarray:
        return array[:, ::-1] if self.flip else array


def flow_colours(flow: np.ndarray) -> np.ndarray:
    """Flow (S, S, 2) in pixels as a picture (S, S, 3) uint8: direction its hue, length its saturation, stillness white.

    Of slot-attention-video's `flow_tensor_to_rgb_tensor`: saturated from a fiftieth of the picture's diagonal on.
    """
    first, second = flow[..., 0].astype(np.float32), flow[..., 1].astype(np.float32)
    hue = (np.arctan2(second, first) / np.pi + 1) / 2
    length = np.hypot(first, second) * np.float32(50 / np.hypot(*flow.shape[:2]))
    # HSV of value one: a colour is what of white its distance in hue leaves (red, green, blue at 5, 3, 1 sixths).
    hue_phase = (np.array([5, 3, 1], np.float32) + 6 * hue[..., None]) % 6
    left = 1 - np.clip(length, 0, 1)[..., None] * np.clip(np.minimum(hue_phase, 4 - hue_phase), 0, 1)
    return (left * 255 + 0.5).astype(np.uint8)
