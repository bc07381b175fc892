"""Pictures of slots: one page that contains everything, and PNGs of its parts."""

from __future__ import annotations

import logging
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from PIL import Image

from evals.encoders.encoder import Encoder
from evals.report.plots import literal, save_figure
from evals.slots.attend import Attended, filter_slots, gallery, top_words
from evals.slots.overlay import image_crop, overlay, thumbnail
from sparo_train.core.files import escape_control_chars, write_whole

from .html import data_uri, render, shaded_caption

_TILE_HEIGHT = 1.25  # inches of a tile with its title, for a picture of size 1
_MAX_GALLERIES = 16  # default number of slots with a gallery
_MAX_TILES = 6  # slots of an image in examples.png

logger = logging.getLogger(__name__)


class CaptionedImage(NamedTuple):
    """An image with its key and its caption, if it has one."""

    key: str
    image: Image.Image
    caption: str | None


class _Tile(NamedTuple):
    image: Image.Image
    title: str


def write_report(
    folder: Path, encoder: Encoder, samples: Sequence[CaptionedImage], attended: Sequence[Attended], facts: Mapping[str, Any], show_options: Any,
    slot_ids: Sequence[int] | None, names: Mapping[int, str], num_own: int,
) -> list[Path]:  # fmt: skip
    """Write `report.html`, `examples.png` and a PNG per gallery; return their paths.

    Args:
        folder, encoder, samples, attended, facts, slot_ids, names: content of the report.
        show_options: `examples`, `tiles`, and the filter's `cosine` and `share`.
        num_own: number of the user's images, which come first and are always shown completely.
    """
    overlays = _Overlays(encoder, samples, attended)
    num_examples = min(len(samples), max(num_own, show_options.examples))
    passing, note = choose_example_slots(attended, slot_ids, show_options)
    # The user's own first, then those with most slots that pass.
    order = [*range(num_own), *sorted(range(num_own, len(samples)), key=lambda i: -len(passing[i]))][:num_examples]
    slots = list(slot_ids) if slot_ids is not None else _best_slots(attended)
    # A single image has no highest and lowest.
    if len(samples) < 2:
        slots = []
    galleries = {slot: _gallery(attended, slot, show_options.tiles) for slot in slots}
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / "report.html"]
    page = render(
        "slots.html.jinja",
        facts={name: escape_control_chars(str(value)) for name, value in facts.items()},
        uniform=f"{1 / attended[0].maps[0].numel():.1%}",
        shaded=bool(attended[0].words),
        filter=note,
        examples=[_example(overlays, i, passing[i]) for i in order],
        slots=[_section(overlays, slot, rows, names.get(slot, "")) for slot, rows in galleries.items()],
    )
    write_whole(paths[0], page)
    paths.append(_grid(folder / "examples.png", [[_Tile(overlays.plain(i), _short_title(samples[i]))] + [
        _Tile(overlays.over(i, slot), f"slot {slot}{overlays.words(i, slot)}") for slot in passing[i][:_MAX_TILES]] for i in order]))  # fmt: skip
    for slot, rows in galleries.items():
        tiles = [
            [_Tile(overlays.over(i, slot), _short_title(samples[i])) for i in numbers] for numbers in rows.values()
        ]
        paths.append(_grid(folder / f"slot-{slot:03d}.png", tiles, list(rows)))
    return paths


class _Overlays:
    """Images under attention, with one scale per slot."""

    def __init__(self, encoder: Encoder, samples: Sequence[CaptionedImage], attended: Sequence[Attended]):
        self.samples, self.attended = samples, attended
        self._views = [image_crop(encoder, one.image) for one in samples]
        # One scale per slot over all images, so that strengths can be compared at a glance.
        self._brightest = torch.stack([one.maps.flatten(1).amax(1) for one in attended]).amax(0)

    def plain(self, number: int) -> Image.Image:
        return thumbnail(self._views[number])

    def over(self, number: int, slot: int) -> Image.Image:
        return overlay(self._views[number], self.attended[number].maps[slot], float(self._brightest[slot]))

    def tile(self, number: int, slot: int) -> dict[str, Any]:
        """Return the values that a page shows for an image under a slot."""
        one, sample = self.attended[number], self.samples[number]
        return {
            "slot": slot,
            "key": escape_control_chars(sample.key),
            "title": _short_title(sample),
            "picture": data_uri(self.over(number, slot)),
            "words": shaded_caption(one, slot) if one.words else [],
            "cosine": f"{float(one.cosine[slot]):.2f}",
        }

    def words(self, number: int, slot: int) -> str:
        """Return the two words with the highest attention of a slot, and its cosine."""
        one = self.attended[number]
        if not one.words:
            return ""
        words = "  ".join(top_words(one, slot))
        return escape_control_chars(f": {words}; cosine {float(one.cosine[slot]):.2f}")


def choose_example_slots(
    attended: Sequence[Attended], slot_ids: Sequence[int] | None, show_options: Any
) -> tuple[list[list[int]], str]:
    """Return the slots that are drawn for each image, and a sentence that says which these are."""
    if slot_ids is not None:
        return [list(slot_ids)] * len(attended), "The selected slots."
    if not attended[0].words:
        note = f"This model has no text tower: the {_MAX_TILES} slots whose attention is sharpest."
        return [_highest(one.sharp, _MAX_TILES) for one in attended], note
    passing = [filter_slots(one, show_options.cosine, show_options.share) for one in attended]
    if any(passing):
        return passing, (
            f"Slots with more than {show_options.share:.0%} of their text attention on one word, each slot "
            f"on a different word, whose image and text vectors have a cosine "
            f"above {show_options.cosine:g}."
        )
    note = (
        f"No slot passes --min-share {show_options.share:g} and --min-cosine {show_options.cosine:g}, which is usual "
        f"after few steps of training. These are the {_MAX_TILES} slots of each image whose image and text vectors have the highest cosine."
    )
    logger.warning(note)
    return [_highest(one.cosine, _MAX_TILES) for one in attended], note


def _highest(values: torch.Tensor, count: int) -> list[int]:
    return values.argsort(descending=True, stable=True)[:count].tolist()


def _best_slots(attended: Sequence[Attended]) -> list[int]:
    score = torch.stack([one.cosine if one.words else one.sharp for one in attended]).mean(0)
    return _highest(score, _MAX_GALLERIES)


def _gallery(attended: Sequence[Attended], slot: int, tiles: int) -> dict[str, list[int]]:
    texts = bool(attended[0].words)
    alignment = torch.stack([one.cosine[slot] if texts else one.sharp[slot] for one in attended])
    ranked_images = gallery(alignment, tiles)
    what = "aligned" if texts else "sharp"
    return {
        f"most {what}": ranked_images.most, f"median {what}": ranked_images.median, f"least {what}": ranked_images.least, "random": ranked_images.random,
    }  # fmt: skip


def _example(overlays: _Overlays, number: int, slots: Sequence[int]) -> dict[str, Any]:
    one = overlays.samples[number]
    return {
        "key": escape_control_chars(one.key),
        "caption": escape_control_chars(one.caption or ""),
        "picture": data_uri(overlays.plain(number)),
        "tiles": [overlays.tile(number, slot) for slot in slots],
    }


def _section(overlays: _Overlays, slot: int, rows: Mapping[str, Sequence[int]], name: str) -> dict[str, Any]:
    sharp = torch.stack([one.sharp[slot] for one in overlays.attended]).mean()
    cosine = torch.stack([one.cosine[slot] for one in overlays.attended]).mean()
    note = f"sharpness {float(sharp):.2f}" + (
        f", mean cosine {float(cosine):.2f}" if overlays.attended[0].words else ""
    )

    tiles = [{"title": title, "tiles": [overlays.tile(i, slot) for i in numbers]} for title, numbers in rows.items()]
    return {"slot": slot, "name": escape_control_chars(name), "note": note, "rows": tiles}


def _short_title(one: CaptionedImage) -> str:
    text = one.caption or one.key
    short = textwrap.shorten(text, 60, placeholder=" …")
    return escape_control_chars(f"{text[:59]}…" if short.strip() == "…" else short)  # of a script without spaces


@literal()
def _grid(path: Path, rows: Sequence[Sequence[_Tile]], names: Sequence[str] = ()) -> Path:
    """Write rows of tiles as one PNG."""
    # On a single axis, because an axis per tile would take a second for every picture.
    width, height, left = max(map(len, rows)), len(rows) * _TILE_HEIGHT, 0.15 if names else 0.0
    figure = plt.figure(figsize=(1.9 * (width + left), 1.9 * height))
    axis = figure.add_axes((0, 0, 1, 1))
    for number, tiles in enumerate(rows):
        top = number * _TILE_HEIGHT + _TILE_HEIGHT - 1
        for place, tile in enumerate(tiles):
            across, down = (n / max(tile.image.size) * 0.94 / 2 for n in tile.image.size)
            x, y = place + 0.5, top + 0.5
            axis.imshow(tile.image, extent=(x - across, x + across, y + down, y - down))
            axis.text(x, y - down - 0.02, textwrap.fill(tile.title, 34), fontsize=6, ha="center", va="bottom")
    for number, name in enumerate(names):
        axis.text(-left / 2, (number + 0.5) * _TILE_HEIGHT, name, rotation=90, fontsize=8, ha="center", va="center")
    axis.set(xlim=(-left, width), ylim=(height, 0))
    axis.set_axis_off()
    save_figure(figure, path, 120)
    return path
