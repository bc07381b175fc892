"""Class names and prompts of Babel-ImageNet (Geigle et al. 2024): ImageNet's classes in other languages."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from sparo_train.core.errors import DataError, did_you_mean
from sparo_train.core.files import read_json

IMAGENET_CLASSES = 1000
_LABELS, _PROMPTS = "babel_imagenet.json", "nllb_dist13b_prompts.json"


def babel_imagenet(root: Path, language: str) -> tuple[list[int], list[str], list[str]]:
    """Return numbers and names of the classes that have a name in a language, and prompts with `{c}`.

    Args:
        root: folder with the two files of Babel-ImageNet; those that it lacks are read from clip-benchmark.
        language: code of the language, in any case.

    Raises:
        DataError: files are missing or damaged, or have no such language.
    """
    labels, prompts = (_table(root, name) for name in (_LABELS, _PROMPTS))
    code = language.upper()
    # Some languages have names, but no prompts.
    known = [name for name in labels if name in prompts]
    if code not in known:
        raise DataError(f"language={language}: is not in Babel-ImageNet; {did_you_mean(code, known)}")
    try:
        numbers, names = labels[code]
        numbers, names, templates = [int(n) for n in numbers], [*map(str, names)], [*map(str, prompts[code])]
    except (TypeError, ValueError) as error:
        raise DataError(
            f"{root}: {_LABELS}: {code} must have a list of class numbers and a list of names ({error}). Fetch the "
            "file again."
        ) from None
    if len(numbers) != len(names) or not all(0 <= n < IMAGENET_CLASSES for n in numbers) or len(set(numbers)) < 2:
        raise DataError(
            f"{root}: {_LABELS}: the language {code} needs one name per class number. Fetch the file again."
        )
    if bad := [text for text in templates if text.count("{}") != 1]:
        raise DataError(
            f"{root}: {_PROMPTS}: each prompt must contain {{}} (for the class name) exactly once, got {bad[0]!r}"
        )
    return numbers, names, [text.replace("{}", "{c}") for text in templates]


def _table(root: Path, name: str) -> dict[str, Any]:
    """Return a file of Babel-ImageNet, of the set's folder or clip-benchmark's."""
    if (root / name).is_file():
        return read_json(root / name, dict, DataError)
    spec = importlib.util.find_spec("clip_benchmark")
    places = (spec.submodule_search_locations if spec is not None else None) or []
    path = next((p for place in places if (p := Path(place) / "datasets" / name).is_file()), None)
    if path is None:
        raise DataError(
            f"{root / name}: missing. Install clip-benchmark, or copy the file from github.com/gregor-ge/Babel-ImageNet (data/)."
        )
    return read_json(path, dict, DataError)
