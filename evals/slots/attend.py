"""Where slots look: attention over an image and over its caption's words, and which slots are worth a picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from sparo_train.core.errors import ConfigError
from sparo_train.data.examples.tokenizer import decode_words

from ..encoders.encoder import Encoder
from ..sets.base import EvalSet
from ..sets.task_config import TaskConfig
from .quality import sharpness

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
