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
from sparo_train.core.ring import sum_over_ranks
from sparo_train.core.rng import generator, torch_seed
from sparo_train.data.transforms import eval_pixels, random_resized_crop_box, resized_crop
from sparo_train.train.eval_config import KnnTaskConfig, LinearTaskConfig

from .encoders import DinoEncoder, Encoder
from .labelled import LabelledImages, batched, read_batches
from .results import Result
from .tasks import knn, linear

_BATCH, _AT_ONCE = 256, 16  # images in a forward, and forwards whose encodings are handed on together


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
    bank, test = LabelledImages(task.train, pixels, "train"), LabelledImages(task.test, pixels, "test")
    own = _features(encoder, test, task.workers, ranks, encoder.encode)
    queries, labels = (torch.cat(parts) for parts in zip(*ranks.gather(own[:2]), strict=True))
    k, seen = max(task.k), [torch.zeros(0, dtype=torch.int64)]

    def rows() -> Iterator[Tensor]:
        """The bank's encodings, of which nothing is kept: its labels are."""
        for encodings, answers in _encoded(encoder, bank, task.workers, ranks, encoder.encode):
            seen.append(answers)
            yield encodings

    found = knn.nearest(queries.to(encoder.device), rows(), k, _share(bank, ranks)[0])
    found = knn.merge(ranks.gather(knn.Nearest(*(t.cpu() for t in found))), k)
    bank_labels = torch.cat(ranks.gather(torch.cat(seen)))
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
    classes = task.classes or 1 + max(ranks.gather(max(torch.cat(known).tolist(), default=0)))
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
        read = read_batches(train, [mine for mine in own if mine], task.workers)
        for numbers, mine in zip(whole, own, strict=True):
            if not mine:  # a last batch smaller than the number of ranks
                yield held.encodings[:0].to(encoder.device), held.labels[:0].to(encoder.device), len(numbers)
                continue
            pixels, labels = next(read)
            if int(labels.max()) >= classes:
                raise DataError(
                    f"{task.train}: label {int(labels.max())}, and {task.test} has {classes} classes; set the task's classes"
                )
            yield probe(pixels), labels.to(encoder.device), len(numbers)

    lr, seed = task.lr * task.batch_size / 256, torch_seed(task.seed, "probe")
    alone = (
        {"summed": sum_over_ranks} if ranks.size > 1 else {}
    )  # not by the process group: in training the others wait
    linear.train_probe(
        batches, held.encodings.shape[1], classes, task.epochs, lr, seed, encoder.device, report, **alone
    )
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


Encode = Callable[[Tensor], Tensor]


def _share(images: LabelledImages, ranks: Ranks) -> tuple[int, int]:
    """This rank's images: first, and one behind the last."""
    first, last = (len(images) * (ranks.rank + i) // ranks.size for i in (0, 1))
    return first, last


def _encoded(
    encoder: Encoder, images: LabelledImages, workers: int, ranks: Ranks, encode: Encode
) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's share of a data set, encoded on the encoder's device, with labels, some thousand at a time."""
    numbers = batched(list(range(*_share(images, ranks))), _BATCH)
    found: list[tuple[Tensor, Tensor]] = []
    for count, (pixels, labels) in enumerate(read_batches(images, numbers, workers), 1):
        found.append((encode(pixels), labels))
        if count % _AT_ONCE == 0 or count == len(numbers):
            encodings, answers = (torch.cat(parts) for parts in zip(*found, strict=True))
            if not encodings.isfinite().all():
                raise DataError(f"{images.key}: encodings are not finite; is the checkpoint whole?")
            yield encodings, answers
            found = []


def _features(encoder: Encoder, images: LabelledImages, workers: int, ranks: Ranks, encode: Encode) -> Features:
    """This rank's share of a data set, encoded."""
    parts = [(e.cpu(), y) for e, y in _encoded(encoder, images, workers, ranks, encode)]
    first = _share(images, ranks)[0]
    if not parts:  # more ranks than images
        none = encode(torch.zeros(1, 3, encoder.image_size, encoder.image_size, dtype=torch.uint8))[:0]
        return Features(none.cpu(), torch.zeros(0, dtype=torch.int64), first)
    encodings, labels = (torch.cat(column) for column in zip(*parts, strict=True))
    return Features(encodings, labels, first)
