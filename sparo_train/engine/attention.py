"""Which form of attention is faster on this CPU: found by a short measurement, and remembered for this machine.

torch's fused kernel wins on long sequences and loses on short ones, by a factor that depends on the processor, the precision and
the threads: on one EPYC with two threads plain attention is twice as fast for 50 tokens in bf16 and half as fast for 197.
"""

from __future__ import annotations

import json
import time
from contextlib import nullcontext, suppress
from typing import NamedTuple

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..core.disk.rundir import machine_name
from ..core.files import cache_folder, write_whole

_SHAPE = (16, 8, 64)  # samples, heads, width of a head
_ROUNDS = 5


class Attention(NamedTuple):
    """`name`: plain or fused.  `seconds`: of one forward and backward over all lengths, plain and fused, where they were measured."""

    name: str
    seconds: tuple[float, float] | None = None

    def __str__(self) -> str:
        if self.seconds is None:
            return self.name
        plain, fused = (1000 * s for s in self.seconds)
        return f"{self.name} (plain {plain:.1f} ms, fused {fused:.1f} ms)"


def fastest(tokens: list[int], precision: str) -> Attention:
    """The faster form for sequences of these lengths in fp32 or bf16, with torch's current number of threads.

    The answer is kept in the user's cache: it would differ from one start to the next where both are nearly equal, and a run
    would then not end with the same bits twice.
    """
    path = cache_folder() / "attention.json"
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        known = {}
    known = known if isinstance(known, dict) else {}
    key = f"{machine_name()} torch {torch.__version__} {precision} {torch.get_num_threads()} {tokens}"
    found = known.get(key)
    if not (isinstance(found, list) and len(found) == 2 and all(isinstance(s, float) for s in found)):
        found = list(_measured(tokens, torch.bfloat16 if precision == "bf16" else torch.float32))
        with suppress(OSError):  # measured again at the next start
            write_whole(path, json.dumps({**known, key: found}, indent=1))
    plain, fused = found
    return Attention("plain" if plain <= fused else "fused", (plain, fused))


def _measured(tokens: list[int], dtype: torch.dtype) -> tuple[float, float]:
    """Seconds of plain and fused, each the best of alternating rounds, summed over the lengths."""
    batch, heads, width = _SHAPE
    totals = [0.0, 0.0]
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        for length in tokens:
            q, k, v, g = (torch.randn(batch, heads, length, width, dtype=dtype) for _ in range(4))
            for tensor in (q, k, v):
                tensor.requires_grad_()
            best = [float("inf")] * 2
            for _ in range(_ROUNDS):
                for form in (0, 1):
                    with nullcontext() if form else sdpa_kernel(SDPBackend.MATH):
                        begin = time.perf_counter()
                        F.scaled_dot_product_attention(q, k, v).backward(g)
                        best[form] = min(best[form], time.perf_counter() - begin)
            totals = [total + b for total, b in zip(totals, best, strict=True)]
    return totals[0], totals[1]
