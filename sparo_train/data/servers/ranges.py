"""Byte ranges of files on servers: parallel requests for the bytes of samples that will be read soon."""

from __future__ import annotations

import io
from collections import defaultdict, deque
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import pairwise
from typing import Any, NamedTuple

from .remote import open_filesystem, with_retries

_IN_FLIGHT = 8  # announced requests of a process at a time
_AHEAD_BYTES = 1 << 30  # limit on the announced samples of a process that were not read yet
_HEDGE_SECONDS = 5.0  # if `read` has waited so long for an announced sample, the sample is requested a second time
_HEADER_BYTES = 4096  # one request after an image: usually its text members and the next header


def read_range(url: str, start: int, end: int) -> bytes:
    """Return the bytes [`start`, `end`) of a file.

    Raises:
        DataError: all tries failed, or the server ignores byte ranges.
    """

    def request() -> bytes:
        filesystem, path = open_filesystem(url)
        data = filesystem.cat_file(path, start=start, end=end)
        if len(data) > end - start:
            raise ValueError(
                f"the server ignores byte ranges: it sent {len(data)} bytes, but {end - start} were requested"
            )
        if len(data) < end - start:
            raise OSError(f"the server sent {len(data)} of {end - start} bytes")
        return data

    return with_retries(url, request) if end > start else b""


class _Waiting(NamedTuple):
    """A requested sample: its request, which returns samples by their first byte, and its own end."""

    request: Future[dict[int, bytes]]
    end: int


class RangeReader:
    """Reads samples of remote files for one process; announced samples are requested in advance.

    It has threads, so it must be made after a fork.
    """

    def __init__(self) -> None:
        # A sample has several entries if it is announced again before it is read.
        self._waiting = defaultdict[tuple[str, int], deque[_Waiting]](deque)
        self._bytes = 0
        self._pool = ThreadPoolExecutor(_IN_FLIGHT, thread_name_prefix="ranges")
        self._hedges = ThreadPoolExecutor(_IN_FLIGHT, thread_name_prefix="hedges")

    def announce(self, url: str, offsets: Sequence[int]) -> None:
        """Request neighbouring samples together. Above the memory limit, nothing happens, and `read` requests each sample.

        Args:
            url: the file.
            offsets: first byte of each sample, and the end of the last one.
        """
        size = offsets[-1] - offsets[0]
        if self._bytes + size > _AHEAD_BYTES:
            return
        request = self._pool.submit(_read_samples, url, offsets)
        self._bytes += size
        for start, end in pairwise(offsets):
            self._waiting[url, start].append(_Waiting(request, end))

    def is_announced(self, url: str, start: int) -> bool:
        """Return whether the sample at a first byte was announced and not read yet."""
        return (url, start) in self._waiting

    def read(self, url: str, start: int, end: int) -> bytes:
        """Return one sample. Raises like `read_range`."""
        if (url, start) not in self._waiting:
            return read_range(url, start, end)
        requests = self._waiting[url, start]
        waiting = requests.popleft()
        if not requests:
            del self._waiting[url, start]
        self._bytes -= waiting.end - start
        done, _ = wait([waiting.request], _HEDGE_SECONDS)
        if not done:
            # Another connection may be faster. It asks for this sample only; the first request continues for the others.
            hedge = self._hedges.submit(read_range, url, start, end)
            either: list[Future[Any]] = [waiting.request, hedge]
            wait(either, return_when=FIRST_COMPLETED)
            if not waiting.request.done() or (waiting.request.exception() and not hedge.exception()):
                return hedge.result()
        return waiting.request.result().pop(start)

    def close(self) -> None:
        """Discard announced samples. Running requests finish in the background."""
        self._waiting.clear()
        for pool in (self._pool, self._hedges):
            pool.shutdown(wait=False, cancel_futures=True)


def _read_samples(url: str, offsets: Sequence[int]) -> dict[int, bytes]:
    data, begin = read_range(url, offsets[0], offsets[-1]), offsets[0]
    # Copies, so that memory is freed sample by sample.
    return {start: data[start - begin : end - begin] for start, end in pairwise(offsets)}


class RemoteHeaders(io.RawIOBase):
    """A remote tar as a file to scan for headers: it requests small blocks, so that images are not fetched.

    Raises:
        DataError: a read failed after all tries.
    """

    def __init__(self, url: str, size: int):
        self._url, self._size, self._at = url, size, 0
        self._block, self._block_at = b"", 0

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
        size = left if size < 0 else min(size, left)
        first = self._at - self._block_at
        if not 0 <= first <= len(self._block) - size:
            end = min(self._size, self._at + max(size, _HEADER_BYTES))
            self._block, self._block_at, first = read_range(self._url, self._at, end), self._at, 0
        self._at += size
        return self._block[first : first + size]
