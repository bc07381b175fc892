"""MosaicML's MDS and Lightning's LitData: `index.json` and files of packed samples, each with a table of offsets at its beginning.

Both have the same outline, little-endian: the number of samples n, n+1 offsets (all uint32), and the samples. A sample
begins with the sizes of its fields (uint32; MDS omits those of fixed sizes), followed by the fields.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np
from fsspec.implementations.local import LocalFileSystem
from PIL import Image

from ...core.errors import BadSampleError, DataError
from ..servers.ranges import read_range
from ..servers.remote import file_info, open_filesystem, version_stamp, with_retries
from ..sources.shards import RangeStorage, process_reader
from .columns import Columns, RowsConfig, choose_columns, encode_picture, row_members

_MAX_INDEX_BYTES = 1 << 28
_MAX_SAMPLES = 1 << 26  # of a file, whose table of offsets is read as a whole
Decode = Callable[[bytes], Any]  # bytes of a field -> value; raises ValueError, IndexError or struct.error


class PackedField(NamedTuple):
    """A field of a sample: column, encoding, and its size in bytes if that is fixed."""

    column: str
    encoding: str
    size: int | None = None


class PackedFile(RangeStorage):
    """One file of packed samples; its table of offsets is read with the first sample.

    Attributes:
        decoders: decoder of each encoding; fields of other encodings are not read.
    """

    decoders: ClassVar[Mapping[str, Decode]]
    stamp = ""  # version of `index.json` on a server

    def __init__(self, url: str, length: int, size: int, fields: Sequence[PackedField], columns: Columns, digest: str):
        self.url, self._length, self._size, self._fields = url, length, size, fields
        self._columns, self._digest = columns, digest
        self._offsets: np.ndarray | None = None
        self.is_sampled = False
        self._wanted = {columns.image, *columns.others.values()}

    def __len__(self) -> int:
        return self._length

    def digest(self) -> str:
        return self._digest

    def row_sample(self) -> str:
        if not self.is_sampled or not len(self):
            return ""
        digest = hashlib.sha256()
        for number in (round(i * (len(self) - 1) / 3) for i in range(4)):
            with suppress(DataError):  # training reports a damaged file when it reads the sample
                digest.update(process_reader().read_bytes(self.url, number, self.offsets, self.cached()))
        return digest.hexdigest()[:16]

    def version(self) -> tuple[bytes, int]:
        return f"{self._digest}{self.stamp}".encode(), self._size

    @property
    def offsets(self) -> np.ndarray:
        """Return the first byte of each sample, and the end of the last one. Raises `DataError` if the table is not valid."""
        if self._offsets is None:
            table = np.frombuffer(read_range(self.url, 0, 4 * (self._length + 2)), dtype="<u4").astype(np.int64)
            count, offsets = table[0], table[1:]
            # Rising, and inside the file: anything else would read other samples or fill memory.
            if (
                count != self._length
                or offsets[0] < len(table) * 4
                or offsets[-1] > self._size
                or (np.diff(offsets) < 0).any()
            ):
                raise DataError(
                    f"{self.url}: its table of offsets does not fit the {self._length} samples in index.json. Copy the data set again."
                )
            self._offsets = offsets
        return self._offsets

    def read(self, number: int) -> tuple[str, dict[str, bytes]]:
        key = f"{Path(self.url).stem}-{number:06d}"
        row = self.row(number)
        try:
            return key, row_members(self._columns, row if isinstance(row, Mapping) else self.unpack_sample(row))
        except BadSampleError as bad:
            bad.key = key
            raise
        except (ValueError, IndexError, struct.error, RecursionError):
            raise BadSampleError("damaged sample", key) from None

    def row(self, number: int) -> bytes | Mapping[str, Any]:
        """Return a sample's bytes, or its fields. Raises `DataError` if the file cannot be read."""
        return process_reader().read_bytes(self.url, number, self.offsets, self.cached())

    def unpack_sample(self, data: bytes) -> dict[str, Any]:
        """Return the fields of a sample that are used. Raises ValueError, IndexError or struct.error if it is damaged."""
        counted = [f for f in self._fields if f.size is None]
        sizes = iter(struct.unpack_from(f"<{len(counted)}I", data))
        at, row = 4 * len(counted), {}
        for name, encoding, fixed in self._fields:
            size = next(sizes) if fixed is None else fixed
            if at + size > len(data):
                raise ValueError("a field extends beyond the end of its sample")
            if name in self._wanted:
                row[name] = self.decoders[encoding](data[at : at + size])
            at += size
        return row


F = TypeVar("F", bound=PackedFile)


def decode_picture(data: bytes) -> bytes:
    """Encode a picture that both formats store as width, height, length of the mode's name, mode and pixels."""
    width, height, length = struct.unpack_from("<3I", data)
    mode = data[12 : 12 + length].decode("ascii")
    if mode == "P":
        raise BadSampleError("the picture needs a palette, which this format does not store")
    if mode not in ("1", "L", "LA", "RGB", "RGBA", "CMYK", "YCbCr", "I;16", "I", "F"):
        raise ValueError(f"a picture of mode {mode}, which is not supported")
    return encode_picture(Image.frombytes(mode, (width, height), data[12 + length :]))


def number_decoder(kind: str) -> Decode:
    """Return the decoder of a number of a numpy type."""
    return lambda data: np.frombuffer(data, kind)[0].item()


def decode_text(data: bytes) -> str:
    """Decode UTF-8; raises ValueError."""
    return data.decode("utf-8")


def read_index(folder: str, key: str, writer: str) -> dict[str, Any]:
    """Read `index.json`. Raises `DataError` that names `key`, and `writer`, the function that writes such a folder."""
    url = f"{folder.rstrip('/')}/index.json"
    filesystem, path = open_filesystem(url)
    if isinstance(filesystem, LocalFileSystem) and not Path(path).is_file():
        hint = ""
        with suppress(OSError):
            below = sorted(p.parent.name for p in Path(folder).glob("*/index.json"))
            hint = f" The folder has data sets in {', '.join(below[:5])}." if below else ""
        raise DataError(f"{key}: {url} does not exist.{hint} Name the folder that {writer} wrote.")
    size = with_retries(url, lambda: filesystem.info(path)["size"]) or 0
    if size > _MAX_INDEX_BYTES:
        raise DataError(f"{url}: expected at most {_MAX_INDEX_BYTES} bytes, got {size}. Is it an index?")
    try:
        index = json.loads(read_range(url, 0, size))
    except (ValueError, RecursionError):
        raise DataError(f"{url}: is not JSON. Copy the data set again.") from None
    if not isinstance(index, dict):
        raise DataError(
            f"{url}: expected a JSON object, got a {type(index).__name__}. Name the folder that {writer} wrote."
        )
    return index


def set_stamps(files: Sequence[PackedFile], folder: str) -> None:
    """Record the version of a remote `index.json`: if the data set is written again, cached samples are of another version."""
    if "://" in folder:
        stamp = version_stamp(file_info(f"{folder.rstrip('/')}/index.json"))
        for file in files:
            file.stamp = stamp


def _file_facts(url: str, count: Any, size: Any) -> tuple[int, int]:
    if not (isinstance(count, int) and 0 <= count <= _MAX_SAMPLES and isinstance(size, int) and size >= 0):
        raise DataError(
            f"index.json of {url}: expected the number of samples and the number of bytes, got {count!r} and {size!r}. Copy the data set again."
        )
    return count, size


def refuse_compression(url: str, compression: Any, writer: str) -> None:
    """Raise `DataError` if there is a compression."""
    if compression:
        raise DataError(
            f"{url}: is compressed with {compression}, so samples cannot be read by position. Write the data set again with "
            f"{writer}(…, compression=None); compression hardly makes image files smaller."
        )


def index_entries(index: Mapping[str, Any], name: str, where: str) -> list[dict[str, Any]]:
    """Return the objects in a list of the index, one per file. Raises `DataError`."""
    entries = index.get(name)
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise DataError(
            f"{where}/index.json: expected a list {name}, got {type(entries).__name__}. Is it an index of another format?"
        )
    return entries


def file_below(folder: str, name: Any) -> str:
    """Return the address of a file of a data set. Its name must not lead out of the folder."""
    if not isinstance(name, str) or not name or name.startswith("/") or ".." in Path(name).parts or "://" in name:
        raise DataError(f"{folder}/index.json: expected the name of a file in this folder, got {name!r}.")
    return f"{folder.rstrip('/')}/{name}"


def open_packed(
    kind: type[F],
    url: str,
    count: Any,
    size: Any,
    fields: Sequence[PackedField],
    config: RowsConfig,
    entry: Mapping[str, Any],
) -> F:
    """Return one file of a data set.

    Args:
        kind: class of the file.
        url: its address.
        count, size: its number of samples and of bytes, as found in the index.
        fields: the fields of its samples.
        config: the source.
        entry: the file's object in the index, for the fingerprint.

    Raises:
        DataError: numbers that cannot be right, or a missing column.
    """
    length, size = _file_facts(url, count, size)
    if 4 * (length + 2) > size:
        raise DataError(f"index.json of {url}: {length} samples do not fit into {size} bytes. Copy the data set again.")
    columns = choose_columns([f.column for f in fields if f.encoding in kind.decoders], config, url)
    digest = hashlib.sha256(json.dumps(entry, sort_keys=True).encode()).hexdigest()[:16]
    return kind(url, length, size, fields, columns, digest)
