"""Device of an engine: precision, attention kernels, moving batches, random state, timing."""

from __future__ import annotations

import ctypes
import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..core.accelerator import (
    DeviceName,
    compile_problem,
    find_device,
    grow_segments,
    has_bf16,
    is_bf16_slow,
    is_streaming,
    random_state,
    set_random_state,
    set_tf32,
    start_compile_workers,
)
from ..core.config import Frozen, field, resumable_field
from ..core.contracts import Batch, Objective
from ..core.errors import ConfigError

logger = logging.getLogger(__name__)

_STAT = Path("/proc/stat")


def fitting_threads(window: float = 0.3) -> int:
    """Return a number of threads that leaves busy cores to other programs; torch's default if the load is unknown.

    The threads of an operation wait for each other, so one thread on a core that another program uses delays all of
    them.

    Args:
        window: seconds during which the load is measured.
    """
    own = torch.get_num_threads()
    if (busy := busy_cores(window)) is None:
        return own
    return max(1, min(own, round((os.cpu_count() or own) - busy)))


def busy_cores(window: float) -> float | None:
    """Return how many cores other processes used on average in the next `window` seconds; None if Linux does not report it."""
    before, own = _ticks(), time.process_time()
    time.sleep(window)
    after, own = _ticks(), time.process_time() - own
    if before is None or after is None or after[1] <= before[1]:
        return None
    share = (after[0] - before[0]) / (after[1] - before[1])
    return max(0.0, share * (os.cpu_count() or 1) - own / window)


def _ticks() -> tuple[int, int] | None:
    """Return the ticks of all cores since boot: busy ones, and all."""
    try:
        counts = [int(word) for word in _STAT.read_text().split("\n", 1)[0].split()[1:9]]
    except (OSError, ValueError):
        return None
    if len(counts) < 5:
        return None
    return sum(counts) - counts[3] - counts[4], sum(counts)  # without idle and iowait


class Clock:
    """Sum of measured times: with events on a GPU, which runs asynchronously, and with the system clock on a CPU."""

    def __init__(self, device: torch.device):
        self.device, self.has_events = device, is_streaming(device)
        self._seconds = 0.0
        self._events: list[tuple[torch.Event, torch.Event]] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """Return a context that is timed."""
        if self.has_events:
            pair = (torch.Event(self.device, enable_timing=True), torch.Event(self.device, enable_timing=True))
            # Record without reading: reading would make the program wait for the device.
            pair[0].record()
            yield
            pair[1].record()
            self._events.append(pair)
        else:
            begin = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - begin

    def take(self) -> float:
        """Return the seconds since the last call; waits for pending work."""
        if self._events:
            # The last event follows all others, so one wait is enough.
            self._events[-1][1].synchronize()
            self._seconds += sum(begin.elapsed_time(end) for begin, end in self._events) / 1000
            self._events = []
        seconds, self._seconds = self._seconds, 0.0
        return seconds


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


class DeviceConfig(Frozen):
    """Keys of every engine's block."""

    # False: `compile: auto` does not compile with this engine.
    compile_by_default: ClassVar[bool] = True

    device: DeviceName = field(
        "auto",
        "Device. cuda: an NVIDIA or AMD GPU; xpu: Intel; mps: Apple. auto: a cuda or xpu device if torch finds one, otherwise cpu.",
    )
    precision: Literal["fp32", "bf16"] = field(
        "bf16", "Compute precision. bf16: autocast; weights and optimizer state stay fp32."
    )
    attention: Literal["auto", "plain", "fused"] = resumable_field(
        "auto",
        "Attention implementation: fused (a kernel chosen by torch's scaled_dot_product_attention) or plain (softmax "
        "between two matrix products). auto: fused; in a resumed run, the implementation recorded in its checkpoint.",
    )
    # Leave one core per loader worker, because threads that wait for a core spin (DINO on Fashion-MNIST, two cores, one
    # worker: 6.7 steps/s with one thread, 4.2 with two).
    threads: int | None = resumable_field(
        None,
        "CPU threads. Default: torch's default number of threads, minus the cores that other programs use when the run starts.",
        gt=0,
        le=1024,
        examples=[2],
    )
    grad_checkpointing: bool = field(False, "Recompute activations in the backward pass. Less memory, slower.")
    compile: bool | Literal["auto"] = resumable_field(
        "auto",
        "Compile Transformer blocks and readouts with torch.compile. The first steps take up to a minute longer. auto: for "
        "CLIP and DINO on a GPU with Triton and a C compiler.",
    )
    tf32: bool = field(
        False,
        "Compute fp32 matrix products and convolutions on NVIDIA GPUs in TF32 (10 bits of mantissa), which "
        "is faster. With `precision: bf16`, this mainly affects the loss.",
    )
    expandable_segments: bool = resumable_field(
        True,
        "Use expandable segments in torch's allocator on NVIDIA GPUs, which reduces memory fragmentation if batch sizes "
        "change. The environment variable PYTORCH_ALLOC_CONF takes precedence.",
    )


class Device:
    """One rank's device, from the recipe's `engine` block. Raises `ConfigError` if a GPU was requested and there is none.

    Attributes:
        kernel: how attention is computed, `plain` or `fused`. It is never chosen by timing, which would give the same
            recipe and seed different bits on equal machines.
    """

    def __init__(self, config: DeviceConfig):
        self.config, self.device = config, find_device(config.device, "engine.device")
        if config.precision == "bf16" and not has_bf16(self.device):
            raise ConfigError(
                f"engine.precision=bf16: {self.device.type} has no bfloat16 on this machine. Use engine.precision=fp32."
            )
        set_tf32(config.tf32)
        if config.expandable_segments:
            grow_segments(self.device)
        self.clock = Clock(self.device)
        self.kernel: str = "fused" if config.attention == "auto" else config.attention
        self._copy_stream: torch.Stream | None = None

    def prepare_objective(self, objective: Objective) -> Objective:
        """Prepare an objective for this device, in a fixed order: compiled blocks must see their checkpointing."""
        self.limit_threads()
        if self.config.precision == "bf16" and is_bf16_slow(self.device):
            # Not refused, because a run may continue on another machine.
            logger.warning(
                "engine.precision=bf16: this CPU has no bfloat16 instructions, so a step takes several times as long "
                "as in fp32. A new run is faster with engine.precision=fp32."
            )
        if self.config.grad_checkpointing:
            objective.set_grad_checkpointing(True)
        # Before compile, whose guards hold the device, and before the optimizer, which holds the parameters.
        objective.to(self.device)
        objective.train()  # so that frozen modules are in evaluation mode from the first step on
        if self.device.type == "cpu":
            keep_freed_memory()
        if self._can_compile(objective):
            # Combined kernels: autocast's copies of a block's weights become one launch instead of eight.
            options = None if self.device.type == "cpu" else {"combo_kernels": True}
            logger.info("engine.compile: the model is compiled in the first steps, which takes up to a minute")
            if self.device.type != "cpu":  # on a CPU, kernels are compiled in this process
                start_compile_workers()
            for unit in objective.compile_units():
                # Compile unit by unit: towers share code, and another length recompiles one unit only.
                unit.compile(options=options)
        return objective

    def _can_compile(self, objective: Objective) -> bool:
        if self.config.compile == "auto":
            return (
                self.device.type != "cpu"
                and self.config.compile_by_default
                and objective.compile_by_default
                and compile_problem(self.device) is None
            )
        if self.config.compile and self.device.type != "cpu" and (problem := compile_problem(self.device)):
            raise ConfigError(f"engine.compile=true: {problem}. Install it, or use engine.compile=false.")
        return bool(self.config.compile)

    def limit_threads(self) -> None:
        """Limit the threads before anything is computed, because torch's thread pools get their size at first use."""
        if self.config.threads:
            torch.set_num_threads(self.config.threads)

    def choose_threads(self, trained_with: int | None = None) -> str:
        """Choose the number of CPU threads, unless `engine.threads` or OMP_NUM_THREADS sets it.

        Another number of threads changes the last bits of sums, so a resumed run keeps the number of its checkpoint.

        Args:
            trained_with: the checkpoint's number; None at the first start.

        Returns:
            A line for the log; empty on a GPU.
        """
        if self.device.type != "cpu":
            return ""
        self.limit_threads()
        own, cores = torch.get_num_threads(), os.cpu_count() or 1
        if not self.config.threads and "OMP_NUM_THREADS" not in os.environ:
            threads = min(trained_with, cores) if trained_with else fitting_threads()
            torch.set_num_threads(threads)
            if trained_with and threads != own:
                return f"engine.threads: {threads} of {cores} CPU cores, as in the run that is resumed"
            if threads < own:
                return (
                    f"engine.threads: {threads} of {cores} CPU cores, since other programs use the rest; "
                    f"engine.threads={own} takes them all"
                )
        return f"engine.threads: {torch.get_num_threads()} of {cores} CPU cores"

    def restore_kernel(self, name: str) -> str | None:
        """Continue with the attention kernel of a checkpoint, so that a resumed run has the same bits.

        Returns:
            A warning if the recipe names another kernel.
        """
        if self.config.attention == "auto" and self.device.type == "cpu" and name in ("plain", "fused"):
            self.kernel = name
        elif self.device.type == "cpu" and name != self.kernel:
            return (
                f"engine.attention: the checkpoint was trained with {name} attention, got {self.kernel}. "
                "The run continues, but its results will not be bit-identical."
            )
        return None

    @property
    def precision(self) -> str:
        return self.config.precision

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.config.precision == "bf16")

    def attention(self) -> AbstractContextManager[object, bool | None]:
        return sdpa_kernel(SDPBackend.MATH) if self.kernel == "plain" else nullcontext()

    def to_device(self, batch: Batch) -> dict[str, Tensor]:
        """Copy a batch to the device for immediate use."""
        # Asynchronous from pinned memory, an ordinary copy otherwise.
        return {key: value.to(self.device, non_blocking=True) for key, value in batch.items()}

    def prefetch_to_device(self, batch: Batch) -> Batch:
        """Start copying a batch that is needed later, while the device computes; on a CPU, return it unchanged."""
        if not is_streaming(self.device):
            return batch
        self._copy_stream = self._copy_stream or torch.Stream(self.device)
        # Copies from other memory make the host wait.
        pinned = {key: value.pin_memory() for key, value in batch.items()}
        with self._copy_stream:
            out = self.to_device(pinned)
        current = torch.accelerator.current_stream(self.device)
        current.wait_stream(self._copy_stream)  # on the device; the host continues
        for value in out.values():
            # Otherwise its memory could be reused while this stream still reads it.
            value.record_stream(current)
        return out

    def random_state(self) -> dict[str, Tensor]:
        """Return the state of torch's generators that a forward may use."""
        own = random_state(self.device)
        return {"cpu": torch.get_rng_state()} | ({} if own is None else {self.device.type: own})

    def set_random_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `random_state` returned."""
        torch.set_rng_state(state["cpu"])
        if self.device.type != "cpu" and self.device.type in state:
            set_random_state(self.device, state[self.device.type])


def keep_freed_memory() -> None:
    """Configure glibc to keep freed memory, because the next training step would request the same pages, which the kernel clears each time.

    ViT-B/32 in bf16 on two cores: 110,000 page faults and 0.7 s of kernel time per step without it, none with it.
    """
    with suppress(OSError, AttributeError):  # another C library has another allocator
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
        libc.mallopt(_M_MMAP_THRESHOLD, 32 << 20)  # glibc's maximum; setting it disables its adaptation
