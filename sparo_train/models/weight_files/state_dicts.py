"""Tensors of weight files: state dicts, nested checkpoints and TorchScript archives, all read without running code."""

from __future__ import annotations

import argparse
import pickle
import re
import shlex
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from ...core.errors import CheckpointError
from ...core.files import read_json

_MAX_MODULES = 100_000  # levels of a model; more indicate modules nested in a cycle
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
    """Return the tensors of a TorchScript archive under their dotted names, like `torch.jit.load(path).state_dict()`.

    Raises:
        CheckpointError: the archive contains anything but modules, tensors and plain values, or is damaged.
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
    """Unpickler that builds modules as `_Module`, tensors from the archive's storages, and nothing else."""

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
            raise pickle.UnpicklingError(f"an object of type {kind!r} where only tensors are expected")
        if key not in self.storages:
            data = bytearray(self.archive.read(f"{self.root}/data/{key}"))
            self.storages[key] = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
        return self.storages[key]


def _tensor(storage: Tensor, offset: int, size: Sequence[int], stride: Sequence[int], *_rest: Any) -> Tensor:
    """Return a view of a storage; unlike torch's own function, refuse one that reaches beyond it."""
    last = offset + 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True)) if all(size) else 0
    if min([offset, *size, *stride]) < 0 or last > len(storage):
        raise ValueError(f"a tensor of shape {tuple(size)} extends outside its storage of {len(storage)} numbers")
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
    raise ValueError("modules that contain each other")


# Keys under which trainers keep a model's state dict in a checkpoint, averages last.
_STATES = (
    "state_dict", "model", "model_state_dict", "module", "state_dict_ema", "model_ema", "ema_state_dict", "ema_model", "ema",
)  # fmt: skip
# Inserted by torch.compile, FSDP, activation checkpointing and DeepSpeed anywhere in a name.
_WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module"}
_LEADING = ("module.", "model.")  # prefixes added by DDP and trainers; inside a name, they may be names of modules


def split_state(text: str) -> tuple[str, str | None]:
    """Split `FILE?state=KEY` into the file and the key; a path that exists as written has no key."""
    file, mark, key = text.partition("?state=")
    return (text, None) if not mark or Path(text).exists() else (file, key)


def read_raw(path: str | Path) -> Any:
    """Read a .safetensors file, a torch checkpoint (`weights_only`) or a TorchScript archive, without running code.

    argparse.Namespace (DINO's `args`) and NumPy numbers are read as plain data.

    Raises:
        CheckpointError: missing, damaged, or containing anything but tensors and plain values.
    """
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file")
    try:
        if is_safetensors(path):
            return load_file(path)
        if archive_root(path) is not None:
            return read_torchscript(path)
        if is_exported_program(path):
            raise CheckpointError(
                f"{path}: is a torch.export program, which sparo cannot read. Use the run that this program was "
                "exported from, or load the program with torch.export.load."
            )
        # A stream, because torch chooses the format of a path by its suffix.
        with path.open("rb") as stream, torch.serialization.safe_globals(PLAIN):
            return torch.load(stream, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL (\S+)", str(error))
        if named is None and (path.parent / "checkpoints").is_dir():
            raise CheckpointError(
                f"{path}: is not a file of weights. Name the folder of the run: {path.parent}"
            ) from None
        if named is None:
            raise CheckpointError(f"{path}: not a torch checkpoint (is it a web page, or a git-lfs pointer?)") from None
        raise CheckpointError(
            f"{path}: holds objects that could run code ({named[1]}) and is refused. If you trust it, save its state_dict as safetensors."
        ) from None
    except (OSError, RuntimeError, EOFError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise CheckpointError(f"{path}: not a readable checkpoint ({error})") from None


def is_safetensors(path: Path) -> bool:
    """Return whether a file has a header of safetensors, whatever its suffix: hubs and users rename files."""
    with path.open("rb") as stream:
        start = stream.read(9)
    return start[8:] == b"{" and int.from_bytes(start[:8], "little") < path.stat().st_size


def is_exported_program(path: Path) -> bool:
    """Return whether a file is an archive that `torch.export.save` wrote (.pt2)."""
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return any(name.rpartition("/")[2] == "archive_format" for name in archive.namelist())


def read_raw_parts(folder: Path) -> dict[str, Tensor]:
    """Read model.safetensors of a folder of transformers, or the parts that its index lists for large models. Raises `CheckpointError`."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return read_raw(folder / "model.safetensors")
    parts = read_json(index, dict, CheckpointError).get("weight_map", {})
    state: dict[str, Tensor] = {}
    for name in sorted(set(parts.values())):
        if not isinstance(name, str) or Path(name).name != name:
            raise CheckpointError(
                f"{index}: `weight_map` must contain names of files in the same folder, got {name!r}."
            )
        state |= read_raw(folder / name)
    return state


def extract_state(raw: Any, origin: str | Path, key: str | None = None) -> dict[str, Tensor]:
    """Return the state dict in a file's content, under names without wrappers' prefixes.

    Args:
        raw: the content.
        origin: name for error messages.
        key: which of several, such as `state_dict_ema`; default: the only one.

    Raises:
        CheckpointError: there is none, there are several different ones, or two tensors have the same name without
            prefixes.
    """
    raw_state = _select_state(raw, str(origin), key)
    state: dict[str, Tensor] = {}
    original_names: dict[str, str] = {}
    for name, value in raw_state.items():
        short = strip_wrapper_prefixes(str(name))
        if short in state:
            raise CheckpointError(
                f"{origin}: two tensors have the same name after removing the prefixes of wrappers, got {original_names[short]} and {name}. "
                "Save the model's own state_dict."
            )
        state[short], original_names[short] = value, str(name)
    return state


def strip_wrapper_prefixes(name: str) -> str:
    """Return a parameter's name without the prefixes of DDP, FSDP, torch.compile, checkpointing, DeepSpeed and trainers."""
    if not any(wrapper in name for wrapper in _WRAPPERS) and not name.startswith(_LEADING):
        return name
    name = ".".join(part for part in name.split(".") if part not in _WRAPPERS)
    while name.startswith(_LEADING):
        name = name.partition(".")[2]
    return name


def _select_state(raw: Any, origin: str, key: str | None) -> Mapping[str, Tensor]:
    if key is not None:
        named = _inner_state(raw.get(key)) if isinstance(raw, Mapping) else None
        if named is None:
            contents = ", ".join(map(str, list(raw)[:8])) if isinstance(raw, Mapping) else type(raw).__name__
            raise CheckpointError(
                f"{origin}: state={key}: the file has no state dict with this name. The file holds: {contents}."
            )
        return named
    for _ in range(3):  # a trainer's checkpoint may contain a model's checkpoint
        if _is_state(raw):
            return raw
        if not isinstance(raw, Mapping):
            break
        inner = {name: raw[name] for name in _STATES if isinstance(raw.get(name), Mapping) and raw[name]}
        # An average may be one level deeper than the weights, as in {model: …, ema: {module: …, updates: 7}}.
        states = {name: state for name, value in inner.items() if (state := _inner_state(value)) is not None}
        if len(states) > 1 and not _all_equal(list(states.values())):
            raise CheckpointError(
                f"{origin}: expected one model, got {len(states)}: {', '.join(states)}. Append ?state=NAME to the "
                f"file's name to choose one, as in FILE?state={list(states)[-1]}, or save one of them to a separate "
                "file."
            )
        if not inner:
            break
        raw = next((value for value in inner.values() if _is_state(value)), next(iter(inner.values())))
    raise CheckpointError(f"{origin}: contains no state dict of tensors")


def _is_state(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and bool(value)
        and all(isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in value.items())
    )


def _inner_state(value: Any) -> Mapping[str, Tensor] | None:
    """Return a state dict, or the only one under a trainer's key in a mapping; None for anything else."""
    if _is_state(value):
        return value
    found = [value[name] for name in _STATES if _is_state(value.get(name))] if isinstance(value, Mapping) else []
    return found[0] if len(found) == 1 else None


def _all_equal(states: list[Mapping[str, Tensor]]) -> bool:
    first = states[0]
    return all(
        other.keys() == first.keys() and all(torch.equal(tensor, first[name]) for name, tensor in other.items())
        for other in states[1:]
    )


class _Dtype:
    """Replaces numpy.dtype while a pickle is read."""

    def __init__(self, code: str, *_rest: Any):
        self.code = str(code)
        self.order: Any = "="

    def __setstate__(self, state: Any) -> None:
        self.order = state[1] if state[1] in "<>=" else "="


def _number(dtype: Any, data: Any) -> Any:
    """Replaces NumPy's scalar constructor: returns a Python number for a boolean, integer, float or complex number."""
    if not isinstance(dtype, _Dtype) or dtype.code[:1] not in ("b", "i", "u", "f", "c"):
        raise pickle.UnpicklingError("GLOBAL numpy.object_")
    buffer = data if isinstance(data, bytes) else str(data).encode("latin1")
    return np.frombuffer(buffer, np.dtype(dtype.code).newbyteorder(dtype.order))[0].item()


# Types in checkpoints of optimizers, schedulers and argument parsers, which are read as plain data.
PLAIN: list[Any] = [
    argparse.Namespace,
    (_number, "numpy._core.multiarray.scalar"),
    (_number, "numpy.core.multiarray.scalar"),
    (_Dtype, "numpy.dtype"),
]
