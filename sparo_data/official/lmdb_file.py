"""LMDB files of the Genera1Z family (VQ-VFM-OCL, object_centric_bench): pickled dicts, unpickled as arrays of numbers only."""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from sparo_train.core.errors import ConfigError, DataError

from .clips import sanitize_key
from .published import PublishedScene, decode_array, to_label_map

_MODULES = ("numpy", "numpy.core.multiarray", "numpy._core.multiarray", "numpy.core.numeric", "numpy._core.numeric")


class _Dtype:
    """A dtype as named in a pickle; nothing of numpy is called with values of the file."""

    def __init__(self, kind: str, *_: Any):
        if not isinstance(kind, str) or not re.fullmatch("[biuf][1248]", kind):
            raise DataError(f"expected an array of numbers, got {kind!r}")
        self.kind, self.order = kind, "<"

    def __setstate__(self, state: Any) -> None:
        self.order = state[1] if state[1] in ("<", ">") else "<"

    def array(self, data: Any, shape: Any, fortran: bool) -> np.ndarray:
        return np.frombuffer(bytes(data), self.order + self.kind).reshape(shape, order="F" if fortran else "C")


class _Array:
    """An array that a pickle builds in two steps."""

    value = np.empty(0)

    def __init__(self, *_: Any):
        """Ignore arguments, because the array's content is in its state."""

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, fortran, data = state
        if not isinstance(dtype, _Dtype) or not isinstance(data, bytes):
            raise DataError("expected the pickled state of an array of numbers, got something else")
        self.value = dtype.array(data, shape, bool(fortran))


def _from_buffer(data: Any, dtype: Any, shape: Any, order: str) -> _Array:
    array = _Array()
    array.__setstate__((1, shape, dtype, order == "F", bytes(data)))
    return array


_ALLOWED: dict[str, Any] = {"_reconstruct": _Array, "ndarray": None, "dtype": _Dtype, "_frombuffer": _from_buffer}


class _ArrayUnpickler(pickle.Unpickler):
    """Unpickler for arrays of numbers and plain Python values; a pickle that names anything else is refused before it runs."""

    def find_class(self, module: str, name: str) -> Any:
        if module in _MODULES and name in _ALLOWED:
            return _ALLOWED[name]
        raise DataError(
            f"is refused for safety, because its pickle imports {module}.{name}, which arrays and plain values do not need"
        )


def lmdb_scenes(path: Path) -> Iterator[PublishedScene]:
    """Yield the samples of a file, in the order of its `__keys__`: `image` and `segment`, encoded images.

    Raises:
        DataError: no such file, or not in this format.
        ConfigError: lmdb is not installed.
    """
    try:
        import lmdb
    except ImportError:
        raise ConfigError(f"{path}: needs lmdb. pip install -e '.[convert]' in sparo's checkout.") from None
    if not path.exists():
        raise DataError(f"{path}: no such file")
    try:
        env = lmdb.open(str(path), subdir=path.is_dir(), readonly=True, readahead=False, lock=False)
    except lmdb.Error as error:
        raise DataError(f"{path}: is not an LMDB file ({error})") from None
    # The file is memory-mapped, so a missing page would kill the process without a message.
    file, expected_bytes = (
        path / "data.mdb" if path.is_dir() else path,
        (env.info()["last_pgno"] + 1) * env.stat()["psize"],
    )
    if file.stat().st_size < expected_bytes:
        env.close()
        raise DataError(f"{file}: expected {expected_bytes} bytes, got {file.stat().st_size}. Fetch it again.")
    try:
        yield from _scenes(env, path)
    except lmdb.Error as error:
        raise DataError(f"{path}: is damaged ({error}). Fetch it again.") from None


def _scenes(env: Any, path: Path) -> Iterator[PublishedScene]:
    with env, env.begin() as txn:
        keys = _unpickle(txn.get(b"__keys__"), f"{path}: __keys__")
        if not isinstance(keys, list) or not all(isinstance(key, bytes) and key for key in keys):
            raise DataError(f"{path}: __keys__ is not a list of keys")
        for key in keys:
            name = key.decode(errors="replace")
            where = f"{path}: {name}"
            record = _unpickle(txn.get(key), where)
            if not isinstance(record, dict) or "image" not in record:
                raise DataError(
                    f"{where}: has no key `image`. LMDB files with videos are not supported. Use a file with images."
                )
            image = decode_array(_data(record["image"], where), where)
            label = None
            if "segment" in record:
                segment = decode_array(_data(record["segment"], where), where, labels=True)
                label = to_label_map(
                    segment[..., 0] if segment.ndim == 3 else segment, where
                )  # .webp has three equal channels
            yield PublishedScene(sanitize_key(name), image, label, {})


def _unpickle(data: bytes | None, where: str) -> Any:
    if data is None:
        raise DataError(f"{where}: missing")
    try:
        return _ArrayUnpickler(io.BytesIO(data)).load()
    except DataError as error:
        raise DataError(f"{where}: {error}") from None
    except Exception as error:  # an invalid pickle may raise anything
        raise DataError(f"{where}: cannot be read as a plain pickle ({str(error)[:200]})") from None


def _data(value: Any, where: str) -> bytes:
    if isinstance(value, _Array) and value.value.dtype == np.uint8:
        return value.value.tobytes()
    if isinstance(value, bytes):
        return value
    raise DataError(f"{where}: expected an encoded image, got {type(value).__name__}")
