"""Open tables: a recipe names a row, own rows come first, installed packages add more through entry points.

    MINE = Table("sparo.methods", {"clip": "sparo_train.objectives.clip:METHOD"}, ("config", "objective"))
    class Recipe(Frozen):
        objective: Annotated[Any, Open(MINE, default="clip")]

A row is imported when it is named and not before, so a package that is broken breaks only who names it. An own row cannot
be replaced. The block of a recipe is checked by its row's own pydantic model, and what is wrong in it is told by dotted key.
"""

from __future__ import annotations

import importlib
import json
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib.metadata import Distribution, EntryPoint, distributions, entry_points
from typing import Any

from pydantic import BaseModel, GetCoreSchemaHandler, ValidationError
from pydantic_core import PydanticCustomError, core_schema

from .errors import ConfigError, did_you_mean

GROUPS = "sparo."  # every group of ours begins with it
_MISSING = abstractmethod(lambda: None)  # as abstract as a method that a class leaves out
NESTED = "open_table"  # type of the pydantic error that carries those of a row's own model


class Registry:
    """Rows by name.

    Args:
        group: of the entry points, `sparo.…`.
        builtin: `name -> module:attribute`.
        attributes: what a row must have; empty: it is called.
        reserved: names that no row of a package may have, as they mean something else where rows stand.
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
        """Own rows, then those of installed packages; nothing is imported."""
        added = (entry.name for entry in entry_points(group=self.group) if entry.name not in self.reserved)
        return list(dict.fromkeys([*self.builtin, *added]))

    def get(self, name: str, key: str = "") -> Any:
        """The row of a name, imported now.

        Args:
            key: what to call the place that names it, for errors (`objective.kind`).

        Raises:
            ConfigError: no such row, a package that cannot be imported, a row without what the table asks for, or two
                packages that both add it.
        """
        prefix = f"{key}: " if key else f"{self.group}: "
        if name in self.builtin:
            module, _, attribute = self.builtin[name].partition(":")
            return getattr(importlib.import_module(module), attribute)
        matches = list({e.value: e for e in entry_points(group=self.group) if e.name == name}.values())
        if not matches:
            hint = did_you_mean(str(name), self.names())
            # No near name: a run or a recipe of somebody who has a package that is not installed here.
            hint += ". If a package adds it, install that package" if hint.startswith("known") else ""
            raise ConfigError(f"{prefix}{name!r}; {hint}")
        if name in self.reserved:
            raise ConfigError(
                f"{prefix}{name!r} of package {_package(matches[0])} is a name that {self.group} keeps; its package has to call it otherwise"
            )
        if len(matches) > 1:
            packages = " and ".join(sorted(_package(e) for e in matches))
            raise ConfigError(f"{prefix}{name!r} is added by {packages}; uninstall all but one")
        return self._load(matches[0], prefix)

    def _load(self, entry: EntryPoint, prefix: str) -> Any:
        label = f"{prefix}{entry.name!r} of package {_package(entry)}"
        try:
            loaded_entry = entry.load()
        # Somebody else's module may fail in any way while it is imported, or end the program.
        except (Exception, SystemExit) as error:
            raise ConfigError(
                f"{label} ({entry.value}) cannot be imported ({type(error).__name__}: {error}); repair or uninstall it"
            ) from error
        missing = [
            a for a in self.attributes if getattr(getattr(loaded_entry, a, _MISSING), "__isabstractmethod__", False)
        ]
        if missing or not (self.attributes or callable(loaded_entry)):
            problem = f"has no {', '.join(missing)}" if missing else "cannot be called"
            raise ConfigError(
                f"{label} ({entry.value}) {problem}; docs/extending.md says what a row of {self.group} is"
            )
        return loaded_entry


Completion = Callable[[Mapping[str, Any]], Mapping[str, Any]]


class FromRegistry:
    """Annotates a field of a recipe whose block is checked by the row that it names.

    Args:
        registry: where rows are looked up. A row is a pydantic model, or has one as its `config`.
        key: of the block, that names the row; the row's model has it as a field, too.
        default: the row of a block that names none, or what completes such a block (raising `ValueError`); None: it has to name one.
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
                "{found} is not the {wanted} of its row",
                {"found": type(value).__name__, "wanted": expected_model.__name__},
            )
        if not isinstance(value, Mapping):
            raise PydanticCustomError("block", "a block with keys is expected")
        if self.key not in value and callable(self.default):
            value = self.default(value)
        model = self._model(value)
        try:
            return model.model_validate_json(json.dumps(value)) if info.mode == "json" else model.model_validate(value)
        except ValidationError as error:
            problems = error.errors()
            raise _nested(f"{len(problems)} problem(s), first: {problems[0]['msg']}", problems, model) from None

    def model_of(self, block: Mapping[str, Any]) -> type[BaseModel] | None:
        """The model that checks this block; None where it names no row."""
        try:
            full = self.default(block) if self.key not in block and callable(self.default) else block
            return self._model(full)
        except (PydanticCustomError, ValueError):
            return None

    def _model(self, block: Mapping[str, Any]) -> type[BaseModel]:
        name = block.get(self.key, self.default)
        if not isinstance(name, str):
            message = (
                f"a value is required; {did_you_mean('', self.registry.names())}"
                if name is None
                else "a name is expected"
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
            raise self._wrong(f"{name!r}: its row of {self.registry.group} has no pydantic model as its config", None)
        if self.key not in model.model_fields or model.model_fields[self.key].get_default() != name:
            raise self._wrong(
                f"{name!r}: {model.__name__} of {self.registry.group} has no field {self.key}: Literal[{name!r}] = {name!r}",
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
    """Installed packages, other than ours, that add rows to any of our tables."""
    by_name: dict[str, Distribution] = {}
    for dist in distributions():
        if any(entry.group.startswith(GROUPS) for entry in dist.entry_points):
            by_name.setdefault(dist.name, dist)  # the first one on the path is the one that is used
    return [dist for name, dist in by_name.items() if name != "sparo"]
