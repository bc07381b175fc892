"""Class names and templates that clip-benchmark publishes, from its data files where it is installed; it is never imported."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

_FILES = {"classnames": "en_classnames.json", "templates": "en_zeroshot_classification_templates.json"}


def published(what: str, name: str) -> list[str] | None:
    """`classnames` or `templates` of a set by clip-benchmark's name (`vtab/pets`); None where it has none or is not installed."""
    spec = importlib.util.find_spec("clip_benchmark")
    if spec is None or not spec.submodule_search_locations:
        return None
    path = Path(spec.submodule_search_locations[0]) / "datasets" / _FILES[what]
    if not path.is_file():
        return None
    table = json.loads(path.read_text(encoding="utf-8"))
    found = table.get(name) or table.get(name.rpartition("/")[2])
    return [str(entry) for entry in found] if isinstance(found, list) else None
