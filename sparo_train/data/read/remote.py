"""Paths and URLs, through fsspec."""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import fsspec

from ...core.errors import DataError, SparoError, did_you_mean

T = TypeVar("T")
_PAUSES = (1.0, 4.0, 15.0)  # seconds between tries
_CONNECT, _SILENCE = 20.0, 30.0  # seconds until a connection stands, and between two packets of an answer
_WHOLE = 600.0  # seconds of one answer: a few megabytes, which a server that sends byte by byte never finishes
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "http": "http", "https": "http"}


def filesystem_of(url: str) -> tuple[Any, str]:
    """The fsspec file system of a path or URL, and the path in it. Raises `DataError` where the protocol cannot be used."""
    protocol = url.partition("://")[0]
    try:
        return fsspec.core.url_to_fs(url, **_limits(protocol))
    except (ImportError, AttributeError) as error:  # fsspec names some classes that its own modules lack
        extra = _EXTRAS.get(protocol)
        remedy = f"pip install -e '.[{extra}]' in sparo's checkout" if extra else str(error)
        raise DataError(f"{url}: {protocol}:// needs a package that is not installed; {remedy}") from None
    except (OSError, TypeError) as error:  # a protocol that wants a host or a file: `zip://`, `sftp://`
        raise DataError(f"{url}: cannot be opened ({error})") from None
    except ValueError:
        hint = did_you_mean(protocol, fsspec.available_protocols())
        raise DataError(f"{url}: {protocol}:// is no protocol that fsspec knows; {hint}") from None


def _limits(protocol: str) -> dict[str, Any]:
    """Time limits of a web server's answers; by default aiohttp waits five minutes, and for a body for ever."""
    if protocol not in ("http", "https"):
        return {}
    from aiohttp import ClientTimeout  # from the extra `http`; the caller reports its absence

    return {"client_kwargs": {"timeout": ClientTimeout(total=_WHOLE, sock_connect=_CONNECT, sock_read=_SILENCE)}}


def with_retries(url: str, work: Callable[[], T]) -> T:
    """Return `work()`, with growing pauses and further tries where `url` is on a server and the error may be temporary.

    Raises:
        DataError: it failed at last, or in a way that no pause mends.
    """
    pauses = iter(_PAUSES if "://" in url else ())
    tries = 0
    while True:
        try:
            tries += 1
            return work()
        except SparoError:
            raise
        except Exception as error:  # protocols are libraries of others, with errors of their own
            pause = None if _is_final(error) else next(pauses, None)
            if pause is None:
                counted = f" in {tries} tries" if tries > 1 else ""
                raise DataError(f"{url}: cannot be read{counted} ({_words(error)}). {_remedy(url, error)}") from None
        time.sleep(pause)


class RemoteFile(io.RawIOBase):
    """A file of a server, read by position; every read is tried again on a new connection.

    Raises:
        DataError: where a read fails at last.
    """

    def __init__(self, url: str, size: int):
        self._url, self._size, self._at = url, size, 0
        self._stream: Any = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._size - self._at)
        num_bytes = left if size < 0 else min(size, left)
        data = with_retries(self._url, lambda: self._read(num_bytes))
        self._at += len(data)
        return data

    def _read(self, num_bytes: int) -> bytes:
        try:
            if self._stream is None:
                filesystem, path = filesystem_of(self._url)
                self._stream = filesystem.open(path, "rb")
            self._stream.seek(self._at)
            data = self._stream.read(num_bytes)
            if len(data) < num_bytes:
                raise OSError(f"the server sent {len(data)} of {num_bytes} bytes")
        except Exception:
            self.close_stream()
            raise
        return data

    def close_stream(self) -> None:
        """Close the connection; a later read opens another."""
        stream, self._stream = self._stream, None
        if stream is not None:
            with suppress(Exception):
                stream.close()

    def close(self) -> None:
        self.close_stream()
        super().close()


def _is_final(error: Exception) -> bool:
    status = getattr(error, "status", None)  # aiohttp's
    if isinstance(status, int) and 400 <= status < 500:
        return status not in (408, 429)
    return isinstance(error, FileNotFoundError | PermissionError | ValueError | TypeError | NotImplementedError)


def _words(error: Exception) -> str:
    first = (str(error).splitlines() or [""])[0][:200]
    return first or type(error).__name__


def _remedy(url: str, error: Exception) -> str:
    if "://" not in url:
        return "Check the disk and the permissions, then run the same line again."
    if isinstance(error, ValueError | NotImplementedError):
        return "Shards are read by position, which needs a server with byte ranges; copy the shard to a disk or to another server."
    return "Check the address, the server and the network, then run the same line again."
