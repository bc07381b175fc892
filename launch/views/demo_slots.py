"""The demo's slots in pictures: which are shown, on the page and as one PNG."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from PIL import Image

from evals.encoders.sparo_encoders import ClipEncoder
from evals.report.plots import save_figure
from evals.slots.attend import Attended, attend
from evals.slots.overlay import image_crop, spotlight, thumbnail
from evals.slots.word_profiles import FUNCTION_WORDS, informative_slots, word_profiles

_SLOTS, _COLUMNS, _SIZE = 4, 6, 192
_IN_PICTURE = (0, 2, 3, 4)


class SlotTile(NamedTuple):
    """One image as a slot sees it, and the words of its caption that the slot attends to."""

    picture: Image.Image
    words: str


class SlotGallery(NamedTuple):
    """A slot: its words over all captions, and its tiles."""

    number: int
    words: str
    tiles: list[SlotTile]


class DemoSlots(NamedTuple):
    """What is shown: images with captions, and the same images by each slot."""

    images: list[tuple[Image.Image, str]]
    slots: list[SlotGallery]


def demo_slots(encoder: ClipEncoder, images: Sequence[Image.Image], captions: Sequence[str]) -> DemoSlots:
    """Choose slots over all images and show them on a few, evenly spaced."""
    attended = attend(encoder, images, captions)
    profiles = word_profiles(attended)
    # One scale per slot, the brightest patch of its median image: one image with a glaring patch must not dim all others.
    brightest = torch.stack([one.maps.flatten(1).amax(1) for one in attended]).median(0).values
    some = [i * len(images) // _COLUMNS for i in range(_COLUMNS)]
    galleries = []
    for slot in informative_slots(attended, profiles, _SLOTS):
        tiles = [
            SlotTile(
                spotlight(image_crop(encoder, images[i]), attended[i].maps[slot], float(brightest[slot]), _SIZE),
                _top_words(attended[i], slot),
            )
            for i in some
        ]
        words = ", ".join(f"{word} {share:.0%}" for word, share in profiles.of(slot, 4))
        galleries.append(SlotGallery(slot, words, tiles))
    return DemoSlots([(thumbnail(image_crop(encoder, images[i]), _SIZE), captions[i]) for i in some], galleries)


def _top_words(one: Attended, slot: int) -> str:
    # What a slot gives to the start or to "a" says nothing of the picture.
    naming = [i for i, word in enumerate(one.words) if word.lower() not in FUNCTION_WORDS]
    top = sorted(sorted(naming, key=lambda i: -float(one.weights[slot, i]))[:2])
    return "  ".join(f"{one.words[i]} {float(one.weights[slot, i]):.0%}" for i in top)


def draw_slots(demo: DemoSlots, path: Path) -> None:
    """The same as one picture, of fewer images, so that it can be read on a phone: images on top, then a row per slot."""
    some = _IN_PICTURE
    rows = len(demo.slots) + 1
    figure, axes = plt.subplots(rows, len(some), figsize=(1.9 * len(some), 2.3 * rows), layout="constrained")
    for axis, (picture, caption) in zip(axes[0], (demo.images[i] for i in some), strict=True):
        axis.imshow(picture)
        axis.set_title(textwrap.fill(caption, 22), fontsize=9.5)
    for line, slot in zip(axes[1:], demo.slots, strict=True):
        for axis, tile in zip(line, (slot.tiles[i] for i in some), strict=True):
            axis.imshow(tile.picture)
            axis.set_xlabel(tile.words.replace("  ", "\n"), fontsize=11)
        line[0].set_ylabel(f"slot {slot.number}", fontsize=12)
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[])
        for side in axis.spines.values():
            side.set_visible(False)
    save_figure(figure, path, 110)
