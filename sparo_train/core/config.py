"""Recipes: YAML with `extends:`, overrides `a.b=c`, checked against frozen pydantic models.

The order is fixed: the recipe's parents, the recipe, the command line. What comes out is written to the run
folder and is the only truth afterwards.
"""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from .errors import ConfigError, did_you_mean
from .plugins import NESTED
from .recipe_yaml import parse_yaml as parse_yaml
from .untrusted import read_text

Tree = dict[str, Any]


class Frozen(BaseModel):
    """Base of every configuration model: immutable, no unknown keys, no silent conversions, no infinite numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, protected_namespaces=(), allow_inf_nan=False)


C = TypeVar("C", bound=Frozen)
_ON_RESUME = "on_resume"


def setting(default: Any, description: str, **constraints: Any) -> Any:
    """A field with what it means; `...` as its default makes it one that must be given."""
    return Field(default=default, description=description, **constraints)


def between(low: float, high: float, rising: bool = False) -> AfterValidator:
    """Checks every number of a tuple, and that they rise where they are a smallest and a largest."""

    def check(values: tuple[float, ...]) -> tuple[float, ...]:
        if not all(low <= value <= high for value in values) or (rising and list(values) != sorted(values)):
            order = ", the smaller one first" if rising else ""
            raise ValueError(f"every number is between {low:g} and {high:g}{order}")
        return values

    return AfterValidator(check)


def free(default: Any, description: str, with_kind: bool = False, **constraints: Any) -> Any:
    """A `setting` that may differ between a run folder and the same line again: it does not change what is computed.

    Args:
        with_kind: only where the block's `kind` changes, too (a choice that one engine has).
    """
    mark: dict[str, Any] = {_ON_RESUME: "with kind" if with_kind else "free"}
    return Field(default=default, description=description, json_schema_extra=mark, **constraints)


def free_keys(config: BaseModel, switched: Collection[str] = (), prefix: str = "") -> Iterator[str]:
    """Dotted keys of fields made by `free`; a block made by it is given as itself, with all that is below.

    Args:
        switched: blocks whose kind changes.
    """
    for name, field in type(config).model_fields.items():
        key, value = f"{prefix}{name}", getattr(config, name)
        mark = field.json_schema_extra.get(_ON_RESUME) if isinstance(field.json_schema_extra, dict) else None
        if mark == "free" or (mark is not None and prefix.rstrip(".") in switched):
            yield key
        elif isinstance(value, BaseModel):
            yield from free_keys(value, switched, f"{key}.")
        elif isinstance(value, dict):
            for inner, block in value.items():
                if isinstance(block, BaseModel):
                    yield from free_keys(block, switched, f"{key}.{inner}.")


def merge(base: Tree, over: Mapping[str, Any]) -> Tree:
    """Merge `over` into a copy of `base`. An empty mapping, or one whose `kind` changes, replaces the old one whole."""
    out = dict(base)
    for key, value in over.items():
        old = out.get(key)
        if isinstance(old, dict) and isinstance(value, Mapping):
            switched = "kind" in value and "kind" in old and value["kind"] != old["kind"]
            out[key] = dict(value) if switched or not value else merge(old, value)
        else:
            out[key] = value
    return out


def load_recipe(path: str | Path, _seen: tuple[Path, ...] = ()) -> Tree:
    """Read a recipe and what it extends (a path or list of paths, relative to the file) into one tree.

    Raises `ConfigError` for a missing file, a cycle, or a file that is no mapping.
    """
    path = Path(path)
    if not path.is_file():
        near = (
            did_you_mean(path.name, [p.name for p in path.parent.glob("*.yaml")])
            if path.parent.is_dir()
            else "the folder does not exist"
        )
        raise ConfigError(f"{path}: no such recipe; {near}")
    resolved = path.resolve()
    if resolved in _seen:
        raise ConfigError(f"{path}: `extends:` goes in a circle: {' -> '.join(str(p) for p in (*_seen, resolved))}")
    tree = parse_yaml(read_text(path), str(path))
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: a recipe is a mapping of keys, found {type(tree).__name__}")
    parents = tree.pop("extends", [])
    parents = [parents] if isinstance(parents, str) else parents
    if not isinstance(parents, list) or not all(isinstance(parent, str) for parent in parents):
        raise ConfigError(f"{path}: extends: {parents!r} is no path and no list of paths")
    base: Tree = {}
    for parent in parents:
        base = merge(base, load_recipe(path.parent / parent, (*_seen, resolved)))
    return merge(base, tree)


def override(tree: Tree, assignments: Sequence[str]) -> Tree:
    """Apply `a.b=value` strings (the value is YAML; a new `kind` drops the old block's other keys)."""
    for text in assignments:
        dotted, equals, value = text.partition("=")
        keys = dotted.strip().split(".")
        if not equals or not all(keys):
            raise ConfigError(f"override {text!r}: write key.path=value, as in optim.lr=1e-3")
        patch: Any = parse_yaml(value, f"override {text!r}")
        for depth, key in enumerate(reversed(keys)):
            at = tree
            for outer in keys[: len(keys) - 1 - depth]:
                at = at.get(outer, {}) if isinstance(at, dict) else at
            if not isinstance(at, dict):
                where = ".".join(keys[: len(keys) - 1 - depth])
                raise ConfigError(f"override {text!r}: {where} is {at!r}, not a block with keys")
            patch = {key: patch}
        tree = merge(tree, patch)
    return tree


def resolve(model: type[C], tree: Tree, origin: str) -> C:
    """Check a tree against a model. Raises `ConfigError` listing every problem by dotted key, with near misses."""
    try:
        return model.model_validate_json(json.dumps(tree))
    except ValidationError as error:
        lines = [_explained(*problem) for problem in _flat(model, error.errors(), ())]
        raise ConfigError(f"{origin}: {len(lines)} problem(s)\n  " + "\n  ".join(lines)) from None
    except (TypeError, ValueError, RecursionError) as error:  # json's, on what a tag made: a set, bytes
        raise ConfigError(f"{origin}: a value is of a kind YAML recipes do not hold: {error}") from None


def dump(config: BaseModel) -> str:
    """The resolved recipe as YAML; reading it back gives an equal model."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def differences(old: Any, new: Any, prefix: str = "") -> list[str]:
    """Dotted keys whose values differ between two trees, as `key: old -> new`."""
    if isinstance(old, dict) and isinstance(new, dict):
        return [
            line
            for key in dict.fromkeys([*old, *new])
            for line in differences(old.get(key, "(absent)"), new.get(key, "(absent)"), f"{prefix}{key}.")
        ]
    return [] if old == new else [f"{prefix.rstrip('.')}: {old!r} -> {new!r}"]


def wrong_keys(model: type[BaseModel], tree: Tree) -> list[tuple[Any, ...]]:
    """Where a tree does not fit a model: the keys of every problem."""
    try:
        model.model_validate_json(json.dumps(tree))
    except ValidationError as error:
        return [where for _, where, _ in _flat(model, error.errors(), ())]
    return []


def _flat(model: Any, problems: Sequence[Any], above: tuple[Any, ...]) -> Iterator[tuple[Any, tuple[Any, ...], Any]]:
    """(model, place, problem) of every problem; those of a block that an open table's row checks are the row's own model's."""
    for problem in problems:
        where = (*above, *problem["loc"])
        if problem["type"] == NESTED:
            yield from _flat(problem["ctx"]["model"], problem["ctx"]["problems"], where)
        else:
            yield model, where, problem


def _explained(model: Any, where: tuple[Any, ...], problem: Any) -> str:
    dotted = ".".join(map(str, where)) or "(top level)"
    if problem["type"] == "extra_forbidden":
        known = _fields_at(model, tuple(problem["loc"])[:-1])
        return f"{dotted}: unknown key; {did_you_mean(str(problem['loc'][-1]), known)}"
    if problem["type"] == "missing":
        return f"{dotted}: a value is required"
    got = problem.get("input")
    shown = "" if got is None or isinstance(got, dict) else f" (got {got!r})"
    return f"{dotted}: {problem['msg'].removeprefix('Value error, ')}{shown}"


def _fields_at(annotation: Any, loc: Sequence[Any]) -> list[str]:
    """Names of the fields of the model that sits at `loc` below `annotation`."""
    models = _models_in(annotation)
    if not loc:
        return sorted({name for m in models for name in m.model_fields})
    head, rest = loc[0], loc[1:]
    for m in models:
        if head in m.model_fields:
            return _fields_at(m.model_fields[head].annotation, rest)
    return _fields_at(annotation, rest)  # a list index, a mapping's key


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    origin = typing.get_origin(annotation)
    if origin is None and not isinstance(annotation, types.UnionType):
        return []
    return [m for arg in typing.get_args(annotation) for m in _models_in(arg)]
