"""Storages that are decoded as a whole, as an Arrow table: row groups of Parquet, and some files of LitData."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections import OrderedDict, defaultdict, deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from ...core.errors import BadSampleError
from ..sources.base import Storage, on_close

_GROUPS = 2  # decoded groups that a process keeps
_AHEAD_BYTES = 1 << 30  # limit of a process on announced rows that were not read yet


class Group(Storage):
    """A storage that is decoded as a whole.

    Attributes:
        row_bytes: mean size of a row.
    """

    row_bytes: int
    is_group = True

    @abstractmethod
    def table(self) -> Any:
        """Return all rows as an Arrow table. Raises `DataError` if they cannot be read."""

    def read_ahead(self, first: int, last: int) -> None:
        process_groups().announce(self, first, last)


class GroupReader:
    """Rows of one process. A thread decodes groups, and takes announced rows out of them.

    Of a group, only announced rows are kept: a window of the data plan has rows of many groups.
    """

    def __init__(self) -> None:
        self._tables: OrderedDict[Group, Any] = OrderedDict()  # used by the thread only
        self._waiting = defaultdict[tuple[Group, int], deque[Future[dict[int, dict[str, Any] | BadSampleError]]]](deque)
        self._bytes = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="groups")

    def announce(self, group: Group, first: int, end: int) -> None:
        """Request rows. Above the memory limit, nothing happens, and `row` requests each row."""
        size = group.row_bytes * (end - first)
        if self._bytes + size > _AHEAD_BYTES:
            return
        request = self._thread.submit(self._take, group, first, end)
        self._bytes += size
        for number in range(first, end):
            self._waiting[group, number].append(request)

    def row(self, group: Group, number: int) -> dict[str, Any]:
        """Return a row.

        Raises:
            BadSampleError: it contains text that is not UTF-8.
            DataError: its group cannot be read.
        """
        if (group, number) in self._waiting:
            requests = self._waiting[group, number]
            request = requests.popleft()
            if not requests:
                del self._waiting[group, number]
            self._bytes -= group.row_bytes
        else:
            request = self._thread.submit(self._take, group, number, number + 1)
        row = request.result().pop(number)
        if isinstance(row, BadSampleError):
            raise row
        return row

    def _take(self, group: Group, first: int, end: int) -> dict[int, dict[str, Any] | BadSampleError]:
        if group not in self._tables:
            self._tables[group] = group.table()
            while len(self._tables) > _GROUPS:
                self._tables.popitem(last=False)
        self._tables.move_to_end(group)
        part = self._tables[group].slice(first, end - first)
        try:
            return dict(enumerate(part.to_pylist(), first))
        except ValueError:  # text that is not UTF-8, in one row or more
            return {number: _row_or_error(part.slice(number - first, 1)) for number in range(first, end)}

    def close(self) -> None:
        """Discard announced rows. A read that is in progress finishes in the background."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def _row_or_error(row: Any) -> dict[str, Any] | BadSampleError:
    try:
        return row.to_pylist()[0]
    except ValueError:
        return BadSampleError("bad text")


_readers: dict[int, GroupReader] = {}  # by process: a forked loader worker has its own


def process_groups() -> GroupReader:
    """Return this process's own reader, which is created at its first read."""
    return _readers.setdefault(os.getpid(), GroupReader())


@on_close
def _close() -> None:
    if reader := _readers.pop(os.getpid(), None):
        reader.close()
