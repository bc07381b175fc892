"""Names for slots: words whose similarity to a slot predicts which captions contain them, tested on images that did not choose the names."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from scipy.special import expit, logit
from scipy.stats import rankdata
from scipy.stats import t as student_t
from torch import Tensor

from sparo_train.core.errors import ConfigError

from .attend import FUNCTION_WORDS

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
    """Names of a slot, best first, and the mean and the 97.5 % quantile of the AUC of names that only other slots have, if there are any."""

    slot: int
    tests: list[NameTest]
    shuffled: float | None
    shuffled_high: float | None

    @property
    def passing(self) -> list[str]:
        """Return the names whose interval lies above the AUC of other slots' names."""
        if self.shuffled_high is None:
            return []
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


def contain_names(captions: Sequence[Sequence[str]], names: Sequence[str]) -> np.ndarray:
    """Return (n, W): whether a caption of the image contains the name as whole words, in upper or lower case."""
    labels = np.zeros((len(captions), len(names)), dtype=bool)
    # Most names are single words, which are found by looking up the words of a caption.
    columns = {name.lower(): i for i, name in enumerate(names) if re.fullmatch(r"\w+", name)}
    patterns = {
        i: re.compile(rf"(?<!\w){re.escape(name)}(?!\w)", re.IGNORECASE)
        for i, name in enumerate(names)
        if name.lower() not in columns
    }
    for row, texts in zip(labels, captions, strict=True):
        joined = "\n".join(texts)
        row[[columns[word] for word in set(re.findall(r"\w+", joined.lower())) if word in columns]] = True
        row[[i for i, pattern in patterns.items() if pattern.search(joined)]] = True
    return labels


def testable(labels: np.ndarray, halves: tuple[np.ndarray, np.ndarray], min_images: int) -> np.ndarray:
    """Return the names (numbers) that at least `min_images` images of each half have, and as many do not."""
    enough = np.ones(labels.shape[1], dtype=bool)
    for half in halves:
        count = labels[half].sum(0)
        enough &= (count >= min_images) & (count <= len(half) - min_images)
    return enough.nonzero()[0]


def split_halves(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
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

    The variance is that of DeLong et al. (1988), on the logit scale, with a quantile of Student's t for as many samples as the
    smaller class has. At an AUC of 0 or 1, where the variance is 0, the interval is the exact one of a proportion over as many
    trials.
    """
    positive, negative = scores[labels], scores[~labels]
    ranks = rankdata(scores)
    above = (ranks[labels] - rankdata(positive)) / len(negative)  # for each positive: share of negatives below it
    below = 1 - (ranks[~labels] - rankdata(negative)) / len(positive)
    auc = float(above.mean())
    smaller = min(len(positive), len(negative))
    if auc in (0.0, 1.0):
        limit = 0.025 ** (1 / smaller)
        return (auc, limit, 1.0) if auc == 1 else (auc, 0.0, 1 - limit)
    error = math.sqrt(above.var(ddof=1) / len(positive) + below.var(ddof=1) / len(negative))
    half = float(student_t.ppf(0.975, smaller - 1)) * error / (auc * (1 - auc))
    low, high = expit(np.array([-half, half]) + logit(auc))
    return auc, float(low), float(high)


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
    choosing, held_out = split_halves(len(images), seed)
    usable = testable(labels, (choosing, held_out), min_images)
    if not len(usable):
        raise ConfigError(
            f"--min-images: no name can be tested: each half of the images must contain {min_images} images with the "
            f"name in their captions and {min_images} images without it. None of the {len(names)} names meets this "
            "condition. Use more images, or lower --min-images."
        )
    chosen_auc, tested_auc = (np.empty((images.shape[1], len(usable))) for _ in range(2))
    # One name at a time: the scores of all names of many images would not fit into memory.
    for column, w in enumerate(usable.tolist()):
        scores = torch.einsum("nud,ud->nu", images, texts[w]).numpy()
        chosen_auc[:, column] = roc_auc(scores[choosing], labels[choosing, w])
        tested_auc[:, column] = roc_auc(scores[held_out], labels[held_out, w])
    best = np.argsort(-chosen_auc, axis=1, kind="stable")[:, :count]
    slots = []
    for slot, columns in enumerate(best):
        tests = []
        for column in columns.tolist():
            w = int(usable[column])
            scores = (images[held_out, slot] @ texts[w, slot]).numpy()
            auc, low, high = auc_interval(scores, labels[held_out, w])
            tests.append(NameTest(names[w], auc, low, high, int(labels[held_out, w].sum())))
        others = np.delete(best[:, 0], slot)
        values = tested_auc[slot, others[~np.isin(others, columns)]]
        shuffled = (float(values.mean()), float(np.quantile(values, 0.975))) if len(values) else (None, None)
        slots.append(SlotNames(slot, tests, *shuffled))
    rng, everyone = np.random.default_rng(seed), np.arange(len(best))
    actual = float(tested_auc[everyone, best[:, 0]].mean())
    random_means = [tested_auc[everyone, rng.permutation(best[:, 0])].mean() for _ in range(_SHUFFLES)]
    p = (1 + sum(mean >= actual for mean in random_means)) / (1 + _SHUFFLES)
    return Naming(slots, len(images), len(usable), actual, float(np.mean(random_means)), p)
