"""Multi-crop augmentation on one core: this project compared with the official pipeline (torchvision and PIL), on the same images.

    python benchmarks/crops.py [--quick] [--json FILE]

Two crops of 224 pixels and eight of 96 pixels of every image, with the official probabilities. The official pipeline ends
with ToTensor and Normalize, as DataAugmentationDINO does. Ours ends with uint8, and the batch is then normalised as in
the objective. Rows: with and without decoding, for both values of `data.decode`. One thread.
"""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from common import interleave, parser, report, row, seconds
from PIL import Image, ImageFilter, ImageOps
from torchvision import transforms as T

from sparo_train.data.decode.decoding import decode, decode_pixels
from sparo_train.data.examples.image_transforms import Picture
from sparo_train.data.examples.multi_crop import CropsConfig, multi_crop
from sparo_train.models.vit_config import IMAGENET_MEAN, IMAGENET_STD

MEAN, STD = (torch.tensor(v).view(3, 1, 1) for v in (IMAGENET_MEAN, IMAGENET_STD))


def images(count: int, size: tuple[int, int]) -> list[bytes]:
    """Return JPEG images that resemble photos: smooth colours and some noise."""
    found = []
    for number in range(count):
        rng = np.random.default_rng(number)
        smooth = Image.fromarray(rng.integers(0, 256, (12, 16, 3), dtype=np.uint8)).resize(
            size, Image.Resampling.BICUBIC
        )
        noisy = np.clip(np.asarray(smooth).astype(int) + rng.integers(-12, 13, (size[1], size[0], 3)), 0, 255)
        buffer = io.BytesIO()
        Image.fromarray(noisy.astype(np.uint8)).save(buffer, format="JPEG", quality=90)
        found.append(buffer.getvalue())
    return found


def official() -> Callable[[Image.Image], list[Any]]:
    """Return the official augmentation, made of operations of torchvision and PIL."""

    def blur(p: float) -> Callable[[Image.Image], Image.Image]:
        def run(image: Image.Image) -> Image.Image:
            if random.random() > p:
                return image
            return image.filter(ImageFilter.GaussianBlur(radius=random.uniform(0.1, 2.0)))

        return run

    def solarize(image: Image.Image) -> Image.Image:
        return ImageOps.solarize(image) if random.random() < 0.2 else image

    colour = [
        T.RandomHorizontalFlip(0.5),
        T.RandomApply([T.ColorJitter(0.4, 0.4, 0.2, 0.1)], p=0.8),
        T.RandomGrayscale(0.2),
    ]
    end = [T.ToTensor(), T.Normalize(IMAGENET_MEAN, IMAGENET_STD)]
    bicubic = T.InterpolationMode.BICUBIC
    first = T.Compose([T.RandomResizedCrop(224, (0.4, 1.0), interpolation=bicubic), *colour, blur(1.0), *end])
    second = T.Compose(
        [T.RandomResizedCrop(224, (0.4, 1.0), interpolation=bicubic), *colour, blur(0.1), solarize, *end]
    )
    local = T.Compose([T.RandomResizedCrop(96, (0.05, 0.4), interpolation=bicubic), *colour, blur(0.5), *end])
    return lambda image: [first(image), second(image), *(local(image) for _ in range(8))]


def ours(data: Sequence[Picture] | Sequence[bytes], read: Callable[[bytes], Picture]) -> None:
    rng, config = np.random.default_rng(0), CropsConfig()
    views = [multi_crop(read(item) if isinstance(item, bytes) else item, 224, config, rng) for item in data]
    for part in zip(*views, strict=True):
        torch.from_numpy(np.stack(part)).to(torch.float32).div_(255).sub_(MEAN).div_(STD)


def theirs(
    data: Sequence[Image.Image] | Sequence[bytes], transform: Callable[[Image.Image], list[torch.Tensor]]
) -> None:
    views = [transform(opened(item)) for item in data]
    for part in zip(*views, strict=True):
        torch.stack(part)


def opened(item: Image.Image | bytes) -> Image.Image:
    return Image.open(io.BytesIO(item)).convert("RGB") if isinstance(item, bytes) else item


def main() -> None:
    options = parser(__doc__).parse_args()
    torch.set_num_threads(1)
    count, rounds = (16, 3) if options.quick else (64, 9)
    data, transform = images(count, (500, 375)), official()
    official_images = [opened(item) for item in data]
    rows = []
    for mode, read in {"fast": decode_pixels, "exact": decode}.items():
        decoded = [read(item) for item in data]
        for label, mine, other in (("crops", decoded, official_images), ("decoding and crops", data, data)):
            pairs = interleave(
                lambda i=mine, r=read: 10 * count / seconds(lambda: ours(i, r)),
                lambda i=other: 10 * count / seconds(lambda: theirs(i, transform)),
                rounds,
            )
            rows.append(row(f"{label}, {mode}", pairs, 1.3, "crops/s", True))
    report("multi-crop on one core: ours / torchvision + PIL", rows, options.json)


if __name__ == "__main__":
    main()
