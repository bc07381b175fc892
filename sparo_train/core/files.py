"""Files that others may read at any moment."""

from __future__ import annotations

import errno
import os
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import did_you_mean

_MOST_NAMES = 200
_DISK_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO})
_UMASK = os.umask(0o022)  # it can be read only by setting it
os.umask(_UMASK)


def cache_folder() -> Path:
    """Where sparo keeps what can be found again: $XDG_CACHE_HOME/sparo, or ~/.cache/sparo."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sparo"


def write_whole(path: Path, content: str | bytes) -> Path:
    """Write a file as `whole_file` does; returns the path."""
    with whole_file(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Give a temporary path that becomes `path` at the end: readers see the old content or the new one, and writers do not mix.

    Raises:
        OSError: with `path` as its `filename`, where the disk is full or read-only, whatever error the writing library raised.
            What was at `path` before is still there.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # In the same folder, for a rename instead of a copy; with the same suffix, by which libraries choose the format.
    temporary = path.with_name(f".{path.stem}.{uuid.uuid4().hex[:8]}.tmp{path.suffix}")
    try:
        yield temporary
        temporary.replace(path)
    except Exception as error:
        code = disk_error(error)
        if code is None:
            raise
        raise OSError(code, os.strerror(code), str(path)) from error
    finally:
        temporary.unlink(missing_ok=True)


def disk_error(error: BaseException | None) -> int | None:
    """Return the errno of a disk that is full, read-only or broken, where an error or its context comes from one; None otherwise."""
    while error is not None:
        in_words = re.search(r"\(os error (\d+)\)", str(error))  # safetensors gives no other sign
        code = error.errno if isinstance(error, OSError) else int(in_words[1]) if in_words else None
        if code in _DISK_ERRORS:
            return code
        error = error.__cause__ or error.__context__
    return None


def nearest(path: Path) -> str:
    """For a path that is not there: the neighbour that was meant, or where to look."""
    if not path.parent.is_dir():
        return f"{path.parent} is no folder either"
    names = sorted(entry.name for entry in path.parent.iterdir() if not entry.name.startswith("."))[:_MOST_NAMES]
    return did_you_mean(path.name, names)


def give_usual_mode(path: Path) -> None:
    """Let a file be read by whom the umask allows; some libraries write through temporary files that are their owner's alone."""
    path.chmod(0o666 & ~_UMASK)
