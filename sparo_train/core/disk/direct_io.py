"""A file written past the page cache and hashed on the way: nobody reads a checkpoint soon, and the steps beside need the processors.

Giving 94 MB to the page cache took 0.26 s of a core that also trains (a virtual machine, whose every new page is a fault of its
host's), reading them back for the hash 0.06; written so, both are gone.
"""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
from pathlib import Path
from types import TracebackType

import numpy as np

_CHUNK = 8 << 20
_ALIGNED = 4096  # what any disk's sectors divide
_UNSUPPORTED = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)  # how disks and servers say that they have no such way
_DIRECT: int = getattr(os, "O_DIRECT", 0)  # not on every system


class DirectFile:
    """Context manager: a new file, complete and on disk behind it.

    Attributes:
        size: bytes written so far.  sha256: their hash.

    Raises:
        OSError: the disk does not take it.
    """

    def __init__(self, path: Path):
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        try:
            self._file = os.open(path, flags | _DIRECT, 0o666)
        except OSError as error:  # tmpfs, and some servers
            if error.errno not in _UNSUPPORTED:
                raise
            self._file = os.open(path, flags, 0o666)
        self._buffer, self._pending = mmap.mmap(-1, _CHUNK), 0  # anonymous memory begins at a page
        self._bytes = np.frombuffer(self._buffer, np.uint8)
        self.size, self.sha256 = 0, hashlib.sha256()

    def write(self, data: bytes | memoryview) -> None:
        """Append; of a memoryview its bytes, in one dimension."""
        self.sha256.update(data)
        self.size += len(data)
        view = np.frombuffer(data, np.uint8)  # whose copies let other threads go on
        while len(view):
            take = min(len(view), _CHUNK - self._pending)
            self._bytes[self._pending : self._pending + take] = view[:take]
            self._pending, view = self._pending + take, view[take:]
            if self._pending == _CHUNK:
                self._flush(_CHUNK)

    def _flush(self, count: int) -> None:
        """Write what is held, `count` bytes of it."""
        with memoryview(self._buffer) as view:
            done = 0
            while done < count:
                try:
                    done += os.write(self._file, view[done:count])
                except OSError as error:
                    if error.errno not in _UNSUPPORTED or not _DIRECT:
                        raise
                    self._disable_direct_io()  # opened so, and not written so: a disk of larger sectors, a server
        self._pending = 0

    def _disable_direct_io(self) -> None:
        import fcntl  # where there is O_DIRECT, there is this

        flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
        if not flags & _DIRECT:
            raise OSError(errno.EINVAL, "the file takes no data")
        fcntl.fcntl(self._file, fcntl.F_SETFL, flags & ~_DIRECT)

    def __enter__(self) -> DirectFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                if self._pending:
                    self._flush(-(-self._pending // _ALIGNED) * _ALIGNED)  # whole sectors; what is too much is cut off
                os.ftruncate(self._file, self.size)
                os.fsync(self._file)
        finally:
            os.close(self._file)
