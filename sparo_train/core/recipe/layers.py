"""What a recipe is put together from: its parents, itself, the words of the command line, in this order.

Files are merged key by key. A word of the command line replaces what stands at its key, mappings too, so that nobody trains on
sources that he did not name; a word with `+` in front adds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel

from ..errors import ConfigError, did_you_mean
from ..untrusted import read_text
from .config_keys import Entries, below, keys_named, value_text
from .recipe_yaml import parse_yaml

Tree = dict[str, Any]
_OPTIONS = ("--dry", "--print", "--help")  # of `sparo train`, for near misses
_ROW_KEYS = ("kind", "task")  # name the row of a table; another row has other keys


def merge(base: Tree, over: Mapping[str, Any]) -> Tree:
    """Merge `over` into a copy of `base`. An empty mapping, or one whose `kind` (or `task`) changes, replaces the old one whole."""
    out = dict(base)
    for key, value in over.items():
        old = out.get(key)
        if isinstance(old, dict) and isinstance(value, Mapping):
            # Keys of an AdamW would be errors of a Muon: another row begins anew.
            switched = any(k in value and k in old and value[k] != old[k] for k in _ROW_KEYS)
            out[key] = dict(value) if switched or not value else merge(old, value)
        else:
            out[key] = value
    return out


def recipe_layers(path: str | Path, _seen: tuple[Path, ...] = ()) -> list[tuple[str, Tree]]:
    """(file, what it says itself) of a recipe and all that it extends, in the order in which they are merged.

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
    # By where it really lies: two names of one file are a circle, too.
    if resolved in _seen:
        raise ConfigError(f"{path}: `extends:` goes in a circle: {' -> '.join(str(p) for p in (*_seen, resolved))}")
    tree = parse_yaml(read_text(path), str(path))
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: a recipe is a mapping of keys, found {type(tree).__name__}")
    parents = tree.pop("extends", [])
    parents = [parents] if isinstance(parents, str) else parents
    if not isinstance(parents, list) or not all(isinstance(parent, str) for parent in parents):
        raise ConfigError(f"{path}: extends: {parents!r} is no path and no list of paths")
    above = [layer for parent in parents for layer in recipe_layers(path.parent / parent, (*_seen, resolved))]
    return [*above, (str(path), tree)]


def load_recipe(path: str | Path) -> Tree:
    """A recipe and what it extends (a path or list of paths, relative to the file) as one tree. Raises as `recipe_layers`."""
    tree: Tree = {}
    for _, own in recipe_layers(path):
        tree = merge(tree, own)
    return tree


def is_sweep(tree: Mapping[str, Any]) -> bool:
    """Whether a file names runs, and is no recipe of one."""
    return isinstance(tree.get("runs"), Mapping)


_DEEPEST = 64  # levels of a key; recipes have fewer than ten


class Assignment(NamedTuple):
    """A word `key.path=value` of the command line; `adds`: it begins with `+`."""

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
    """Parse one word; the value is YAML. Raises `ConfigError`."""
    dotted, equals, value = text.removeprefix("+").partition("=")
    keys = tuple(dotted.strip().split("."))
    if len(keys) > _DEEPEST:
        raise ConfigError(
            f"override {text[:40]}…: a key of {len(keys)} levels, got more than {_DEEPEST}. Write key.path=value."
        )
    if text.startswith("-"):
        bare = dotted.lstrip("-")
        known = model is not None and (bare.partition(".")[0] in model.model_fields or keys_named(model, {}, bare))
        near = did_you_mean(f"--{bare}", _OPTIONS)
        remedy = f"write {bare}={value or 'VALUE'}" if known else near
        raise ConfigError(f"{text}: no such option; {remedy}")
    if not equals or not all(keys):
        raise ConfigError(f"override {text!r}: write key.path=value, as in optim.lr=1e-3")
    return Assignment(text, keys, parse_yaml(value, f"override {text!r}"), text.startswith("+"))


def override(tree: Tree, assignments: Sequence[str], model: type[BaseModel] | None = None) -> Tree:
    """Apply words of the command line.

    `a.b=value` replaces, a mapping whole; a new `kind` drops the block's other keys; `+a.b=value` adds to what stands there;
    `a.b=null` takes an entry of a mapping of named blocks away. One of the model's `alternatives` (`epochs=3`) drops the
    others that a recipe gave; those of the command line itself stay, and are refused when the recipe is resolved. A name that
    fills other keys (`objective.model.arch=vit_base`) drops those that a recipe gave, which would win over the name.

    Args:
        model: what the tree is checked against later; tells such mappings (`data.sources`, `eval.tasks`) from other blocks.

    Raises:
        ConfigError: a word that is no assignment, goes through a value, or names an entry that is not there without `+`.
    """
    alternatives: tuple[str, ...] = getattr(model, "alternatives", ())
    parsed = [assignment(text, model) for text in assignments]
    chosen = {given.keys[0] for given in parsed if len(given.keys) == 1 and given.value is not None} & {*alternatives}
    if chosen:
        tree = {key: value for key, value in tree.items() if key not in alternatives}
    for given in parsed:
        tree = _without_filled(model, tree, given)
    for text, given in zip(assignments, parsed, strict=True):
        # Before anything is put: `optim.lr.x=1` would make a block of a number.
        for depth in range(1, len(given.keys)):
            at = _held(tree, given.keys[:depth])
            if not isinstance(at, dict) and at is not None:
                raise ConfigError(f"override {text!r}: {'.'.join(given.keys[:depth])} is {at!r}, not a block with keys")
        tree = _applied(tree, given, list(_entry_places(model, tree, given.keys)))
    return tree


def _without_filled(model: type[BaseModel] | None, tree: Tree, given: Assignment) -> Tree:
    """The tree without the keys that a name of the command line fills: its model says which in `fills`."""
    *above, last = given.keys
    shape: Any = model
    at: Any = tree
    for key in above:
        shape = below(shape, key, at)
        at = at.get(key) if isinstance(at, Mapping) else None
    filled = getattr(shape, "fills", {}).get(last)
    if filled is None or given.value is None or not isinstance(at, Mapping):
        return tree
    return _put(tree, above, _minus(at, filled))


def _minus(tree: Mapping[str, Any], keys: Mapping[str, Any]) -> Tree:
    """A tree without the leaves of `keys`."""
    kept = {}
    for key, value in tree.items():
        if key not in keys:
            kept[key] = value
        elif isinstance(keys[key], Mapping) and isinstance(value, Mapping):
            kept[key] = _minus(value, keys[key])
    return kept


def _applied(tree: Tree, given: Assignment, places: Sequence[int]) -> Tree:
    for place in places:
        held = _held(tree, given.keys[:place])
        # What a parent's null took away is not there to be named.
        held = {name: entry for name, entry in held.items() if entry is not None} if isinstance(held, Mapping) else {}
        if held and given.keys[place] not in held and not given.adds:
            raise ConfigError(_no_entry(given, place, held))
    if given.adds and isinstance(given.value, Mapping):
        return merge(tree, given.patch)
    *above, last = given.keys
    block = _held(tree, above)
    # A new kind alone: what the old one had below it is none of its keys.
    if isinstance(block, Mapping) and last in _ROW_KEYS and block.get(last) not in (None, given.value):
        return _put(tree, above, {last: given.value})
    if given.value is None and len(above) in places and isinstance(block, Mapping):
        return _put(tree, above, {key: value for key, value in block.items() if key != last})
    return _put(tree, given.keys, given.value)


def _no_entry(given: Assignment, place: int, held: Mapping[str, Any]) -> str:
    where, name = ".".join(given.keys[:place]), given.keys[place]
    if given.value is None:
        return f"override {given.text!r}: {where} has no {name!r}; {did_you_mean(name, held)}"
    alone: Any = given.value
    for key in reversed(given.keys[place:]):
        alone = {key: alone}
    return (
        f"override {given.text!r}: {where} has {', '.join(held)} and no {name!r}; write +{given.text} to add it beside, "
        f"or {where}='{value_text(alone)}' to have it alone"
    )


def without_null_entries(shape: Any, tree: Any) -> Any:
    """The tree without entries of named blocks that are null: so a recipe takes away what a parent has."""
    if not isinstance(tree, Mapping) or shape is None:
        return tree
    kept = {k: v for k, v in tree.items() if not (v is None and isinstance(shape, Entries))}
    return {k: without_null_entries(below(shape, k, tree), v) for k, v in kept.items()}


def origins(path: str | Path, assignments: Sequence[str], model: type[BaseModel]) -> dict[tuple[str, ...], str]:
    """Which file, or which word of the command line, said the value at each place of the finished tree."""
    tree: Tree = {}
    found: dict[tuple[str, ...], str] = {}
    steps: list[tuple[str, Tree]] = recipe_layers(path)
    for name, own in [*steps, *((text, assignment(text, model).patch) for text in assignments)]:
        tree = override(tree, [name], model) if name in assignments else merge(tree, own)
        # What a later layer replaced is no origin of anything any more.
        held = set(_leaves(tree))
        found = {place: origin for place, origin in found.items() if place in held}
        said = f"command line: {name}" if name in assignments else name
        found |= {place: said for place in _leaves(own) if place in held}
    return found


def _leaves(tree: Any, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if isinstance(tree, Mapping) and tree:
        for key, value in tree.items():
            yield from _leaves(value, (*above, key))
    else:
        yield above


def _held(tree: Any, keys: Sequence[str]) -> Any:
    for key in keys:
        tree = tree.get(key) if isinstance(tree, Mapping) else tree
    return tree


def _put(tree: Any, keys: Sequence[str], value: Any) -> Any:
    if not keys:
        return value
    first, *rest = keys
    held = dict(tree) if isinstance(tree, Mapping) else {}
    return {**held, first: _put(held.get(first), rest, value)}


def _entry_places(model: type[BaseModel] | None, tree: Tree, keys: Sequence[str]) -> Iterator[int]:
    """Where in `keys` stand names that users choose."""
    shape: Any = model
    at: Any = tree
    for place, key in enumerate(keys):
        if isinstance(shape, Entries):
            yield place
        shape = below(shape, key, at)
        at = at.get(key) if isinstance(at, Mapping) else None
