"""Folders written by DeepSpeed's own `save_checkpoint`, read as fp32 weights through its consolidation, without running code."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ...core.errors import CheckpointError, ConfigError
from .state_dicts import PLAIN
from .weights import Weights, to_ours


def is_zero_folder(path: Path) -> bool:
    """Return True for a DeepSpeed checkpoint folder: one with a `latest` file, or one of its tags."""
    return (path / "latest").is_file() or any(path.glob("*_optim_states.pt"))


def read_zero_folder(path: Path) -> Weights:
    """Return the fp32 master weights of a ZeRO-1, 2 or 3 folder, under our names.

    DeepSpeed loads its files as pickles. Here, torch only allows four names (and the form of a pickled enum).

    Raises:
        CheckpointError: a rank's file is missing or damaged, or contains something that could run code.
        ConfigError: DeepSpeed is not installed.
    """
    try:
        from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
        from deepspeed.runtime.zero.config import ZeroStageEnum
        from deepspeed.utils.tensor_fragment import fragment_address
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
    except ImportError as error:
        raise ConfigError(
            f"{path}: reading a DeepSpeed folder needs DeepSpeed, which cannot be imported ({error}). Run pip install "
            "-e '.[deepspeed]' in sparo's checkout."
        ) from None

    def stage(kind: Any, name: Any) -> Any:
        """Replace `getattr`, which Pythons before 3.11.4 use to pickle an enum member, and allow nothing else."""
        if kind is not ZeroStageEnum or name not in ZeroStageEnum.__members__:
            raise pickle.UnpicklingError(f"the call getattr({kind!r}, {name!r}) is not allowed")
        return ZeroStageEnum[name]

    safe_types = [LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address, (stage, "builtins.getattr"), *PLAIN]
    # The path is the folder of one step, or the folder of all steps, which names the last one.
    tagged = any(path.glob("*_optim_states.pt"))
    folder, tag = (path.parent, path.name) if tagged else (path, None)
    try:
        with _tensors_only(), torch.serialization.safe_globals(safe_types):
            state: dict[str, torch.Tensor] = get_fp32_state_dict_from_zero_checkpoint(str(folder), tag=tag)  # pyright: ignore[reportAssignmentType]
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path}: refused, because a file is damaged or holds objects that could run code ({str(error)[-300:].strip()})"
        ) from None
    except (
        OSError,
        ValueError,
        LookupError,
        RuntimeError,
        EOFError,
        AttributeError,
        TypeError,
        AssertionError,
    ) as error:
        raise CheckpointError(
            f"{path}: not a whole DeepSpeed checkpoint ({error}). It must contain the files of every rank "
            f"that wrote it, even if this run has another number of ranks."
        ) from None
    # Copy, because views of the ranks' flat buffers would keep all of them in memory.
    return to_ours({name: tensor.clone() for name, tensor in state.items()})


@contextlib.contextmanager
def _tensors_only() -> Iterator[None]:
    """Force `weights_only` in `torch.load`, whatever the caller passes, and silence the consolidation."""
    name = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
