"""Names for slots: words whose similarity to a slot predicts which captions contain them, tested on images that did not choose the names."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from scipy.stats import rankdata
from torch import Tensor

from sparo_train.core.errors import ConfigError

from .attend import FUNCTION_WORDS

_Z = 1.959964
_SHUFFLES = 1000
_WORD = re.compile(r"[^\W\d_][\w'-]*")


class NameTest(NamedTuple):
    """A name with its AUC on the held-out half, the 95 % interval, and the number of held-out images whose caption contains it."""

    name: str
    auc: float
    low: float
    high: float
    positives: int


class SlotNames(NamedTuple):
    """Names of a slot, best first, and the mean and the 97.5 % quantile of the AUC of names that only other slots have."""

    slot: int
    tests: list[NameTest]
    shuffled: float
    shuffled_high: float

    @property
    def passing(self) -> list[str]:
        """Return the names whose interval lies above the AUC of other slots' names."""
        return [test.name for test in self.tests if test.low > max(0.5, self.shuffled_high)]


class Naming(NamedTuple):
    """Names of all slots.

    Attributes:
        slots: by slot.
        images, names: number of images in both halves, and of names that were compared.
        auc, shuffled: mean held-out AUC of the best names, and of the same names assigned to other slots.
        p: share of 1,000 random assignments with a mean AUC at least as high.
    """

    slots: list[SlotNames]
    images: int
    names: int
    auc: float
    shuffled: float
    p: float


def caption_words(captions: Sequence[Sequence[str]], limit: int) -> list[str]:
    """Return the words of all captions except function words, most frequent first, at most `limit`."""
    counts = Counter(word for texts in captions for word in {w.lower() for text in texts for w in _WORD.findall(text)})
    return [word for word, _ in counts.most_common() if word not in FUNCTION_WORDS][:limit]


def contained(captions: Sequence[Sequence[str]], names: Sequence[str]) -> np.ndarray:
    """Return (n, W): whether a caption of the image contains the name as whole words, in upper or lower case."""
    patterns = [re.compile(rf"(?<!\w){re.escape(name)}(?!\w)", re.IGNORECASE) for name in names]
    joined = ["\n".join(texts) for texts in captions]
    return np.array([[pattern.search(text) is not None for pattern in patterns] for text in joined], dtype=bool)


def testable(labels: np.ndarray, halves: tuple[np.ndarray, np.ndarray], min_images: int) -> np.ndarray:
    """Return the names (numbers) that at least `min_images` images of each half have, and as many do not."""
    enough = np.ones(labels.shape[1], dtype=bool)
    for half in halves:
        count = labels[half].sum(0)
        enough &= (count >= min_images) & (count <= len(half) - min_images)
    return enough.nonzero()[0]


def halves_of(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return two random halves of image numbers: one chooses names, the other tests them."""
    order = np.random.default_rng(seed).permutation(count)
    return order[: count // 2], order[count // 2 :]


def roc_auc(scores: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return (U,) the area under the ROC curve of scores (n, U) for labels (n,); a tie counts one half."""
    positives = int(labels.sum())
    ranks = rankdata(scores, axis=0)[labels].sum(0)
    return (ranks - positives * (positives + 1) / 2) / (positives * (len(labels) - positives))


def auc_interval(scores: np.ndarray, labels: np.ndarray) -> tuple[float, float, float]:
    """Return the AUC of scores (n,) and its 95 % interval, within 0 and 1.

    The interval is that of DeLong et al. (1988). At an AUC of 0 or 1, where it has no width, it is the exact interval of a
    proportion over as many trials as the smaller class has samples.
    """
    positive, negative = scores[labels], scores[~labels]
    ranks = rankdata(scores)
    above = (ranks[labels] - rankdata(positive)) / len(negative)  # for each positive: share of negatives below it
    below = 1 - (ranks[~labels] - rankdata(negative)) / len(positive)
    auc = float(above.mean())
    if auc in (0.0, 1.0):
        limit = 0.025 ** (1 / min(len(positive), len(negative)))
        return (auc, limit, 1.0) if auc == 1 else (auc, 0.0, 1 - limit)
    half = _Z * math.sqrt(above.var(ddof=1) / len(positive) + below.var(ddof=1) / len(negative))
    return auc, max(0.0, auc - half), min(1.0, auc + half)


def name_slots(
    images: Tensor, texts: Tensor, names: Sequence[str], labels: np.ndarray, count: int, min_images: int, seed: int
) -> Naming:
    """Find names for slots on one half of the images, and test them on the other half.

    A slot's score for a name is the dot product of its part of the image encoding and of the name's encoding. The AUC
    of this score says how well it separates images whose captions contain the name from the others.

    Args:
        images: (n, U, d) encodings.
        texts: (W, U, d) encodings of the names.
        names: W names.
        labels: (n, W), whether captions contain the names.
        count: names per slot.
        min_images: images of each half that must have a name, and that must not.
        seed: seed of the halves and of the random assignments.

    Raises:
        ConfigError: no name can be tested.
    """
    choosing, held_out = halves_of(len(images), seed)
    usable = testable(labels, (choosing, held_out), min_images)
    if not len(usable):
        raise ConfigError(
            f"none of {len(names)} names is contained in the captions of {min_images} images of each half, and absent "
            f"from as many. Use more images, or lower --min-images."
        )
    scores = {w: torch.einsum("nud,ud->nu", images, texts[w]).numpy() for w in usable.tolist()}
    chosen_auc = np.stack([roc_auc(scores[w][choosing], labels[choosing, w]) for w in usable], 1)
    tested_auc = np.stack([roc_auc(scores[w][held_out], labels[held_out, w]) for w in usable], 1)
    best = np.argsort(-chosen_auc, axis=1, kind="stable")[:, :count]
    slots = []
    for slot, columns in enumerate(best):
        tests = []
        for column in columns.tolist():
            w = int(usable[column])
            auc, low, high = auc_interval(scores[w][held_out, slot], labels[held_out, w])
            tests.append(NameTest(names[w], auc, low, high, int(labels[held_out, w].sum())))
        others = np.delete(best[:, 0], slot)
        values = tested_auc[slot, others[~np.isin(others, columns)]]
        shuffled = (float(values.mean()), float(np.quantile(values, 0.975))) if len(values) else (0.5, 0.5)
        slots.append(SlotNames(slot, tests, *shuffled))
    rng, everyone = np.random.default_rng(seed), np.arange(len(best))
    actual = float(tested_auc[everyone, best[:, 0]].mean())
    random_means = [tested_auc[everyone, rng.permutation(best[:, 0])].mean() for _ in range(_SHUFFLES)]
    p = (1 + sum(mean >= actual for mean in random_means)) / (1 + _SHUFFLES)
    return Naming(slots, len(images), len(usable), actual, float(np.mean(random_means)), p)
