"""DINO's linear probe on a set's images: on stored features if the protocol allows it, otherwise through the backbone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from sparo_train.core.config import field
from sparo_train.core.distributed import Ranks, sum_over_ranks
from sparo_train.core.errors import BadSampleError, DataError
from sparo_train.core.rng import generator, torch_seed
from sparo_train.core.world import stop_here
from sparo_train.data.decode.decoding import TRAINING, Decoding, to_8bit, to_bands
from sparo_train.data.examples.image_transforms import get_size, random_resized_crop_box, resized_crop

from ..encoders.capabilities import BlocksEncoder
from ..feature_store.feature_table import Features, View
from ..sets.base import EvalSet, Fact, read_batches, split_batches
from ..sets.open_set import open_labelled
from ..sets.pictures import NEEDS_ALL
from ..sets.task_config import LabelledTaskConfig
from ..tasks import linear
from ..tasks.result import Result
from .labelled_tasks import check_labelled
from .scoring import Scoring, attach_data_info, chance, collect_labels, training_details
from .task import Task

_BATCH = 256


class LinearTaskConfig(LabelledTaskConfig):
    """DINO's linear probe on CLS of the last blocks (with SPARO: its encoding instead of the last one's)."""

    task: Literal["linear"] = field("linear", "Kind of the task: an entry of sparo.tasks.")
    n_last_blocks: int = field(4, "Number of last blocks whose CLS tokens are concatenated.", ge=1)
    avgpool: bool = field(
        False, "Also use the mean patch token of the last block (as DINO's authors do for ViT-B, with n_last_blocks=1)."
    )
    epochs: int = field(100, "Passes over the training images.", ge=1)
    lr: float = field(0.001, "Learning rate per 256 images: the rate is lr * batch_size / 256.", gt=0)
    batch_size: int = field(1024, "Images per step over all ranks.", gt=0)
    augment: bool = field(
        True, "Train on random crops and flips. false: compute features once, which differs from DINO's protocol."
    )
    classes: int | None = field(
        None,
        "Number of classes. Default: one more than the largest training or test label. With `augment`, only test "
        "labels count.",
        gt=1,
        examples=[1000],
    )
    seed: int = field(0, "Random seed for the order of training images, for the crops and for the initial weights.")


def run_linear(scoring: Scoring, task: LinearTaskConfig) -> Result:
    """Run the probe. Test features are computed once, and training features, too, if `augment` is off. All ranks return the same result."""
    encoder, ranks = scoring.encoder, scoring.ranks
    assert isinstance(encoder, BlocksEncoder)  # encoders with `blocks`
    train, test = open_labelled(task)
    # Set for the readers, so that a label beyond it is reported with its file's name.
    train.label_below = test.label_below = task.classes
    probe = partial(encoder.probe, n=task.n_last_blocks, avgpool=task.avgpool)
    view = View(f"probe n={task.n_last_blocks} avgpool={task.avgpool}", probe)
    transform = encoder.transform_with_resize(task.resize)
    test_features, *rest = scoring.features([test] if task.augment else [test, train], task.workers, transform, view)
    bank, answers = (rest[0] if rest else None), collect_labels(test_features, test)
    label_sets = [answers] if bank is None else [answers, collect_labels(bank, train)]
    classes = task.classes or 1 + max(torch.cat(label_sets).tolist())
    # Every rank scores its own share of the test after each epoch; counts are summed.
    own, first = test_features.share(ranks.rank, ranks.size)
    own_answers = answers[first : first + len(own)]
    right: list[Tensor] = []
    last: list[bool] = []

    def report(epoch: int, layer: nn.Linear) -> None:
        hits = linear.right_answers(layer, list(own.blocks(_BATCH)), _split_like(own, own_answers))
        counts = linear.count_right(hits, own_answers, classes)
        right.append(torch.tensor(ranks.gather(counts.tolist())).sum(dim=0))
        if epoch + 1 == task.epochs:  # the shares of the ranks follow each other
            last.extend(answer for part in ranks.gather(hits[0].tolist()) for answer in part)

    def batches(epoch: int) -> Iterator[tuple[Tensor, Tensor, int]]:
        # From the epoch only, so any number of ranks has the same batches.
        order = generator(task.seed, "probe", epoch).permutation(len(train)).tolist()
        if bank is None:
            yield from _augmented_batches(scoring, task, train, epoch, order, probe, classes, test_features.width)
            return
        for numbers, mine in _rank_batches(order, task.batch_size, ranks):
            at = torch.tensor(mine, dtype=torch.int64)
            yield bank.rows(at).to(encoder.device), label_sets[1][at].to(encoder.device), len(numbers)

    # The official script scales the rate by the batch size, too, so published rates can be used directly.
    lr, seed = task.lr * task.batch_size / 256, torch_seed(task.seed, "probe")
    # not by the process group: in training the others wait
    reduce_kwargs = {"summed": sum_over_ranks} if ranks.size > 1 else {}
    linear.train_probe(
        batches, test_features.width, classes, task.epochs, lr, seed, encoder.device, report, **reduce_kwargs
    )
    result = linear.result(right, torch.tensor(last), answers, classes)
    steps = task.epochs * -(-len(train) // task.batch_size)
    guess = chance(label_sets) if task.classes is None else 1 / task.classes
    result = result._replace(options={**result.options, "steps": steps}, chance=guess)
    return attach_data_info(result, test_features, test, training_details(train, test, task.resize))


def _split_like(features: Features, labels: Tensor) -> list[Tensor]:
    """Split labels into the blocks of `features`."""
    return list(labels.split([len(block) for block in features.blocks(_BATCH)]))


def _rank_batches(order: list[int], size: int, ranks: Ranks) -> Iterator[tuple[list[int], list[int]]]:
    """Yield global batches, and this rank's part of each."""
    for numbers in split_batches(order, size):
        yield list(numbers), list(numbers[ranks.rank :: ranks.size])


def _augmented_batches(
    scoring: Scoring, task: LinearTaskConfig, train: EvalSet, epoch: int, order: list[int], probe: partial[Tensor],
    classes: int, width: int,
) -> Iterator[tuple[Tensor, Tensor, int]]:  # fmt: skip
    """Yield an epoch through the backbone."""
    encoder = scoring.encoder
    dealt = list(_rank_batches(order, task.batch_size, scoring.ranks))
    crops = _Crops(train, encoder.image_size, task.seed, epoch, encoder.decoding)
    single_rank = scoring.ranks.size == 1
    if not single_rank:  # gradients are summed in every step, so ranks may only stop together, between epochs
        scoring.ranks.call_on_all(stop_here)
    own = [mine for _, mine in dealt if mine]
    with closing(read_batches(crops, np.asarray, own, task.workers, stoppable=single_rank)) as read:
        for numbers, mine in dealt:
            if not mine:  # a last batch smaller than the number of ranks
                none = torch.zeros(0, dtype=torch.int64, device=encoder.device)
                yield torch.zeros(0, width, device=encoder.device), none, len(numbers)
                continue
            batch = next(read)
            labels = torch.tensor(batch.facts, dtype=torch.int64)
            if int(labels.max()) >= classes:
                raise DataError(
                    f"{task.train}: expected labels below {classes} (the number of classes in {task.test}), got "
                    f"{int(labels.max())}. Set the task's key `classes`."
                )
            yield probe(batch.pixels), labels.to(encoder.device), len(numbers)


class _Crops(EvalSet):
    """torchvision's RandomResizedCrop and flip as in eval_linear.py: bilinear, 8 to 100 per cent of the area.

    Pixels are read like those of the encoder's `decoding`.
    """

    def __init__(self, whole: EvalSet, size: int, seed: int, epoch: int, decoding: Decoding = TRAINING):
        self.whole, self.size, self.names, self.decoding = whole, size, (seed, epoch), decoding
        self.root, self.kind = whole.root, whole.kind

    def __len__(self) -> int:
        return len(self.whole)

    def read(self, number: int) -> tuple[str, Any, Fact]:
        key, image, fact = self.whole.read(number)
        how = self.decoding
        try:
            picture = (
                to_8bit(image, how.pixel_range or "by_type").convert("RGB")
                if how.bands is None
                else to_bands(image, how)
            )
        except BadSampleError as bad:
            raise DataError(f"{self.root}: {key}: {bad.full_message()}{NEEDS_ALL}") from None
        rng = generator(self.names[0], "probe-augment", self.names[1], number)
        # Seeded by the image's number, not by the order in which workers process images.
        box = random_resized_crop_box(get_size(picture), (0.08, 1.0), rng)
        pixels = resized_crop(picture, box, self.size, Image.Resampling.BILINEAR)
        return key, np.ascontiguousarray(pixels[:, ::-1]) if rng.random() < 0.5 else pixels, fact

    def identity(self) -> str:
        return self.whole.identity()

    def stamp(self) -> str:
        return self.whole.stamp()


LINEAR = Task(LinearTaskConfig, run_linear, check_labelled, needs=("blocks",))
