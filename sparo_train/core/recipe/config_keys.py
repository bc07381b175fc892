"""List of the keys that a recipe may have: pydantic models walked as dotted keys, through registries and mappings of named blocks."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, Literal, NamedTuple

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from ..errors import ConfigError
from ..registry import FromRegistry

_NO_BOUND = 100_000_000  # a limit that protects a counter means nothing to a reader
NAME = "NAME"  # placeholder for user-chosen names, such as those of `data.sources` and `eval.tasks`


class RegistryBlock(NamedTuple):
    """A block that a registry entry validates."""

    from_registry: FromRegistry


class Entries(NamedTuple):
    """A mapping whose keys the user chooses; `value_shape` is the shape of each value."""

    value_shape: Any


class Items(NamedTuple):
    """A list of blocks."""

    item_shape: Any


Shape = type[BaseModel] | RegistryBlock | Entries | Items | None


class Key(NamedTuple):
    """A recipe key. `entry_label` names the registry entry that it belongs to (`kind=sparo`), and is empty if every recipe has the key."""

    dotted: str
    owner: type[BaseModel]
    name: str
    shape: Shape
    entry_label: str

    @property
    def field(self) -> FieldInfo:
        return self.owner.model_fields[self.name]


def infer_shape(annotation: Any, metadata: Sequence[Any] = ()) -> Shape:
    """Return the shape of values with this annotation, or None for a plain value."""
    # Check the marker first: for Python, the block of a registry is just Any.
    for mark in metadata:
        if isinstance(mark, FromRegistry):
            return RegistryBlock(mark)
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return infer_shape(arguments[0], arguments[1:])
    if origin is dict:
        return Entries(infer_shape(arguments[1]))
    if origin is tuple and arguments[-1] is Ellipsis and infer_shape(arguments[0]) is not None:
        return Items(infer_shape(arguments[0]))
    if origin in (typing.Union, types.UnionType):
        return next((shape for argument in arguments if (shape := infer_shape(argument)) is not None), None)
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def child_shape(shape: Shape, name: str, block: Any) -> Shape:
    """Return the shape of key `name` of a block with the content `block`."""
    if isinstance(shape, Entries):
        return shape.value_shape
    if isinstance(shape, RegistryBlock):
        shape = shape.from_registry.find_model(block if isinstance(block, Mapping) else {})
    field = shape.model_fields.get(name) if isinstance(shape, type) else None
    return None if field is None else infer_shape(field.annotation, field.metadata)


def list_keys(
    shape: Shape, block: Any = None, prefix: str = "", entry_label: str = "", installed: bool = False
) -> Iterator[Key]:
    """Return every key below a shape, in order.

    Args:
        shape: shape of the block.
        block: content of a recipe there, whose registry entries and named blocks are followed. None: every built-in
            entry of every registry, and NAME for named blocks.
        prefix: dotted key of the block.
        entry_label: see `Key`.
        installed: without a block, entries of installed packages, too.
    """
    if isinstance(shape, Entries):
        for name in [NAME] if block is None else list(block):
            yield from list_keys(
                shape.value_shape, None if block is None else block[name], f"{prefix}{name}.", entry_label, installed
            )
    elif isinstance(shape, Items):
        if block is None:  # a recipe gives the whole list
            yield from list_keys(shape.item_shape, None, f"{prefix.removesuffix('.')}[].", entry_label, installed)
    elif isinstance(shape, RegistryBlock):
        for model, label in _list_models(shape.from_registry, block, entry_label, installed):
            # The key that names the entry is listed with its block.
            yield from (
                k
                for k in list_keys(model, block, prefix, label, installed)
                if k.dotted != f"{prefix}{shape.from_registry.key}"
            )
    elif shape is not None:
        for name, field in shape.model_fields.items():
            inner = infer_shape(field.annotation, field.metadata)
            yield Key(f"{prefix}{name}", shape, name, inner, entry_label)
            # A block that is not given is empty, and its keys have their defaults.
            child_block = None if block is None else block.get(name, {}) if isinstance(block, Mapping) else {}
            if inner is not None and (block is None or isinstance(child_block, Mapping)):
                yield from list_keys(inner, child_block, f"{prefix}{name}.", entry_label, installed)


def _list_models(
    from_registry: FromRegistry, block: Any, entry_label: str, installed: bool
) -> Iterator[tuple[type[BaseModel] | None, str]]:
    """Return the model of the block's entry, or of every built-in (or installed) entry, with labels."""
    if block is not None:
        # Follow the named entry of a recipe; for the list of all recipes, only built-in entries, because others depend
        # on installed packages.
        yield (from_registry.find_model(block) if isinstance(block, Mapping) else None), entry_label
        return
    registry = from_registry.registry
    for name in registry.names() if installed else registry.builtin:
        model = None
        with suppress(ConfigError, AttributeError):  # a broken package hides its own keys only
            entry = registry.get(name)
            model = entry if isinstance(entry, type) else entry.config
        if isinstance(model, type) and issubclass(model, BaseModel):
            yield model, f"{from_registry.key}={name}"


def keys_named(model: type[BaseModel], tree: Mapping[str, Any], name: str) -> list[str]:
    """Return the dotted keys of a recipe that end in `name`."""
    return [key.dotted for key in list_keys(model, tree) if key.name == name]


def type_text(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """Describe an annotation in words: `int > 0`, `float or null`, `cosine | constant`, `list of text`."""
    shape, origin, arguments = (
        infer_shape(annotation, metadata),
        typing.get_origin(annotation),
        typing.get_args(annotation),
    )
    if isinstance(shape, RegistryBlock):
        return f"block; {shape.from_registry.key}: {' | '.join(shape.from_registry.registry.builtin)}"
    if origin is Annotated:
        return type_text(arguments[0], arguments[1:])
    if origin is Literal:
        return " | ".join(map(str, arguments))
    if origin in (typing.Union, types.UnionType):
        words = [type_text(a) for a in arguments if a is not type(None)]
        words[0] = _with_constraints(words[0], metadata)
        return " or ".join([*words, *(["null"] if type(None) in arguments else [])])
    if origin is tuple:
        if arguments[-1] is Ellipsis:
            return f"list of {type_text(arguments[0])}"
        return f"[{', '.join(map(type_text, arguments))}]"
    if origin is dict:
        return f"{NAME}: {type_text(arguments[1])}"
    if isinstance(shape, type):
        return "block"
    words = {int: "int", float: "float", str: "text", bool: "true | false", Any: "any"}.get(annotation, str(annotation))
    return _with_constraints(words, metadata)


def _with_constraints(words: str, metadata: Sequence[Any]) -> str:
    return " ".join([words, *filter(None, map(_constraint_text, metadata))])


def _constraint_text(mark: Any) -> str:
    signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
    limits = {sign: getattr(mark, name) for name, sign in signs.items() if hasattr(mark, name)}
    return ", ".join(f"{sign} {value}" for sign, value in limits.items() if value < _NO_BOUND)


def default_text(key: Key) -> str:
    """Return the default of a key: a YAML value, `required`, or an empty string for a block."""
    if key.field.is_required():
        return "required"
    value = key.field.get_default(call_default_factory=True)
    if isinstance(value, BaseModel) or (isinstance(value, Mapping) and not value):
        return ""
    return value_text(value)


def value_text(value: Any) -> str:
    """Return a value as YAML on one line."""
    # YAML has no tuples, and PyYAML writes a Python tag for them.
    plain = list(value) if isinstance(value, tuple) else value
    text = yaml.safe_dump(plain, default_flow_style=True, width=1 << 20, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")
