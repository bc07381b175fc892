"""Slots for the demo: those that are easiest to understand, and their attention on a few images."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from PIL import Image

from evals.encoders.clip_encoder import ClipEncoder
from evals.report.plots import save_figure
from evals.slots.attend import (
    Attended,
    attend_pixels,
    filter_slots,
    informative_slots,
    preprocess_image,
    top_words,
    word_profiles,
)
from evals.slots.overlay import image_crop, overlay, thumbnail

from .html import shaded_caption

COSINE, SHARE = 0.75, 0.5  # thresholds of the filter, as in `sparo slots show`
MIN_PASSING = 0.05  # share of the images on which a slot has to pass the filter
_MIN_SLOTS, _MAX_SLOTS, _COLUMNS, _SIZE = 2, 4, 6, 192
_IN_PICTURE = 4  # columns of the picture, for small screens


class SlotTile(NamedTuple):
    """One image under a slot's attention, whether the slot passes the filter on it, and its caption with the words that it attends to."""

    picture: Image.Image
    passes: bool
    words: list[str]
    caption: list[tuple[str, str, int]]


class SlotGallery(NamedTuple):
    """A slot: the number of images on which it passes the filter, its words over all captions, and its tiles."""

    number: int
    passes: int
    words: str
    tiles: list[SlotTile]


class DemoSlots(NamedTuple):
    """Images with captions, the same images under each slot's attention, and the number of images that were searched."""

    images: list[tuple[Image.Image, str]]
    slots: list[SlotGallery]
    searched: int


def demo_slots(encoder: ClipEncoder, images: Sequence[Image.Image], captions: Sequence[str]) -> DemoSlots:
    """Select slots by attention over all images, and the images on which most of these slots pass the filter."""
    attended = attend_pixels(encoder, [preprocess_image(encoder, image) for image in images], captions)
    passing = [filter_slots(one, COSINE, SHARE) for one in attended]
    passes = Counter(slot for slots in passing for slot in slots)
    profiles = word_profiles(attended)
    numbers = _distinct_slots(attended, passing)
    if len(numbers) < _MIN_SLOTS:  # the model has hardly learned
        others = [slot for slot in informative_slots(attended, profiles, 2 * _MIN_SLOTS) if slot not in numbers]
        numbers = [*numbers, *others][:_MIN_SLOTS]
    count = [len(set(slots) & set(numbers)) for slots in passing]
    some = sorted(range(len(images)), key=lambda i: -count[i])[:_COLUMNS]
    # One scale per slot, from its median image, so that one image with a very bright patch does not dim all others.
    brightest = torch.stack([one.maps.flatten(1).amax(1) for one in attended]).median(0).values
    views = [image_crop(encoder, images[i]) for i in some]
    galleries = []
    for slot in numbers:
        tiles = [
            SlotTile(
                overlay(view, attended[i].maps[slot], float(brightest[slot]), _SIZE),
                slot in passing[i],
                top_words(attended[i], slot),
                shaded_caption(attended[i], slot),
            )
            for i, view in zip(some, views, strict=True)
        ]
        words = ", ".join(f"{word} {share:.0%}" for word, share in profiles.top_words(slot, 3))
        galleries.append(SlotGallery(slot, passes[slot], words, tiles))
    plain = [(thumbnail(view, _SIZE), captions[i]) for i, view in zip(some, views, strict=True)]
    return DemoSlots(plain, galleries, len(images))


def _distinct_slots(attended: Sequence[Attended], passing: Sequence[Sequence[int]]) -> list[int]:
    """Return the slots that pass the filter on most images, but at least on 5 %, each with another main word than those before it."""
    words: dict[int, Counter[str]] = {}
    for one, slots in zip(attended, passing, strict=True):
        for slot in slots:
            words.setdefault(slot, Counter())[one.words[int(one.weights[slot].argmax())]] += 1
    distinct, used = [], set()
    for slot in sorted(words, key=lambda s: (-words[s].total(), s)):
        ((main, _),) = words[slot].most_common(1)
        if main not in used and words[slot].total() >= MIN_PASSING * len(attended):
            used.add(main)
            distinct.append(slot)
    return distinct[:_MAX_SLOTS]


def draw_slots(demo: DemoSlots, path: Path) -> None:
    """Draw images on top, then a row per slot, as one picture for small screens."""
    rows = len(demo.slots) + 1
    figure, axes = plt.subplots(rows, _IN_PICTURE, figsize=(1.9 * _IN_PICTURE, 2.3 * rows), layout="constrained")
    for axis, (picture, caption) in zip(axes[0], demo.images, strict=False):
        axis.imshow(picture)
        axis.set_title(textwrap.fill(caption, 22), fontsize=9.5)
    for line, slot in zip(axes[1:], demo.slots, strict=True):
        for axis, tile in zip(line, slot.tiles, strict=False):
            axis.imshow(tile.picture)
            axis.set_xlabel("\n".join(tile.words), fontsize=11)
        line[0].set_ylabel(f"slot {slot.number}", fontsize=12)
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[])
        for side in axis.spines.values():
            side.set_visible(False)
    save_figure(figure, path, 110)
