"""TorchScript archives (OpenAI's CLIP `.pt` files): their tensors, read from the zip file without running the code they hold."""

from __future__ import annotations

import pickle
import shlex
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...core.errors import CheckpointError

_MAX_MODULES = 100_000  # of a model; more are modules nested in a circle
_DTYPES = {
    "HalfStorage": torch.float16,
    "FloatStorage": torch.float32,
    "DoubleStorage": torch.float64,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}
_LISTS = ("build_intlist", "build_doublelist", "build_boollist", "build_tensorlist")


def archive_root(path: Path) -> str | None:
    """Return the folder inside a TorchScript archive that holds its files; None for any other file."""
    if not zipfile.is_zipfile(path):
        return None
    with zipfile.ZipFile(path) as archive:
        names = set(archive.namelist())
    roots = [name.partition("/")[0] for name in names if name.count("/") == 1 and name.endswith("/data.pkl")]
    return next((root for root in roots if f"{root}/constants.pkl" in names), None)


def read_torchscript(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a TorchScript archive under their dotted names, as `torch.jit.load(path).state_dict()` does.

    Raises:
        CheckpointError: the archive holds anything but modules, tensors and plain values, or is damaged.
    """
    root = archive_root(path)
    try:
        with zipfile.ZipFile(path) as archive:
            order = f"{root}/byteorder"
            if order in archive.namelist() and archive.read(order) != b"little":
                raise pickle.UnpicklingError("big-endian storage")
            module = _Unpickler(archive, str(root)).load()
        return _tensors(module)
    except (
        pickle.UnpicklingError,
        zipfile.BadZipFile,
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        EOFError,
    ) as error:
        quoted = shlex.quote(str(path))
        raise CheckpointError(
            f"{path}: a TorchScript archive that cannot be read without running it, got {error}. Convert it on a machine where you "
            f"trust the file: python -c \"import sys, torch; torch.save(torch.jit.load(sys.argv[1], map_location='cpu').state_dict(), "
            f'sys.argv[2])" {quoted} OUT.pt'
        ) from None


class _Module:
    """Attributes of a scripted module or object."""

    def __setstate__(self, state: Any) -> None:
        self.attributes = state


class _Unpickler(pickle.Unpickler):
    """Builds modules as `_Module`, tensors from the archive's storages, and nothing else."""

    def __init__(self, archive: zipfile.ZipFile, root: str):
        super().__init__(archive.open(f"{root}/data.pkl"))
        self.archive, self.root = archive, root
        self.storages: dict[str, Tensor] = {}

    def find_class(self, module: str, name: str) -> Any:
        if module == "__torch__" or module.startswith("__torch__."):
            return _Module
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _tensor
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        if module == "torch.jit._pickle" and name in _LISTS:
            return list
        if (module, name) == ("torch.jit._pickle", "restore_type_tag"):
            return lambda value, _tag: value
        raise pickle.UnpicklingError(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> Tensor:
        kind, dtype, key, _device, _count = pid
        if kind != "storage" or not isinstance(dtype, torch.dtype):
            raise pickle.UnpicklingError(f"persistent object {kind!r}")
        if key not in self.storages:
            data = bytearray(self.archive.read(f"{self.root}/data/{key}"))
            self.storages[key] = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
        return self.storages[key]


def _tensor(storage: Tensor, offset: int, size: Sequence[int], stride: Sequence[int], *_rest: Any) -> Tensor:
    """Return a view of a storage; unlike torch's own function, refuse one that reaches beyond it."""
    last = offset + 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True)) if all(size) else 0
    if min([offset, *size, *stride]) < 0 or last > len(storage):
        raise ValueError(f"a tensor of shape {tuple(size)} outside its storage of {len(storage)} numbers")
    return storage.as_strided(tuple(size), tuple(stride), offset)


def _tensors(module: Any) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    stack = [("", module)]
    for _ in range(_MAX_MODULES):
        if not stack:
            return tensors
        prefix, node = stack.pop()
        for name, value in dict(node.attributes).items():
            if isinstance(value, Tensor):
                tensors[prefix + name] = value
            elif isinstance(value, _Module):
                stack.append((f"{prefix}{name}.", value))
    raise ValueError("modules nested in a circle")
