"""The engine of one process on one device (CPU or GPU)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..core.config import Frozen
from ..core.contracts import Batch, CoupledObjective, Embedded, Loss, Objective, Progress, StepReport
from ..core.errors import ConfigError
from ..core.pieces import CheckpointReader, Pieces
from .clock import Clock
from .kinds import EngineKind, replicated
from .optim import OptimConfig, build_adamw, learning_rate, weight_decay
from .spans import Span, load_tensors, pieces_of


class DeviceConfig(Frozen):
    """What every engine's recipe block has."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["fp32", "bf16"] = "bf16"  # bf16: autocast; weights and optimizer stay fp32
    # How scaled_dot_product_attention is computed. On CPUs its fused backward is slow for a CLIP's short sequences
    # (ViT-B/32 step: 1.48 s fused, 1.24 s plain), so auto means plain there and torch's own choice on GPUs.
    attention: Literal["auto", "plain", "fused"] = "auto"
    # On CPUs; default: torch's own number. Loader workers that need a core each want one left free: threads that wait for a
    # core spin (DINO on Fashion-MNIST, two cores, one worker: 6.7 steps/s with one thread, 4.2 with two).
    threads: int | None = Field(default=None, gt=0)
    grad_checkpointing: bool = False
    compile: bool = False


class LocalEngineConfig(DeviceConfig):
    kind: Literal["local"] = "local"


class LocalEngine:
    """Runs forward, backward and the optimizer of an objective in this process.

    Order of preparation: activation checkpointing, device, compile (blocks see their checkpointing), optimizer.
    """

    share = (0, 1)  # this process, of how many, among those that write a checkpoint together

    def __init__(self, config: DeviceConfig, optim: OptimConfig):
        if config.device == "cuda" and not torch.cuda.is_available():
            raise ConfigError("engine.device: cuda was asked for and torch sees no GPU; use engine.device=cpu or auto")
        kind = ("cuda" if torch.cuda.is_available() else "cpu") if config.device == "auto" else config.device
        self.config, self.optim_config = config, optim
        self.device = torch.device(kind)
        self._clock = Clock(self.device)

    def prepare(self, objective: Objective) -> None:
        """Take over `objective`: to the device, compiled if asked, with its optimizer."""
        if self.config.threads:
            torch.set_num_threads(self.config.threads)
        if self.config.grad_checkpointing:
            objective.set_grad_checkpointing(True)
        self.objective = objective.to(self.device)
        if self.config.compile:
            for unit in objective.shard_units():
                unit.compile()
        self.wrap(objective)
        self.optimizer = self._build_optimizer(objective)
        self._names = {id(p): name for name, p in objective.named_parameters()}

    def wrap(self, objective: Objective) -> None:
        """What an engine of several ranks puts around the objective, after compile and before the optimizer."""

    def _build_optimizer(self, objective: Objective) -> torch.optim.Optimizer:
        return build_adamw(self.optim_config, objective)

    def forward(self, batch: Batch, progress: Progress, *, last: bool) -> Loss:
        """The objective's loss on a CPU batch, under autocast where the recipe asks for bf16."""
        with self._autocast(), self._attention(), self._clock.running():
            return self.objective(self._moved(batch), progress)

    def embed(self, batch: Batch, *, last: bool) -> Embedded:
        """A coupled objective's embeddings of a CPU batch, computed as `forward` computes them."""
        assert isinstance(self.objective, CoupledObjective)
        with self._autocast(), self._attention(), self._clock.running():
            return Embedded(self.objective.embed(self._moved(batch)), tuple(self.objective.loss_parameters()))

    def backward(self, total: Tensor, *, last: bool) -> None:
        """Accumulate gradients. `last` marks the final micro-batch; one process has nothing to synchronise there."""
        with self._attention():  # recomputed activations take the kernels of the forward
            total.backward()

    def step(self, progress: Progress) -> StepReport:
        """Clip, check that the gradient is finite, step or skip, then the objective's `after_step`."""
        lr = self._set_rates(progress)
        for p in self.objective.held_back(progress):
            p.grad = None
        each = self._norms()
        norm, norms = self._told(each)
        value = float(norm)
        applied = math.isfinite(value)
        if applied:
            self._clip(each, value)
            self.optimizer.step()
            self.objective.after_step(progress)
        self.optimizer.zero_grad(set_to_none=True)
        return StepReport(lr, value, applied, norms)

    def _set_rates(self, progress: Progress) -> float:
        at = progress.step, progress.total_steps
        lr, decay = learning_rate(self.optim_config, *at), weight_decay(self.optim_config, *at)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
            if group["decayed"]:
                group["weight_decay"] = decay
        return lr

    def _clip(self, each: Mapping[int, Tensor], value: float) -> None:
        """Scale gradients whose norm is above `clip_grad_norm`: all together, or each by its own."""
        most, held = self.optim_config.clip_grad_norm, self._local_gradients()
        if most is None:
            return
        if self.optim_config.clip_per == "tensor":
            free = set(self.objective.unclipped())
            mine = [key for key in held if self._names[key] not in free]
            factors = [(most / (each[key] + 1e-6)).clamp(max=1.0) for key in mine]  # stays on the device
            torch._foreach_mul_([held[key] for key in mine], factors)  # pyright: ignore[reportPrivateImportUsage]
        elif value > most:  # torch.nn.utils.clip_grads_with_norm_ takes no shards
            torch._foreach_mul_(list(held.values()), most / (value + 1e-6))  # pyright: ignore[reportPrivateImportUsage]

    def _local_gradients(self) -> dict[int, Tensor]:
        """What this rank holds of the gradients, to be written to, by the id of their parameter."""
        return {key: Span.of(gradient).local for key, gradient in self._gradients().items()}

    def forward_seconds(self) -> float:
        """Seconds spent in forwards since the last call."""
        return self._clock.take()

    def _norms(self) -> dict[int, Tensor]:
        """The norm of each gradient, by the id of its parameter."""
        held = self._gradients()
        each = torch._foreach_norm(list(held.values()))  # pyright: ignore[reportPrivateImportUsage]  as get_total_norm does
        return dict(zip(held, each, strict=True))

    def _told(self, each: Mapping[int, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """The gradient's norm, whole and within each of the objective's parts."""
        parts = {
            name: _joined([each[id(p)] for p in module.parameters() if id(p) in each])
            for name, module in self.objective.parts().items()
        }
        return _joined(list(each.values())), parts

    def _gradients(self) -> dict[int, Tensor]:
        """Gradients by the id of their parameter."""
        return {id(p): p.grad for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None}

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

    def _moved(self, batch: Batch) -> dict[str, Tensor]:
        return {key: value.to(self.device, non_blocking=True) for key, value in batch.items()}

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.config.precision == "bf16")

    def _attention(self) -> AbstractContextManager[object, bool | None]:
        plain = self.config.attention == "plain" or (self.config.attention == "auto" and self.device.type == "cpu")
        return sdpa_kernel(SDPBackend.MATH) if plain else nullcontext()

    @contextmanager
    def whole(self) -> Iterator[Objective | None]:
        """The objective as an ordinary module in evaluation mode; None on ranks that do not hold it."""
        self.objective.eval()
        try:
            yield self.objective
        finally:
            self.objective.train()

    def pieces(self) -> Pieces:
        """What this rank writes: `model`, parameters and buffers by name; `optimizer`, `NAME/exp_avg` …"""
        optimizer = {
            f"{self._names[id(p)]}/{key}": value
            for p, entries in self.optimizer.state.items()
            for key, value in entries.items()
        }
        parts = {"model": self.objective.state_dict(), "optimizer": optimizer}
        return {part: pieces_of(tensors, *self.share) for part, tensors in parts.items()}

    def load(self, source: CheckpointReader) -> None:
        """Take this rank's share of a checkpoint, whatever engine and however many ranks wrote it.

        Raises:
            CheckpointError: parameter names or shapes differ.
        """
        load_tensors(source, "model", self.objective.state_dict())
        held = {self._names[id(p)]: p for group in self.optimizer.param_groups for p in group["params"]}
        found: dict[str, Tensor] = {}
        for key in source.names("optimizer"):
            name, _, entry = key.rpartition("/")
            if (p := held.get(name)) is not None:
                shape = source.shape("optimizer", key)
                like = p.detach() if shape == tuple(p.shape) else torch.zeros(shape, device=p.device)
                self.optimizer.state[p][entry] = found[key] = torch.zeros_like(like)
        load_tensors(source, "optimizer", found)


def _joined(norms: list[Tensor]) -> Tensor:
    return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())


ENGINE = EngineKind(
    LocalEngineConfig, lambda config, optim, _ranks: LocalEngine(config, optim), replicated, one_process=True
)
