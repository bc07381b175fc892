"""Blind baseline of caption pairs: how well text alone distinguishes the true caption from the false one. Far above chance, pairs do not test vision."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from .result import Result


def score(true: Sequence[str], false: Sequence[str], corpus: Sequence[str], folds: int = 5) -> Result:
    """Return the accuracy of three text-only guessers on caption pairs; ties count half.

    `likelihood`: the more probable caption under a bigram model of `corpus` (training captions). `length`: the shorter
    caption, or the longer one, whichever is right more often. `learned`: naive Bayes on words and bigrams, trained on
    the other folds' pairs. `blind` (headline) is the best of the three.
    """
    bigrams = _Bigrams(corpus)
    margins = [bigrams(t) - bigrams(f) for t, f in zip(true, false, strict=True)]
    metrics = {"likelihood": _wins(margins)}
    shorter = _wins([len(f.split()) - len(t.split()) for t, f in zip(true, false, strict=True)])
    # The better of both, because a guesser by length may use either.
    metrics["length"] = max(shorter, 1 - shorter)
    learned: list[float] = []
    for fold in range(folds):
        # Trained on other pairs only, or every pair would reveal its own answer.
        train = [i for i in range(len(true)) if i % folds != fold]
        learned += _naive_bayes(true, false, train, range(fold, len(true), folds))
    metrics["learned"] = _wins(learned)
    metrics["blind"] = max(metrics.values())
    return Result("textonly", len(true), "blind", metrics, 0.5)


class _Bigrams:
    """Add-one smoothed bigram log-likelihood per word."""

    def __init__(self, corpus: Sequence[str]):
        self.pairs: Counter[tuple[str, str]] = Counter()
        self.firsts: Counter[str] = Counter()
        for words in map(_words, corpus):
            self.pairs.update(pairwise(words))
            self.firsts.update(words[:-1])
        self.size = len({w for pair in self.pairs for w in pair}) + 1

    def __call__(self, text: str) -> float:
        words = _words(text)
        # Per word, because otherwise the shorter caption would always be more probable.
        steps = [math.log((self.pairs[a, b] + 1) / (self.firsts[a] + self.size)) for a, b in pairwise(words)]
        return sum(steps) / len(steps)


def _naive_bayes(true: Sequence[str], false: Sequence[str], train: Sequence[int], test: Sequence[int]) -> list[float]:
    positive: Counter[object] = Counter()
    negative: Counter[object] = Counter()
    for i in train:
        positive.update(_features(true[i]))
        negative.update(_features(false[i]))

    def lean(text: str) -> float:
        return sum(math.log((positive[f] + 1) / (negative[f] + 1)) for f in _features(text))

    return [lean(true[i]) - lean(false[i]) for i in test]


def _wins(margins: Sequence[float]) -> float:
    # Ties count half, so that an undecided guesser is at chance instead of below.
    return sum(1.0 if m > 1e-12 else 0.5 if m > -1e-12 else 0.0 for m in margins) / len(margins)


def _words(text: str) -> list[str]:
    return ["<", *text.lower().replace(",", " ,").split(), ">"]


def _features(text: str) -> set[object]:
    words = _words(text)
    return {*words, *pairwise(words)}
