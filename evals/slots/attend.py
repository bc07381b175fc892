"""Where slots look: attention over an image and over its caption's words, and which slots attend to words that name things."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from sparo_train.core.errors import ConfigError
from sparo_train.data.examples.image_text import decode_words

from ..encoders.encoder import Encoder
from ..sets.base import EvalSet
from ..sets.task_config import TaskConfig
from .quality_measures import sharpness

_AT_ONCE = 32


class Attended(NamedTuple):
    """One image with its caption.

    maps: (L, g, g), the share of attention on each patch.  on_class: (L,), what is left of it: on the class token.
    words: of the caption, start and end included; none without a text tower.  weights: (L, T) over them.
    cosine: (L,) of each slot's image and text vector.  sharp: (L,) of the text's attention, else of the image's, see `sharpness`.
    """

    maps: Tensor
    on_class: Tensor
    words: list[str]
    weights: Tensor
    cosine: Tensor
    sharp: Tensor


def captions_of(task: TaskConfig, source: EvalSet, texts: bool) -> Any:
    """From a sample's fact to what is said of its image: its caption, or a prompt with the name of its class; None without texts.

    Raises:
        ConfigError: a set without captions and classes.
    """
    if not texts:
        return lambda fact: None
    if source.kind == "captions":
        return lambda fact: next(iter(fact), "")
    if source.kind == "pairs":
        return lambda fact: fact[0].caption if fact else ""
    if source.kind != "label":
        raise ConfigError(f"task {task.task}: has no captions and no classes to show")
    classes, template = source.classnames(), source.templates()[0]
    return lambda fact: template.replace("{c}", classes[fact])


def attend(encoder: Encoder, images: Sequence[Image.Image], captions: Sequence[str] | None) -> list[Attended]:
    """Attention of a few images, and of their captions where the encoder has a text tower with slots.

    Raises:
        ConfigError: an encoder that shows no attention.
    """
    show: Any = getattr(encoder, "image_slots", None)
    if show is None or encoder.slots < 2:
        raise ConfigError(
            f"{encoder.label}: has no slots whose attention could be shown; use a run or export with a read-out"
        )
    read: Any = getattr(encoder, "text_slots", None)
    attended: list[Attended] = []
    for begin in range(0, len(images), _AT_ONCE):
        some = slice(begin, begin + _AT_ONCE)
        image = show([encoder.transform(one) for one in images[some]])
        # On the CPU in fp32: maps of a whole set are kept, and pictures need no more.
        maps, on_class = _maps(image.attention.float().cpu(), getattr(encoder, "prefix_tokens", 1))
        if read is None or captions is None:
            nothing = torch.zeros(*maps.shape[:2])
            for m, c, n, a in zip(maps, on_class, nothing, image.attention.float().cpu(), strict=True):
                attended.append(Attended(m, c, [], n[:, None], n, sharpness(a[None])[0]))
            continue
        # With their images: a slot's vector of an image is compared with that of its own caption.
        texts = list(captions[some])
        text = read(texts)
        cosine = F.cosine_similarity(image.values.float().cpu(), text.values.float().cpu(), dim=-1)
        tokens = [encoder.tokenizer(caption) for caption in texts]  # type: ignore[attr-defined]
        weights = text.attention.float().cpu()
        for i, ids in enumerate(tokens):
            w, words = weights[i, :, : len(ids)], decode_words(ids)
            # what a slot gives to the pieces of a word it gives to the word
            whole = torch.stack([part.sum(-1) for part in w.split([pieces for _, pieces in words], -1)], -1)
            names = [word for word, _ in words]
            attended.append(Attended(maps[i], on_class[i], names, whole, cosine[i], sharpness(w[None])[0]))
    return attended


def _maps(attention: Tensor, prefix: int) -> tuple[Tensor, Tensor]:
    """(n, L, N) with or without the `prefix` tokens (class token, registers) first, to (n, L, g, g) and (n, L)."""
    n = attention.shape[-1]
    # A read-out may look at patches alone: a square number of all tokens says so.
    patches = attention[..., prefix:] if math.isqrt(n - prefix) ** 2 == n - prefix else attention
    side = math.isqrt(patches.shape[-1])
    return patches.unflatten(-1, (side, side)), 1 - patches.sum(-1)


def filter_slots(one: Attended, cosine: float = 0.75, share: float = 0.5) -> list[int]:
    """Slots after the paper's filter (Section 5.5), those whose image and text agree most first.

    Sharp attention in the text: more than `share` of it on one word (the paper gives no number), which is neither start nor end.
    Words that do not overlap: of slots that look at the same word the one with the highest cosine is taken.
    """
    used_words: set[int] = set()
    slots: list[int] = []
    for slot in one.cosine.argsort(descending=True, stable=True).tolist():
        if float(one.cosine[slot]) <= cosine or not one.words:
            break
        # The start and the end are where a slot rests that found nothing to say.
        word = int(one.weights[slot].argmax())
        if word in used_words or word in (0, len(one.words) - 1) or float(one.weights[slot, word]) <= share:
            continue
        used_words.add(word)
        slots.append(slot)
    return slots


class Gallery(NamedTuple):
    """Images by number, for one slot: where image and caption agree most, in the middle, least, and some drawn at random."""

    most: list[int]
    median: list[int]
    least: list[int]
    random: list[int]


def gallery(alignment: Tensor, count: int, seed: int = 0) -> Gallery:
    """From a slot's alignment (n,) with each image."""
    order = alignment.argsort(descending=True, stable=True).tolist()
    # The middle of the order, not of the scores: half of the images are above it.
    count = min(count, len(order))
    middle = max(0, (len(order) - count) // 2)
    random_ids = torch.randperm(len(order), generator=torch.Generator().manual_seed(seed))[:count].tolist()
    return Gallery(order[:count], order[middle : middle + count], order[::-1][:count], random_ids)


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
