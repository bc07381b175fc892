"""Files: atomic writes, reads with size limits, and foreign text with its control characters escaped."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import Any, TypeVar

from .errors import ConfigError, SparoError, did_you_mean

T = TypeVar("T")
MAX_TEXT_BYTES = 64 << 20  # limit in bytes for text files that are read whole; the largest that we know of have a tenth
# Control characters other than line feed and tab, bidirectional marks, other line ends, and lone surrogates.
_CONTROL_CHARS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def escape_control_chars(text: str) -> str:
    r"""Escape characters that a terminal would interpret: ESC as `\x1b`, a byte that is not UTF-8 as `\xff`."""
    return _CONTROL_CHARS.sub(lambda found: _escape(found.group()), text)


def _escape(character: str) -> str:
    number = ord(character)
    if 0xDC80 <= number <= 0xDCFF:  # as Python decodes file names
        return f"\\x{number - 0xDC00:02x}"
    return f"\\x{number:02x}" if number < 256 else f"\\u{number:04x}"


def read_bytes(path: str | Path, error: type[SparoError] = ConfigError, max_bytes: int | None = None) -> bytes:
    """Return a file's content. Pipes and devices are refused, because reading them might never end.

    Raises:
        error: names the file; it is missing, not a regular file, not readable, or has more than `max_bytes` bytes.
    """
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as stream:  # noqa: PTH123 a pipe would wait for a writer
            # Check the open file, not its name, which could refer to another file by now.
            file_stat = os.fstat(stream.fileno())
            if not stat.S_ISREG(file_stat.st_mode):
                raise error(f"{path}: is not a regular file. Name a file.")
            if max_bytes is not None and file_stat.st_size > max_bytes:
                raise error(
                    f"{path}: has {file_stat.st_size} bytes, more than the limit of {max_bytes}. Is it the right file?"
                )
            return stream.read()
    except (OSError, ValueError) as failed:  # a name with a NUL raises ValueError
        why = failed.strerror if isinstance(failed, OSError) else failed
        raise error(f"{path}: cannot be read ({why})") from None


def read_text(path: str | Path, error: type[SparoError] = ConfigError, max_bytes: int = MAX_TEXT_BYTES) -> str:
    """Return the text of a UTF-8 file, with the limits of `read_bytes` and line ends as `open` reads them."""
    data = read_bytes(path, error, max_bytes)
    try:
        # Editors on Windows write a byte-order mark.
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as failed:
        line = data.count(b"\n", 0, failed.start) + 1
        raise error(f"{path}: line {line} is not UTF-8 ({failed.reason}). Save the file as UTF-8.") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def is_safe_relative_path(name: object) -> bool:
    """Return whether this can be a file inside a folder. Names in foreign files may be absolute or lead outside."""
    if not isinstance(name, str) or not name or "\0" in name:
        return False
    try:
        os.fsencode(name)
    except UnicodeEncodeError:  # a lone surrogate, as JSON can contain
        return False
    place = PurePath(name)
    return not place.is_absolute() and ".." not in place.parts


def read_json(
    path: str | Path, kind: type[T], error: type[SparoError] = ConfigError, max_bytes: int = MAX_TEXT_BYTES
) -> T:
    """Return the JSON of a file, whose top level must be a `kind` (dict or list). Raises `error` naming the file."""
    return parse_json(read_text(path, error, max_bytes), str(path), kind, error)


def parse_json(text: str, where: str, kind: type[T], error: type[SparoError] = ConfigError) -> T:
    """Return parsed JSON whose top level must be a `kind`. Raises `error` naming `where`."""
    try:
        value: Any = json.loads(text)
    except (ValueError, RecursionError) as failed:  # unlimited nesting does not raise a ValueError
        raise error(f"{where}: not valid JSON ({failed}). Is it truncated?") from None
    if not isinstance(value, kind):
        raise error(f"{where}: expected a JSON {kind.__name__}, got {type(value).__name__}")
    return value


_MOST_NAMES = 200
_DISK_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO})
_UMASK = os.umask(0o022)  # os.umask can only be read by setting it
os.umask(_UMASK)


def cache_folder() -> Path:
    """Return the folder for data that can be recreated: $XDG_CACHE_HOME/sparo, or ~/.cache/sparo."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sparo"


def write_whole(path: Path, content: str | bytes) -> Path:
    """Write a file atomically with `whole_file`; returns the path."""
    with whole_file(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Give a temporary path that becomes `path` at the end. Readers see the old or the new content, and writers do not mix.

    Raises:
        OSError: with `path` as its `filename`, if the disk is full or read-only, whatever error the writing library
            raised. The previous content of `path` is unchanged.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # In the same folder, so that a rename suffices; with the same suffix, because libraries choose the format by it.
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
    """Return the errno if an error, or its context, comes from a full, read-only or broken disk; otherwise None."""
    while error is not None:
        in_words = re.search(r"\(os error (\d+)\)", str(error))  # the only sign that safetensors gives
        code = error.errno if isinstance(error, OSError) else int(in_words[1]) if in_words else None
        if code in _DISK_ERRORS:
            return code
        error = error.__cause__ or error.__context__
    return None


def suggest_path(path: Path) -> str:
    """Return, for a path that does not exist, the existing path that was probably meant, or where to look."""
    if not path.parent.is_dir():
        return f"{path.parent} is not a folder either"
    names = sorted(entry.name for entry in path.parent.iterdir() if not entry.name.startswith("."))[:_MOST_NAMES]
    return did_you_mean(path.name, names)


def give_usual_mode(path: Path) -> None:
    """Give a file the permissions of the umask. Some libraries write through temporary files that only the owner can read."""
    path.chmod(0o666 & ~_UMASK)


def flush(path: Path) -> None:
    """Write a file or a folder from the page cache to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
