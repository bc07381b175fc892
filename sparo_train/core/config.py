"""What recipes are checked against: frozen pydantic models, whose problems are told by dotted key.

What comes out of a recipe (core/recipe/layers.py puts it together) is written to the run folder and is the only truth afterwards.
"""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Collection, Iterator, Sequence
from typing import Any, TypeVar

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, GetCoreSchemaHandler, ValidationError
from pydantic_core import CoreSchema

from .errors import ConfigError, did_you_mean
from .recipe.config_keys import keys_named
from .recipe.layers import Tree, without_null_entries
from .registry import NESTED


def _accept_lists(schema: Any) -> None:
    """Switch strictness off for every tuple in a core schema, in place; their elements stay strict."""
    if isinstance(schema, dict):
        if schema.get("type") == "tuple":
            schema["strict"] = False
        for part in schema.values():
            _accept_lists(part)
    elif isinstance(schema, list):
        for part in schema:
            _accept_lists(part)


class Frozen(BaseModel):
    """Base of every configuration model: immutable, no unknown keys, no silent conversions, no infinite numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, protected_namespaces=(), allow_inf_nan=False)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Let tuples be given as lists from Python as well; strict mode allows that in JSON only."""
        schema = handler(source)
        _accept_lists(handler.resolve_ref_schema(schema))
        return schema


C = TypeVar("C", bound=Frozen)
_ON_RESUME = "on_resume"


def field(default: Any, description: str, **constraints: Any) -> Any:
    """A field with what it means; `...` as its default makes it one that must be given."""
    return Field(default=default, description=description, **constraints)


def between(low: float, high: float, rising: bool = False) -> AfterValidator:
    """Checks every number of a tuple, and that they rise where they are a smallest and a largest."""

    def check(values: tuple[float, ...]) -> tuple[float, ...]:
        if not all(low <= value <= high for value in values) or (rising and list(values) != sorted(values)):
            order = ", the smaller one first" if rising else ""
            raise ValueError(f"every number must be between {low:g} and {high:g}{order}")
        return values

    return AfterValidator(check)


def resumable_field(default: Any, description: str, with_kind: bool = False, **constraints: Any) -> Any:
    """A `field` that may differ between a run folder and the same line again: it does not change what is computed.

    Args:
        with_kind: only where the block's `kind` changes, too (a choice that one engine has).
    """
    mark: dict[str, Any] = {_ON_RESUME: "with kind" if with_kind else "free"}
    return Field(default=default, description=description, json_schema_extra=mark, **constraints)


def resumable_keys(config: BaseModel, changed_blocks: Collection[str] = (), prefix: str = "") -> Iterator[str]:
    """Dotted keys of fields made by `free`; a block made by it is given as itself, with all that is below.

    Args:
        changed_blocks: blocks whose kind changes.
    """
    for name, info in type(config).model_fields.items():
        key, value = f"{prefix}{name}", getattr(config, name)
        mark = info.json_schema_extra.get(_ON_RESUME) if isinstance(info.json_schema_extra, dict) else None
        if mark == "free" or (mark is not None and prefix.rstrip(".") in changed_blocks):
            yield key
        elif isinstance(value, BaseModel):
            yield from resumable_keys(value, changed_blocks, f"{key}.")
        elif isinstance(value, dict):
            for inner, block in value.items():
                if isinstance(block, BaseModel):
                    yield from resumable_keys(block, changed_blocks, f"{key}.{inner}.")


def resolve(model: type[C], tree: Tree, origin: str, stored: bool = False) -> C:
    """Check a tree, without entries of named blocks that are null, against a model.

    Args:
        origin: the file or command that errors name.
        stored: the tree was written by sparo, perhaps by a version with other names of keys.

    Raises:
        ConfigError: lists every problem by dotted key, with near misses.
    """
    if stored:
        from .recipe.renamed import with_new_names  # only files of older versions need the table

        tree = with_new_names(model, tree)
    tree = without_null_entries(model, tree)
    if (bad := next(_keys_with_nul(tree), None)) is not None:
        raise ConfigError(f"{origin}: {bad}: holds a NUL character, which no name or path has. Remove it.")
    try:
        # As JSON: pydantic's strict mode then takes a list for a tuple, and still no number for a text.
        return model.model_validate_json(json.dumps(tree))
    except ValidationError as error:
        lines = [_problem_line(*problem, model, tree) for problem in _flatten_problems(model, error.errors(), ())]
        raise ConfigError(f"{origin}: {len(lines)} problem(s)\n  " + "\n  ".join(lines)) from None
    except (TypeError, ValueError, RecursionError) as error:  # json's, on what a tag made: a set, bytes
        raise ConfigError(f"{origin}: a value has a type that recipes cannot hold: {error}") from None


def _keys_with_nul(tree: Any, key: str = "") -> Iterator[str]:
    """Dotted keys of texts with a NUL character, which the file system would answer with a traceback."""
    if isinstance(tree, str):
        yield from [key] if "\0" in tree else []
    elif isinstance(tree, dict | list | tuple):
        for name, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            below = f"{key}.{name}".lstrip(".")
            yield from [below] if isinstance(name, str) and "\0" in name else _keys_with_nul(value, below)


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


def invalid_keys(model: type[BaseModel], tree: Tree) -> list[tuple[Any, ...]]:
    """Where a tree does not fit a model: the keys of every problem."""
    try:
        model.model_validate_json(json.dumps(tree))
    except ValidationError as error:
        return [where for _, where, _ in _flatten_problems(model, error.errors(), ())]
    return []


def _flatten_problems(
    model: Any, problems: Sequence[Any], above: tuple[Any, ...]
) -> Iterator[tuple[Any, tuple[Any, ...], Any]]:
    """(model, place, problem) of every problem; those of a block that an open table's row checks are the row's own model's."""
    for problem in problems:
        where = (*above, *problem["loc"])
        if problem["type"] == NESTED:
            yield from _flatten_problems(problem["ctx"]["model"], problem["ctx"]["problems"], where)
        else:
            yield model, where, problem


def _problem_line(model: Any, where: tuple[Any, ...], problem: Any, top: type[BaseModel], tree: Tree) -> str:
    dotted = ".".join(map(str, where)) or "(top level)"
    if problem["type"] == "extra_forbidden":
        # Near misses come from the block that was meant, not from the whole recipe.
        from .recipe.renamed import new_name

        models = _models_at(model, tuple(problem["loc"])[:-1])
        renamed = next((name for m in models if (name := new_name(m, str(where[-1])))), None)
        if renamed is not None:
            return f"{dotted}: was renamed, got {where[-1]!r}. Write {'.'.join(map(str, (*where[:-1], renamed)))}."
        field_names = sorted({name for m in models for name in m.model_fields})
        elsewhere = keys_named(top, tree, str(where[-1]))
        if elsewhere:
            return f"{dotted}: unknown key; did you mean {' or '.join(repr(key) for key in elsewhere[:4])}?"
        return f"{dotted}: unknown key; {did_you_mean(str(problem['loc'][-1]), field_names)}"
    if problem["type"] == "missing":
        return f"{dotted}: a value is required"
    if problem["type"] == "too_short" and isinstance(problem.get("input"), dict):
        return f"{dotted}: is empty; at least one entry is needed"
    if problem["type"] in ("dict_type", "model_type", "model_attributes_type"):
        return f"{dotted}: a block with keys is expected, {{}} for an empty one (got {problem.get('input')!r})"
    got = problem.get("input")
    got_text = "" if got is None or isinstance(got, dict) else f" (got {got!r})"
    return f"{dotted}: {problem['msg'].removeprefix('Value error, ')}{got_text}"


def _models_at(annotation: Any, loc: Sequence[Any]) -> list[type[BaseModel]]:
    """Return the models that may check the block at `loc` below `annotation`."""
    models = _models_in(annotation)
    if not loc:
        return models
    head, rest = loc[0], loc[1:]
    for m in models:
        if head in m.model_fields:
            return _models_at(m.model_fields[head].annotation, rest)
    return _models_at(annotation, rest)  # a list index, a mapping's key


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    # Unions and containers are looked through: a block may stand in either.
    origin = typing.get_origin(annotation)
    if origin is None and not isinstance(annotation, types.UnionType):
        return []
    return [m for arg in typing.get_args(annotation) for m in _models_in(arg)]
