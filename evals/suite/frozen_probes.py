"""Probes of frozen features other than classification: ridge regression of numbers, and linear segmentation of pixels."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from sparo_train.core.config import field
from sparo_train.core.errors import ConfigError, DataError

from ..encoders.capabilities import TokensEncoder
from ..encoders.encoder import Encoder
from ..encoders.pixels import LibraryPixels, Pixels
from ..feature_store.feature_table import Features, View
from ..sets.base import EvalSet
from ..sets.open_set import open_labelled
from ..sets.task_config import LabelledTaskConfig
from ..tasks import linear_segmentation, regression
from ..tasks.linear_segmentation import PatchFeatures, SegmentationTraining
from ..tasks.result import Result
from .scoring import Scoring, attach_data_info, learned_on
from .task import Task

_MOST_CLASSES = 1000


class RegressionTaskConfig(LabelledTaskConfig):
    """Ridge regression of the numbers in `columns.target` on the encodings, which are standardised."""

    task: Literal["regression"] = field("regression", "Entry of sparo.tasks.")
    normalize: bool = field(False, "Scale encodings to norm one before standardising.")
    headline: Literal["r2", "mae", "rmse", "spearman"] = field("r2", "Metric that tables show.")


def run_regression(scoring: Scoring, task: RegressionTaskConfig) -> Result:
    """Fit on one rank, while the others wait for the result."""
    train_set, test_set = open_labelled(task, "target")
    transform = scoring.encoder.transform_with_resize(task.resize)
    train, test = scoring.features([train_set, test_set], task.workers, transform)

    def encodings(features: Features) -> np.ndarray:
        rows = features.in_memory()
        return (F.normalize(rows, dim=-1) if task.normalize else rows).numpy()

    def fit() -> Result:
        numbers = [np.array(features.facts, np.float64) for features in (train, test)]
        found = regression.score(
            encodings(train), numbers[0], encodings(test), numbers[1], train_set.groups, test_set.groups
        )
        return found.headed(task.headline)

    options = {"normalize": task.normalize, **learned_on(train_set, test_set, task.resize)}
    return attach_data_info(scoring.ranks.rank0_broadcast(fit), test, test_set, options)


class SegmentationTaskConfig(LabelledTaskConfig):
    """A linear layer from patch features to the class of each pixel.

    Images have masks of the same size: `columns.mask` of a table, or members `.semantic.png` (without them,
    `.mask.png`) of shards. They are resized and cropped like the images, by nearest neighbours.
    """

    task: Literal["linear_segmentation"] = field("linear_segmentation", "Entry of sparo.tasks.")
    features: Literal["patches", "attention"] = field(
        "patches",
        "Input of the layer. patches: the last block's patch tokens; attention: each slot's attention to the patch.",
    )
    classes: int | None = field(
        None, "Number of classes. Default: the largest number in a mask plus one.", gt=1, examples=[21]
    )
    ignore: int | None = field(255, "Value of pixels that are not counted. null: none.", ge=0, lt=1 << 16)
    epochs: int = field(20, "Passes over the training images.", ge=1)
    lr: float = field(0.003, "Peak learning rate of AdamW.", gt=0)
    batch_size: int = field(16, "Images per step.", gt=0)
    seed: int = field(0, "Seed of the order and the initial weights.")


def run_segmentation(scoring: Scoring, task: SegmentationTaskConfig) -> Result:
    """Train on one rank, while the others wait for the result. Features are computed once per image."""
    encoder = scoring.encoder
    sets = open_labelled(task, "masks")
    transform = encoder.transform_with_resize(task.resize)
    stored = scoring.features(sets, task.workers, transform, _view(encoder, task.features))
    how = SegmentationTraining(task.lr, task.epochs, task.batch_size, task.seed, encoder.device)

    def train_and_score() -> Result:
        parts = [_patches(encoder, task, *part, transform) for part in zip(stored, sets, strict=True)]
        classes = 1 + max(linear_segmentation.largest_label(part.masks, task.ignore) for part in parts)
        if classes < 2:
            raise DataError(
                f"{task.train}: masks have a single class, got {max(classes - 1, 0)} as their largest number (ignored: {task.ignore}). "
                "If the ignored value is a class, set ignore: null."
            )
        if task.classes is not None and classes > task.classes:
            raise ConfigError(
                f"classes={task.classes}: a mask contains class {classes - 1}. Raise classes, or set ignore."
            )
        return linear_segmentation.score(parts[0], parts[1], task.classes or classes, task.ignore, how, sets[1].groups)

    options = {
        "features": task.features, "lr": task.lr, "epochs": task.epochs, "batch_size": task.batch_size, "seed": task.seed,
        "steps": task.epochs * -(-len(sets[0]) // task.batch_size), "ignore": task.ignore, "mask_size": encoder.image_size,
        **learned_on(*sets, task.resize),
    }  # fmt: skip
    return attach_data_info(scoring.ranks.rank0_broadcast(train_and_score), stored[1], sets[1], options)


def _view(encoder: Encoder, features: str) -> View:
    """Return the function whose values are stored: all tokens, as for the attentive probe, or the slots' attention to patches."""
    assert isinstance(encoder, TokensEncoder)  # encoders with `tokens`
    if features == "patches":
        return View("tokens", lambda pixels: encoder.tokens(pixels).flatten(1))
    slots: Any = encoder

    def attention(pixels: Tensor) -> Tensor:
        shown = slots.image_slots(list(pixels.permute(0, 2, 3, 1).cpu().numpy())).attention
        return shown[..., encoder.prefix_tokens :].float().flatten(1)

    return View("slots' attention to patches", attention, measured=True)


def _patches(
    encoder: Any, task: SegmentationTaskConfig, features: Features, source: EvalSet, transform: Any
) -> PatchFeatures:
    """Return patch features (n, P, D) and masks at the size of the encoder's input."""
    if task.features == "patches":
        prefix, width = encoder.prefix_tokens, encoder.token_width

        def rows(numbers: Tensor) -> Tensor:
            return features.rows(numbers).unflatten(1, (-1, width))[:, prefix:]
    else:

        def rows(numbers: Tensor) -> Tensor:
            return features.rows(numbers).unflatten(1, (encoder.slots, -1)).mT

    maps = []
    for key, fact in zip(features.keys, features.facts, strict=True):
        # The class of each pixel, if the object numbers come with one.
        mask = np.asarray(fact)
        mask = mask[-1] if mask.ndim == 3 else mask
        largest = linear_segmentation.largest_label([mask], task.ignore)
        if largest >= _MOST_CLASSES:
            raise DataError(
                f"{source.root}: {key}: class numbers must be below {_MOST_CLASSES}, got {largest}. Set ignore, or renumber the classes."
            )
        labels = transform.labels(Image.fromarray(mask.astype(np.int32)))
        maps.append(labels.astype(np.uint8 if mask.max(initial=0) < 256 else np.uint16))
    return PatchFeatures(rows, np.stack(maps))


def _segmentation_incompatibility(task: SegmentationTaskConfig, encoder: Any) -> str | None:
    """Return why this encoder's features cannot be segmented, before they are computed."""
    if task.features == "attention" and (encoder.slots < 2 or not hasattr(encoder, "image_slots")):
        return f"features=attention: {encoder.label} has no slots with attention to patches. Use features=patches."
    if not isinstance(encoder.transform, Pixels | LibraryPixels):
        return f"task: {encoder.label} has an unknown transform, which masks cannot follow. Use linear or probe."
    return None


def _check(kind: str) -> Any:
    return lambda task: [source.check() for source in open_labelled(task, kind)]


REGRESSION = Task(RegressionTaskConfig, run_regression, _check("target"), facts="target")
SEGMENTATION = Task(
    SegmentationTaskConfig,
    run_segmentation,
    _check("masks"),
    needs=("tokens",),
    facts="masks",
    incompatibility=_segmentation_incompatibility,
)
