"""What every engine does on its device: precision, attention kernels, moving batches, random state, time spent."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Literal

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..core.config import Frozen, field, resumable_field
from ..core.contracts import Batch, Objective
from ..core.errors import ConfigError
from .clock import Clock
from .cpu_threads import fitting_threads

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


class DeviceConfig(Frozen):
    """What every engine's block has."""

    device: Literal["auto", "cpu", "cuda"] = field("auto", "auto: a GPU where torch sees one")
    precision: Literal["fp32", "bf16"] = field("bf16", "bf16: autocast; weights and optimizer stay fp32")
    attention: Literal["auto", "plain", "fused"] = resumable_field(
        "auto",
        "how attention is computed: fused (torch's scaled_dot_product_attention chooses a kernel), or plain (a softmax between two matrix "
        "products); auto: fused, and for a resumed run whatever its checkpoint was trained with",
    )
    # Loader workers that need a core each want one left free: threads that wait for a core spin (DINO on Fashion-MNIST, two
    # cores, one worker: 6.7 steps/s with one thread, 4.2 with two).
    threads: int | None = resumable_field(
        None,
        "of the CPU; default: torch's own number, less the cores that other programs use at the start",
        gt=0,
        le=1024,
        examples=[2],
    )
    grad_checkpointing: bool = field(False, "recompute activations in backward: less memory, slower")
    compile: bool = field(False, "compile the objective's shard units")


class Device:
    """One rank's device, from the recipe's `engine` block. Raises `ConfigError` if a GPU was asked for and there is none.

    kernel: how attention is computed, `plain` or `fused`. It is never chosen by timing, which would give the same recipe and seed other
    bits on an equal machine.
    """

    def __init__(self, config: DeviceConfig):
        if config.device == "cuda" and not torch.cuda.is_available():
            raise ConfigError("engine.device: cuda was asked for and torch sees no GPU; use engine.device=cpu or auto")
        kind = ("cuda" if torch.cuda.is_available() else "cpu") if config.device == "auto" else config.device
        self.config, self.device = config, torch.device(kind)
        self.clock = Clock(self.device)
        self.kernel: str = "fused" if config.attention == "auto" else config.attention
        self._copy_stream: torch.cuda.Stream | None = None

    def prepare_objective(self, objective: Objective) -> Objective:
        """Make an objective ready for this device, in one order: compiled blocks have to see their checkpointing."""
        self.limit_threads()
        if self.config.grad_checkpointing:
            objective.set_grad_checkpointing(True)
        # Before compile, whose guards hold the device, and before any optimizer, which holds the parameters.
        objective.to(self.device)
        objective.train()  # so that what is frozen takes its evaluation mode from the first step on
        if self.device.type == "cpu":
            keep_freed_memory()
        if self.config.compile:
            for unit in objective.shard_units():
                # Unit by unit, not whole: towers share code, and a change of length compiles one unit anew.
                unit.compile()
        return objective

    def limit_threads(self) -> None:
        """Before anything is computed: the thread pools of torch take their size at their first use."""
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
                return f"engine.threads: {threads} of {cores} CPU cores, as before"
            if threads < own:
                return (
                    f"engine.threads: {threads} of {cores} CPU cores, since other programs use the rest; "
                    f"engine.threads={own} takes them all"
                )
        return f"engine.threads: {torch.get_num_threads()} of {cores} CPU cores"

    def restore_kernel(self, name: str) -> str | None:
        """Continue with the form of attention that a checkpoint was trained with, so that a resumed run has the same bits.

        Returns:
            A warning if the recipe names another form.
        """
        if self.config.attention == "auto" and self.device.type == "cpu" and name in ("plain", "fused"):
            self.kernel = name
        elif self.device.type == "cpu" and name != self.kernel:
            return (
                f"engine.attention: the checkpoint was trained with {name} attention, got {self.kernel}. "
                "The run continues, but not with the same bits."
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
        """The batch on the device, for what runs next."""
        # Non-blocking from pinned memory; from pageable memory it is an ordinary copy.
        return {key: value.to(self.device, non_blocking=True) for key, value in batch.items()}

    def prefetch_to_device(self, batch: Batch) -> Batch:
        """Begin to copy a batch that is needed later, beside what the device is doing; on a CPU there is nothing to copy."""
        if self.device.type != "cuda":
            return batch
        self._copy_stream = self._copy_stream or torch.cuda.Stream(self.device)
        with torch.cuda.stream(self._copy_stream):
            out = self.to_device(batch)
        current = torch.cuda.current_stream(self.device)
        current.wait_stream(self._copy_stream)  # on the device; the host goes on
        for value in out.values():
            # Or its memory could be handed out again while this stream still reads it.
            value.record_stream(current)
        return out

    def random_state(self) -> dict[str, Tensor]:
        """The state of torch's generators that a forward may draw from."""
        state = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            state["cuda"] = torch.cuda.get_rng_state(self.device)
        return state

    def set_random_state(self, state: Mapping[str, Tensor]) -> None:
        """Go back to what `random_state` returned."""
        torch.set_rng_state(state["cpu"])
        if self.device.type == "cuda" and "cuda" in state:
            torch.cuda.set_rng_state(state["cuda"], self.device)


def keep_freed_memory() -> None:
    """Tell glibc not to give freed memory back: a training step would ask for the same pages again, and the kernel clears each.

    ViT-B/32 in bf16 on two cores: 110,000 page faults and 0.7 s of the kernel's time per step, and none with it.
    """
    with suppress(OSError, AttributeError):  # another C library has another allocator
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
        libc.mallopt(_M_MMAP_THRESHOLD, 32 << 20)  # the largest that glibc takes; it stops adapting it
