"""Layers of a recipe: its parents, itself, and the overrides of the command line, in this order.

Files are merged key by key. An override of the command line replaces the value at its key, even a mapping, so that a
run never trains on sources that its user did not name. An override that begins with `+` adds to the value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel

from ..errors import ConfigError, did_you_mean
from ..files import read_text
from .config_keys import Entries, RegistryBlock, child_shape, keys_named, value_text
from .recipe_yaml import parse_yaml
from .trees import Tree, entry_places, get_at, leaves, set_at, shape_at, without_keys

_OPTIONS = ("--dry-run", "--print", "--help")  # options of `sparo train`, for suggestions
_ROW_KEYS = ("kind", "task")  # keys that name an entry of a registry; other entries have other keys
_KEEPS_KEYS = "optim"  # blocks most of whose keys belong to every kind, which they keep when the kind changes
_KEEPS_COMMON_KEYS = "engine"  # blocks that keep the keys which both kinds inherit


def merge(base: Tree, over: Mapping[str, Any], shape: Any = None) -> Tree:
    """Merge `over` into a copy of `base`. An empty mapping, or one with another `kind` (or `task`), replaces the whole old mapping.

    `optim` keeps its keys when its kind changes, and `engine` those that every engine has: a dropped learning rate or
    precision would go unnoticed.

    Args:
        base, over: the trees.
        shape: the configuration class, or the shape of an inner block; None: nothing is known of common keys.
    """
    out = dict(base)
    for key, value in over.items():
        old = out.get(key)
        if isinstance(old, dict) and isinstance(value, Mapping):
            inner = child_shape(shape, key, out)
            switched = key != _KEEPS_KEYS and any(k in value and k in old and value[k] != old[k] for k in _ROW_KEYS)
            if switched:  # keys of the old kind would be errors under the new kind
                out[key] = {**_common_keys(key, inner, old, {**old, **value}), **value}
            else:
                out[key] = merge(old, value, inner) if value else dict(value)
        else:
            out[key] = value
    return out


def _common_keys(key: str, shape: Any, old: Mapping[str, Any], new: Mapping[str, Any]) -> Tree:
    """Return the keys of an engine's block that its new kind inherits from the same class."""
    if key != _KEEPS_COMMON_KEYS or not isinstance(shape, RegistryBlock):
        return {}
    models = [shape.from_registry.find_model(block) for block in (old, new)]
    bases = [model.__mro__ if model else () for model in models]
    common = next((base for base in bases[0] if base in bases[1] and issubclass(base, BaseModel)), BaseModel)
    return {name: value for name, value in old.items() if name in common.model_fields and name not in _ROW_KEYS}


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
        raise ConfigError(
            f"{path}: expected a mapping of keys, got {type(tree).__name__}. Write lines of the form `key: value`."
        )
    parents = tree.pop("extends", [])
    parents = [parents] if isinstance(parents, str) else parents
    if not isinstance(parents, list) or not all(isinstance(parent, str) for parent in parents):
        raise ConfigError(f"{path}: extends: expected a path or a list of paths, got {parents!r}.")
    above = [layer for parent in parents for layer in recipe_layers(path.parent / parent, (*_ancestors, resolved))]
    return [*above, (str(path), tree)]


def load_recipe(path: str | Path, model: type[BaseModel] | None = None) -> Tree:
    """Load a recipe and its base recipes (a path or a list of paths, relative to the file) as one tree.

    With its configuration class `model`, a name that fills other keys (`objective.model.arch`) replaces those of a
    parent. Raises like `recipe_layers`, and `ConfigError` for a null that removes an entry which no parent has.
    """
    tree: Tree = {}
    for origin, own in recipe_layers(path):
        tree = _add_layer(tree, own, origin, model)
    return tree


def _add_layer(tree: Tree, own: Tree, origin: str, model: type[BaseModel] | None) -> Tree:
    """Return the tree of the parents with the content of a file."""
    for keys in leaves(own) if own else ():
        value = get_at(own, keys)
        if model is not None and value is None:
            _refuse_absent_entry(model, tree, own, keys, origin)
        if value != get_at(tree, keys):  # a repeated name keeps the other keys of the parents
            tree = _drop_filled_keys(model, tree, keys, value)
    return merge(tree, own, model)


def _refuse_absent_entry(model: type[BaseModel], tree: Tree, own: Tree, keys: tuple[str, ...], origin: str) -> None:
    """Raise `ConfigError` if a null entry of named blocks removes nothing."""
    *above, name = keys
    shape = shape_at(model, own, above)
    if not isinstance(shape, Entries) or shape.value_shape is None:
        return
    entries = get_at(tree, above)
    if not isinstance(entries, Mapping) or name not in entries:
        known = entries if isinstance(entries, Mapping) else {}
        raise ConfigError(
            f"{origin}: {'.'.join(map(str, keys))}: an empty value removes an entry of a parent recipe, but no "
            f"parent recipe has this entry. Write {name}: {{}} for an entry with defaults; "
            f"{did_you_mean(name, known)}"
        )


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
    if " #" in value and isinstance(parsed, str) and parsed == value.partition(" #")[0].strip():
        raise ConfigError(f"override {text!r}: ' #' begins a comment in YAML. Write quotation marks around the value.")
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
        tree = _drop_filled_keys(model, tree, given.keys, given.value)
    for given in _kinds_first(parsed):
        text = given.text
        # Check before assigning: `optim.lr.x=1` would replace a number by a block.
        for depth in range(1, len(given.keys)):
            at = get_at(tree, given.keys[:depth])
            if not isinstance(at, dict) and at is not None:
                raise ConfigError(f"override {text!r}: {'.'.join(given.keys[:depth])} is {at!r}, not a block with keys")
        tree = _apply_change(tree, given, list(entry_places(model, tree, given.keys)), model)
    return tree


def _kinds_first(changes: Sequence[Assignment]) -> list[Assignment]:
    """Return overrides with every `kind` before other keys of its block, which it would otherwise drop."""
    ordered: list[Assignment] = []
    for change in changes:
        at, above = len(ordered), change.keys[:-1]
        if change.keys[-1] in _ROW_KEYS and above:
            # Not before a word that sets this block, a block around it, or one of their kinds.
            while at and not _sets_block(ordered[at - 1].keys, above):
                at -= 1
        ordered.insert(at, change)
    return ordered


def _sets_block(keys: tuple[str, ...], block: tuple[str, ...]) -> bool:
    """Return whether an override of `keys` replaces a block, as a whole or by the kind of this block or of one around it."""
    place = keys[:-1] if keys[-1] in _ROW_KEYS else keys
    return block[: len(place)] == place


def _drop_filled_keys(model: type[BaseModel] | None, tree: Tree, keys: Sequence[str], value: Any) -> Tree:
    """Return the tree without the keys that a name at `keys` fills (`fills` of its model)."""
    *above, last = keys
    shape: Any = model
    at: Any = tree
    for key in above:
        shape = child_shape(shape, key, at)
        at = at.get(key) if isinstance(at, Mapping) else None
    filled = getattr(shape, "fills", {}).get(last)
    if filled is None or value is None or not isinstance(at, Mapping):
        return tree
    return set_at(tree, above, without_keys(at, filled))


def _apply_change(tree: Tree, change: Assignment, places: Sequence[int], model: type[BaseModel] | None) -> Tree:
    for place in places:
        entries = get_at(tree, change.keys[:place])
        # An entry that null removed from a parent cannot be named.
        entries = (
            {name: entry for name, entry in entries.items() if entry is not None}
            if isinstance(entries, Mapping)
            else {}
        )
        if entries and change.keys[place] not in entries and not change.adds:
            raise ConfigError(_no_entry_message(change, place, entries))
    if change.adds and isinstance(change.value, Mapping):
        return merge(tree, change.patch, model)
    *above, last = change.keys
    block = get_at(tree, above)
    # Only the new kind: keys below the old kind are not its keys.
    is_switched = isinstance(block, Mapping) and last in _ROW_KEYS and block.get(last) not in (None, change.value)
    if is_switched and above != [_KEEPS_KEYS] and not _derives(model, tree, above, {**block, last: change.value}):
        shape = shape_at(model, tree, above)
        common = _common_keys(above[-1] if above else "", shape, block, {**block, last: change.value})
        return set_at(tree, above, {**common, last: change.value})
    if change.value is None and len(above) in places and isinstance(block, Mapping):
        return set_at(tree, above, {key: value for key, value in block.items() if key != last})
    return set_at(tree, change.keys, change.value)


def _derives(model: type[BaseModel] | None, tree: Tree, above: Sequence[str], switched: Mapping[str, Any]) -> bool:
    """Return whether a block's new kind has all keys of the old one, because its config derives from it."""
    shape = shape_at(model, tree, above)
    if not isinstance(shape, RegistryBlock):
        return False
    old, new = (shape.from_registry.find_model(block) for block in (get_at(tree, above) or {}, switched))
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
    given = _kinds_first([assignment(text, model) for text in assignments])
    for name, own in [*steps, *((change.text, change.patch) for change in given)]:
        tree = override(tree, [name], model) if name in assignments else _add_layer(tree, own, name, model)
        # A value that a later layer replaced has no origin any more.
        places = set(leaves(tree))
        origin_by_key = {place: origin for place, origin in origin_by_key.items() if place in places}
        source = f"command line: {name}" if name in assignments else name
        origin_by_key |= {place: source for place in leaves(own) if place in places}
    return origin_by_key
