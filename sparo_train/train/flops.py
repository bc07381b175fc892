"""What a step costs: model FLOPs from the operations themselves, the share of the device's peak, and memory."""

from __future__ import annotations

import resource
from collections.abc import Callable

import torch
from torch._subclasses import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from ..core.contracts import Batch, CoupledObjective, Objective, Progress

# Dense bf16 tensor-core peaks in FLOP/s, from the vendors' data sheets; a name that holds another ("H100 PCIe") comes before it.
PEAKS = {
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "A40": 150e12,
    "A10": 125e12,
    "L40S": 362e12,
    "L4": 121e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
    "MI300X": 1307e12,
    "MI250X": 383e12,
}


class FlopCounter:
    """Model FLOPs of a sample: three times the forward's matrix products and attentions (recomputation is not counted).

    Args:
        build: makes the objective; called once, without allocating or computing anything.
    """

    def __init__(self, build: Callable[[], Objective]):
        self._build, self._objective = build, None
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)  # the meta tensors that it is built of
        self._flops_by_shape: dict[tuple[torch.Size, ...], float] = {}

    def per_sample(self, batch: Batch) -> float:
        """FLOPs of forward and backward of one sample of this batch's shapes."""
        # Captions are cut to the batch's longest, so lengths change; each is traced once.
        shapes = tuple(value.shape[1:] for value in batch.values())
        if shapes not in self._flops_by_shape:
            if self._objective is None:
                with torch.device("meta"):
                    objective = self._build()
                with self._fake:
                    # without gradients: the counter's hooks stumble over a parameter that is a module's input
                    self._objective = objective.to_empty(device="cpu").requires_grad_(False)
            with self._fake, FlopCounterMode(display=False) as counter, torch.no_grad():
                # One sample: counts are linear in the batch, and traces of small tensors are cheap.
                one = {k: torch.empty((1, *v.shape[1:]), dtype=v.dtype) for k, v in batch.items()}
                if isinstance(self._objective, CoupledObjective):
                    # Not its loss: that grows with the square of the batch, and no published figure counts it.
                    self._objective.embed(one)
                else:
                    self._objective(one, Progress(0, 1, 0))
            # Backward takes two products for each of the forward.
            self._flops_by_shape[shapes] = 3.0 * counter.get_total_flops()
        return self._flops_by_shape[shapes]


def utilisation(flops_per_second: float, device: torch.device) -> float | None:
    """Share of one device's peak; None where the peak is not known (CPUs, other GPUs)."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    peak = next((value for part, value in PEAKS.items() if part in name), None)
    return None if peak is None else flops_per_second / peak


def memory(device: torch.device) -> float:
    """GiB: the most this process held on its GPU since the last call; on a CPU, the most it ever held resident."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        # From here anew, so that a record shows its own steps' peak.
        torch.cuda.reset_peak_memory_stats(device)
        return peak / 2**30
    # Linux counts KiB.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
