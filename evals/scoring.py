"""What a runner works with: an encoder, the store, and the ranks that score together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sparo_train.core.distributed import Ranks
from sparo_train.core.errors import ConfigError, DataError

from .encoders import Encoder, TextEncoder
from .feature_table import Features, View
from .features import FeatureStore
from .sets.base import EvalSet, Transform


class Scoring(NamedTuple):
    """`name`: the task's, for errors.  `part`: encode only this share of the images (i of n), and score nothing before all are there."""

    name: str
    encoder: Encoder
    store: FeatureStore
    ranks: Ranks
    part: tuple[int, int] | None = None

    def features(
        self, sources: Sequence[EvalSet], workers: int, transform: Transform | None = None, view: View | None = None
    ) -> list[Features]:
        """The sets' encodings, all that a task needs at once: this process's shares of all of them come before any is missed.

        Raises:
            PartsMissingError: other processes have not encoded theirs.
        """
        tried = [self.store.images(self.encoder, s, transform, view, workers, self.ranks, self.part) for s in sources]
        found = [features for features in tried if features is not None]
        if len(found) < len(tried):
            raise PartsMissingError(
                f"{self.name}: other shares of {sources[tried.index(None)].root} are not encoded yet"
            )
        return found

    def with_texts(self) -> TextEncoder:
        """The encoder, which must have a text tower."""
        if not isinstance(self.encoder, TextEncoder):
            raise UnfitError(
                f"{self.name}: needs texts encoded, and {self.encoder.label} encodes images alone; use knn, linear or probe"
            )
        return self.encoder

    def texts(self, captions: list[str]) -> Tensor:
        """Unit-norm encodings (n, D) of captions."""
        return self.store.texts(self.with_texts(), captions)


class UnfitError(ConfigError):
    """A task that this kind of encoder cannot do; raised before anything is encoded."""


class PartsMissingError(DataError):
    """Not an error where several processes share the encoding: the last one of them scores."""


def labels_of(features: Features, source: EvalSet, classes: int | None) -> Tensor:
    """(n,) int64. Raises `DataError` where a label is not below `classes`."""
    labels = torch.tensor(features.facts, dtype=torch.int64)
    if classes is not None and len(labels) and int(labels.max()) >= classes:
        key = features.keys[int(labels.argmax())]
        raise DataError(f"{source.root}: {key} has label {int(labels.max())}, and there are {classes} classes")
    return labels
