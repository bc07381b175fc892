"""Base classes of all configuration: frozen pydantic models whose errors name the dotted key.

`core/recipe/layers.py` assembles a recipe. The resolved recipe is written to the run folder, and only this copy is used
from then on.
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
    """Disable strict mode for every tuple in a core schema, in place; elements of tuples stay strict."""
    if isinstance(schema, dict):
        if schema.get("type") == "tuple":
            schema["strict"] = False
        for part in schema.values():
            _accept_lists(part)
    elif isinstance(schema, list):
        for part in schema:
            _accept_lists(part)


class Frozen(BaseModel):
    """Base class of all configuration models: immutable, no unknown keys, no implicit conversions, no infinite numbers."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        protected_namespaces=(),
        allow_inf_nan=False,
        hide_input_in_errors=True,
    )

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Accept lists for tuples from Python, too. Strict mode of pydantic does this for JSON only."""
        schema = handler(source)
        _accept_lists(handler.resolve_ref_schema(schema))
        return schema


C = TypeVar("C", bound=Frozen)
_ON_RESUME = "on_resume"


def field(default: Any, description: str, **constraints: Any) -> Any:
    """Declare a configuration field with its description. The default `...` makes it required."""
    return Field(default=default, description=description, **constraints)


def between(low: float, high: float, rising: bool = False) -> AfterValidator:
    """Return a validator that checks the range of every number of a tuple and, if `rising`, that they ascend."""

    def check(values: tuple[float, ...]) -> tuple[float, ...]:
        if not all(low <= value <= high for value in values) or (rising and list(values) != sorted(values)):
            order = ", the smaller one first" if rising else ""
            raise ValueError(f"every number must be between {low:g} and {high:g}{order}")
        return values

    return AfterValidator(check)


def resumable_field(default: Any, description: str, with_kind: bool = False, **constraints: Any) -> Any:
    """Declare a field that may differ when a run is resumed, because it does not change the computation.

    Args:
        with_kind: the field may only differ if the block's `kind` differs, too (an option of one engine).
    """
    mark: dict[str, Any] = {_ON_RESUME: "with kind" if with_kind else "free"}
    return Field(default=default, description=description, json_schema_extra=mark, **constraints)


def resumable_keys(config: BaseModel, changed_blocks: Collection[str] = (), prefix: str = "") -> Iterator[str]:
    """List the dotted keys of fields made by `resumable_field`. A block made by it is listed as a whole.

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
    """Validate a tree against a model, after removing null entries of named blocks.

    Args:
        origin: file or command for error messages.
        stored: the tree was written by sparo, perhaps by a version with other key names.

    Raises:
        ConfigError: lists every problem by dotted key, with similar valid names.
    """
    if stored:
        from .recipe.renamed import with_new_names  # only files of older versions need the table of renamed keys

        tree = with_new_names(model, tree)
    tree = without_null_entries(model, tree)
    if (bad := next(_keys_with_nul(tree), None)) is not None:
        raise ConfigError(f"{origin}: {bad}: contains a NUL character, which no name or path may have. Remove it.")
    try:
        # Validate as JSON, because pydantic's strict mode then accepts lists for tuples but still no numbers for
        # strings.
        return model.model_validate_json(json.dumps(tree))
    except ValidationError as error:
        lines = [_problem_line(*problem, model, tree) for problem in _flatten_problems(model, error.errors(), ())]
        raise ConfigError(f"{origin}: {len(lines)} problem(s)\n  " + "\n  ".join(lines)) from None
    except (
        TypeError,
        ValueError,
        RecursionError,
    ) as error:  # json cannot serialize what some YAML tags build: a set, bytes
        raise ConfigError(f"{origin}: a value has a type that recipes cannot hold: {error}") from None


def _keys_with_nul(tree: Any, key: str = "") -> Iterator[str]:
    """List the dotted keys of strings with a NUL character, which would raise a bare ValueError in file functions."""
    if isinstance(tree, str):
        yield from [key] if "\0" in tree else []
    elif isinstance(tree, dict | list | tuple):
        for name, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            below = f"{key}.{name}".lstrip(".")
            yield from [below] if isinstance(name, str) and "\0" in name else _keys_with_nul(value, below)


def dump(config: BaseModel) -> str:
    """Return the resolved recipe as YAML; parsing it gives an equal model."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def differences(old: Any, new: Any, prefix: str = "") -> list[str]:
    """List the dotted keys whose values differ between two trees, as `key: old -> new`."""
    if isinstance(old, dict) and isinstance(new, dict):
        return [
            line
            for key in dict.fromkeys([*old, *new])
            for line in differences(old.get(key, "(absent)"), new.get(key, "(absent)"), f"{prefix}{key}.")
        ]
    return [] if old == new else [f"{prefix.rstrip('.')}: {old!r} -> {new!r}"]


def invalid_keys(model: type[BaseModel], tree: Tree) -> list[tuple[Any, ...]]:
    """List the keys of all problems of a tree under a model."""
    try:
        model.model_validate_json(json.dumps(tree))
    except ValidationError as error:
        return [where for _, where, _ in _flatten_problems(model, error.errors(), ())]
    return []


def _flatten_problems(
    model: Any, problems: Sequence[Any], above: tuple[Any, ...]
) -> Iterator[tuple[Any, tuple[Any, ...], Any]]:
    """Return (model, key, problem) for every problem. Problems inside the block of a registry entry refer to the entry's own model."""
    for problem in problems:
        where = (*above, *problem["loc"])
        if problem["type"] == NESTED:
            yield from _flatten_problems(problem["ctx"]["model"], problem["ctx"]["problems"], where)
        else:
            yield model, where, problem


def _problem_line(model: Any, where: tuple[Any, ...], problem: Any, top: type[BaseModel], tree: Tree) -> str:
    dotted = ".".join(map(str, where)) or "(top level)"
    if problem["type"] == "extra_forbidden":
        # Suggest names from the block where the mistake is, not from the whole recipe.
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
        return f"{dotted}: expected a block with keys, got {problem.get('input')!r}. Write {{}} for an empty block."
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
    return _models_at(annotation, rest)  # a list index or a key of a mapping


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    # Look through unions and containers, because a block may be in either.
    origin = typing.get_origin(annotation)
    if origin is None and not isinstance(annotation, types.UnionType):
        return []
    return [m for arg in typing.get_args(annotation) for m in _models_in(arg)]
