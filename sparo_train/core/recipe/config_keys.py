"""Which keys a recipe may have: pydantic models walked as dotted keys, through open tables and mappings of named blocks."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from ..plugins import Open

_NO_BOUND = 100_000_000  # a limit that protects a counter says nothing to a reader
NAME = "NAME"  # stands for what the user calls an entry of `data.sources`, `eval.tasks`


class Rows(NamedTuple):
    """A block that a row of an open table checks."""

    open: Open


class Entries(NamedTuple):
    """A mapping whose keys the user chooses; `of` is what each entry is."""

    of: Any


class Items(NamedTuple):
    """A list of blocks."""

    of: Any


Shape = type[BaseModel] | Rows | Entries | Items | None


class Key(NamedTuple):
    """A key: `row` says of which row of a table it is (`kind=sparo`), empty where it is in every recipe."""

    dotted: str
    owner: type[BaseModel]
    name: str
    shape: Shape
    row: str

    @property
    def field(self) -> FieldInfo:
        return self.owner.model_fields[self.name]


def shape_of(annotation: Any, metadata: Sequence[Any] = ()) -> Shape:
    """What stands below a key of this annotation; None: a plain value."""
    # The mark first: to Python a block of an open table is just Any.
    for mark in metadata:
        if isinstance(mark, Open):
            return Rows(mark)
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return shape_of(arguments[0], arguments[1:])
    if origin is dict:
        return Entries(shape_of(arguments[1]))
    if origin is tuple and arguments[-1] is Ellipsis and shape_of(arguments[0]) is not None:
        return Items(shape_of(arguments[0]))
    if origin in (typing.Union, types.UnionType):
        return next((shape for argument in arguments if (shape := shape_of(argument)) is not None), None)
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def below(shape: Shape, name: str, block: Any) -> Shape:
    """The shape of key `name` of a block that holds `block`."""
    if isinstance(shape, Entries):
        return shape.of
    if isinstance(shape, Rows):
        shape = shape.open.model_of(block if isinstance(block, Mapping) else {})
    field = shape.model_fields.get(name) if isinstance(shape, type) else None
    return None if field is None else shape_of(field.annotation, field.metadata)


def keys_of(shape: Shape, block: Any = None, prefix: str = "", row: str = "") -> Iterator[Key]:
    """Every key below a shape, in order.

    Args:
        block: what a recipe has there: its rows and its entries are walked. None: every own row of every table, and NAME for entries.
    """
    if isinstance(shape, Entries):
        for name in [NAME] if block is None else list(block):
            yield from keys_of(shape.of, None if block is None else block[name], f"{prefix}{name}.", row)
    elif isinstance(shape, Items):
        if block is None:  # a recipe gives the list whole
            yield from keys_of(shape.of, None, f"{prefix.removesuffix('.')}[].", row)
    elif isinstance(shape, Rows):
        for model, label in _models_of(shape.open, block, row):
            # the key that names the row is told where the block is
            yield from (k for k in keys_of(model, block, prefix, label) if k.dotted != f"{prefix}{shape.open.key}")
    elif shape is not None:
        for name, field in shape.model_fields.items():
            inner = shape_of(field.annotation, field.metadata)
            yield Key(f"{prefix}{name}", shape, name, inner, row)
            # A block that is not given is empty, and its keys have their defaults.
            held = None if block is None else block.get(name, {}) if isinstance(block, Mapping) else {}
            if inner is not None and (block is None or isinstance(held, Mapping)):
                yield from keys_of(inner, held, f"{prefix}{name}.", row)


def _models_of(opened: Open, block: Any, row: str) -> Iterator[tuple[type[BaseModel] | None, str]]:
    """The model of the block's own row, or of every row of ours, and what to call it."""
    if block is not None:
        # Of a recipe its own row alone; of all recipes our rows, as a stranger's are not here to be listed.
        yield (opened.model_of(block) if isinstance(block, Mapping) else None), row
        return
    for name in opened.table.own:
        found = opened.table.row(name)
        yield (found if isinstance(found, type) else found.config), f"{opened.key}={name}"


def keys_named(model: type[BaseModel], tree: Mapping[str, Any], name: str) -> list[str]:
    """Dotted keys of a recipe that end in `name`."""
    return [key.dotted for key in keys_of(model, tree) if key.name == name]


def type_text(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """An annotation in words: `int > 0`, `float or null`, `cosine | constant`, `list of text`."""
    shape, origin, arguments = (
        shape_of(annotation, metadata),
        typing.get_origin(annotation),
        typing.get_args(annotation),
    )
    if isinstance(shape, Rows):
        return f"block; {shape.open.key}: {' | '.join(shape.open.table.own)}"
    if origin is Annotated:
        return type_text(arguments[0], arguments[1:])
    if origin is Literal:
        return " | ".join(map(str, arguments))
    if origin in (typing.Union, types.UnionType):
        words = [type_text(a) for a in arguments if a is not type(None)]
        words[0] = _bounded(words[0], metadata)
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
    return _bounded(words, metadata)


def _bounded(words: str, metadata: Sequence[Any]) -> str:
    return " ".join([words, *filter(None, map(_bound, metadata))])


def _bound(mark: Any) -> str:
    signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
    found = {sign: getattr(mark, name) for name, sign in signs.items() if hasattr(mark, name)}
    return ", ".join(f"{sign} {value}" for sign, value in found.items() if value < _NO_BOUND)


def default_text(key: Key) -> str:
    """What a key is where a recipe leaves it away: a YAML value, `required`, or nothing for a block."""
    if key.field.is_required():
        return "required"
    value = key.field.get_default(call_default_factory=True)
    if isinstance(value, BaseModel) or (isinstance(value, Mapping) and not value):
        return ""
    return value_text(value)


def value_text(value: Any) -> str:
    """A value as YAML on one line."""
    # YAML has no tuples, and writes a Python tag for one.
    plain = list(value) if isinstance(value, tuple) else value
    text = yaml.safe_dump(plain, default_flow_style=True, width=1 << 20, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")
