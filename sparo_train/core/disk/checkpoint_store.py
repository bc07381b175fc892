"""Checkpoints: folders of safetensors files and a meta.json, named `step-N` once they are complete.

    checkpoints/step-00012000/
        model.safetensors  optimizer.safetensors             one rank
        model-00003-of-00008.safetensors …                   several ranks: each writes its pieces (pieces.py)
        index.safetensors                                    several ranks: which file contains which elements
        meta.json          step, samples, cursor, fingerprint, recipe, versions; size and SHA-256 of every file, and its
        own checksum

Everything is written to a hidden temporary folder, flushed to disk, and renamed. If the writer is killed or the disk is
full, the previous checkpoint is unchanged, and the next start removes the temporary folder.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointError
from ..files import flush, is_safe_relative_path

if TYPE_CHECKING:
    from torch import Tensor

    from .pieces import Pieces
    from .pieces_reader import Extent, PiecesReader

FORMAT = 3
_READABLE = (2, 3)  # format 2 has other names for some parameters of slot models (core/recipe/renamed.py)
Files = dict[str, dict[str, Any]]  # name -> {"part", "bytes", "sha256"}
Extents = dict[str, "dict[str, Extent]"]  # name of a file -> extents of the pieces in it


class CheckpointStore:
    """Checkpoints of one run folder. To save, call `write` on every rank, then `complete` or `abandon` on one rank.

    Args:
        root: the `checkpoints/` folder.
        keep_last: number of newest checkpoints to keep.
        keep_every: also keep every checkpoint whose step is a multiple of this (0: none).
        guard: called before a checkpoint is begun and before it is renamed; raises if this process may not write.
        writer: suffix of temporary folders, equal on all ranks, so that two starts do not write to the same folder.
    """

    def __init__(
        self,
        root: Path,
        keep_last: int = 2,
        keep_every: int = 0,
        guard: Callable[[], None] = lambda: None,
        writer: str = "",
    ):
        self.root, self.keep_last, self.keep_every = root, max(1, keep_last), keep_every
        self.guard, self.writer = guard, writer

    def folder(self, step: int) -> Path:
        """Return the folder of a step's checkpoint, which exists once it is complete."""
        return self.root / f"step-{step:08d}"

    def _temporary(self, step: int) -> Path:
        return self.root / f".tmp-{self.writer}step-{step:08d}"

    def write(self, step: int, pieces: Pieces, rank: int = 0, size: int = 1) -> tuple[Files, Extents]:
        """Write one rank's pieces to the temporary folder; returns what `complete` needs to know about them.

        Raises:
            CheckpointError: the disk is full or read-only; older checkpoints are unchanged.
        """
        # Imported here, so that checkpoint metadata can be read without torch.
        from .pieces import write_pieces
        from .pieces_reader import collect_extents

        temporary = self._temporary(step)
        files: Files = {}
        extents: Extents = {}
        self.guard()
        if rank == 0:  # a smaller keep_last than before frees space
            self._prune()
        own = f"-{rank:05d}-of-{size:05d}" if size > 1 else ""
        try:
            temporary.mkdir(parents=True, exist_ok=True)
            for part, part_pieces in pieces.items():
                path = temporary / f"{part}{own}.safetensors"
                written, digest = write_pieces(path, part_pieces)
                files[path.name] = {"part": part, "bytes": written, "sha256": digest}
                extents[path.name] = collect_extents(part_pieces)
        except OSError as error:
            raise self._failure(step, error) from None
        return files, extents

    def complete(self, step: int, files: Files, extents: Extents, meta: Mapping[str, Any]) -> Path:
        """Publish the checkpoint with everything that the ranks wrote, then remove old checkpoints.

        Args:
            files, extents: joined results of `write` of all ranks.

        Raises:
            CheckpointError: the disk is full or read-only, or a rank's file is not visible from this node.
        """
        temporary, target = self._temporary(step), self.folder(step)
        try:
            for name, facts in files.items():
                # A network file system may show a file of another machine late, or never.
                if not (temporary / name).is_file() or (temporary / name).stat().st_size != facts["bytes"]:
                    raise OSError(
                        f"{name} of another rank is not visible on this node. `out` must be a folder that all nodes share"
                    )
            files = files | self._write_index(temporary, files, extents)
            content = {**meta, "format": FORMAT, "step": step, "files": files}
            path = temporary / "meta.json"
            path.write_text(json.dumps({**content, "checksum": _checksum(content)}), encoding="utf-8")
            flush(path)
            flush(temporary)
            self.guard()
            # After a signal, the same step can be saved twice: the old checkpoint stays until the new one is complete.
            if target.exists():
                target.rename(self.root / f".tmp-old-{target.name}")
            temporary.rename(target)
            flush(self.root)
        except OSError as error:
            raise self._failure(step, error) from None
        self.guard()
        self._prune()
        self.sweep()
        return target

    def _write_index(self, temporary: Path, files: Files, extents: Extents) -> Files:
        """Write the index of a checkpoint of several ranks."""
        if len(files) == len({facts["part"] for facts in files.values()}):
            return {}
        from .pieces_reader import INDEX, write_index

        size, digest = write_index(temporary / INDEX, {name: (files[name]["part"], extents[name]) for name in files})
        return {INDEX: {"part": "index", "bytes": size, "sha256": digest}}

    def abandon(self, step: int) -> None:
        """Remove the files of an unfinished `write`; no rank may be writing any more."""
        shutil.rmtree(self._temporary(step), ignore_errors=True)

    def sweep(self) -> None:
        """Remove the files of killed writers; call it before training starts."""
        for leftover in self.root.glob(".tmp-*"):
            replaced = self.root / leftover.name.removeprefix(".tmp-old-")
            if replaced.name.startswith("step-") and not replaced.exists():
                leftover.rename(replaced)  # killed between the two renames that replace a checkpoint
            else:
                shutil.rmtree(leftover, ignore_errors=True)

    def steps(self) -> dict[int, Path]:
        """Return complete checkpoints by step, oldest first."""
        checkpoints = {}
        for path in self.root.glob("step-*"):
            if path.name[5:].isdigit() and (path / "meta.json").is_file():
                checkpoints[int(path.name[5:])] = path
        return dict(sorted(checkpoints.items()))

    def latest(self) -> Path | None:
        """Return the newest complete checkpoint, or None."""
        return next(reversed(list(self.steps().values())), None)

    def latest_valid(self) -> Path | None:
        """Return the newest checkpoint that is not marked as diverged, or None."""
        return next((path for path in reversed(self.steps().values()) if not is_suspect(path)), None)

    def unfinished(self) -> Path | None:
        """Return the newest incomplete checkpoint folder that is later than every complete one, or None."""
        done = max(self.steps(), default=-1)
        folders = {
            int(path.name.rpartition("step-")[2]): path
            for path in self.root.glob("*step-*")
            if path.name.rpartition("step-")[2].isdigit() and not path.name.startswith(".tmp-old-")
        }
        later = [step for step in folders if step > done]
        return folders[max(later)] if later else None

    def quarantine(self, path: Path) -> Path:
        """Rename a damaged checkpoint so that it is ignored but not lost; returns its new path."""
        aside = path.with_name(f"damaged-{path.name}")
        if aside.exists():
            shutil.rmtree(aside, ignore_errors=True)
        return path.rename(aside)

    def _failure(self, step: int, error: Exception) -> CheckpointError:
        latest = self.latest()
        remedy = (
            f"{latest} is intact. Free space or fix permissions, then run the same command again."
            if latest
            else "no earlier checkpoint exists. Free space or fix permissions."
        )
        return CheckpointError(f"{self.folder(step)}: could not be written ({error}). {remedy}")

    def _prune(self) -> None:
        # Only complete checkpoints count, so that a removed one always has a successor on disk.
        steps, sound = self.steps(), self.latest_valid()
        for step in list(steps)[: -self.keep_last]:
            if not (self.keep_every and step % self.keep_every == 0) and steps[step] != sound:
                shutil.rmtree(steps[step], ignore_errors=True)


def is_suspect(path: Path) -> bool:
    """Return whether a checkpoint was written while steps were being skipped, or has values that are not finite (or does not say)."""
    return _flag(path, "suspect", missing=False, unreadable=True)


_META: dict[str, type | tuple[type, ...]] = {
    "step": int, "samples": int, "cursor": (list, dict), "fingerprint": dict, "bad_samples": (dict, list), "skipped_steps": int,
    "skipped_in_a_row": int,
}  # fmt: skip
_FILE = {"part": str, "bytes": int, "sha256": str}


def has_sound_weights(path: Path) -> bool:
    """Return whether a checkpoint records that all of its values are finite. Older checkpoints do not record it and count as sound."""
    return _flag(path, "sound", missing=True, unreadable=False)


def _flag(path: Path, key: str, missing: bool, unreadable: bool) -> bool:
    try:
        return bool(json.loads((path / "meta.json").read_text(encoding="utf-8")).get(key, missing))
    except (OSError, ValueError, AttributeError, TypeError):
        return unreadable


def checkpoint_warnings(path: Path, step: Path) -> str:
    """Return a warning if the checkpoint that was read may not be the intended one, otherwise an empty string.

    Args:
        path: the run or checkpoint that the user named.
        step: the checkpoint that was read for it.
    """
    remarks = []
    if step != path and (unfinished := CheckpointStore(path / "checkpoints").unfinished()):
        remarks.append(f"{unfinished}: is incomplete; {step.name} is read instead")
    if is_suspect(step):
        remarks.append(
            f"{step}: was written while training skipped steps that were not finite; earlier ones may score better"
        )
    return ". ".join(remarks)


def read_meta(path: Path) -> dict[str, Any]:
    """Return the meta.json of a checkpoint folder, after verifying its checksum, its format and the sizes of its files."""
    try:
        meta = json.loads((path / "meta.json").read_text(encoding="utf-8"))
        checksum = meta.pop("checksum", None)
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{path}/meta.json: not readable ({error}). {_remedy(path)}") from None
    if meta.get("format") not in _READABLE:
        raise CheckpointError(
            f"{path}/meta.json: format: this version reads {' and '.join(map(str, _READABLE))}, got "
            f"{meta.get('format')!r}. Use the version of sparo that wrote this checkpoint."
        )
    if checksum != _checksum(meta):
        raise CheckpointError(f"{path}/meta.json: damaged (its checksum differs). {_remedy(path)}")
    _refuse_fields(meta, {"files": dict}, path)
    for name, expected in meta["files"].items():
        facts = expected if isinstance(expected, dict) else {}
        if not all(isinstance(facts.get(k), kind) for k, kind in _FILE.items()) or not is_safe_relative_path(name):
            raise CheckpointError(f"{path}/meta.json: invalid entry for {name!r} in `files`. {_remedy(path)}")
        size = (path / name).stat().st_size if (path / name).is_file() else None
        if size != expected["bytes"]:
            problem = "missing" if size is None else f"expected {expected['bytes']} bytes, got {size}"
            raise CheckpointError(f"{path / name}: {problem}. {_remedy(path)}")
    return meta


def _remedy(path: Path) -> str:
    """Return what to do about a damaged checkpoint folder."""
    if any(step != path for step in CheckpointStore(path.parent).steps().values()):
        return f"Remove {path} to resume from the checkpoint before it."
    return "There is no other checkpoint. Copy its files again, or train again."


def read_run_meta(path: Path) -> dict[str, Any]:
    """Return `read_meta` of a training run's checkpoint, with all that a run needs to continue. Raises `CheckpointError`."""
    meta = read_meta(path)
    _refuse_fields(meta, _META, path)
    return meta


def _refuse_fields(meta: Mapping[str, Any], fields: Mapping[str, type | tuple[type, ...]], path: Path) -> None:
    for key, kinds in fields.items():
        if not isinstance(meta.get(key), kinds) or isinstance(meta[key], bool):
            raise CheckpointError(
                f"{path}/meta.json: {key} is missing or has the wrong type, got {type(meta.get(key)).__name__}. {_remedy(path)}"
            )


def newest_step(path: Path) -> Path | None:
    """Return a checkpoint folder itself, or the newest complete checkpoint of a run folder; None if there is none."""
    return path if (path / "meta.json").is_file() else CheckpointStore(path / "checkpoints").latest()


def open_checkpoint(
    path: Path, parts: Sequence[str], share: tuple[int, int] = (0, 1), meta: Mapping[str, Any] | None = None
) -> PiecesReader:
    """Return a reader of a checkpoint's parts, after verifying the checksums of this rank's share of the files, and of the index.

    Args:
        path: folder of the checkpoint.
        parts: for example `model` and `optimizer`.
        share: rank and number of ranks.
        meta: from `read_meta` on another rank; None: it is read here.

    Raises:
        CheckpointError: a file is missing or damaged, or the part does not exist.
    """
    meta = read_meta(path) if meta is None else meta
    files = meta["files"]
    part_files = {part: [path / name for name, facts in files.items() if facts["part"] == part] for part in parts}
    for part, paths in part_files.items():
        if not paths:
            raise CheckpointError(f"{path}: has no part {part!r}")
    rank, size = share
    index = next((path / name for name, facts in files.items() if facts["part"] == "index"), None)
    own = [file for paths in part_files.values() for file in paths][rank::size]
    for file in own if index is None else [index, *own]:
        try:
            same = _sha256(file) == files[file.name]["sha256"]
        except OSError as error:
            raise CheckpointError(f"{file}: not readable ({error}). Repair it, or remove {path}.") from None
        if not same:
            raise CheckpointError(
                f"{file}: damaged (its checksum differs). Remove {path} to resume from the previous checkpoint."
            )
    from ..recipe.renamed import parameter_name
    from .pieces_reader import PiecesReader

    if meta["format"] == FORMAT:
        return PiecesReader(part_files, index=index)
    objective = meta.get("recipe", {}).get("objective", {})
    return PiecesReader(part_files, lambda name: parameter_name(name, objective.get("kind")), index)


def read_part(path: Path, part: str) -> dict[str, Tensor]:
    """Return one part (`model`, `optimizer`, …) of a checkpoint folder, after verifying its checksums."""
    return open_checkpoint(path, [part]).part(part)


def _checksum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
