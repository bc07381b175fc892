"""Blind baseline of captions: how well text alone distinguishes the right caption from the wrong ones. Far above chance, a set does not test vision."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from .clusters import share_interval
from .questions import weights
from .result import Result, wilson

_FOLDS = 5


class Choice(NamedTuple):
    """Captions, and the index `answer` of the one to choose; choices of one group (an image) are in one fold."""

    texts: Sequence[str]
    answer: int
    group: int


def score(true: Sequence[str], false: Sequence[str], corpus: Sequence[str]) -> Result:
    """Return the accuracy of three text-only guessers on caption pairs; ties count half.

    `likelihood`: the more probable caption under a bigram model of `corpus` (training captions). `length`: the shorter
    caption, or the longer one, whichever is right more often. `learned`: naive Bayes on words and bigrams, trained on
    the other folds' pairs. `blind` (headline) is the best of the three.
    """
    bigrams = _Bigrams(corpus)
    choices = [Choice(both, 0, number) for number, both in enumerate(zip(true, false, strict=True))]
    metrics = {"likelihood": float(np.mean([_share(choice, map(bigrams, choice.texts)) for choice in choices]))}
    metrics |= {name: float(right.mean()) for name, right in guesses(choices).items()}
    metrics["blind"] = max(metrics.values())
    return Result("textonly", len(true), "blind", metrics, 0.5)


def attach(result: Result, choices: Sequence[Choice], kinds: Sequence[str], average: str) -> Result:
    """Return a result with the metric `blind`, the best of `guesses`, averaged like the headline."""
    weight = weights(np.asarray(kinds), average)
    found = guesses(choices)
    values = {name: float((right * weight).sum()) for name, right in found.items()}
    best = max(values, key=lambda name: values[name])
    interval, clusters = wilson(values[best], len(choices)), result.predictions.get("cluster")
    if clusters is not None:
        strata = np.asarray(kinds) if average == "macro" else np.zeros(len(kinds))
        interval = share_interval(found[best], strata, clusters)
    return result._replace(
        metrics={**result.metrics, "blind": values[best]},
        intervals={**result.intervals, "blind": interval},
        options={**result.options, "blind": {name: round(value, 6) for name, value in values.items()}},
    )


def guesses(choices: Sequence[Choice]) -> dict[str, np.ndarray]:
    """Return right answers (n,) of guessers that need no further text, 1 / t for a tie of t captions.

    `length`: the shortest caption, or the longest, whichever is right more often. `learned`: naive Bayes on words and
    bigrams, trained on the other folds.
    """
    lengths = [[len(text.split()) for text in choice.texts] for choice in choices]
    short, long = (
        np.array([_share(choice, (sign * n for n in of)) for choice, of in zip(choices, lengths, strict=True)])
        for sign in (-1, 1)
    )
    return {"length": max(short, long, key=lambda right: right.mean()), "learned": _naive_bayes(choices)}


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


def _naive_bayes(choices: Sequence[Choice]) -> np.ndarray:
    """Return right answers (n,) of a model that is trained on the other folds only, or every choice would reveal its own answer."""
    features = [[_features(text) for text in choice.texts] for choice in choices]
    counts = [(Counter[Hashable](), Counter[Hashable]()) for _ in range(_FOLDS)]
    for choice, texts in zip(choices, features, strict=True):
        right, wrong = counts[choice.group % _FOLDS]
        for number, found in enumerate(texts):
            (right if number == choice.answer else wrong).update(found)
    totals = sum((fold[0] for fold in counts), Counter()), sum((fold[1] for fold in counts), Counter())
    out = np.empty(len(choices))
    for place, (choice, texts) in enumerate(zip(choices, features, strict=True)):
        right, wrong = counts[choice.group % _FOLDS]
        leans = (
            sum(math.log((totals[0][f] - right[f] + 1) / (totals[1][f] - wrong[f] + 1)) for f in found)
            for found in texts
        )
        out[place] = _share(choice, leans)
    return out


def _share(choice: Choice, values: Iterable[float]) -> float:
    """Return 1 if the answer has the largest value, 1 / t in a tie of t, otherwise 0; a tie leaves an undecided guesser at chance."""
    table = list(values)
    best = max(table)
    tied = [value > best - 1e-12 for value in table]
    return 1 / sum(tied) if tied[choice.answer] else 0.0


def _words(text: str) -> list[str]:
    return ["<", *text.lower().replace(",", " ,").split(), ">"]


def _features(text: str) -> set[Hashable]:
    words = _words(text)
    return {*words, *pairwise(words)}
