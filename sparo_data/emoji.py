"""Real image-text pairs for small machines: emoji drawn by several vendors, with human labels and tags.

The drawings are SVG sets from npm (`@iconify-json/*`), the texts come from `emojibase-data`; an ordinary `npm install`
fetches 21 MB. Nothing is redistributed: each set keeps its licence (Apache-2.0: noto, noto-v1, fxemoji; MIT:
fluent-emoji-flat; CC BY 4.0: twemoji, emojione, streamline-emojis; CC BY-SA 4.0: openmoji, emojione-v1).

Splits: one vendor (twemoji) is held out completely, and a tenth of the concepts is held out for all vendors. A concept
is a base label, so skin-tone variants and equal labels stay together. Flags look the same everywhere and are excluded.
"""

from __future__ import annotations

import io
import json
import re
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from sparo_train.core.errors import DataError
from sparo_train.core.rng import generator

from .npm import install_packages

VENDORS = {
    "noto": "1.2.9",
    "noto-v1": "1.2.5",
    "twemoji": "1.2.5",
    "openmoji": "1.2.29",
    "fluent-emoji-flat": "1.2.6",
    "emojione": "1.2.3",
    "emojione-v1": "1.2.3",
    "fxemoji": "1.2.2",
    "streamline-emojis": "1.2.4",
}
TEXTS = ("emojibase-data", "17.0.0")
TEST_VENDOR = "twemoji"
TEMPLATES = ["{c}", "an emoji of {c}"]
FLAGS, COMPONENTS = 9, 2
_ATTRIBUTES = [
    {
        "red",
        "orange",
        "yellow",
        "green",
        "blue",
        "light blue",
        "purple",
        "brown",
        "black",
        "white",
        "grey",
        "pink",
    },
    {"man", "woman", "person"},
    {"men", "women", "people"},
    {"boy", "girl", "child"},
    {"light", "medium-light", "medium", "medium-dark", "dark"},
    {"left", "right", "up", "down"},
    {"up-left", "up-right", "down-left", "down-right"},
    {"small", "medium", "large"},
]


class Emoji(NamedTuple):
    """One emoji: label (`waving hand: dark skin tone`), its base label, tags, subgroup."""

    hexcode: str
    label: str
    concept: str
    tags: tuple[str, ...]
    subgroup: int

    @property
    def is_base(self) -> bool:
        return normalize(self.label) == self.concept

    def caption(self, tags: Sequence[str]) -> str:
        return ", ".join([self.label, *tags])


class Drawing(NamedTuple):
    """One vendor's drawing of an emoji, as a complete SVG."""

    vendor: str
    emoji: Emoji
    svg: str


def install(folder: Path) -> Path:
    """Fetch the pinned npm packages into `folder`; return its node_modules. Raises `DataError`."""
    packages = {**{f"@iconify-json/{name}": version for name, version in VENDORS.items()}, TEXTS[0]: TEXTS[1]}
    return install_packages(folder, packages, "sparo data emoji")


def read_emoji(modules: Path) -> list[Emoji]:
    """Return all emoji with their texts, including skin tones, without flags and bare components."""
    emoji = []
    for base in _json(modules / "emojibase-data/en/data.json"):
        # Bare components (a skin colour, a hair style) are not pictures of anything.
        if base.get("group") in (None, FLAGS, COMPONENTS):
            continue
        tags, concept = tuple(base.get("tags", ())), normalize(base["label"])
        # Skin tones get the tags of their base emoji, because emojibase has none for them.
        for entry in (base, *base.get("skins", ())):
            emoji.append(Emoji(entry["hexcode"], entry["label"], concept, tags, base["subgroup"]))
    return emoji


def read_drawings(modules: Path, vendor: str, emoji: Sequence[Emoji]) -> list[Drawing]:
    """Return a vendor's drawings, matched to the texts by label, then code point, then short code; one per emoji."""
    folder = modules / "@iconify-json" / vendor
    icons = _json(folder / "icons.json")
    chars = _json(folder / "chars.json") if (folder / "chars.json").is_file() else {}
    codes = {slug: code.upper() for code, slug in chars.items()}
    by_label = {normalize(e.label): e for e in emoji}
    by_code = {e.hexcode: e for e in emoji}
    by_short: dict[str, Emoji] = {}
    for code, names in _json(modules / "emojibase-data/en/shortcodes/emojibase.json").items():
        for name in [names] if isinstance(names, str) else names:
            if code in by_code:
                # Keep the first, because later emoji reused short codes.
                by_short.setdefault(normalize(name), by_code[code])
    drawings: dict[str, Drawing] = {}
    for slug, icon in icons["icons"].items():
        # Match labels first, because code points of old sets have their meaning of that time.
        match = by_label.get(normalize(slug)) or by_code.get(codes.get(slug, "")) or by_short.get(normalize(slug))
        # Sets list one drawing under several names; a concept counts once per vendor.
        if match is not None and match.hexcode not in drawings:
            drawings[match.hexcode] = Drawing(vendor, match, _svg(icon, icons))
    return [drawings[code] for code in sorted(drawings)]


def rasterise(svg: str, size: int) -> Image.Image:
    """Render an SVG on white, fitted into a square of `size` pixels."""
    import resvg_py  # only needed to make the data set

    png = resvg_py.svg_to_bytes(svg_string=svg, width=size, dpi=90, skip_system_fonts=True)
    image = Image.open(io.BytesIO(bytes(png))).convert("RGBA")
    # Only shrink, keeping the aspect ratio: a wide drawing fills the width of the square only.
    image.thumbnail((size, size), Image.Resampling.BICUBIC)
    square = Image.new("RGBA", (size, size), "white")
    # Centred on white, because vendors have different margins.
    square.alpha_composite(image, ((size - image.width) // 2, (size - image.height) // 2))
    return square.convert("RGB")


def is_held_out(emoji: Emoji) -> bool:
    """Return whether the emoji belongs to the tenth of concepts that is held out, always the same."""
    return zlib.crc32(emoji.concept.encode()) % 10 == 0


def training_caption(emoji: Emoji, vendor: str, seed: int) -> str:
    """Return the label, sometimes with up to three tags, sometimes as `an emoji of …`; fixed per drawing."""
    rng = generator(seed, "emoji", "caption", vendor, emoji.hexcode)
    tags: list[str] = []
    if emoji.tags and rng.random() < 0.5:
        count = int(rng.integers(1, min(3, len(emoji.tags)) + 1))
        tags = [emoji.tags[i] for i in sorted(rng.permutation(len(emoji.tags))[:count])]
    text = emoji.caption(tags)
    return f"an emoji of {text}" if rng.random() < 0.3 else text


def sibling_pairs(emoji: Sequence[Emoji], rng: np.random.Generator) -> Iterator[tuple[Emoji, str]]:
    """Return `replace_obj` pairs: each base emoji with the label of another in its subgroup; every label is true as often as false."""
    groups: dict[int, list[Emoji]] = defaultdict(list)
    for e in emoji:
        if e.is_base:
            groups[e.subgroup].append(e)
    for members in groups.values():
        order = [members[i] for i in rng.permutation(len(members))]
        if len(order) > 1:
            for e, other in zip(order, [*order[1:], order[0]], strict=True):
                yield e, other.label


def attribute_pairs(emoji: Sequence[Emoji], rng: np.random.Generator) -> Iterator[tuple[Emoji, str]]:
    """Return `replace_att` pairs: labels that differ from another emoji's in one attribute word (a colour, a skin tone, man/woman …)."""
    labels = {e.label: e for e in emoji}
    families: dict[str, list[str]] = defaultdict(list)
    for label in labels:
        words = label.split(" ")
        for i, word in enumerate(words):
            for number, values in enumerate(_ATTRIBUTES):
                if word in values:
                    families[" ".join([*words[:i], f"<{number}>", *words[i + 1 :]])].append(label)
    for family in sorted(families):
        members = families[family]
        order = [members[i] for i in rng.permutation(len(members))]
        if len(order) > 1:
            for true, false in zip(order, [*order[1:], order[0]], strict=True):
                yield labels[true], false


def normalize(text: str) -> str:
    """Keep letters and digits only, in lower case."""
    return re.sub("[^a-z0-9]", "", text.lower())


def _svg(icon: dict[str, Any], defaults: dict[str, Any]) -> str:
    left, top = icon.get("left", 0), icon.get("top", 0)
    width = icon.get("width", defaults.get("width", 16))
    height = icon.get("height", defaults.get("height", 16))
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'width="{width}" height="{height}" viewBox="{left} {top} {width} {height}">{icon["body"]}</svg>'
    )


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path}: not readable ({error}). Remove {path.parents[1]} and run `sparo data emoji` again."
        ) from None
