"""Descriptions of all recipe keys, for the terminal and for docs/reference/keys."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from pydantic import BaseModel

from sparo_train.core.errors import ConfigError
from sparo_train.core.recipe.config_keys import (
    NAME,
    Entries,
    Key,
    RegistryBlock,
    default_text,
    list_keys,
    type_text,
    value_text,
)
from sparo_train.core.recipe.layers import load_recipe
from sparo_train.core.registries import (
    ENGINES,
    LOSSES,
    METHODS,
    OPTIMIZERS,
    READOUTS,
    SLOT_ENCODERS,
    SOURCES,
    TASKS,
    TEACHERS,
)
from sparo_train.core.registry import Registry
from sparo_train.train.run_config import RunConfig

from ..recipes import shipped_recipes

FieldId = tuple[type[BaseModel], str]
# registry, heading, key of its block in a recipe
TABLES: tuple[tuple[Registry, str, str], ...] = (
    (METHODS, "Methods", "objective"),
    (READOUTS, "Readouts", "objective.model.readout"),
    (LOSSES, "Losses of CLIP", "objective.loss"),
    (OPTIMIZERS, "Optimizers", "optim"),
    (SLOT_ENCODERS, "Image encoders of slot models", "objective.model.encoder"),
    (TEACHERS, "Teachers of distillation", "objective.teacher"),
    (ENGINES, "Engines", "engine"),
    (SOURCES, "Sources", f"data.sources.{NAME}"),
    (TASKS, "Tasks", f"eval.tasks.{NAME}"),
)


def describe_key(key: Key) -> str:
    """Return type, default and meaning on one line."""
    kind, default = type_text(key.field.annotation, key.field.metadata), default_text(key)
    facts = f"{kind}; {default if default == 'required' else f'default {default}'}" if default else kind
    return f"{key.field.description} ({facts})"


def find_keys(word: str) -> list[Key]:
    """Return the key with a dotted name and those below it; otherwise every key that ends in it.

    Raises:
        ConfigError: there is none; with suggestions.
    """
    keys = _deduplicate(list_keys(RunConfig, installed=True))
    if not word:
        return [key for key in keys if "." not in key.dotted]
    words = word.split(".")
    # The key that names a registry's entry is listed as the block itself.
    if len(words) > 1 and words[-1] in ("kind", "task"):
        words = words[:-1]
    exact = [key for key in keys if _matches_suffix(key.dotted.split("."), words)]
    # keys of an inner registry's entries are listed under that registry
    near = [key for key in exact if not _add_registry_keys(key, len(words), exact)]
    # tasks of separate jobs have the same keys as tasks
    matches = near or [key for key in keys if key.name == word and not key.dotted.startswith("eval.job.tasks.")]
    if not matches:
        raise ConfigError(f"{word}: not a key of a recipe; {_suggestion(word, keys)}")
    return matches


def _deduplicate(keys: Iterable[Key]) -> list[Key]:
    """Return the keys without repetitions; a key that several entries of a registry inherit from one class names all of them."""
    labels: dict[tuple[str, type], list[str]] = {}
    first: dict[tuple[str, type], Key] = {}
    for key in keys:
        place = key.dotted, _definer(key)
        first.setdefault(place, key)
        labels.setdefault(place, []).append(key.entry_label)
    return [
        key._replace(entry_label=", ".join(dict.fromkeys(filter(None, labels[place])))) for place, key in first.items()
    ]


def _definer(key: Key) -> type[BaseModel]:
    """Return the class that declares a key; entries of a registry may inherit it."""
    return next(cls for cls in reversed(key.owner.__mro__) if key.name in getattr(cls, "model_fields", {}))


def _suggestion(word: str, keys: Sequence[Key]) -> str:
    close = get_close_matches(
        word, dict.fromkeys([*(k.dotted for k in keys), *(k.name for k in keys)]), n=1, cutoff=0.7
    )
    # Users who do not know the name of a key type its meaning: learning_rate instead of lr.
    meaning = re.sub(r"[_-]", " ", word.rpartition(".")[2]).lower()
    described = [k for k in keys if " " in meaning and meaning in _first_sentence(k).lower()]
    described.sort(key=lambda k: len(_first_sentence(k)))
    named = [k for k in keys if close and close[0] in (k.dotted, k.name)]
    suggestions = list(dict.fromkeys(k.dotted for k in [*described[:2], *named]))[:3]
    if suggestions:
        return f"did you mean {' or '.join(map(repr, suggestions))}?"
    return "`sparo config` lists the blocks, `sparo config optim` the keys of one"


def _first_sentence(key: Key) -> str:
    return (key.field.description or "").partition(".")[0]


def _matches_suffix(key: list[str], words: list[str]) -> bool:
    return len(key) >= len(words) and all(k.removesuffix("[]") in (w, NAME) for k, w in zip(key, words, strict=False))


def _add_registry_keys(key: Key, depth: int, keys: list[Key]) -> bool:
    above = key.dotted.split(".")
    tables = {
        other.dotted for other in keys if isinstance(other.shape, RegistryBlock) and other.dotted.count(".") >= depth
    }
    return any(".".join(above[:n]) in tables for n in range(depth + 1, len(above)))


def examples() -> dict[FieldId, str]:
    """Return `dotted.key=value` for keys in shipped recipes, from the first recipe that has it."""
    example_by_key: dict[FieldId, str] = {}
    for shipped in shipped_recipes():
        tree = load_recipe(shipped.path)
        for key in list_keys(RunConfig, tree):
            # A key that no recipe sets has its default as example.
            value = _value_at(tree, key.dotted.split("."))
            if value is not None and not isinstance(value, Mapping):
                example_by_key.setdefault((_definer(key), key.name), f"{key.dotted}={value_text(value)}")
    return example_by_key


def example(key: Key, example_by_key: Mapping[FieldId, str]) -> str:
    """Return an example of a key: from a shipped recipe, from its field, or its default; empty for a block."""
    if isinstance(key.shape, type | RegistryBlock | Entries) or "[]" in key.dotted:
        return ""
    field_examples = key.field.examples
    if field_examples:
        return f"{key.dotted}={value_text(field_examples[0])}"
    if (_definer(key), key.name) in example_by_key:
        return example_by_key[_definer(key), key.name]
    default = default_text(key)
    return "" if default in ("", "required", "null") else f"{key.dotted}={default}"


def _value_at(tree: Any, keys: list[str]) -> Any:
    for key in keys:
        tree = tree.get(key) if isinstance(tree, Mapping) else None
    return tree


def own_keys(model: type[BaseModel], prefix: str = "") -> Iterator[Key]:
    """Return the keys of a model without those of registries below it."""
    tables: list[str] = []
    for key in list_keys(model, None, prefix):
        if any(key.dotted.startswith(f"{above}.") for above in tables):
            continue
        shape = key.shape.value_shape if isinstance(key.shape, Entries) else key.shape
        if isinstance(shape, RegistryBlock):
            # Their entries have separate chapters.
            tables.append(key.dotted)
        yield key
