"""Folders that DeepSpeed's own `save_checkpoint` wrote, read as fp32 weights through its own consolidation; never code."""

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
    """True for a DeepSpeed checkpoint folder: one with a `latest` file, or one of its tags."""
    return (path / "latest").is_file() or any(path.glob("*_optim_states.pt"))


def read_zero_folder(path: Path) -> Weights:
    """The fp32 master weights of a ZeRO-1, 2 or 3 folder, in our names.

    DeepSpeed loads its files as pickles; here torch is told to refuse whatever is not on a list of four names (and how an enum is written).

    Raises:
        CheckpointError: a rank's file is missing or damaged, or holds something that could run code.
        ConfigError: DeepSpeed is not installed.
    """
    try:
        from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
        from deepspeed.runtime.zero.config import ZeroStageEnum
        from deepspeed.utils.tensor_fragment import fragment_address
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
    except ImportError as error:
        raise ConfigError(
            f"{path}: a DeepSpeed folder, and {error}; pip install -e '.[deepspeed]' in sparo's checkout"
        ) from None

    def stage(kind: Any, name: Any) -> Any:
        """In the place of `getattr`, by which Pythons before 3.11.4 write an enum's member: that, and nothing else."""
        if kind is not ZeroStageEnum or name not in ZeroStageEnum.__members__:
            raise pickle.UnpicklingError(f"getattr of {kind!r} and {name!r} is refused")
        return ZeroStageEnum[name]

    safe_types = [LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address, (stage, "builtins.getattr"), *PLAIN]
    # A folder of one step was given, or the one that holds all steps and says which is the last.
    tagged = any(path.glob("*_optim_states.pt"))
    folder, tag = (path.parent, path.name) if tagged else (path, None)
    try:
        with _tensors_only(), torch.serialization.safe_globals(safe_types):
            state: dict[str, torch.Tensor] = get_fp32_state_dict_from_zero_checkpoint(str(folder), tag=tag)  # pyright: ignore[reportAssignmentType]
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path}: a file is damaged, or holds objects that could run code, and is refused ({str(error)[-300:].strip()})"
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
            f"{path}: not a whole DeepSpeed checkpoint ({error}); every rank's files have to be there, whatever the number of ranks now"
        ) from None
    # Views of the ranks' flat buffers otherwise, which would keep all of them alive.
    return to_ours({name: tensor.clone() for name, tensor in state.items()})


@contextlib.contextmanager
def _tensors_only() -> Iterator[None]:
    """`torch.load` with `weights_only` whatever its caller says, and without the consolidation's own prints."""
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
