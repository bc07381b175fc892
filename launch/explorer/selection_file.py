"""The selection that the page saves: one file, which nobody else may have changed since it was read."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from evals.encoders.selection import Selection, read_selection, selected, write_selection
from sparo_train.core.errors import ConfigError

from .opened import Side

_LONGEST = 10_000  # characters of a name or a note


class ChangedError(ConfigError):
    """The file is not what it was when the page read it."""


class SelectionFile:
    """`selection.json` of one checkpoint.

    Args:
        side: whose units it chooses.  path: where it lies, or will.

    Raises:
        ConfigError: a file that is there and is no selection of this checkpoint.
    """

    def __init__(self, side: Side, path: Path):
        self.side, self.path = side, path
        self._lock = threading.Lock()
        self.read()

    def read(self) -> tuple[Selection | None, str]:
        """What it holds, and its revision; an empty revision where there is no file."""
        revision = self._revision()
        if not revision:
            return None, ""
        try:
            found = read_selection(self.path)
            selected(self.side.encoder, found, f"--slots {self.path}")
        except ConfigError as error:
            raise ConfigError(
                f"--out {str(error).removeprefix('--slots ')}; or move it away, or name another --out"
            ) from None
        shown, own = f"{self.side.units.number} {self.side.units.kind}", f"{found.count} {found.units}"
        if shown != own:
            raise ConfigError(f"--out {self.path}: chooses of {own}, and the page shows {shown}; name another file")
        if found.mask:
            raise ConfigError(f"--out {self.path}: is a mask, which cannot be switched on and off; name another file")
        return found, revision

    def facts(self, whole: bool = True) -> dict[str, Any]:
        """As the page takes it. Not `whole`: a file that was spoilt meanwhile is told as its `error`, and the page goes on."""
        told = {
            "path": str(self.path),
            "chosen": None,
            "names": {},
            "notes": {},
            "made_on": None,
            "looked_at": [],
            "error": "",
        }
        try:
            found, told["revision"] = self.read()
        except ConfigError as error:
            if whole:
                raise
            return {**told, "error": str(error), "revision": self._revision()}
        if found is not None:
            told |= {
                "chosen": sorted(found.chosen), "names": found.names, "notes": found.notes, "looked_at": list(found.looked_at),
                "made_on": found.made_on.model_dump(), "method": found.method,
            }  # fmt: skip
        return told

    def write(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Save what the page sends: `chosen`, `names`, `notes`, `looked_at`, and the `revision` that it began with.

        Args:
            given: with `over` the file is written over, whatever it holds by now.

        Raises:
            ChangedError: another tab or program has written the file since.
            ConfigError: something that is no selection of these units.
        """
        with self._lock:
            over = given.get("over") is True
            if not over and given.get("revision") != self._revision():
                raise ChangedError(
                    f"{self.path}: was changed by another tab or program since this page read it, and is left as it is; "
                    "read it again, or write over it"
                )
            try:
                before = None if over else self.read()[0]
            except ConfigError as error:  # spoilt before the page read it
                raise ChangedError(str(error)) from None
            write_selection(self.path, self._selection(given, before))
            return self.facts()

    def _selection(self, given: Mapping[str, Any], before: Selection | None) -> Selection:
        units = self.side.units
        try:
            words = {key: {int(slot): _clean(text) for slot, text in dict(given.get(key) or {}).items() if text} for key in ("names", "notes")}  # fmt: skip
            chosen = tuple(sorted(int(slot) for slot in given["chosen"]))
            if before is not None and tuple(sorted(before.chosen)) == chosen:
                # Only names changed: how it was chosen is still true.
                return Selection.model_validate(before.model_dump(by_alias=True) | words)
            found = {
                "checkpoint": self.side.encoder.weights, "label": self.side.bench.checkpoint, "units": units.kind, "count": units.number,
                "classifier_slots": self.side.bench.options.classifier_slots, "chosen": chosen, "method": "hand",
                "looked_at": tuple(str(data) for data in given.get("looked_at") or ()), **words,
            }  # fmt: skip
            return Selection.model_validate(found)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise ConfigError(f"{where + ': ' if where else ''}{first['msg']}; nothing was saved") from None
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ConfigError(f"no selection: {error}; nothing was saved") from None

    def _revision(self) -> str:
        try:
            return hashlib.sha256(self.path.read_bytes()).hexdigest()
        except FileNotFoundError:
            return ""


def _clean(text: Any) -> str:
    """A name or a note, as a file can hold it: half of a pair of surrogates is no character."""
    return str(text)[:_LONGEST].encode("utf-8", "replace").decode()
