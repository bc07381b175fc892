"""DINO's pixel augmentations on uint8 arrays (H, W, 3): torchvision's and PIL's operations and distributions, by OpenCV's kernels.

Draws come from a generator of the sample's own. Against PIL pixels differ by rounding in the colour operations, and by
up to three levels in the blur (PIL's is a box approximation of the Gaussian that this is).
"""

from __future__ import annotations

import cv2
import numpy as np

Pixels = np.ndarray

_LEVELS = np.arange(256)
_INVERTED = np.where(_LEVELS < 128, _LEVELS, 255 - _LEVELS).astype(np.uint8)  # PIL's solarize at its default threshold

cv2.setNumThreads(0)  # a pool of threads does not survive the fork of a loader worker


def jitter(x: Pixels, strength: tuple[float, float, float, float], rng: np.random.Generator) -> Pixels:
    """torchvision's ColorJitter(brightness, contrast, saturation, hue): factors uniform in 1 ± strength, in random order."""
    # All factors first, used or not, as torchvision draws them.
    bright, contrast, saturation = (rng.uniform(max(0.0, 1 - s), 1 + s) for s in strength[:3])
    shift = rng.uniform(-strength[3], strength[3])
    for number in rng.permutation(4):
        if number == 0 and strength[0]:
            x = _levels(x, bright, 0.0)
        elif number == 1 and strength[1]:
            # Rounded as PIL rounds the mean that contrast turns around.
            mean = float(int(cv2.cvtColor(x, cv2.COLOR_RGB2GRAY).mean() + 0.5))
            x = _levels(x, contrast, mean)
        elif number == 2 and strength[2]:
            x = cv2.addWeighted(x, saturation, gray(x), 1 - saturation, 0)
        elif number == 3 and strength[3]:
            x = hue(x, shift)
    return x


def gray(x: Pixels) -> Pixels:
    """Luma in three equal channels (RandomGrayscale)."""
    return cv2.cvtColor(cv2.cvtColor(x, cv2.COLOR_RGB2GRAY), cv2.COLOR_GRAY2RGB)


def hue(x: Pixels, shift: float) -> Pixels:
    """Rotate the hue by `shift` of the whole circle."""
    hsv = cv2.cvtColor(x, cv2.COLOR_RGB2HSV_FULL)
    # Eight bits wrap around, which is what a circle wants.
    hsv[..., 0] += np.uint8(int(shift * 255) % 256)
    return cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB_FULL)


def blur(x: Pixels, radius: tuple[float, float], rng: np.random.Generator) -> Pixels:
    """A Gaussian blur whose sigma is uniform in `radius` (pixels)."""
    return cv2.GaussianBlur(x, (0, 0), float(rng.uniform(*radius)))


def solarize(x: Pixels) -> Pixels:
    """Invert levels from 128 on."""
    return cv2.LUT(x, _INVERTED)


def flip(x: Pixels) -> Pixels:
    """Left to right."""
    return cv2.flip(x, 1)


def _levels(x: Pixels, factor: float, around: float) -> Pixels:
    """PIL's enhancement: around + factor * (x - around), cut to 0..255."""
    table = np.clip(around + factor * (_LEVELS - around), 0, 255).astype(np.uint8)
    return cv2.LUT(x, table)
