"""HTML pages: their templates and their common style."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup
from PIL import Image

from evals.slots.attend import Attended
from evals.slots.overlay import jpeg
from sparo_train.core.files import escape_control_chars

_FOLDER = Path(__file__).parent
STYLE_FILES = (_FOLDER / "style/tokens.css", _FOLDER / "style/base.css")
_MAX_LEVEL = 5  # classes w1 to w5 of base.css


def stylesheet() -> str:
    """Return the style of every page."""
    return "".join(path.read_text(encoding="utf-8") for path in STYLE_FILES)


def render(template: str, **values: Any) -> str:
    """Render a template of this folder; values are escaped."""
    environment = Environment(autoescape=True, loader=FileSystemLoader(_FOLDER), trim_blocks=True)
    return environment.get_template(template).render(style=Markup(stylesheet()), **values)


def data_uri(image: Image.Image) -> str:
    """Return an image as the address that contains it."""
    return "data:image/jpeg;base64," + base64.b64encode(jpeg(image.convert("RGB"))).decode()


def shaded_caption(one: Attended, slot: int) -> list[tuple[str, str, int]]:
    """Return for each word of a caption the space before it, the word, and its shade: 0 below a tenth of the slot's attention, at most 5."""
    shades: list[tuple[str, str, int]] = []
    for word, weight in zip(one.words, one.weights[slot].tolist(), strict=True):
        if word in ("[start]", "[end]"):
            continue
        level = min(_MAX_LEVEL, 1 + int(weight * _MAX_LEVEL)) if weight >= 0.1 else 0
        shades.append(("" if not shades or word in ",.;:!?" else " ", escape_control_chars(word), level))
    return shades
