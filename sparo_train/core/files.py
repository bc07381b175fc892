"""Files that others may read at any moment."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

from .errors import did_you_mean

_MOST_NAMES = 200
_UMASK = os.umask(0o022)  # it can be read only by setting it
os.umask(_UMASK)


def cache_folder() -> Path:
    """Where sparo keeps what can be found again: $XDG_CACHE_HOME/sparo, or ~/.cache/sparo."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sparo"


def write_whole(path: Path, content: str | bytes) -> Path:
    """Write a file so that a reader sees the old content or the new one, and two writers do not mix; returns the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        # Within one folder, so that it is a rename and not a copy.
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def nearest(path: Path) -> str:
    """For a path that is not there: the neighbour that was meant, or where to look."""
    if not path.parent.is_dir():
        return f"{path.parent} is no folder either"
    names = sorted(entry.name for entry in path.parent.iterdir() if not entry.name.startswith("."))[:_MOST_NAMES]
    return did_you_mean(path.name, names)


def give_usual_mode(path: Path) -> None:
    """Let a file be read by whom the umask allows; some libraries write through temporary files that are their owner's alone."""
    path.chmod(0o666 & ~_UMASK)
