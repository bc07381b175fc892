"""The accelerators that torch supports: CUDA, XPU and MPS.

Only this module depends on the kind of device; all others take a `torch.device`.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor

from .errors import ConfigError

logger = logging.getLogger(__name__)
DeviceName = Literal["auto", "cpu", "cuda", "xpu", "mps"]

# Kinds with streams, events, pinned host memory and an allocator that counts its peak.
_STREAMING = ("cuda", "xpu")
_DEVICE_FILES = Path("/dev")
_ALLOCATED_GPUS = ("SLURM_JOB_GPUS", "SLURM_STEP_GPUS", "SLURM_GPUS_ON_NODE")
_GROUP_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_BACKENDS = {"cuda": "nccl", "xpu": "xccl"}


@cache
def _warn_of_unused_gpus() -> None:
    """Warn once if this process may use NVIDIA GPUs that torch does not see, because the CPU would silently be used."""
    env = os.environ
    hidden = env.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    allocated = "SLURM_JOB_ID" not in env or any(name in env for name in _ALLOCATED_GPUS)
    if allocated and not hidden and (gpus := list(_DEVICE_FILES.glob("nvidia[0-9]*"))):
        build = "is built without CUDA" if torch.version.cuda is None else f"is built for CUDA {torch.version.cuda}"
        logger.warning(
            f"torch {torch.__version__} {build} and sees none of the {len(gpus)} GPU(s) of this machine, so the CPU is used. Install a "
            "build of torch that fits the driver. If the CPU is intended, set the device to cpu."
        )


def available_device() -> torch.device:
    """Return this machine's CUDA or XPU device, or the CPU if there is none.

    MPS has to be named: it lacks fp64, and what works there has not been tested.
    """
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        _warn_of_unused_gpus()
    return found if found is not None and is_streaming(found) else torch.device("cpu")


def indices_by_device(tensors: Iterable[Tensor]) -> list[list[int]]:
    """Return the positions of tensors on each device. With offloading, there are two: operations on lists need one."""
    groups: dict[torch.device, list[int]] = {}
    for i, tensor in enumerate(tensors):
        groups.setdefault(tensor.device, []).append(i)
    return list(groups.values())


def find_device(name: str, key: str) -> torch.device:
    """Return the device with this name.

    Args:
        name: a `DeviceName`, or `cuda:1` for one of several.
        key: dotted key or option for the error.

    Raises:
        ConfigError: this machine has no such device.
    """
    if name == "auto":
        return available_device()
    kind, _, index = name.partition(":")
    if kind not in get_args(DeviceName)[1:] or (index and not index.isdecimal()):
        raise ConfigError(f"{key}: expected {', '.join(get_args(DeviceName))}, got {name}.")
    found = torch.accelerator.current_accelerator(check_available=True)
    if kind != "cpu" and (found is None or found.type != kind):
        what = "GPU" if kind == "cuda" else f"device of kind {kind}"
        raise ConfigError(f"{key}={name}: torch finds no {what}. Use {key}=cpu or auto.")
    if kind != "cpu" and int(index or 0) >= (count := torch.accelerator.device_count()):
        raise ConfigError(f"{key}={name}: this machine has {count} device(s), counted from 0. Use a smaller number.")
    return torch.device(name)


def is_streaming(device: torch.device) -> bool:
    """Return whether the device runs asynchronously in streams and copies from pinned memory."""
    return device.type in _STREAMING


def collectives(device: torch.device) -> str:
    """Return the backends of `torch.distributed`: gloo for the host, in addition to the device's own."""
    own = _BACKENDS.get(device.type)
    return "gloo" if own is None else f"cpu:gloo,{device.type}:{own}"


def uses_nccl(device: torch.device) -> bool:
    """Return whether collectives of the device run on NCCL."""
    return _BACKENDS.get(device.type) == "nccl"


def device_name(device: torch.device) -> str | None:
    """Return the name of an accelerator, such as `NVIDIA H200`; None for a CPU."""
    if device.type == "cpu":
        return None
    module = torch.get_device_module(device)
    return module.get_device_name(device) if hasattr(module, "get_device_name") else device.type.upper()


def take_peak_memory(device: torch.device) -> int | None:
    """Return the allocator's peak in bytes since the last call; None if the device does not count it."""
    if not is_streaming(device):
        return None
    peak = torch.accelerator.max_memory_allocated(device)
    torch.accelerator.reset_peak_memory_stats(device)
    return peak


def random_state(device: torch.device) -> Tensor | None:
    """Return the state of an accelerator's random generator; None for a CPU, whose generator is torch's default."""
    return None if device.type == "cpu" else torch.get_device_module(device).get_rng_state(*_device_index(device))


def set_random_state(device: torch.device, state: Tensor) -> None:
    """Restore what `random_state` returned."""
    torch.get_device_module(device).set_rng_state(state, *_device_index(device))


def _device_index(device: torch.device) -> tuple[torch.device, ...]:
    return (device,) if is_streaming(device) else ()  # there is only one MPS device


def has_fp64(device: torch.device) -> bool:
    """Return whether tensors of the device can have float64."""
    return device.type != "mps"


def has_bf16(device: torch.device) -> bool:
    """Return whether tensors of the device can have bfloat16; old versions of macOS do not support it on MPS."""
    if device.type != "mps":
        return True  # without a tensor, because the first one starts CUDA, and workers are forked later
    try:
        torch.zeros(1, device=device, dtype=torch.bfloat16)
    except (RuntimeError, TypeError):
        return False
    return True


def is_bf16_slow(device: torch.device) -> bool:
    """Return whether bfloat16 is slower than fp32: on CPUs without AVX-512 (x86) or bfloat16 instructions (Arm)."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return not torch.ops.mkldnn._is_mkldnn_bf16_supported()


def has_tf32(device: torch.device) -> bool:
    """Return whether the device can compute fp32 products in TF32."""
    return device.type == "cuda"


def set_tf32(enable: bool) -> None:
    """Set whether fp32 products and convolutions on CUDA devices are computed in TF32. torch's default is convolutions only."""
    torch.backends.cuda.matmul.allow_tf32 = enable
    torch.backends.cudnn.allow_tf32 = enable


@contextmanager
def tf32_enabled() -> Iterator[None]:
    """Compute fp32 products and convolutions on CUDA devices in TF32 inside this context."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    set_tf32(True)
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def grow_segments(device: torch.device) -> None:
    """Let CUDA's allocator extend its blocks, so that tensors of changing sizes leave fewer gaps; other devices have no such setting.

    It reads its settings when it allocates first. A setting of the user is kept.
    """
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
    if device.type == "cuda" and torch.version.hip is None and not any(name in os.environ for name in names):
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def start_compile_workers() -> None:
    """Start torch.compile's worker processes so that signals do not reach them.

    Ctrl-C in a terminal and schedulers signal the whole process group. Workers that end would make compilation fail, although
    training saves and stops, or only saves, at these signals. Workers end with the main process.
    """
    # Blocked signals are inherited by new processes. Here, they are only delayed.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, set(_GROUP_SIGNALS))
    try:
        from torch._inductor.async_compile import AsyncCompile  # its import starts workers in some versions

        AsyncCompile.warm_pool()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def compile_problem(device: torch.device) -> str | None:
    """Return why torch.compile cannot work on an accelerator; None if it can."""
    from torch.utils._triton import has_triton

    if not has_triton():
        return f"Triton is missing or does not support {device_name(device)}"
    # Triton compiles a launcher for each kernel with it.
    if not (os.environ.get("CC") or any(map(shutil.which, ("cc", "gcc", "clang")))):
        return "a C compiler (gcc or clang) is missing"
    return None
