"""The selection that the page saves: one file, with detection of changes by others."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from evals.encoders.selection import Selection, keep_units, read_selection, write_selection
from sparo_train.core.errors import ConfigError

from .opened import Side

_MAX_TEXT_LENGTH = 10_000  # characters of a name or a note


class ChangedError(ConfigError):
    """The file has changed since the page read it."""


class SelectionFile:
    """`selection.json` of one checkpoint.

    Args:
        side: whose units it selects.
        path: its path; the file may not exist yet.

    Raises:
        ConfigError: an existing file is not a selection of this checkpoint.
    """

    def __init__(self, side: Side, path: Path):
        self.side, self.path = side, path
        self._lock = threading.Lock()
        self.read()

    def read(self) -> tuple[Selection | None, str]:
        """Return its content and its revision; an empty revision without a file."""
        revision = self._revision()
        if not revision:
            return None, ""
        try:
            selection = read_selection(self.path)
            keep_units(self.side.encoder, selection, f"--slots {self.path}")
        except ConfigError as error:
            raise ConfigError(
                f"--out {str(error).removeprefix('--slots ')} To keep this file, name another --out, or move it away."
            ) from None
        page_units, file_units = (
            f"{self.side.units.number} {self.side.units.kind}",
            f"{selection.count} {selection.units}",
        )
        if page_units != file_units:
            raise ConfigError(
                f"--out {self.path}: contains a selection of {file_units}, but the page shows {page_units}. Name another "
                "file."
            )
        if selection.mask:
            raise ConfigError(
                f"--out {self.path}: the existing file contains a mask, which the page cannot edit. Name another file."
            )
        return selection, revision

    def facts(self, whole: bool = True) -> dict[str, Any]:
        """Return the content for the page. Unless `whole`, a file that was damaged meanwhile is returned as its `error`."""
        payload = {
            "path": str(self.path),
            "chosen": None,
            "names": {},
            "notes": {},
            "made_on": None,
            "looked_at": [],
            "error": "",
        }
        try:
            selection, payload["revision"] = self.read()
        except ConfigError as error:
            if whole:
                raise
            return {**payload, "error": str(error), "revision": self._revision()}
        if selection is not None:
            payload |= {
                "chosen": sorted(selection.chosen), "names": selection.names, "notes": selection.notes, "looked_at": list(selection.looked_at),
                "made_on": selection.made_on.model_dump(), "method": selection.method,
            }  # fmt: skip
        return payload

    def write(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Save the data that the page sends: `chosen`, `names`, `notes`, `looked_at`, and the `revision` that it started from.

        Args:
            body: with `overwrite`, the file is replaced whatever its content.

        Raises:
            ChangedError: another tab or program has written the file since.
            ConfigError: not a selection of these units.
        """
        with self._lock:
            overwrite = body.get("over") is True
            if not overwrite and body.get("revision") != self._revision():
                raise ChangedError(
                    f"{self.path}: was changed by another tab or program since this page read it, and was not overwritten. "
                    "Read it again, or overwrite it."
                )
            try:
                previous = None if overwrite else self.read()[0]
            except ConfigError as error:  # damaged before the page read it
                raise ChangedError(str(error)) from None
            write_selection(self.path, self._build_selection(body, previous))
            return self.facts()

    def _build_selection(self, body: Mapping[str, Any], previous: Selection | None) -> Selection:
        units = self.side.units
        try:
            labels = {key: {int(slot): _clean(text) for slot, text in dict(body.get(key) or {}).items() if text} for key in ("names", "notes")}  # fmt: skip
            selected_units = tuple(sorted(int(slot) for slot in body["chosen"]))
            if previous is not None and tuple(sorted(previous.chosen)) == selected_units:
                # If only names changed, the recorded method still applies.
                return Selection.model_validate(previous.model_dump(by_alias=True) | labels)
            fields = {
                "checkpoint": self.side.encoder.weights, "label": self.side.bench.checkpoint, "units": units.kind, "count": units.number,
                "classifier_slots": self.side.bench.options.classifier_slots, "chosen": selected_units, "method": "hand",
                "looked_at": tuple(str(data) for data in body.get("looked_at") or ()), **labels,
            }  # fmt: skip
            return Selection.model_validate(fields)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise ConfigError(f"{where + ': ' if where else ''}{first['msg']}; nothing was saved") from None
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ConfigError(f"the selection could not be saved: {error}") from None

    def _revision(self) -> str:
        try:
            return hashlib.sha256(self.path.read_bytes()).hexdigest()
        except FileNotFoundError:
            return ""


def _clean(text: Any) -> str:
    """Clean a name or a note for a file: lone surrogates are not characters."""
    return str(text)[:_MAX_TEXT_LENGTH].encode("utf-8", "replace").decode()
