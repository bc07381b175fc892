"""Registries: a recipe names an entry, which is built in or added by an installed package through an entry point.

    METHODS = Registry("sparo.methods", {"clip": "sparo_train.objectives.clip:METHOD"}, ("config", "objective"))
    class Recipe(Frozen):
        objective: Annotated[Any, FromRegistry(METHODS, default="clip")]

An entry is imported when it is named and not before, so a broken package breaks only the recipes that name it. A built-in entry cannot be
replaced. The block of a recipe is validated by its entry's own pydantic model; errors name the dotted key.
"""

from __future__ import annotations

import importlib
import json
import logging
import sys
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import cache, lru_cache
from importlib.metadata import Distribution, EntryPoint, EntryPoints, distributions, entry_points
from pathlib import Path
from typing import Any, cast

from pydantic import BaseModel, GetCoreSchemaHandler, ValidationError
from pydantic_core import PydanticCustomError, core_schema

from .errors import ConfigError, did_you_mean

logger = logging.getLogger(__name__)

GROUPS = "sparo."  # prefix of all groups of this project
_MISSING = abstractmethod(lambda: None)  # marks a required method, like an abstract method of a class
NESTED = "open_table"  # type of the pydantic error that carries the errors of an entry's own model


class Registry:
    """Entries by name.

    Args:
        group: group of the entry points, `sparo.…`.
        builtin: `name -> module:attribute`.
        attributes: attributes that an entry must have; without any, an entry must be callable.
        reserved: names that no package may use, because they have another meaning in the same place.
    """

    def __init__(
        self, group: str, builtin: Mapping[str, str], attributes: Sequence[str] = (), reserved: Collection[str] = ()
    ):
        self.group, self.builtin, self.attributes, self.reserved = (
            group,
            dict(builtin),
            tuple(attributes),
            frozenset(reserved),
        )

    def names(self) -> list[str]:
        """Return the names of built-in entries, then those of installed packages. Nothing is imported."""
        added = (entry.name for entry in _entries(self.group) if entry.name not in self.reserved)
        return list(dict.fromkeys([*self.builtin, *added]))

    def get(self, name: str, key: str = "") -> Any:
        """Import and return the entry of a name.

        Args:
            key: dotted key that names the entry, for errors (`objective.kind`).

        Raises:
            ConfigError: the entry does not exist, its package cannot be imported, the entry lacks an attribute, or two packages add it.
        """
        prefix = f"{key}: " if key else f"{self.group}: "
        if name in self.builtin:
            _warn_of_hidden_entries(self.group, frozenset(self.builtin))
            module, _, attribute = self.builtin[name].partition(":")
            return getattr(importlib.import_module(module), attribute)
        matches = list({e.value: e for e in _entries(self.group) if e.name == name}.values())
        if not matches:
            hint = did_you_mean(str(name), self.names())
            # Without a suggestion: the run or recipe may come from a user who has a package that is not installed here.
            hint += ". If it comes with a plug-in package, install that package" if hint.startswith("known") else ""
            raise ConfigError(f"{prefix}{name!r}; {hint}")
        if name in self.reserved:
            raise ConfigError(
                f"{prefix}{name!r} of package {_package(matches[0])} is a reserved name of {self.group}. Rename the entry point in that package."
            )
        if len(matches) > 1:
            packages = " and ".join(sorted(_package(e) for e in matches))
            raise ConfigError(f"{prefix}{name!r} is added by {packages}. Uninstall all but one.")
        return self._load(matches[0], prefix)

    def _load(self, entry: EntryPoint, prefix: str) -> Any:
        label = f"{prefix}{entry.name!r} of package {_package(entry)}"
        try:
            loaded_entry = entry.load()
        # The import of a foreign module may fail in any way, or even exit.
        except (Exception, SystemExit) as error:
            raise ConfigError(
                f"{label} ({entry.value}) cannot be imported ({type(error).__name__}: {error}). Repair or uninstall it."
            ) from error
        missing = [
            a for a in self.attributes if getattr(getattr(loaded_entry, a, _MISSING), "__isabstractmethod__", False)
        ]
        if missing or not (self.attributes or callable(loaded_entry)):
            problem = f"has no {', '.join(missing)}" if missing else "cannot be called"
            raise ConfigError(
                f"{label} ({entry.value}) {problem}. docs/guides/extending.md describes entries of {self.group}."
            )
        return loaded_entry


def _entries(group: str) -> EntryPoints:
    """Return the entry points of a group. Metadata of all packages is read again if a package was installed or removed."""
    stamps = []
    for folder in sys.path:
        with suppress(OSError):
            stamps.append((folder, Path(folder).stat().st_mtime_ns))
    return _all_entries(tuple(stamps)).select(group=group)


@lru_cache(maxsize=1)
def _all_entries(stamps: tuple[tuple[str, int], ...]) -> EntryPoints:
    return cast(EntryPoints, entry_points())  # in Python 3.11 another class that has `select`, too


@cache
def _warn_of_hidden_entries(group: str, builtin: frozenset[str]) -> None:
    """Warn once of packages whose entries are named like built-in ones, which take precedence."""
    for entry in _entries(group):
        if entry.name in builtin:
            logger.warning(
                f"{group}: {entry.name!r} of package {_package(entry)} has the name of a built-in entry and is ignored. "
                "Rename the entry point in that package."
            )


Completion = Callable[[Mapping[str, Any]], Mapping[str, Any]]


class FromRegistry:
    """Annotation of a recipe field whose block is validated by the registry entry that it names.

    Args:
        registry: the registry of entries. An entry is a pydantic model, or has one as its `config`.
        key: key of the block that names the entry; the entry's model has it as a field, too.
        default: entry of a block that names none, or a function that completes such a block (raising `ValueError`).
            None: the block must name one.
    """

    def __init__(self, registry: Registry, key: str = "kind", default: str | Completion | None = None):
        self.registry, self.key, self.default = registry, key, default

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.with_info_plain_validator_function(self._validate)

    def _validate(self, value: Any, info: core_schema.ValidationInfo) -> BaseModel:
        if isinstance(value, BaseModel):
            expected_model = self._model({self.key: getattr(value, self.key, None)})
            if isinstance(value, expected_model):
                return value
            raise PydanticCustomError(
                "block",
                "{found} is not the {wanted} of its entry",
                {"found": type(value).__name__, "wanted": expected_model.__name__},
            )
        if not isinstance(value, Mapping):
            raise PydanticCustomError("block", "expected a block with keys")
        if self.key not in value and callable(self.default):
            value = self.default(value)
        model = self._model(value)
        try:
            return model.model_validate_json(json.dumps(value)) if info.mode == "json" else model.model_validate(value)
        except ValidationError as error:
            problems = error.errors()
            raise _nested(f"{len(problems)} problem(s), first: {problems[0]['msg']}", problems, model) from None

    def find_model(self, block: Mapping[str, Any]) -> type[BaseModel] | None:
        """Return the model that validates this block, or None if the block names no entry."""
        try:
            full = self.default(block) if self.key not in block and callable(self.default) else block
            return self._model(full)
        except (PydanticCustomError, ValueError):
            return None

    def _model(self, block: Mapping[str, Any]) -> type[BaseModel]:
        name = block.get(self.key, self.default)
        if not isinstance(name, str):
            message = (
                f"a value is required; {did_you_mean('', self.registry.names())}" if name is None else "expected a name"
            )
            raise self._wrong(message, name)
        try:
            entry = self.registry.get(name)
        except ConfigError as error:
            raise self._wrong(str(error).removeprefix(f"{self.registry.group}: "), None) from error
        model: Any = (
            entry if isinstance(entry, type) and issubclass(entry, BaseModel) else getattr(entry, "config", None)
        )
        if not (isinstance(model, type) and issubclass(model, BaseModel)):
            raise self._wrong(
                f"{name!r}: the entry of {self.registry.group} must be a pydantic model or have one as `config`", None
            )
        if self.key not in model.model_fields or model.model_fields[self.key].get_default() != name:
            raise self._wrong(
                f"{name!r}: {model.__name__} of {self.registry.group} lacks a required field. Add the line `{self.key}: "
                f"Literal[{name!r}] = {name!r}`",
                None,
            )
        return model

    def _wrong(self, message: str, value: Any) -> PydanticCustomError:
        problem = {"type": "row", "loc": (self.key,), "msg": message}
        return _nested(message, [problem if value is None else {**problem, "input": value}], None)


def _nested(message: str, problems: Sequence[Any], model: type[BaseModel] | None) -> PydanticCustomError:
    return PydanticCustomError(NESTED, "{message}", {"message": message, "problems": problems, "model": model})


def _package(entry: EntryPoint) -> str:
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist else entry.value


def plugin_distributions() -> list[Distribution]:
    """Return the installed packages, other than sparo, that add entries to any registry."""
    by_name: dict[str, Distribution] = {}
    for dist in distributions():
        if any(entry.group.startswith(GROUPS) for entry in dist.entry_points):
            by_name.setdefault(dist.name, dist)  # the first one on the path is the one in use
    return [dist for name, dist in by_name.items() if name != "sparo"]
