"""Inputs of a task's scoring function: an encoder, the store, and the ranks that score together."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from torch import Tensor

from sparo_train.core.distributed import Ranks
from sparo_train.core.errors import DataError

from ..encoders.encoder import Encoder, TextEncoder
from ..feature_store.feature_table import Features, View
from ..feature_store.features import FeatureStore
from ..sets.base import EvalSet, Transform, evenly, refuse_label
from ..sets.image_files import FileSet
from ..tasks.result import Result, bootstrap, percentiles, sum_groups


class Scoring(NamedTuple):
    """Encoder, store and ranks of a task; `part`: only encode this share of the images (i of n), and score once all are there."""

    name: str
    encoder: Encoder
    store: FeatureStore
    ranks: Ranks
    part: tuple[int, int] | None = None

    def features(
        self, sources: Sequence[EvalSet], workers: int, transform: Transform | None = None, view: View | None = None
    ) -> list[Features]:
        """Return the encodings of all sets of a task. This process's shares of all sets are computed before a missing one is reported.

        Raises:
            PartsMissingError: shares of other processes are missing.
        """
        # All sets before the first missing share, because other processes may wait for this one.
        tried = [self.store.images(self.encoder, s, transform, view, workers, self.ranks, self.part) for s in sources]
        available = [features for features in tried if features is not None]
        if len(available) < len(tried):
            raise PartsMissingError(
                f"{self.name}: is not scored yet, because other processes (--part) have not encoded all of "
                f"{sources[tried.index(None)].root}"
            )
        return available

    def texts(self, captions: list[str]) -> Tensor:
        """Return unit-norm encodings (n, D) of captions, by an encoder with `texts`."""
        assert isinstance(self.encoder, TextEncoder)
        return self.store.texts(self.encoder, captions)

    def text_rows(self, captions: Sequence[str]) -> Callable[[Sequence[str]], Tensor]:
        """Return a function from some of these captions to their unit-norm encodings."""
        assert isinstance(self.encoder, TextEncoder)
        return self.store.text_rows(self.encoder, captions)


class PartsMissingError(DataError):
    """Raised while several processes share the encoding; the last one of them scores."""


def collect_labels(features: Features, source: EvalSet) -> Tensor:
    """Return (n,) int64, or (n, C) for a multilabel set. Raises `DataError` for a label that is not below `source.label_below`."""
    for key, fact in zip(features.keys, features.facts, strict=True):  # stored features were not checked by the reader
        refuse_label(source, key, fact)
        if isinstance(fact, list) and len(fact) != len(features.facts[0]):
            raise DataError(
                f"{source.root}: {key}: expected {len(features.facts[0])} labels, as for {features.keys[0]}, got {len(fact)}"
            )
    return torch.tensor(features.facts, dtype=torch.int64)


def chance(label_sets: Sequence[Tensor]) -> float:
    """Return the accuracy of guessing among the classes that occur, because numbers of classes may have gaps."""
    return 1 / len(torch.cat([*label_sets]).unique())


def training_details(train: EvalSet, test: EvalSet, resize: int | None = None) -> dict[str, Any]:
    """Return the options of a score with training: the training images, skipped files, and the resize."""
    options: dict[str, Any] = {"trained_on": train.identity()[:16], "resize": resize}
    if train.left_out:
        options["left_out_of_training"] = dict(train.left_out)
    if is_same_set(train, test):
        options["scored_on_training"] = True
    elif isinstance(train, FileSet) and isinstance(test, FileSet):
        copies, compared = test.copies_in(train)
        if copies:
            options["copies_of_training_images"] = f"{copies} of {compared}"
    return options


def is_same_set(train: EvalSet, test: EvalSet) -> bool:
    """Return whether two sets contain the same images: by their identity, which includes names and sizes, and the pixels of 16 of them."""
    if train.identity() != test.identity():
        return False
    try:
        return all(
            np.array_equal(np.asarray(train.read(i)[1]), np.asarray(test.read(i)[1])) for i in evenly(len(test), 16)
        )
    except DataError:  # the features are stored, but the images were removed
        return False


def attach_data_info(
    result: Result, images: Features, source: EvalSet, options: dict[str, Any], keys: list[str] | None = None
) -> Result:
    """Add to a result what only the caller knows: options, the data's identity, and the keys of its predictions."""
    options = {**options, **result.options, "facts": facts_digest(images.keys, images.facts)}
    if recall := _recall_by_class(result, images, source):
        options["recall"] = recall
    if source.groups is not None:
        result = _over_groups(result, source.groups)
    if source.left_out:
        options["left_out"] = dict(source.left_out)
        result = result._replace(counts={**result.counts, "left_out": sum(source.left_out.values())})
    return result._replace(options=options, data=source.identity(), keys=tuple(keys or images.keys))


def _over_groups(result: Result, groups: Sequence[str]) -> Result:
    """Return the result with its groups (patients) for comparisons, and with an interval of its accuracy that resamples them instead of images."""
    right = result.predictions.get("right")
    rows = {len(array) for array in result.predictions.values()}
    if rows == {len(groups)}:
        cluster = np.unique(np.asarray(groups), return_inverse=True)[1]
        result = result._replace(predictions={**result.predictions, "cluster": cluster})
    # Only a mean of right answers can be resampled here.
    if right is None or len(right) != len(groups) or not math.isclose(np.mean(right), result.value, abs_tol=1e-6):
        return result
    draws = bootstrap(sum_groups(right[:, None], groups), sum_groups(np.ones((len(right), 1)), groups))
    intervals = {**result.intervals, result.headline: percentiles(draws[:, 0])}
    return result._replace(counts={**result.counts, "groups": len(set(groups))}, intervals=intervals)


def _recall_by_class(result: Result, images: Features, source: EvalSet) -> dict[str, float]:
    """Return the share of correct images of each class that occurs, by its name or number; empty for more than 100 classes."""
    right, names = result.predictions.get("right"), source.own_classnames()
    if right is None or len(right) != len(images.facts) or not all(isinstance(fact, int) for fact in images.facts):
        return {}
    labels = np.array(images.facts)
    present = np.unique(labels).tolist()
    if len(present) > 100:  # more than anyone reads
        return {}
    return {names[c] if c < len(names) else str(c): float(right[labels == c].mean()) for c in present}


def facts_digest(keys: Sequence[str], facts: Sequence[Any]) -> str:
    """Return a hash of the annotations, because the identity of shards only contains positions, which other captions or masks of equal length share."""
    digest = xxhash.xxh3_128()
    for key, fact in zip(keys, facts, strict=True):
        fact_bytes = fact.tobytes() if isinstance(fact, np.ndarray) else json.dumps(fact, default=str).encode()
        digest.update(f"{key} {len(fact_bytes)}\n".encode() + fact_bytes)
    return digest.hexdigest()
