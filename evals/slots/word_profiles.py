"""Which slots tell a reader something: they look at words that name things, not all at the same ones, and agree with the image."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .attend import Attended
from .quality import sharpness

# What stands in captions of any content; a slot that looks here says nothing of the image.
FUNCTION_WORDS = frozenset(
    (
        *("[start]", "[end]", "a", "an", "the", "of", "and", "with", "is", "are", "in", "on", "at", "to", "it", "its"),
        *("this", "that", "there", ".", ",", "!", "?", "-", "'", '"'),
    )
)
_MIN_CAPTIONS = 5  # captions that have a word, before its share says anything of a slot


class WordProfiles(NamedTuple):
    """How slots share their attention over captions.

    words: those that occur often enough, those that name something alone.  shares: (L, W), a slot's mean attention on each word, over
    the captions that have it.  content: (L,), mean attention on all words that name something.
    """

    words: list[str]
    shares: Tensor
    content: Tensor

    def of(self, slot: int, count: int) -> list[tuple[str, float]]:
        """The words that a slot attends to most, with its mean attention."""
        top = self.shares[slot].topk(min(count, len(self.words)))
        return [(self.words[i], share) for share, i in zip(top.values.tolist(), top.indices.tolist(), strict=True)]


def word_profiles(attended: Sequence[Attended]) -> WordProfiles:
    """Over captions; a word that a caption has twice counts with both."""
    totals: dict[str, Tensor] = {}
    captions: dict[str, int] = {}
    content = torch.zeros(len(attended[0].weights))
    for one in attended:
        here: dict[str, Tensor] = {}
        for place, word in enumerate(one.words):
            if word.lower() not in FUNCTION_WORDS:
                # A caption's two places of one word are one word to a reader.
                here[word] = here.get(word, torch.zeros(len(one.weights))) + one.weights[:, place]
        for word, share in here.items():
            totals[word] = totals.get(word, torch.zeros(len(share))) + share
            captions[word] = captions.get(word, 0) + 1
        content += sum(here.values(), torch.zeros(len(one.weights)))
    words = sorted(word for word, count in captions.items() if count >= min(_MIN_CAPTIONS, len(attended)))
    shares = torch.stack([totals[word] / captions[word] for word in words], 1) if words else content[:, None][:, :0]
    return WordProfiles(words, shares, content / len(attended))


def informative_slots(attended: Sequence[Attended], profiles: WordProfiles, count: int) -> list[int]:
    """Slots (at most `count`) by attention on words that name something, times how sharply they look at images and how well image
    and text agree; each less as far as it looks at words that one before it looks at."""
    agree = torch.stack([one.cosine for one in attended]).mean(0).clamp(min=0)
    sharp = torch.stack([sharpness(one.maps.flatten(1)[None])[0] for one in attended]).mean(0).clamp(min=0)
    informativeness = profiles.content * (0.5 + 0.5 * agree) * (0.5 + sharp)
    direction = F.normalize(profiles.shares, dim=1)
    alike = direction @ direction.T
    slots: list[int] = []
    for _ in range(min(count, len(informativeness))):
        redundancy = alike[:, slots].amax(1) if slots else torch.zeros(len(informativeness))
        # By what is new: the tenth slot that looks at "red" tells nobody anything.
        left = informativeness * (1 - redundancy)
        left[slots] = -1
        slots.append(int(left.argmax()))
    return slots
