"""Task of zero-shot segmentation: the class of every pixel by the similarity of patches, or of slots and their attention, to texts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from sparo_train.core.config import field
from sparo_train.core.errors import DataError
from sparo_train.data.decode.bands import PixelRange
from sparo_train.data.decode.decoding import to_8bit

from ..encoders.dense import LastBlock, slot_similarity
from ..encoders.encoder import Encoder
from ..encoders.pixels import MappedPixels
from ..sets.base import EvalSet, read_batches, sha256
from ..sets.open_set import open_set
from ..sets.task_config import SetTaskConfig
from ..tasks import dense_segmentation as dense
from ..tasks import zeroshot
from ..tasks.linear_segmentation import class_counts, mean_iou
from ..tasks.result import Result
from .scoring import PartsMissingError, Scoring, facts_digest
from .task import Task


class ZeroshotSegmentationTaskConfig(SetTaskConfig):
    """The class of every pixel by the similarity of patches to prompts; mIoU over all images together.

    Scores of published protocols differ by several points, so results record the protocol: `windows`, `last_block`, and
    the background (`ignore_background`, or a class with `background_threshold`).
    """

    task: Literal["zeroshot_segmentation"] = field(
        "zeroshot_segmentation", "Kind of the task: an entry of sparo.tasks."
    )
    features: Literal["patches", "attention"] = field(
        "patches",
        "Encodings that are compared with texts. patches: one per patch. attention: one per slot; the slot's "
        "similarity to the text is then spread over the patches by the slot's attention.",
    )
    last_block: LastBlock = field(
        "standard",
        "Attention of the last block, for features=patches. standard: unchanged; values: every patch attends to itself only "
        "(MaskCLIP); correlative: queries to queries and keys to keys (SCLIP).",
    )
    windows: Literal["slide", "whole"] = field(
        "slide",
        "slide: the image is resized so that its shorter side is 1.5 times the encoder's input size, and "
        "windows of the input size slide over it; whole: the image is resized to the encoder's input size.",
    )
    ignore: int | None = field(
        255, "Value of mask pixels that are not counted. null: all pixels are counted.", ge=0, lt=1 << 16
    )
    ignore_background: bool = field(
        False, "Exclude pixels of class 0 from the score. The list of names then begins with class 1."
    )
    background_threshold: float | None = field(
        None, "Pixels get class 0 if their largest probability is below this value.", gt=0, lt=1, examples=[0.1]
    )
    several_names: bool = field(False, "Lines of classnames.txt contain several names, separated by commas.")
    scale: float = field(40.0, "Factor by which cosines are multiplied before the softmax over all names.", gt=0)


@dataclass(frozen=True)
class WindowPixels:
    """Resize an image for windows of `window` pixels, (H, W, 3) uint8.

    The shorter side becomes `short`, and the proportions are kept as far as the longer side is at most `long` and no side is
    below `window`. With `short` equal to `window`, the image becomes a square.
    """

    window: int
    short: int
    long: int = 2048
    pixel_range: PixelRange = "by_type"

    def __call__(self, image: Image.Image) -> np.ndarray:
        image = to_8bit(image, self.pixel_range).convert("RGB")
        ratio = min(self.short / min(image.size), self.long / max(image.size))
        width, height = (max(self.window, round(side * ratio)) for side in image.size)
        size = (self.window, self.window) if self.short == self.window else (width, height)
        return np.asarray(image.resize(size, Image.Resampling.BICUBIC))


def run_zeroshot_segmentation(scoring: Scoring, task: ZeroshotSegmentationTaskConfig) -> Result:
    """Compute mIoU over the images; ranks share them. Nothing but texts is stored, because a map has thousands of values per pixel."""
    if scoring.part is not None:
        raise PartsMissingError(f"{scoring.name}: cannot be divided into parts. Score it without --part.")
    source, ranks = open_set(task, "masks"), scoring.ranks
    names = _names(source, task)
    templates = source.templates()
    class_of_query = torch.tensor([i for i, listed in enumerate(names) for _ in listed])
    queries = [name for listed in names for name in listed]
    texts = ranks.rank0_broadcast(
        lambda: zeroshot.classifier(scoring.texts(zeroshot.prompts(queries, templates)), len(queries))
    ).to(scoring.encoder.device)
    numbers = list(range(ranks.rank, len(source), ranks.size))

    def own_counts() -> list[tuple[int, str, bytes, np.ndarray]]:
        rows = []
        for number, (key, mask, similarity) in zip(
            numbers, _similarities(scoring, source, task, texts, numbers), strict=True
        ):
            truth = _truth(source, key, mask, task, len(names))
            predicted = dense.classify(
                dense.enlarge(similarity, truth.shape),
                class_of_query,
                len(names),
                task.scale,
                task.background_threshold,
            )
            row = class_counts(truth, predicted.cpu().numpy(), len(names), -1)
            rows.append((number, key, facts_digest([key], [truth]).encode(), row))
            scoring.store.on_progress(str(source.root), len(rows), len(numbers))
        return rows

    gathered = sorted(
        (row for rows in ranks.gather(ranks.call_on_all(own_counts)) for row in rows), key=lambda row: row[0]
    )
    _, keys, digests, counts = zip(*gathered, strict=True)
    if not np.any(np.stack(counts)[:, 1]):
        raise DataError(f"{source.root}: no pixel is left to score. Correct `ignore` or `ignore_background`.")
    result = mean_iou("zeroshot_segmentation", np.stack(counts), source.groups)
    if repeated := len(queries) - len({" ".join(name.lower().split()) for name in queries}):
        result = result._replace(counts={**result.counts, "classes_of_one_name": repeated})
    options: dict[str, Any] = {
        "features": task.features, "last_block": task.last_block, "windows": task.windows, "scale": task.scale,
        "ignore": task.ignore, "ignore_background": task.ignore_background, "background_threshold": task.background_threshold,
        "prompts": sha256(*queries, *templates)[:16], "templates": len(templates), "facts": sha256(*digests)[:32],
    }  # fmt: skip
    if source.left_out:
        options["left_out"] = dict(source.left_out)
    return result._replace(options={**result.options, **options}, data=source.identity(), keys=keys)


def _names(source: EvalSet, task: ZeroshotSegmentationTaskConfig) -> list[list[str]]:
    """Return the names of each class."""
    lines = source.classnames()
    names = [
        [part.strip() for part in line.split(",") if part.strip()] if task.several_names else [line] for line in lines
    ]
    if empty := [line for line, listed in zip(lines, names, strict=True) if not listed]:
        raise DataError(f"{source.home or source.root}: class names: {empty[0]!r} contains no name")
    return names


def _similarities(
    scoring: Scoring, source: EvalSet, task: ZeroshotSegmentationTaskConfig, texts: Tensor, numbers: Sequence[int]
) -> Iterator[tuple[str, np.ndarray, Tensor]]:
    """Yield key, mask and similarities (Q, h, w) of these images."""
    encoder: Any = scoring.encoder
    size = encoder.image_size
    # 16 bits are mapped as in training.
    pixel_range = encoder.transform.pixel_range if isinstance(encoder.transform, MappedPixels) else "by_type"
    short = size if task.windows == "whole" else size * 3 // 2
    transform = WindowPixels(size, short, pixel_range=pixel_range)
    batches = read_batches(source, transform, [[number] for number in numbers], task.workers, scoring.ranks.size == 1)
    for batch in batches:
        height, width = batch.pixels.shape[-2:]
        corners = [
            (row, column)
            for row in dense.window_starts(height, size, size // 2)
            for column in dense.window_starts(width, size, size // 2)
        ]
        windows = torch.stack([batch.pixels[0, :, r : r + size, c : c + size] for r, c in corners])
        view = f"dense {task.features} {task.last_block}"
        maps = scoring.store.batch.run(encoder, view, lambda pixels: _maps(encoder, task, texts, pixels), windows)
        yield batch.keys[0], np.asarray(batch.facts[0]), dense.over_windows(list(maps), corners, (height, width))


def _maps(encoder: Any, task: ZeroshotSegmentationTaskConfig, texts: Tensor, pixels: Tensor) -> Tensor:
    """Return similarities (n, Q, S, S) of pixels (n, 3, S, S) and texts (Q, D)."""
    if task.features == "patches":
        similarity = F.normalize(encoder.dense(pixels, task.last_block), dim=-1) @ texts.T
    else:
        slots = encoder.image_slots(list(pixels.permute(0, 2, 3, 1).cpu().numpy()))
        length = slots.values.shape[1]
        image = F.normalize(slots.flat().float(), dim=-1).unflatten(-1, (length, -1))
        patches = slots.attention[..., encoder.prefix_tokens :].float()
        similarity = slot_similarity(patches, image, texts.unflatten(-1, (length, -1)))
    side = round(similarity.shape[1] ** 0.5)
    grid = similarity.mT.unflatten(2, (side, -1))
    return F.interpolate(grid.float(), pixels.shape[-2:], mode="bilinear", align_corners=False)


def _truth(
    source: EvalSet, key: str, mask: np.ndarray, task: ZeroshotSegmentationTaskConfig, classes: int
) -> np.ndarray:
    """Return the class of each pixel, int64 (H, W), -1 where it is not counted. Raises `DataError` for a class without a name."""
    labels = (mask[-1] if mask.ndim == 3 else mask).astype(np.int64)
    counted = np.ones_like(labels, dtype=bool) if task.ignore is None else labels != task.ignore
    if task.ignore_background:
        counted, labels = counted & (labels != 0), labels - 1
    largest = int(labels[counted].max(initial=-1))
    if largest >= classes:
        raise DataError(
            f"{source.root}: {key}: has class {largest}, but there are {classes} class names. Set the key `ignore`, or add class names."
        )
    return np.where(counted, labels, -1)


def _check_zeroshot(task: ZeroshotSegmentationTaskConfig) -> None:
    source = open_set(task, "masks")
    source.check()
    source.templates()
    if len(_names(source, task)) < 2:
        raise DataError(f"{source.root}: segmentation needs at least two classes, got {len(source.classnames())}")


def _zeroshot_incompatibility(task: ZeroshotSegmentationTaskConfig, encoder: Encoder) -> str | None:
    if task.features == "patches":
        return None if "dense" in encoder.offers else (
            f"features=patches: {encoder.label} has no patches in the space of its texts (open_clip's vision transformer has). Use "
            "linear_segmentation or knn_segmentation."
        )  # fmt: skip
    if encoder.slots < 2 or not hasattr(encoder, "image_slots"):
        return f"features=attention: {encoder.label} has no slots with attention to patches. Use features=patches."
    if task.last_block != "standard":
        return f"last_block={task.last_block}: applies to features=patches only. Remove it."
    return None


ZEROSHOT_SEGMENTATION = Task(
    ZeroshotSegmentationTaskConfig,
    run_zeroshot_segmentation,
    _check_zeroshot,
    needs=("texts",),
    facts="masks",
    incompatibility=_zeroshot_incompatibility,
)
