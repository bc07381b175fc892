"""Counters of a process on the null GPU: launches, copies, waits."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import os
import traceback
import warnings
from collections.abc import Iterator
from typing import Any

# In the order of the enum in csrc/nullgpu.h.
COUNTERS = (
    "launch", "stream_sync", "device_sync", "event_sync", "d2h", "d2h_bytes", "h2d", "h2d_bytes", "h2d_pageable", "d2d",
    "memset", "malloc", "host_alloc", "gemm_16bit", "gemm_fp32", "gemm_flop", "cudnn", "driver_launch", "modules",
)  # fmt: skip


def on_null_gpu() -> bool:
    """Return whether this process runs on the null GPU."""
    return "NULLGPU" in os.environ and hasattr(ctypes.CDLL(None), "nullgpu_counters")


def read_counters() -> collections.Counter[str]:
    """Return all counters since the start of the process."""
    values = (ctypes.c_double * len(COUNTERS))()
    number = ctypes.CDLL(None).nullgpu_counters(values, len(COUNTERS))
    assert number == len(COUNTERS), "csrc/nullgpu.h and counters.py differ"
    return collections.Counter({name: int(value) for name, value in zip(COUNTERS, values, strict=True)})


def kernel_launches() -> collections.Counter[str]:
    """Return the launches since the last call by kernel name."""
    launches: collections.Counter[str] = collections.Counter()
    callback_type = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_long)

    def add(name: bytes, number: int) -> None:
        launches[name.decode()] += number

    ctypes.CDLL(None).nullgpu_kernels(callback_type(add))
    return launches


@contextlib.contextmanager
def count() -> Iterator[collections.Counter[str]]:
    """Return a counter of the block. It is complete when the block has ended."""
    counter: collections.Counter[str] = collections.Counter()
    before = read_counters()
    yield counter
    counter.update({name: value - before[name] for name, value in read_counters().items() if value != before[name]})


@contextlib.contextmanager
def find_syncs(packages: tuple[str, ...] = ()) -> Iterator[collections.Counter[str]]:
    """Return a counter of the lines at which the block makes the host wait for the device, by torch's sync debug mode.

    Args:
        packages: parts of paths. A wait is attributed to the innermost line of a file with one of them.
    """
    import torch

    lines: collections.Counter[str] = collections.Counter()

    def record(message: Any, *_: Any, **__: Any) -> None:
        if "synchroniz" in str(message):
            frames = [f for f in traceback.extract_stack() if not f.filename.endswith(("counters.py", "warnings.py"))]
            own = [f for f in frames if any(part in f.filename for part in packages)] or frames
            lines[f"{own[-1].filename}:{own[-1].lineno}"] += 1

    original = warnings.showwarning
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = record
            yield lines
    finally:
        warnings.showwarning = original
        torch.cuda.set_sync_debug_mode("default")
