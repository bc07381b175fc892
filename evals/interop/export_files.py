"""Model card and checksums of an export, and the check of its output path."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from sparo_train.core.errors import ConfigError
from sparo_train.core.files import give_usual_mode, write_whole

from ..report.model_card import CardFacts, is_own_card, model_card

SUMS = "SHA256SUMS"
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".pt2", ".onnx")


def pack(export: Path, facts: CardFacts, before: Mapping[str, tuple[int, int]]) -> None:
    """Write card and checksums next to an export: README.md and SHA256SUMS in a folder, FILE.md and FILE.sha256.

    Args:
        export: the exported file or folder.
        facts: facts for the card.
        before: `file_versions` of the folder before the export.
    """
    write_whole(card_path(export), model_card(facts))
    if export.is_dir():
        # Files of the user, and single-file exports with their own checksums, may be in the folder, too.
        own = {name for name, version in file_versions(export).items() if version != before.get(name)} | listed_files(
            export
        )
        files = sorted(export / name for name in own - {SUMS, "README.md", "MODEL_CARD.md"})
        sums = export / SUMS
    else:
        files, sums = [export], export.with_name(f"{export.name}.sha256")
    for path in files:
        give_usual_mode(path)
    write_whole(sums, "".join(f"{sha256(path)}  {path.name}\n" for path in files))


def file_versions(folder: Path) -> dict[str, tuple[int, int]]:
    """Return inode and time of the last change of each file in a folder, which may not exist."""
    states = {path.name: path.stat() for path in folder.glob("*") if path.is_file()}
    return {name: (state.st_ino, state.st_mtime_ns) for name, state in states.items()}


def listed_files(folder: Path) -> set[str]:
    """Return the names of the existing files that the checksums of a folder list: those of its exports."""
    sums = folder / SUMS
    lines = sums.read_text(encoding="utf-8", errors="replace").splitlines() if sums.is_file() else []
    return {name for line in lines if (name := line[66:]) and Path(name).name == name and (folder / name).is_file()}


def refuse_foreign_weights(out: Path, is_folder: bool) -> None:
    """Raise `ConfigError` for weights at an output path that no export wrote: they would be lost, or mistaken for the model."""
    found = sorted(path for path in out.glob("*") if path.suffix in _WEIGHTS) if is_folder else [out]
    own = listed_files(out if is_folder else out.parent)
    for path in found:
        if path.is_file() and path.name not in own and not path.with_name(f"{path.name}.sha256").is_file():
            raise ConfigError(
                f"--out: {path} exists, and no checksum of an export lists it, so it is kept. Name another path, or remove it."
            )


def card_path(export: Path) -> Path:
    """Return the path of an export's card: README.md, unless the user's own README exists."""
    if not export.is_dir():
        return export.with_name(f"{export.name}.md")
    readme = export / "README.md"
    return export / "MODEL_CARD.md" if readme.is_file() and not is_own_card(readme) else readme


def sha256(path: Path) -> str:
    """Return the hex SHA-256 of a file, as sha256sum writes it."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
