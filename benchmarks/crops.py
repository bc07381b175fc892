"""Multi-crop augmentation per core: ours against the official pipeline (torchvision and PIL) on the same images.

    python benchmarks/crops.py [--quick] [--json FILE]

Two 224-pixel and eight 96-pixel crops of every image, with the official probabilities; theirs ends in ToTensor and
Normalize as DataAugmentationDINO does, ours in uint8 with the normalisation of the whole batch added, which the
objective does. Without decoding, which is the same on both sides, and with it. One thread.
"""

from __future__ import annotations

import io
import random
from collections.abc import Callable

import numpy as np
import torch
from common import interleave, parser, report, row, seconds
from PIL import Image, ImageFilter, ImageOps
from torchvision import transforms as T

from sparo_train.data.examples.multi_crop import CropsConfig, multi_crop
from sparo_train.models.vit_config import IMAGENET_MEAN, IMAGENET_STD

MEAN, STD = (torch.tensor(v).view(3, 1, 1) for v in (IMAGENET_MEAN, IMAGENET_STD))


def images(count: int, size: tuple[int, int]) -> list[bytes]:
    """Photo-like JPEGs: smooth colours and some noise."""
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


def official() -> Callable[[Image.Image], list[torch.Tensor]]:
    """The official augmentation, from torchvision's and PIL's operations."""

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


def ours(data: list[Image.Image] | list[bytes]) -> None:
    rng, config = np.random.default_rng(0), CropsConfig()
    found = [multi_crop(opened(item), 224, config, rng) for item in data]
    for part in zip(*found, strict=True):
        torch.from_numpy(np.stack(part)).to(torch.float32).div_(255).sub_(MEAN).div_(STD)


def theirs(data: list[Image.Image] | list[bytes], transform: Callable[[Image.Image], list[torch.Tensor]]) -> None:
    found = [transform(opened(item)) for item in data]
    for views in zip(*found, strict=True):
        torch.stack(views)


def opened(item: Image.Image | bytes) -> Image.Image:
    return Image.open(io.BytesIO(item)).convert("RGB") if isinstance(item, bytes) else item


def main() -> None:
    options = parser(__doc__).parse_args()
    torch.set_num_threads(1)
    count, rounds = (16, 3) if options.quick else (64, 9)
    data, transform = images(count, (500, 375)), official()
    decoded = [opened(item) for item in data]
    rows = []
    for label, items, bar in (("crops", decoded, 1.3), ("decoding and crops", data, 1.3)):
        pairs = interleave(
            lambda i=items: 10 * count / seconds(lambda: ours(i)),
            lambda i=items: 10 * count / seconds(lambda: theirs(i, transform)),
            rounds,
        )
        rows.append(row(f"{label}, 500 x 375", pairs, bar, "crops/s", True))
    report("multi-crop on one core: ours / torchvision + PIL", rows, options.json)


if __name__ == "__main__":
    main()
