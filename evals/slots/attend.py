"""Attention of slots over an image and over its caption's words, and slots that attend to content words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from sparo_train.core.errors import BadSampleError, ConfigError, DataError
from sparo_train.data.examples.image_text import decode_words

from ..encoders.encoder import Encoder, as_list
from ..sets.base import EvalSet
from ..sets.task_config import TaskConfig
from .quality_measures import sharpness

_AT_ONCE = 32


class Attended(NamedTuple):
    """One image with its caption.

    Attributes:
        maps: (L, g, g), the share of attention on each patch.
        on_class: (L,), the rest: attention on the class token.
        words: of the caption, including start and end; empty without a text tower.
        weights: (L, T), attention on words.
        cosine: (L,), between each slot's image and text vector.
        sharp: (L,), sharpness of the text's attention if there is one, otherwise of the image's; see `sharpness`.
    """

    maps: Tensor
    on_class: Tensor
    words: list[str]
    weights: Tensor
    cosine: Tensor
    sharp: Tensor


def caption_per_image(task: TaskConfig, source: EvalSet, texts: bool) -> Any:
    """Return an image's caption, or a prompt with the name of its class; None without texts.

    Raises:
        ConfigError: the set has neither captions nor classes.
    """
    if not texts:
        return lambda fact: None
    if source.kind in ("captions", "questions"):
        return lambda fact: next(iter(fact), "")
    if source.kind == "pairs":
        return lambda fact: fact[0].caption if fact else ""
    if source.kind != "label":
        raise ConfigError(f"task {task.task}: has no captions and no classes to show")
    classes, template = source.classnames(), source.templates()[0]
    return lambda fact: template.replace("{c}", classes[fact])


def attend(
    encoder: Encoder, images: Sequence[Image.Image | np.ndarray | str | Path], captions: Sequence[str] | None
) -> list[Attended]:
    """Return the attention of a few images, and of their captions if the encoder's text tower has slots.

    Args:
        encoder: the encoder.
        images: images as in `Encoder.images`.
        captions: one per image, or None.

    Raises:
        ConfigError: the encoder has no attention maps.
        DataError: an image that the encoder cannot read.
    """
    return attend_pixels(encoder, encoder.preprocess(images), captions)


def attend_pixels(encoder: Encoder, images: Sequence[np.ndarray], captions: Sequence[str] | None) -> list[Attended]:
    """Return the same for preprocessed images (S, S, C) uint8."""
    show: Any = getattr(encoder, "image_slots", None)
    if show is None or encoder.slots < 2:
        raise ConfigError(f"{encoder.label}: has no slots with attention. Use a run or export with a readout.")
    read: Any = getattr(encoder, "text_slots", None)
    captions = captions if captions is None else as_list(captions, "captions")
    if captions is not None and len(captions) != len(images):
        raise ConfigError(f"captions: expected one per image, got {len(captions)} for {len(images)} images.")
    attended: list[Attended] = []
    for begin in range(0, len(images), _AT_ONCE):
        some = slice(begin, begin + _AT_ONCE)
        image = show(list(images[some]))
        # On the CPU in fp32, because maps of a whole set are kept, and pictures need no more.
        maps, on_class = _maps(image.attention.float().cpu(), getattr(encoder, "prefix_tokens", 1))
        if read is None or captions is None:
            nothing = torch.zeros(*maps.shape[:2])
            for m, c, n, a in zip(maps, on_class, nothing, image.attention.float().cpu(), strict=True):
                attended.append(Attended(m, c, [], n[:, None], n, sharpness(a[None])[0]))
            continue
        # Together with the images, because a slot's image vector is compared with that of the caption.
        texts = list(captions[some])
        text = read(texts)
        cosine = F.cosine_similarity(image.values.float().cpu(), text.values.float().cpu(), dim=-1)
        tokens = [encoder.tokenizer(caption) for caption in texts]  # type: ignore[attr-defined]
        weights = text.attention.float().cpu()
        for i, ids in enumerate(tokens):
            w, words = weights[i, :, : len(ids)], decode_words(ids)
            # A word's weight is the sum over its tokens.
            whole = torch.stack([part.sum(-1) for part in w.split([pieces for _, pieces in words], -1)], -1)
            names = [word for word, _ in words]
            attended.append(Attended(maps[i], on_class[i], names, whole, cosine[i], sharpness(w[None])[0]))
    return attended


def top_words(one: Attended, slot: int, count: int = 2) -> list[str]:
    """Return the words of the caption with the highest attention of a slot, as `red 55%`, in the caption's order.

    Attention on articles, punctuation, start and end says nothing about the image, so these are not counted as words.
    """
    naming = [
        i for i, word in enumerate(one.words) if word.lower() not in FUNCTION_WORDS and any(map(str.isalnum, word))
    ]
    top = sorted(sorted(naming, key=lambda i: -float(one.weights[slot, i]))[:count])
    return [f"{one.words[i]} {float(one.weights[slot, i]):.0%}" for i in top]


def preprocess_image(encoder: Encoder, image: Image.Image) -> np.ndarray:
    """Return the preprocessed pixels of an image. Raises `DataError` if the encoder cannot read it, for example for lack of a band."""
    try:
        return np.asarray(encoder.transform(image))
    except BadSampleError as bad:
        raise DataError(f"{encoder.label}: cannot read this image: {bad.full_message()}") from None


def _maps(attention: Tensor, prefix: int) -> tuple[Tensor, Tensor]:
    """Split (n, L, N), with or without the `prefix` tokens (class token, registers) first, into (n, L, g, g) and (n, L)."""
    n = attention.shape[-1]
    # A readout may read patches only: then the number of all tokens is a square.
    patches = attention[..., prefix:] if math.isqrt(n - prefix) ** 2 == n - prefix else attention
    side = math.isqrt(patches.shape[-1])
    return patches.unflatten(-1, (side, side)), 1 - patches.sum(-1)


def filter_slots(one: Attended, cosine: float = 0.75, share: float = 0.5) -> list[int]:
    """Return slots that pass the paper's filter (Section 5.5), highest agreement of image and text first.

    Sharp attention in the text: more than `share` of it on one word (the paper gives no number) other than start and
    end. Distinct words: of slots with the same main word, the one with the highest cosine is kept.
    """
    used_words: set[int] = set()
    slots: list[int] = []
    for slot in one.cosine.argsort(descending=True, stable=True).tolist():
        if float(one.cosine[slot]) <= cosine or not one.words:
            break
        # Slots that find nothing attend to the start or the end.
        word = int(one.weights[slot].argmax())
        if word in used_words or word in (0, len(one.words) - 1) or float(one.weights[slot, word]) <= share:
            continue
        used_words.add(word)
        slots.append(slot)
    return slots


class Gallery(NamedTuple):
    """Images for one slot, by number: with the highest, middle and lowest agreement of image and caption, and random ones."""

    most: list[int]
    median: list[int]
    least: list[int]
    random: list[int]


def gallery(alignment: Tensor, count: int, seed: int = 0) -> Gallery:
    """Return the gallery for a slot's agreement (n,) with each image."""
    order = alignment.argsort(descending=True, stable=True).tolist()
    # The middle of the order, not of the scores: half of the images are above it.
    count = min(count, len(order))
    middle = max(0, (len(order) - count) // 2)
    random_ids = torch.randperm(len(order), generator=torch.Generator().manual_seed(seed))[:count].tolist()
    return Gallery(order[:count], order[middle : middle + count], order[::-1][:count], random_ids)


# Function words, which occur in captions of any content and say nothing of the image.
FUNCTION_WORDS = frozenset(
    (
        *("[start]", "[end]", "a", "an", "the", "of", "and", "with", "is", "are", "in", "on", "at", "to", "it", "its"),
        *("this", "that", "there", ".", ",", "!", "?", "-", "'", '"'),
    )
)
_MIN_CAPTIONS = 5  # captions that must contain a word before its weight counts


class WordProfiles(NamedTuple):
    """Attention of slots on the words of captions.

    Attributes:
        words: words that occur often enough, and those among them with content.
        shares: (L, W), a slot's mean attention on each word, over the captions that contain it.
        content: (L,), mean attention on all content words.
    """

    words: list[str]
    shares: Tensor
    content: Tensor

    def top_words(self, slot: int, count: int) -> list[tuple[str, float]]:
        """Return the words with the highest mean attention of a slot."""
        top = self.shares[slot].topk(min(count, len(self.words)))
        return [(self.words[i], share) for share, i in zip(top.values.tolist(), top.indices.tolist(), strict=True)]


def word_profiles(attended: Sequence[Attended]) -> WordProfiles:
    """Compute the profiles over captions; a word that a caption contains twice counts with both."""
    totals: dict[str, Tensor] = {}
    captions: dict[str, int] = {}
    content = torch.zeros(len(attended[0].weights))
    for one in attended:
        here: dict[str, Tensor] = {}
        for place, word in enumerate(one.words):
            if word.lower() not in FUNCTION_WORDS:
                # Two occurrences of a word in a caption are merged.
                here[word] = here.get(word, torch.zeros(len(one.weights))) + one.weights[:, place]
        for word, share in here.items():
            totals[word] = totals.get(word, torch.zeros(len(share))) + share
            captions[word] = captions.get(word, 0) + 1
        content += sum(here.values(), torch.zeros(len(one.weights)))
    words = sorted(word for word, count in captions.items() if count >= min(_MIN_CAPTIONS, len(attended)))
    shares = torch.stack([totals[word] / captions[word] for word in words], 1) if words else content[:, None][:, :0]
    return WordProfiles(words, shares, content / len(attended))


def informative_slots(attended: Sequence[Attended], profiles: WordProfiles, count: int) -> list[int]:
    """Return at most `count` slots by attention on content words, times sharpness on images and agreement of image and text.

    Slots are discounted for words that slots before them attend to.
    """
    agree = torch.stack([one.cosine for one in attended]).mean(0).clamp(min=0)
    sharp = torch.stack([sharpness(one.maps.flatten(1)[None])[0] for one in attended]).mean(0).clamp(min=0)
    informativeness = profiles.content * (0.5 + 0.5 * agree) * (0.5 + sharp)
    direction = F.normalize(profiles.shares, dim=1)
    alike = direction @ direction.T
    slots: list[int] = []
    for _ in range(min(count, len(informativeness))):
        redundancy = alike[:, slots].amax(1) if slots else torch.zeros(len(informativeness))
        # Rank by new information, because the tenth slot for "red" adds nothing.
        left = informativeness * (1 - redundancy)
        left[slots] = -1
        slots.append(int(left.argmax()))
    return slots
