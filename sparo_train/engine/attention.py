"""Which form of attention is faster on this CPU: measured on the first batch, and remembered for this machine.

torch's fused kernel wins here and plain attention there, by a factor that depends on the processor, the precision, the threads and
the lengths. The operation alone does not tell: on one EPYC plain attention is faster by itself for 50 tokens in bf16, and a whole
ViT-B/32 step is a third slower with it, because it keeps every map for backward. So whole forwards and backwards are timed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..core.contracts import CoupledObjective, Objective, Progress
from ..core.disk.rundir import machine_name
from ..core.files import cache_folder, write_whole

_SAMPLES = 8
_ROUNDS, _SECONDS = (2, 20), 0.5  # at least and at most, as many as fit into this time
_MARGIN = 1.15  # plain attention has to be so much faster: what is nearly equal must not change from one machine of a kind to the next
FORMS = ("plain", "fused")


class Attention(NamedTuple):
    """`name`: plain or fused.  `seconds`: of a forward and backward of a few samples, plain and fused, where they were measured."""

    name: str
    seconds: tuple[float, float] | None = None

    def __str__(self) -> str:
        if self.seconds is None:
            return self.name
        return (
            f"{self.name} (a few samples: plain {1000 * self.seconds[0]:.1f} ms, fused {1000 * self.seconds[1]:.1f} ms)"
        )

    def running(self) -> AbstractContextManager[object, bool | None]:
        """The context in which attention is computed so."""
        return sdpa_kernel(SDPBackend.MATH) if self.name == "plain" else nullcontext()


def fastest(
    objective: Objective,
    batch: Mapping[str, Tensor],
    progress: Progress,
    autocast: Callable[[], AbstractContextManager[Any]],
    agreed: Callable[[Callable[[], Any]], Any],
    precision: str,
) -> Attention:
    """The faster form for this objective and batch; parameters, buffers, gradients and random states are as they were.

    The answer is kept in the user's cache: it could differ from one start to the next where both are nearly equal, and a run
    would then not end with the same bits twice.

    Args:
        agreed: makes all ranks take what rank 0 finds; all of them measure, because an objective may talk to the others.
    """
    # Long enough to tell, short enough not to be noticed at the start of a run.
    few = {key: value[:_SAMPLES] for key, value in batch.items()}
    size = sum(p.numel() for p in objective.parameters())
    shapes = {key: tuple(value.shape) for key, value in few.items()}
    # Whatever changes which one wins is in the key; a new torch measures again.
    key = f"{machine_name()}, torch {torch.__version__}, {torch.get_num_threads()} threads, {precision}, {size} parameters, {shapes}"
    seconds = agreed(lambda: _known().get(key))
    # What others wrote into the cache, or what was torn by a crash, is measured again.
    if not (isinstance(seconds, list) and len(seconds) == 2 and all(isinstance(s, int | float) for s in seconds)):
        own = _measured(objective, few, progress, autocast, agreed)
        seconds = agreed(lambda: own)
        agreed(lambda: _remember(key, own))
    plain, fused = map(float, seconds)
    return Attention("plain" if _MARGIN * plain <= fused else "fused", (plain, fused))


def _measured(
    objective: Objective,
    batch: dict[str, Tensor],
    progress: Progress,
    autocast: Callable[[], AbstractContextManager[Any]],
    agreed: Callable[[Callable[[], Any]], Any],
) -> list[float]:
    """Seconds of plain and of fused: the smallest of alternating rounds behind an unmeasured one."""
    trained = [p for p in objective.parameters() if p.requires_grad]
    # Forwards count in buffers (batch norm, DINO's centre), and these do not belong to the run.
    held = [(b, b.clone()) for b in objective.buffers()]

    def seconds(name: str) -> float:
        begin = time.perf_counter()
        with Attention(name).running():
            with autocast():
                total = _total(objective, batch, progress)
            # Frozen parameters are no part of what is timed, as they are none of a step.
            torch.autograd.grad(total, trained, allow_unused=True)  # leaves .grad and its hooks alone
        return time.perf_counter() - begin

    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        first = [seconds(name) for name in FORMS]
        # as many on every rank: an objective may talk to the others
        rounds = agreed(lambda: max(_ROUNDS[0], min(_ROUNDS[1], int(_SECONDS / sum(first)))))
        found = [[seconds(name) for name in FORMS] for _ in range(rounds)]
    with torch.no_grad():
        for buffer, value in held:
            buffer.copy_(value)
    # The least, not the mean: other work on the machine only ever adds.
    return [min(times) for times in zip(*found, strict=True)]


def _total(objective: Objective, batch: dict[str, Tensor], progress: Progress) -> Tensor:
    """What a backward begins with; a coupled objective's own loss would need the other ranks."""
    # Squares, so that every embedding has a gradient of its own.
    if isinstance(objective, CoupledObjective):
        return torch.stack([rows.float().square().sum() for rows in objective.embed(batch)]).sum()
    return objective(batch, progress).total


def _known() -> dict[str, Any]:
    with suppress(OSError, ValueError):
        found = json.loads((cache_folder() / "attention.json").read_text(encoding="utf-8"))
        return found if isinstance(found, dict) else {}
    return {}


def _remember(key: str, seconds: list[float]) -> None:
    with suppress(OSError):  # measured again at the next start
        write_whole(cache_folder() / "attention.json", json.dumps({**_known(), key: seconds}, indent=1))
