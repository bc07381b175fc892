"""Checkpoints: a folder of safetensors files and a meta.json that exists only after its rename.

    checkpoints/step-00012000/
        model.safetensors  optimizer.safetensors
        meta.json          step, samples, cursor, fingerprint, versions, and size + sha256 of every file

Everything is written into a hidden temporary folder, flushed to disk, and renamed. A killed writer or a full
disk leaves the previous checkpoint as it was and a temporary folder that the next save removes.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from .errors import CheckpointError

State = dict[str, dict[str, Tensor]]
FORMAT = 1


class CheckpointStore:
    """The checkpoints of one run folder.

    Args:
        root: the `checkpoints/` folder.
        keep_last: how many of the newest to keep.
        keep_every: besides those, keep each whose step is a multiple of this (0: none).
    """

    def __init__(self, root: Path, keep_last: int = 2, keep_every: int = 0):
        self.root, self.keep_last, self.keep_every = root, max(1, keep_last), keep_every

    def save(self, step: int, state: State, meta: Mapping[str, Any]) -> Path:
        """Write `state` (part -> name -> tensor) and `meta`; return the folder once it is complete on disk.

        Raises:
            CheckpointError: the disk is full or read-only; older checkpoints are untouched.
        """
        target = self.root / f"step-{step:08d}"
        temporary = self.root / f".tmp-step-{step:08d}"
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            self._sweep()
            temporary.mkdir()
            files = {}
            for part, tensors in state.items():
                path = temporary / f"{part}.safetensors"
                save_file({name: t.detach().contiguous().cpu() for name, t in tensors.items()}, path)
                _flush(path)
                files[path.name] = {"bytes": path.stat().st_size, "sha256": _sha256(path)}
            path = temporary / "meta.json"
            path.write_text(json.dumps({**meta, "format": FORMAT, "step": step, "files": files}), encoding="utf-8")
            _flush(path)
            if target.exists():
                shutil.rmtree(target)
            temporary.rename(target)
            _flush(self.root)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(temporary, ignore_errors=True)
            kept = self.latest()
            raise CheckpointError(
                f"{target}: could not be written ({error}); "
                + (
                    f"{kept} is intact. Free space or fix permissions, then run the same line again."
                    if kept
                    else "no earlier one exists."
                )
            ) from None
        self._prune()
        return target

    def steps(self) -> dict[int, Path]:
        """Complete checkpoints by step, oldest first."""
        found = {}
        for path in self.root.glob("step-*"):
            if path.name[5:].isdigit() and (path / "meta.json").is_file():
                found[int(path.name[5:])] = path
        return dict(sorted(found.items()))

    def latest(self) -> Path | None:
        """The newest complete checkpoint, or None."""
        return next(reversed(list(self.steps().values())), None)

    def _sweep(self) -> None:
        for leftover in self.root.glob(".tmp-step-*"):
            shutil.rmtree(leftover)

    def _prune(self) -> None:
        steps = self.steps()
        for step in list(steps)[: -self.keep_last]:
            if not (self.keep_every and step % self.keep_every == 0):
                shutil.rmtree(steps[step])


def read_meta(path: Path) -> dict[str, Any]:
    """The meta.json of a checkpoint folder, checked for its format and the sizes of its files."""
    try:
        meta = json.loads((path / "meta.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path}/meta.json: not readable ({error}); remove {path} to continue from the one before"
        ) from None
    if meta.get("format") != FORMAT:
        raise CheckpointError(f"{path}: format {meta.get('format')!r}, this version reads {FORMAT}")
    for name, expected in meta["files"].items():
        size = (path / name).stat().st_size if (path / name).is_file() else None
        if size != expected["bytes"]:
            found = "missing" if size is None else f"{size} bytes"
            raise CheckpointError(
                f"{path / name}: {found}, should be {expected['bytes']} bytes; remove {path} to continue from the checkpoint before it"
            )
    return meta


def read_part(path: Path, part: str) -> dict[str, Tensor]:
    """One part (`model`, `optimizer`, …) of a checkpoint folder, its checksum verified."""
    expected = read_meta(path)["files"].get(f"{part}.safetensors")
    file = path / f"{part}.safetensors"
    if expected is None:
        raise CheckpointError(f"{path}: holds no {part!r}")
    if _sha256(file) != expected["sha256"]:
        raise CheckpointError(
            f"{file}: damaged (its checksum differs); remove {path} to continue from the checkpoint before it"
        )
    return load_file(file)


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
