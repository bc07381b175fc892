"""Throughput: samples per second, time spent waiting for data, model FLOPs and MFU."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain

import torch
from torch._subclasses import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from ..core.accelerator import device_name, take_peak_memory
from ..core.contracts import Batch, CoupledObjective, Objective, Progress
from ..core.distributed import Ranks

# Dense bf16 tensor-core peaks in FLOP/s, from the vendors' data sheets. A longer name ("H100 PCIe") comes before the
# name that it contains.
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
    """Model FLOPs of a sample: three times the matrix products and attentions of the forward (recomputation does not count).

    Modules that are averages of others, such as DINO's teacher, have no backward, so theirs count once.

    Args:
        build: makes the objective; called once, without allocating or computing anything.
    """

    def __init__(self, build: Callable[[], Objective]):
        self._build, self._objective = build, None
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)  # meta tensors of the objective
        self._flops_by_shape: dict[tuple[torch.Size, ...], float] = {}

    def per_sample(self, batch: Batch) -> float:
        """Return the FLOPs of forward and backward of one sample with this batch's shapes."""
        # Captions are cut to the longest in the batch, so lengths vary; each length is traced once.
        shapes = tuple(value.shape[1:] for value in batch.values())
        if shapes not in self._flops_by_shape:
            if self._objective is None:
                with torch.device("meta"):
                    objective = self._build()
                with self._fake:
                    # Without gradients: the counter's hooks fail on a parameter that is an input of a module
                    self._objective = objective.to_empty(device="cpu").requires_grad_(False)
            with self._fake, FlopCounterMode(display=False) as counter, torch.no_grad():
                # One sample, because counts are linear in the batch and traces of small tensors are fast.
                one = {k: torch.empty((1, *v.shape[1:]), dtype=v.dtype) for k, v in batch.items()}
                if isinstance(self._objective, CoupledObjective):
                    # Without the loss, which grows with the square of the batch and which no published figure counts.
                    self._objective.embed(one)
                else:
                    # The last step of a long run, in which every loss has begun.
                    self._objective(one, Progress(10**9 - 1, 10**9, 0))
            # Backward needs two products for each product of the forward.
            forward_only = sum(
                _flops_below(counter, f"{type(self._objective).__name__}.{n}") for n in self._objective.follows
            )
            self._flops_by_shape[shapes] = 3.0 * counter.get_total_flops() - 2.0 * forward_only
        return self._flops_by_shape[shapes]


def _flops_below(counter: FlopCounterMode, module: str) -> int:
    """Return the FLOPs of a module, or of its parts if their forwards were called one by one."""
    below = {
        name: sum(c.values()) for name, c in counter.get_flop_counts().items() if f"{name}.".startswith(f"{module}.")
    }
    return sum(n for name, n in below.items() if not any(name.startswith(f"{other}.") for other in below))


def utilisation(flops_per_second: float, device: torch.device) -> float | None:
    """Return the share of one device's peak; None if the peak is not known (CPUs, other GPUs)."""
    name = device_name(device) or ""
    peak = next((value for part, value in PEAKS.items() if part in name), None)
    return None if peak is None else flops_per_second / peak


def memory(device: torch.device) -> float:
    """Return the peak memory in GiB: on a GPU since the last call, on a CPU the largest resident size so far."""
    if (peak := take_peak_memory(device)) is not None:
        return peak / 2**30
    # Linux counts KiB.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


class RunClock:
    """Clock of this start, in addition to the time of earlier starts.

    Args:
        before: seconds of earlier starts, from the checkpoint.
    """

    def __init__(self, before: float = 0.0):
        # Monotonic, because the system clock may be set back during training.
        self._before, self._start_time = before, time.monotonic()
        self._first: tuple[int, float] | None = None  # first finished step of this start, and its time
        self._away = 0.0  # seconds of evaluations and checkpoints since then

    @property
    def elapsed(self) -> float:
        """Return the seconds of training so far, over all starts."""
        return self._before + time.monotonic() - self._start_time

    def step(self, step: int) -> bool:
        """Record a finished step; return whether it is the first of this start."""
        if self._first is not None:
            return False
        self._first = (step, time.monotonic())
        return True

    def pause(self, seconds: float) -> None:
        """Exclude seconds from the estimate, which covers steps only."""
        if self._first is not None:
            self._away += seconds

    def seconds_left(self, step: int, total: int) -> float | None:
        """Return an estimate of the seconds to the last step; None before two steps of this start are done.

        The first step is excluded, because it compiles, fills caches and waits for the loader's workers.
        """
        if self._first is None or step <= self._first[0]:
            return None
        first, at = self._first
        return (time.monotonic() - at - self._away) / (step - first) * (total - step)


class Meter:
    """Samples per second and the share of time spent waiting for data, between two calls of `take`."""

    def __init__(self) -> None:
        self.start()
        self._beat = 0.0

    def start(self) -> None:
        # Monotonic, because the system clock may be set back.
        self._since, self._waited, self._samples, self._steps = time.monotonic(), 0.0, 0, 0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        begin = time.monotonic()
        try:
            yield
        finally:
            self._waited += time.monotonic() - begin

    def add(self, samples: int) -> None:
        self._samples, self._steps = self._samples + samples, self._steps + 1

    def take(self) -> dict[str, float]:
        """Return `samples_per_second`, `data_wait` (share) and `step_seconds` since the last call."""
        # Avoid a division by zero if two log steps fall within one clock tick.
        spent = max(time.monotonic() - self._since, 1e-9)
        out = {
            "samples_per_second": self._samples / spent,
            "data_wait": self._waited / spent,
            "step_seconds": spent / max(1, self._steps),
        }
        self.start()
        return out

    def beat_due(self, seconds: float) -> bool:
        now = time.monotonic()
        due = now - self._beat >= seconds
        if due:
            self._beat = now
        return due


class MetricExchange:
    """Exchange of metrics as numbers. Their names, which take much longer with many ranks, are exchanged only when there are new ones."""

    def __init__(self, ranks: Ranks):
        self._ranks = ranks
        self._names: list[str] = []

    def gather(self, own: Mapping[str, float]) -> list[dict[str, float]]:
        """Return the metrics of all ranks, in rank order. Ranks may have different metrics."""
        if self._ranks.size == 1:
            return [dict(own)]
        rows = self._rows(own)
        if any(has_new_names for has_new_names, *_ in rows):
            self._names = sorted({name for names in self._ranks.gather([*self._names, *own]) for name in names})
            rows = self._rows(own)
        return [{name: row[2 * i + 2] for i, name in enumerate(self._names) if row[2 * i + 1]} for row in rows]

    def _rows(self, own: Mapping[str, float]) -> list[list[float]]:
        # For each name, whether this rank has it, and its value, which may be NaN.
        pairs = ((float(name in own), own.get(name, 0.0)) for name in self._names)
        return self._ranks.gather_numbers([float(not own.keys() <= set(self._names)), *chain.from_iterable(pairs)])


def average_over_ranks(facts: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the means over ranks, `step_spread`, the share by which the slowest rank's forward takes longer than the fastest's, and `slowest_rank`.

    Forwards are compared because they do not wait for other ranks; whole steps take equally long on all ranks.
    """
    # A metric that some ranks' batches lack is averaged over the ranks that have it.
    values_by_name = {
        name: [f[name] for f in facts if name in f] for name in dict.fromkeys(name for f in facts for name in f)
    }
    out = {name: sum(values) / len(values) for name, values in values_by_name.items()}
    # Not whole steps: faster ranks wait in the exchange, so all would look alike.
    own = [f["forward_seconds"] for f in facts]
    if len(facts) > 1:
        out["step_spread"] = max(own) / max(min(own), 1e-9) - 1
        out["slowest_rank"] = own.index(max(own))
    return out
