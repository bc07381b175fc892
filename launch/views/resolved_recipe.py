"""A resolved recipe as YAML, each line with where its value comes from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from sparo_train.core.recipe.config_keys import value_text

_WIDTH = 60  # characters before the comment, where the line is no longer


def resolved_lines(config: BaseModel, origins: Mapping[tuple[str, ...], str]) -> list[str]:
    """YAML that reads back to the same recipe; behind each value the file or word that gave it, `default`, or `follows` for what
    other keys imply (a backbone's widths)."""
    return [
        f"{line:<{_WIDTH}}  # {origin}" if origin else line
        for line, origin in _block(config, config.model_dump(mode="json"), origins, ())
    ]


def _block(
    model: Any, dumped: Mapping[str, Any], origins: Mapping[tuple[str, ...], str], above: tuple[str, ...]
) -> Iterator[tuple[str, str]]:
    indent = "  " * len(above)
    for key, value in dumped.items():
        place = (*above, key)
        inner = model.get(key) if isinstance(model, Mapping) else getattr(model, key, None)
        label = f"{indent}{value_text(key)}:"
        if isinstance(value, Mapping) and value:
            yield label, ""
            yield from _block(inner, value, origins, place)
        else:
            yield f"{label} {value_text(value)}", _origin(model, key, inner, origins, place)


def _origin(model: Any, key: str, value: Any, origins: Mapping[tuple[str, ...], str], place: tuple[str, ...]) -> str:
    # A block that was given whole gave its keys, too: the nearest above counts.
    origin = next((origins[place[:n]] for n in range(len(place), 0, -1) if place[:n] in origins), None)
    if origin is not None:
        return origin
    field = type(model).model_fields.get(key) if isinstance(model, BaseModel) else None
    return "default" if field is None or field.get_default(call_default_factory=True) == value else "follows"
