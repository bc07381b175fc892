"""k-NN and linear probe of an image encoder, on one rank or several: every image is seen once, by one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from sparo_train.core.distributed import Ranks
from sparo_train.core.errors import DataError
from sparo_train.core.rng import generator, torch_seed
from sparo_train.data.transforms import eval_pixels, random_resized_crop_box, resized_crop
from sparo_train.train.eval_config import KnnTaskConfig, LinearTaskConfig

from .encoders import DinoEncoder, Encoder
from .labelled import LabelledImages, batched, loader
from .results import Result
from .tasks import knn, linear

_BATCH = 256


class Features(NamedTuple):
    """This rank's rows `first` … of a data set: encodings (n, D) fp32 and labels (n,), on the CPU."""

    encodings: Tensor
    labels: Tensor
    first: int


def official_pixels(size: int, resize: int | None, image: Image.Image, _number: int) -> np.ndarray:
    """Shortest side to `resize` (default: 256 for 224, and in proportion), bicubic, and the middle of it."""
    return eval_pixels(image, size, resize or round(size * 256 / 224))


def run_knn(encoder: Encoder, task: KnnTaskConfig, ranks: Ranks) -> Result:
    """DINO's k-NN: the training images are the bank, cut over the ranks; all ranks return the same result."""
    pixels = partial(official_pixels, encoder.image_size, task.resize)
    bank, test = (
        _features(encoder, LabelledImages(place, pixels, key), task.workers, ranks)
        for key, place in (("train", task.train), ("test", task.test))
    )
    queries, labels = (torch.cat(parts) for parts in zip(*ranks.gather(test[:2]), strict=True))
    k = max(task.k)
    found = knn.nearest(queries.to(encoder.device), bank.encodings, k, bank.first)
    found = knn.merge(ranks.gather(knn.Nearest(*(t.cpu() for t in found))), k)
    bank_labels = torch.cat(ranks.gather(bank.labels))
    classes = 1 + int(torch.cat([bank_labels, labels]).max())
    return knn.score(found, bank_labels, labels, classes, task.k, task.temperature, 20 if 20 in task.k else task.k[0])


def run_linear(encoder: DinoEncoder, task: LinearTaskConfig, ranks: Ranks) -> Result:
    """DINO's linear probe. The test features are computed once; those of training too where `augment` is off."""
    still = partial(official_pixels, encoder.image_size, task.resize)
    train, test = LabelledImages(task.train, still, "train"), LabelledImages(task.test, still, "test")
    probe = partial(encoder.probe, n=task.n_last_blocks, avgpool=task.avgpool)
    held = _features(encoder, test, task.workers, ranks, probe)
    bank = None if task.augment else _features(encoder, train, task.workers, ranks, probe)
    known = [held.labels] if bank is None else [held.labels, bank.labels]
    classes = max(ranks.gather(task.classes or 1 + int(torch.cat(known).max())))
    right: list[tuple[int, int]] = []

    def report(_epoch: int, layer: nn.Linear) -> None:
        counts = linear.count_right(layer, held.encodings.split(_BATCH), held.labels.split(_BATCH))
        first, five = (sum(column) for column in zip(*ranks.gather(counts.tolist()), strict=True))
        right.append((first, five))

    def batches(epoch: int) -> Iterator[tuple[Tensor, Tensor, int]]:
        order = generator(task.seed, "probe", epoch).permutation(len(train)).tolist()
        whole = batched(order, task.batch_size)
        if bank is not None:
            yield from _held_batches(bank, whole, encoder.device)
            return
        train.transform = partial(_augmented, encoder.image_size, (task.seed, epoch))
        own = [numbers[ranks.rank :: ranks.size] for numbers in whole]
        for numbers, (pixels, labels) in zip(whole, loader(train, own, task.workers), strict=True):
            if labels.numel() and int(labels.max()) >= classes:
                raise DataError(
                    f"{task.train}: label {int(labels.max())}, and {task.test} has {classes} classes; set the task's classes"
                )
            yield probe(pixels), labels.to(encoder.device), len(numbers)

    lr, seed = task.lr * task.batch_size / 256, torch_seed(task.seed, "probe")
    linear.train_probe(batches, held.encodings.shape[1], classes, task.epochs, lr, seed, encoder.device, report)
    return linear.result(right, len(test), classes)


def _held_batches(bank: Features, whole: list[list[int]], device: torch.device) -> Iterator[tuple[Tensor, Tensor, int]]:
    """Of every global batch the rows that this rank holds."""
    for numbers in whole:
        at = torch.tensor(numbers) - bank.first
        at = at[(at >= 0) & (at < len(bank.labels))]
        yield bank.encodings[at].to(device), bank.labels[at].to(device), len(numbers)


def _augmented(size: int, names: tuple[int, int], image: Image.Image, number: int) -> np.ndarray:
    """torchvision's RandomResizedCrop and flip as eval_linear.py has them: bilinear, 8 to 100 per cent of the area."""
    seed, epoch = names
    rng = generator(seed, "probe-augment", epoch, number)
    pixels = resized_crop(image, random_resized_crop_box(image.size, (0.08, 1.0), rng), size, Image.Resampling.BILINEAR)
    return np.ascontiguousarray(pixels[:, ::-1]) if rng.random() < 0.5 else pixels


def _features(
    encoder: Encoder,
    images: LabelledImages,
    workers: int,
    ranks: Ranks,
    encode: Callable[[Tensor], Tensor] | None = None,
) -> Features:
    """This rank's share of a data set, encoded (default: the encoder's own encodings)."""
    first, last = (len(images) * (ranks.rank + i) // ranks.size for i in (0, 1))
    found, labels = [], []
    for pixels, answers in loader(images, batched(list(range(first, last)), _BATCH), workers):
        found.append((encode or encoder.encode)(pixels).cpu())
        labels.append(answers)
    encodings = torch.cat(found) if found else torch.zeros(0, 0)
    if not encodings.isfinite().all():
        raise DataError(f"{images.key}: encodings are not finite; is the checkpoint whole?")
    return Features(encodings, torch.cat(labels) if labels else torch.zeros(0, dtype=torch.int64), first)
