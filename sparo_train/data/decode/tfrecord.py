"""TFRecord files and `tf.train.Example` without TensorFlow: framing, checksums, and the five messages of an example."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import numpy as np

from sparo_train.core.errors import ConfigError, DataError

Value = np.ndarray | list[bytes]
_CHUNK = 1 << 20
_MAX_RECORD_BYTES = 1 << 28  # limit in bytes for a record in memory; a larger length is damage, or a decompression bomb


def records(path: Path) -> Iterator[bytes]:
    """Yield the records of a file (plain, gzipped or deflated) after verifying their checksums.

    Raises:
        DataError: no such file, or it is truncated or damaged (the record is named).
        ConfigError: google-crc32c is not installed.
    """
    intact = _checker(path)
    if not path.is_file():
        raise DataError(f"{path}: no such file. Fetch the set again.")
    with path.open("rb") as file:
        head = file.read(12)
        file.seek(0)
        plain = not head or (len(head) == 12 and intact(head[:8], head[8:]))
        stream = _PlainReader(file) if plain else _DecompressingReader(file, path)
        number = 0
        # Eight bytes of length and four of its checksum; after the content, four of its checksum.
        while first := stream.read(12):
            where = f"{path}: record {number}"
            if len(first) < 12 or not intact(first[:8], first[8:]):
                raise DataError(
                    f"{where}: {'is truncated' if len(first) < 12 else 'is not a TFRecord'}. Fetch the file again."
                )
            (length,) = struct.unpack("<Q", first[:8])
            if length >= _MAX_RECORD_BYTES:
                raise DataError(
                    f"{where}: has {length / 1e6:.0f} MB, more than the limit of {_MAX_RECORD_BYTES / 1e6:.0f} MB. Is the file damaged?"
                )
            body = stream.read(length + 4)
            if len(body) < length + 4:
                raise DataError(f"{where}: is truncated after {len(body)} of {length + 4} bytes. Fetch the file again.")
            if not intact(body[:-4], body[-4:]):
                raise DataError(f"{where}: is damaged, because its checksum differs. Fetch the file again.")
            yield body[:-4]
            number += 1


def _checker(path: Path) -> Callable[[bytes, bytes], bool]:
    """Return a function that compares bytes with their masked CRC-32C. Raises `ConfigError` without google-crc32c."""
    try:
        import google_crc32c
    except ImportError:
        raise ConfigError(
            f"{path}: checksums need google-crc32c. Run `pip install -e '.[convert]'` in sparo's checkout."
        ) from None

    def intact(data: bytes, checksum: bytes) -> bool:
        crc = google_crc32c.value(data)
        return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF == struct.unpack("<I", checksum)[0]

    return intact


def record_offsets(path: Path) -> list[int]:
    """Return the positions of the records of an uncompressed file, from the lengths before them. Raises `DataError`."""
    intact, offsets = _checker(path), list[int]()
    try:
        with path.open("rb") as file:
            size, at = path.stat().st_size, 0
            while at < size:
                file.seek(at)
                first = file.read(12)
                if len(first) < 12 or not intact(first[:8], first[8:]):
                    raise DataError(
                        f"{path}: record {len(offsets)}: is truncated, or not a TFRecord. Fetch the file again."
                    )
                offsets.append(at)
                at += 16 + struct.unpack("<Q", first[:8])[0]
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error}). Fetch the file again.") from None
    if at != size:
        raise DataError(f"{path}: record {len(offsets) - 1}: is truncated. Fetch the file again.")
    return offsets


def record_at(path: Path, offset: int) -> bytes:
    """Return the record at a position of `record_offsets`. Raises `DataError` if it is damaged."""
    intact = _checker(path)
    try:
        with path.open("rb") as file:
            file.seek(offset)
            (length,) = struct.unpack("<Q", file.read(12)[:8])
            body = file.read(length + 4)
    except (OSError, struct.error, OverflowError, MemoryError) as error:
        raise DataError(
            f"{path}: the record at byte {offset} cannot be read ({error}). Fetch the file again."
        ) from None
    if len(body) < length + 4 or not intact(body[:-4], body[-4:]):
        raise DataError(f"{path}: the record at byte {offset} is damaged. Fetch the file again.")
    return body[:-4]


class _PlainReader:
    def __init__(self, file: IO[bytes]):
        self._file = file

    def read(self, count: int) -> bytes:
        return self._file.read(count)


class _DecompressingReader:
    def __init__(self, file: IO[bytes], path: Path):
        self._file, self._path, self._rest, self._at = file, path, b"", 0
        self._inflate = zlib.decompressobj(wbits=47)  # headers of both gzip and zlib

    def read(self, count: int) -> bytes:
        parts = [self._rest[self._at : self._at + count]]
        num_read = len(parts[0])
        self._at += num_read
        while num_read < count and (chunk := self._decompress_more()):
            parts.append(chunk[: count - num_read])
            self._rest, self._at = chunk, len(parts[-1])
            num_read += len(parts[-1])
        return b"".join(parts)

    def _decompress_more(self) -> bytes:
        while True:
            state = self._inflate
            packed = state.unconsumed_tail or state.unused_data or self._file.read(_CHUNK)
            if not packed:
                if not state.eof:
                    raise DataError(f"{self._path}: is truncated. Fetch the file again.")
                return b""
            if state.eof:  # concatenated compressed files
                self._inflate = zlib.decompressobj(wbits=47)
            try:
                chunk = self._inflate.decompress(packed, _MAX_RECORD_BYTES >> 5)
            except zlib.error as error:
                raise DataError(f"{self._path}: neither a TFRecord nor a compressed one ({error})") from None
            if chunk:
                return chunk


def parse_example(data: bytes, where: str) -> dict[str, Value]:
    """Return the features of a `tf.train.Example`: numbers as arrays, and strings as a list, or as uint8 if each is one byte.

    Raises:
        DataError: the bytes are not an Example; `where` names them.
    """
    try:
        feature_map: dict[str, Value] = {}
        for number, features in _fields(memoryview(data)):
            for inner, entry in _fields(features) if number == 1 else ():
                if inner == 1:
                    parts = dict(_fields(entry))
                    feature_map[str(parts[1], "utf-8")] = _feature(parts.get(2, memoryview(b"")))
        return feature_map
    except (IndexError, KeyError, ValueError, TypeError, struct.error):
        raise DataError(f"{where}: is not a tf.train.Example. Is the file from another data set?") from None


def _feature(data: memoryview) -> Value:
    for number, listed in _fields(data):
        if number == 1:
            return _strings(listed)
        if number == 2:
            packed = b"".join(bytes(part) for _, part in _fields(listed))
            return np.frombuffer(packed, "<f4")
        if number == 3:
            return np.concatenate(
                [_varints(part) for _, part in _fields(listed, unpacked=True)] or [np.empty(0, np.int64)]
            )
    return []


def _strings(listed: memoryview) -> Value:
    # The official files store every pixel as a string: tag, length 1, pixel. Parsing each would take minutes.
    flat = np.frombuffer(listed, np.uint8)
    if len(flat) and len(flat) % 3 == 0 and (flat[0::3] == 0x0A).all() and (flat[1::3] == 1).all():
        return flat[2::3]
    return [bytes(part) for _, part in _fields(listed)]


def _fields(data: memoryview, unpacked: bool = False) -> Iterator[tuple[int, memoryview]]:
    """Yield number and payload of every field of a message; `unpacked`: a single number is returned as its own bytes."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        kind = tag & 7
        if kind == 2:
            length, at = _varint(data, at)
            end = at + length
        elif kind == 0 and unpacked:
            _, end = _varint(data, at)
        elif kind in (1, 5):
            end = at + (8 if kind == 1 else 4)
        else:
            raise ValueError(f"wire type {kind}")
        if end > len(data):
            raise ValueError("a field is truncated")
        yield tag >> 3, data[at:end]
        at = end


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("a number is too long")


def _varints(packed: memoryview) -> np.ndarray:
    """Decode packed varints to (n,) int64, all at once."""
    flat = np.frombuffer(packed, np.uint8)
    if not len(flat):
        return np.empty(0, np.int64)
    last = np.flatnonzero(flat < 0x80)
    if not len(last) or last[-1] != len(flat) - 1:
        raise ValueError("a number is truncated")
    first = np.concatenate([[0], last[:-1] + 1])
    shift = (np.arange(len(flat)) - np.repeat(first, last - first + 1)) * 7
    if shift.max() > 63:
        raise ValueError("a number is too long")
    return np.add.reduceat((flat & 0x7F).astype(np.uint64) << shift.astype(np.uint64), first).astype(np.int64)
