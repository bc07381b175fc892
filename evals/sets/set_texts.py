"""Class names and templates of a set: from its folder, else those that clip-benchmark publishes, whose data files are read where
it is installed; it is never imported."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

from sparo_train.core.errors import DataError
from sparo_train.core.untrusted import read_text

OWN = {"classnames": "classnames.txt", "templates": "zeroshot_classification_templates.txt"}
_PUBLISHED = {"classnames": "en_classnames.json", "templates": "en_zeroshot_classification_templates.json"}


def read_set_texts(what: str, root: Path, benchmark_name: str | None) -> list[str] | None:
    """`classnames` or `templates` of the set in `root`; None where neither the folder nor clip-benchmark has them."""
    if (root / OWN[what]).is_file():
        return lines(root / OWN[what])
    return published(what, benchmark_name) if benchmark_name else None


def lines(path: Path) -> list[str]:
    """Return the lines of a text file, stripped, without blank ones, as clip-benchmark reads them. Raises `DataError` if it is missing."""
    if not path.is_file():
        raise DataError(f"{path}: missing; this task needs it (one entry per line)")
    return [line.strip() for line in read_text(path, DataError).split("\n") if line.strip()]


def published(what: str, name: str) -> list[str] | None:
    """By clip-benchmark's name (`vtab/pets`); None where it has none or is not installed."""
    spec = importlib.util.find_spec("clip_benchmark")
    if spec is None or not spec.submodule_search_locations:
        return None
    path = Path(spec.submodule_search_locations[0]) / "datasets" / _PUBLISHED[what]
    if not path.is_file():
        return None
    table = json.loads(path.read_text(encoding="utf-8"))
    # clip-benchmark itself drops the collection's name where it finds nothing under the whole.
    entries = table.get(name) or table.get(name.rpartition("/")[2])
    if entries is None and what == "templates":
        entries = table.get("imagenet1k")  # what clip-benchmark uses where a set has no prompts of its own
    return [str(entry) for entry in entries] if isinstance(entries, list) else None
