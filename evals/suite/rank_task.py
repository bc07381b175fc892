"""Task without labels: the effective rank of encodings (RankMe), and of what views of an image share (LiDAR)."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from PIL import Image
from torchvision.transforms import v2

from sparo_train.core.config import field
from sparo_train.core.errors import DataError
from sparo_train.data.decode.bands import PixelRange
from sparo_train.data.decode.decoding import to_8bit

from ..encoders.encoder import Encoder
from ..encoders.pixels import BandPixels, MappedPixels
from ..sets.base import EvalSet
from ..sets.task_config import TaskConfig
from ..sets.wds import open_images
from ..tasks import ranks
from ..tasks.result import Result
from .scoring import Scoring, attach_data_info
from .task import Task


class RankTaskConfig(TaskConfig):
    """Effective ranks of encodings, which predict how well a linear probe does, without labels.

    LiDAR (Thilak et al. 2024) compares images by several random views of each: crops of 40 to 100 % of the image, flips, and
    changes of colour, as the global crops of DINO, without blur. RankMe (Garrido et al. 2023) uses one of the views.
    """

    task: Literal["rank"] = field("rank", "Kind of the task: an entry of sparo.tasks.")
    images: str = field(
        ...,
        "Path of the images: shards (a folder, a glob or a URL), or a folder with one subfolder per class.",
        examples=["data/own/train"],
    )
    views: int = field(10, "Views of each image.", ge=2, le=1000)
    limit: int | None = field(1000, "Use only this many images, evenly spaced. null: all.", gt=0, examples=[500])
    seed: int = field(0, "Seed of the views.")
    workers: int = field(2, "Processes that decode images.", ge=0, le=256)


@dataclass(frozen=True)
class RandomView:
    """A random view of an image, (size, size, 3) uint8, which depends on the image's content, the seed and the number of the view only."""

    size: int
    seed: int
    number: int
    pixel_range: PixelRange = "by_type"

    def __call__(self, image: Image.Image) -> np.ndarray:
        pixels = np.asarray(to_8bit(image, self.pixel_range).convert("RGB"))
        steps = v2.Compose([
            v2.RandomResizedCrop(self.size, scale=(0.4, 1.0), interpolation=v2.InterpolationMode.BICUBIC, antialias=True),
            v2.RandomHorizontalFlip(),
            v2.RandomApply([v2.ColorJitter(0.4, 0.4, 0.2, 0.1)], p=0.8),
            v2.RandomGrayscale(p=0.2),
        ])  # fmt: skip
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(zlib.crc32(pixels.tobytes()) * 1_000_003 + 7919 * self.seed + self.number)
            view = steps(torch.from_numpy(pixels.copy()).permute(2, 0, 1))
        return view.permute(1, 2, 0).numpy()


def run_rank(scoring: Scoring, task: RankTaskConfig) -> Result:
    """Encode every view of every image, and compute the ranks on one rank."""
    source, encoder = _open(task), scoring.encoder
    pixel_range = encoder.transform.pixel_range if isinstance(encoder.transform, MappedPixels) else "by_type"
    encoded = [
        scoring.features([source], task.workers, RandomView(encoder.image_size, task.seed, number, pixel_range))[0]
        for number in range(task.views)
    ]
    result = scoring.ranks.rank0_broadcast(
        lambda: ranks.score(torch.stack([features.in_memory() for features in encoded], dim=1).numpy())
    )
    return attach_data_info(result, encoded[0], source, {"seed": task.seed})


def _open(task: RankTaskConfig) -> EvalSet:
    source = open_images(task.images, "images", "images")
    source = source if task.limit is None else source.limit_to(task.limit)
    if len(source) < 2:
        raise DataError(
            f"{task.images}: the rank of encodings needs at least two images, got {len(source)}. Use more images."
        )
    return source


def _incompatibility(_task: RankTaskConfig, encoder: Encoder) -> str | None:
    if isinstance(encoder.transform, BandPixels):
        return f"task: {encoder.label} reads other bands than RGB, which random views cannot show. Use knn."
    return None


RANK = Task(
    RankTaskConfig, run_rank, lambda task: _open(task).check(), facts="images", incompatibility=_incompatibility
)
