"""Layers of a recipe: its parents, itself, and the overrides of the command line, in this order.

Files are merged key by key. An override of the command line replaces the value at its key, even a mapping, so that a
run never trains on sources that its user did not name. An override that begins with `+` adds to the value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel

from ..errors import ConfigError, did_you_mean
from ..files import read_text
from .config_keys import Entries, RegistryBlock, child_shape, keys_named, value_text
from .recipe_yaml import parse_yaml

Tree = dict[str, Any]
_OPTIONS = ("--dry-run", "--print", "--help")  # options of `sparo train`, for suggestions
_ROW_KEYS = ("kind", "task")  # keys that name an entry of a registry; other entries have other keys
_KEEPS_KEYS = "optim"  # blocks most of whose keys belong to every kind, which they keep when the kind changes


def merge(base: Tree, over: Mapping[str, Any]) -> Tree:
    """Merge `over` into a copy of `base`. An empty mapping, or one with another `kind` (or `task`), replaces the whole old mapping.

    `optim` keeps its keys when its kind changes: most of them apply to every optimizer, and a dropped learning rate
    would go unnoticed.
    """
    out = dict(base)
    for key, value in over.items():
        old = out.get(key)
        if isinstance(old, dict) and isinstance(value, Mapping):
            # Keys of the old kind would be errors under the new kind.
            switched = key != _KEEPS_KEYS and any(k in value and k in old and value[k] != old[k] for k in _ROW_KEYS)
            out[key] = dict(value) if switched or not value else merge(old, value)
        else:
            out[key] = value
    return out


def recipe_layers(path: str | Path, _ancestors: tuple[Path, ...] = ()) -> list[tuple[str, Tree]]:
    """Return (file, its own content) for a recipe and all that it extends, in the order in which they are merged.

    Raises `ConfigError` for a missing file, a cycle, or a file that is not a mapping.
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
    # Compare resolved paths, because two names of one file are a cycle, too.
    if resolved in _ancestors:
        raise ConfigError(f"{path}: `extends:` is circular: {' -> '.join(str(p) for p in (*_ancestors, resolved))}")
    tree = parse_yaml(read_text(path), str(path))
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: expected a mapping of keys, got {type(tree).__name__}. Write key: value lines.")
    parents = tree.pop("extends", [])
    parents = [parents] if isinstance(parents, str) else parents
    if not isinstance(parents, list) or not all(isinstance(parent, str) for parent in parents):
        raise ConfigError(f"{path}: extends: expected a path or a list of paths, got {parents!r}.")
    above = [layer for parent in parents for layer in recipe_layers(path.parent / parent, (*_ancestors, resolved))]
    return [*above, (str(path), tree)]


def load_recipe(path: str | Path) -> Tree:
    """Load a recipe and its base recipes (a path or a list of paths, relative to the file) as one tree. Raises like `recipe_layers`."""
    tree: Tree = {}
    for _, own in recipe_layers(path):
        tree = merge(tree, own)
    return tree


def is_sweep(tree: Mapping[str, Any]) -> bool:
    """Return whether a file describes several runs instead of one recipe."""
    return isinstance(tree.get("runs"), Mapping)


_MAX_DEPTH = 64  # levels of a key; recipes have fewer than ten


class Assignment(NamedTuple):
    """An override `key.path=value` of the command line; `adds` is True if it begins with `+`."""

    text: str
    keys: tuple[str, ...]
    value: Any
    adds: bool

    @property
    def patch(self) -> Tree:
        patch: Any = self.value
        for key in reversed(self.keys):
            patch = {key: patch}
        return patch


def assignment(text: str, model: type[BaseModel] | None = None) -> Assignment:
    """Parse one override; the value is YAML. Raises `ConfigError`."""
    dotted, equals, value = text.removeprefix("+").partition("=")
    keys = tuple(dotted.strip().split("."))
    if len(keys) > _MAX_DEPTH:
        raise ConfigError(
            f"override {text[:40]}…: a key has at most {_MAX_DEPTH} levels, got {len(keys)}. Write key.path=value."
        )
    if text.startswith("-"):
        bare = dotted.lstrip("-")
        is_key = model is not None and (bare.partition(".")[0] in model.model_fields or keys_named(model, {}, bare))
        near = did_you_mean(f"--{bare}", _OPTIONS)
        remedy = f"write {bare}={value or 'VALUE'}" if is_key else near
        raise ConfigError(f"{text}: no such option; {remedy}")
    if not equals or not all(keys):
        raise ConfigError(f"override {text!r}: expected key.path=value, as in optim.lr=1e-3.")
    parsed = parse_yaml(value, f"override {text!r}")
    if len(keys) == 1 and isinstance(parsed, str) and (written := getattr(model, "short_forms", {}).get(keys[0])):
        keys, parsed = written(parsed)
    return Assignment(text, keys, parsed, text.startswith("+"))


def override(tree: Tree, assignments: Sequence[str], model: type[BaseModel] | None = None) -> Tree:
    """Apply overrides of the command line.

    `a.b=value` replaces the value, even a mapping. A new `kind` drops the block's other keys, unless its config derives
    from that of the old kind. `+a.b=value` adds to the value. `a.b=null` removes an entry from a mapping of named
    blocks. One of the model's `alternatives` (`epochs=3`) drops the alternatives in the recipe; if the command line
    gives two of them, resolving the recipe fails. A name that fills other keys (`objective.model.arch=vit_base`) drops
    those keys in the recipe, which would otherwise win over the name. The model's `short_forms` (`data=FOLDER`) are
    replaced by the keys that they stand for.

    Args:
        tree: the recipe.
        assignments: overrides, in order.
        model: the configuration class of the recipe; it identifies mappings of named blocks (`data.sources`,
            `eval.tasks`).

    Raises:
        ConfigError: an override is not an assignment, goes through a value, or names a missing entry without `+`.
    """
    alternatives: tuple[str, ...] = getattr(model, "alternatives", ())
    parsed = [assignment(text, model) for text in assignments]
    set_alternatives = {change.keys[0] for change in parsed if len(change.keys) == 1 and change.value is not None} & {
        *alternatives
    }
    if set_alternatives:
        tree = {key: value for key, value in tree.items() if key not in alternatives}
    for given in parsed:
        tree = _drop_filled_keys(model, tree, given)
    for text, given in zip(assignments, parsed, strict=True):
        # Check before assigning: `optim.lr.x=1` would replace a number by a block.
        for depth in range(1, len(given.keys)):
            at = _get_at(tree, given.keys[:depth])
            if not isinstance(at, dict) and at is not None:
                raise ConfigError(f"override {text!r}: {'.'.join(given.keys[:depth])} is {at!r}, not a block with keys")
        tree = _apply_change(tree, given, list(_entry_places(model, tree, given.keys)), model)
    return tree


def _drop_filled_keys(model: type[BaseModel] | None, tree: Tree, change: Assignment) -> Tree:
    """Return the tree without the keys that a name of the command line fills (`fills` of its model)."""
    *above, last = change.keys
    shape: Any = model
    at: Any = tree
    for key in above:
        shape = child_shape(shape, key, at)
        at = at.get(key) if isinstance(at, Mapping) else None
    filled = getattr(shape, "fills", {}).get(last)
    if filled is None or change.value is None or not isinstance(at, Mapping):
        return tree
    return _set_at(tree, above, _without_keys(at, filled))


def _without_keys(tree: Mapping[str, Any], keys: Mapping[str, Any]) -> Tree:
    """Return a tree without the leaves of `keys`."""
    remaining = {}
    for key, value in tree.items():
        if key not in keys:
            remaining[key] = value
        elif isinstance(keys[key], Mapping) and isinstance(value, Mapping):
            remaining[key] = _without_keys(value, keys[key])
    return remaining


def _apply_change(tree: Tree, change: Assignment, places: Sequence[int], model: type[BaseModel] | None) -> Tree:
    for place in places:
        entries = _get_at(tree, change.keys[:place])
        # An entry that null removed from a parent cannot be named.
        entries = (
            {name: entry for name, entry in entries.items() if entry is not None}
            if isinstance(entries, Mapping)
            else {}
        )
        if entries and change.keys[place] not in entries and not change.adds:
            raise ConfigError(_no_entry_message(change, place, entries))
    if change.adds and isinstance(change.value, Mapping):
        return merge(tree, change.patch)
    *above, last = change.keys
    block = _get_at(tree, above)
    # Only the new kind: keys below the old kind are not its keys.
    is_switched = isinstance(block, Mapping) and last in _ROW_KEYS and block.get(last) not in (None, change.value)
    if is_switched and above != [_KEEPS_KEYS] and not _derives(model, tree, above, {**block, last: change.value}):
        return _set_at(tree, above, {last: change.value})
    if change.value is None and len(above) in places and isinstance(block, Mapping):
        return _set_at(tree, above, {key: value for key, value in block.items() if key != last})
    return _set_at(tree, change.keys, change.value)


def _derives(model: type[BaseModel] | None, tree: Tree, above: Sequence[str], switched: Mapping[str, Any]) -> bool:
    """Return whether a block's new kind has all keys of the old one, because its config derives from it."""
    shape, at = model, tree
    for key in above:
        shape = child_shape(shape, key, at)  # type: ignore[arg-type]
        at = at.get(key, {}) if isinstance(at, Mapping) else {}
    if not isinstance(shape, RegistryBlock):
        return False
    old, new = shape.from_registry.find_model(at), shape.from_registry.find_model(switched)
    return old is not None and new is not None and issubclass(new, old)


def _no_entry_message(change: Assignment, place: int, entries: Mapping[str, Any]) -> str:
    where, name = ".".join(change.keys[:place]), change.keys[place]
    if change.value is None:
        return f"override {change.text!r}: {where} has no {name!r}; {did_you_mean(name, entries)}"
    new_block: Any = change.value
    for key in reversed(change.keys[place:]):
        new_block = {key: new_block}
    return (
        f"override {change.text!r}: {where} has {', '.join(entries)} and no {name!r}. Write +{change.text} to add it, "
        f"or {where}='{value_text(new_block)}' to replace the others"
    )


def without_null_entries(shape: Any, tree: Any) -> Any:
    """Return the tree without null entries of named blocks. A recipe removes an entry of its parent this way."""
    if not isinstance(tree, Mapping) or shape is None:
        return tree
    entries = {k: v for k, v in tree.items() if not (v is None and isinstance(shape, Entries))}
    return {k: without_null_entries(child_shape(shape, k, tree), v) for k, v in entries.items()}


def origins(path: str | Path, assignments: Sequence[str], model: type[BaseModel]) -> dict[tuple[str, ...], str]:
    """Return the file or override that set the value at each key of the finished tree."""
    tree: Tree = {}
    origin_by_key: dict[tuple[str, ...], str] = {}
    steps: list[tuple[str, Tree]] = recipe_layers(path)
    for name, own in [*steps, *((text, assignment(text, model).patch) for text in assignments)]:
        tree = override(tree, [name], model) if name in assignments else merge(tree, own)
        # A value that a later layer replaced has no origin any more.
        leaves = set(_leaves(tree))
        origin_by_key = {place: origin for place, origin in origin_by_key.items() if place in leaves}
        source = f"command line: {name}" if name in assignments else name
        origin_by_key |= {place: source for place in _leaves(own) if place in leaves}
    return origin_by_key


def _leaves(tree: Any, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if isinstance(tree, Mapping) and tree:
        for key, value in tree.items():
            yield from _leaves(value, (*above, key))
    else:
        yield above


def _get_at(tree: Any, keys: Sequence[str]) -> Any:
    for key in keys:
        tree = tree.get(key) if isinstance(tree, Mapping) else tree
    return tree


def _set_at(tree: Any, keys: Sequence[str], value: Any) -> Any:
    if not keys:
        return value
    first, *rest = keys
    block = dict(tree) if isinstance(tree, Mapping) else {}
    return {**block, first: _set_at(block.get(first), rest, value)}


def _entry_places(model: type[BaseModel] | None, tree: Tree, keys: Sequence[str]) -> Iterator[int]:
    """Return the positions in `keys` of names that users choose."""
    shape: Any = model
    at: Any = tree
    for place, key in enumerate(keys):
        if isinstance(shape, Entries):
            yield place
        shape = child_shape(shape, key, at)
        at = at.get(key) if isinstance(at, Mapping) else None
