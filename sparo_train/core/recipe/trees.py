"""Trees of a recipe: values at dotted keys, and the shapes of blocks there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from .config_keys import Entries, child_shape

Tree = dict[str, Any]


def leaves(tree: Any, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Return the places of all values that are not blocks with keys."""
    if isinstance(tree, Mapping) and tree:
        for key, value in tree.items():
            yield from leaves(value, (*above, key))
    else:
        yield above


def get_at(tree: Any, keys: Sequence[str]) -> Any:
    """Return the value at dotted keys; a value on the way that is not a block is returned as it is, and None if a key is missing."""
    for key in keys:
        tree = tree.get(key) if isinstance(tree, Mapping) else tree
    return tree


def set_at(tree: Any, keys: Sequence[str], value: Any) -> Any:
    """Return a copy of the tree with another value at these keys."""
    if not keys:
        return value
    first, *rest = keys
    block = dict(tree) if isinstance(tree, Mapping) else {}
    return {**block, first: set_at(block.get(first), rest, value)}


def entry_places(model: type[BaseModel] | None, tree: Tree, keys: Sequence[str]) -> Iterator[int]:
    """Return the positions in `keys` of names that users choose."""
    shape: Any = model
    at: Any = tree
    for place, key in enumerate(keys):
        if isinstance(shape, Entries):
            yield place
        shape = child_shape(shape, key, at)
        at = at.get(key) if isinstance(at, Mapping) else None


def shape_at(model: type[BaseModel] | None, tree: Tree, keys: Sequence[str]) -> Any:
    """Return the shape of the block at `keys`."""
    shape: Any = model
    at: Any = tree
    for key in keys:
        shape = child_shape(shape, key, at)
        at = at.get(key, {}) if isinstance(at, Mapping) else {}
    return shape


def without_keys(tree: Mapping[str, Any], keys: Mapping[str, Any]) -> Tree:
    """Return a tree without the leaves of `keys`."""
    remaining = {}
    for key, value in tree.items():
        if key not in keys:
            remaining[key] = value
        elif isinstance(keys[key], Mapping) and isinstance(value, Mapping):
            remaining[key] = without_keys(value, keys[key])
    return remaining
