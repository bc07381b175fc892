"""Tasks of segmentation by labelled patches of frozen encoders: a linear layer, and k-NN."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch
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
from ..tasks import dense_segmentation as dense
from ..tasks import knn, linear_segmentation
from ..tasks.linear_segmentation import PatchFeatures, SegmentationTraining, class_counts, largest_label, mean_iou
from ..tasks.result import Result
from .scoring import Scoring, attach_data_info, training_details
from .task import Task

_MOST_CLASSES = 1000
_QUERIES = 4096  # patches whose neighbours are searched at once


class MaskedTaskConfig(LabelledTaskConfig):
    """Images with masks of the same size: `columns.mask` of a table, or members `.semantic.png` (without them, `.mask.png`) of shards.

    They are resized and cropped like the images, by nearest neighbours.
    """

    classes: int | None = field(
        None, "Number of classes. Default: the largest number in a mask plus one.", gt=1, examples=[21]
    )
    ignore: int | None = field(
        255, "Value of mask pixels that are not counted. null: all pixels are counted.", ge=0, lt=1 << 16
    )


class SegmentationTaskConfig(MaskedTaskConfig):
    """A linear layer from patch features to the class of each pixel."""

    task: Literal["linear_segmentation"] = field("linear_segmentation", "Kind of the task: an entry of sparo.tasks.")
    features: Literal["patches", "attention"] = field(
        "patches",
        "Input of the layer. patches: the last block's patch tokens; attention: each slot's attention to the patch.",
    )
    epochs: int = field(20, "Passes over the training images.", ge=1)
    lr: float = field(0.003, "Peak learning rate of AdamW.", gt=0)
    batch_size: int = field(16, "Images per step.", gt=0)
    seed: int = field(0, "Random seed for the initial weights and for the order of training images.")


def run_segmentation(scoring: Scoring, task: SegmentationTaskConfig) -> Result:
    """Train on one rank, while the others wait for the result. Features are computed once per image."""
    encoder = scoring.encoder
    sets = open_labelled(task, "masks")
    transform = encoder.transform_with_resize(task.resize)
    stored = scoring.features(sets, task.workers, transform, _view(encoder, task.features))
    how = SegmentationTraining(task.lr, task.epochs, task.batch_size, task.seed, encoder.device)

    def train_and_score() -> Result:
        train, test = (
            _patches(encoder, task.features, task, *part, transform) for part in zip(stored, sets, strict=True)
        )
        return linear_segmentation.score(train, test, _classes(task, train, test), task.ignore, how, sets[1].groups)

    options = {
        "features": task.features, "lr": task.lr, "epochs": task.epochs, "batch_size": task.batch_size, "seed": task.seed,
        "steps": task.epochs * -(-len(sets[0]) // task.batch_size), "ignore": task.ignore, "mask_size": encoder.image_size,
        **training_details(*sets, task.resize),
    }  # fmt: skip
    return attach_data_info(scoring.ranks.rank0_broadcast(train_and_score), stored[1], sets[1], options)


class KnnSegmentationTaskConfig(MaskedTaskConfig):
    """The class of every pixel by the nearest patches of training images, as in Hummingbird's evaluation (Balažević et al. 2023)."""

    task: Literal["knn_segmentation"] = field("knn_segmentation", "Kind of the task: an entry of sparo.tasks.")
    k: int = field(30, "Number of nearest training patches that vote on the class of a patch.", gt=0)
    temperature: float = field(
        0.02, "Temperature of the softmax that turns cosines into the weights of the neighbours' votes.", gt=0
    )
    bank: int = field(1_024_000, "Largest number of training patches; if there are more, a random part is used.", gt=0)
    seed: int = field(0, "Random seed for choosing training patches if there are more than `bank`.")


def run_knn_segmentation(scoring: Scoring, task: KnnSegmentationTaskConfig) -> Result:
    """Compute mIoU of the test images on one rank; features are computed by all, once per image."""
    encoder = scoring.encoder
    sets = open_labelled(task, "masks")
    transform = encoder.transform_with_resize(task.resize)
    stored = scoring.features(sets, task.workers, transform, _view(encoder, "patches"))

    def score() -> Result:
        train, test = (_patches(encoder, "patches", task, *part, transform) for part in zip(stored, sets, strict=True))
        classes = _classes(task, train, test)
        bank, labels = _bank(train, classes, task)
        if not len(bank):
            raise DataError(f"{task.train}: every pixel is {task.ignore}, which is ignored. Correct the key `ignore`.")
        tables, side = [], round(train.rows(torch.tensor([0])).shape[1] ** 0.5)
        step = max(1, _QUERIES // side**2)
        for numbers in torch.arange(len(test.masks)).split(step):
            patches = test.rows(numbers).to(encoder.device)
            found = knn.find_nearest(patches.flatten(0, 1), bank, min(task.k, len(bank)))
            voted = dense.vote(found.similarity.cpu(), labels[found.row.cpu()], task.temperature)
            maps = voted.mT.unflatten(-1, (len(numbers), side, side)).transpose(0, 1)
            size = test.masks.shape[1:]
            predicted = F.interpolate(maps, size, mode="bilinear", align_corners=False).argmax(1).numpy()
            truth = test.masks[numbers.numpy()]
            tables += [class_counts(t, p, classes, task.ignore) for t, p in zip(truth, predicted, strict=True)]
        return mean_iou("knn_segmentation", np.stack(tables), sets[1].groups)

    options = {
        "k": task.k, "temperature": task.temperature, "bank": task.bank, "ignore": task.ignore, "mask_size": encoder.image_size,
        "ignored_in_bank": "patches without a counted pixel", **training_details(*sets, task.resize),
    }  # fmt: skip
    return attach_data_info(scoring.ranks.rank0_broadcast(score), stored[1], sets[1], options)


def _bank(train: PatchFeatures, classes: int, task: KnnSegmentationTaskConfig) -> tuple[Tensor, Tensor]:
    """Return unit-norm patches (m, D) and their shares of classes (m, C), fp16; patches without a counted pixel are not among them."""
    side = round(train.rows(torch.tensor([0])).shape[1] ** 0.5)
    images = len(train.masks)
    chosen = torch.ones(images * side**2, dtype=torch.bool)
    if len(chosen) > task.bank:
        random = torch.randperm(len(chosen), generator=torch.Generator().manual_seed(task.seed))
        chosen[random[task.bank :]] = False
    patches, labels = [], []
    for numbers in torch.arange(images).split(64):
        masks = torch.from_numpy(train.masks[numbers.numpy()].astype(np.int64))
        shares = dense.patch_labels(masks, side, classes, task.ignore).flatten(0, 1)
        kept = chosen[numbers[0] * side**2 : (numbers[-1] + 1) * side**2] & (shares.sum(1) > 0)
        patches.append(F.normalize(train.rows(numbers).flatten(0, 1)[kept], dim=-1).half())
        labels.append(shares[kept].half())
    return torch.cat(patches), torch.cat(labels)


def _classes(task: MaskedTaskConfig, *parts: PatchFeatures) -> int:
    """Return the number of classes in the masks, or the task's own. Raises an error if masks do not fit it."""
    classes = 1 + max(largest_label(part.masks, task.ignore) for part in parts)
    if classes == 0:
        raise DataError(f"{task.train}: every pixel is {task.ignore}, which is ignored. Correct the key `ignore`.")
    if classes < 2:
        raise DataError(
            f"{task.train}: masks need at least two classes, so the largest class number must be at least 1, got "
            f"{max(classes - 1, 0)} (ignored value: {task.ignore}). If the ignored value is a class, set ignore: "
            "null."
        )
    if task.classes is not None and classes > task.classes:
        raise ConfigError(
            f"classes={task.classes}: a mask contains class {classes - 1}. Raise `classes`, or set `ignore`."
        )
    return task.classes or classes


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
    encoder: Any, kind: str, task: MaskedTaskConfig, features: Features, source: EvalSet, transform: Any
) -> PatchFeatures:
    """Return patch features (n, P, D), or attention of slots, and masks at the size of the encoder's input."""
    if kind == "patches":
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
        largest = largest_label([mask], task.ignore)
        if largest >= _MOST_CLASSES:
            raise DataError(
                f"{source.root}: {key}: class numbers must be below {_MOST_CLASSES}, got {largest}. Set `ignore`, or renumber the classes."
            )
        labels = transform.labels(Image.fromarray(mask.astype(np.int32)))
        maps.append(labels.astype(np.uint8 if mask.max(initial=0) < 256 else np.uint16))
    return PatchFeatures(rows, np.stack(maps))


def _incompatibility(task: SegmentationTaskConfig | KnnSegmentationTaskConfig, encoder: Encoder) -> str | None:
    """Return why this encoder's features cannot be segmented, before they are computed."""
    attention = isinstance(task, SegmentationTaskConfig) and task.features == "attention"
    if attention and (encoder.slots < 2 or not hasattr(encoder, "image_slots")):
        return f"features=attention: {encoder.label} has no slots with attention to patches. Use features=patches."
    if not isinstance(encoder.transform, Pixels | LibraryPixels):
        return f"task: {encoder.label} has an unknown transform, which masks cannot follow. Use linear or probe."
    return None


def _check(task: SegmentationTaskConfig | KnnSegmentationTaskConfig) -> None:
    for source in open_labelled(task, "masks"):
        source.check()


SEGMENTATION = Task(
    SegmentationTaskConfig,
    run_segmentation,
    _check,
    needs=("tokens",),
    facts="masks",
    incompatibility=_incompatibility,
)
KNN_SEGMENTATION = Task(
    KnnSegmentationTaskConfig,
    run_knn_segmentation,
    _check,
    needs=("tokens",),
    facts="masks",
    incompatibility=_incompatibility,
)
