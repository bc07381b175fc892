"""Engine of one process on one device (CPU or GPU)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Literal

import torch
from torch import Tensor

from ..core.config import resumable_field
from ..core.contracts import APPLIED, Batch, CoupledObjective, Embeddings, Loss, Objective, Progress, StepReport
from ..core.disk.pieces import CheckpointReader, Pieces
from ..core.errors import CheckpointError, ConfigError
from .clipping import clip_gradients, total_norms
from .device_context import Device, DeviceConfig
from .engine_kind import EngineKind, replicated_costs
from .optim import OptimConfig, build_optimizer, set_rates
from .shard_slices import Span, load_tensors, select_pieces


class LocalEngineConfig(DeviceConfig):
    """One process, one device."""

    kind: Literal["local"] = resumable_field("local", "Kind of the engine: an entry of sparo.engines.")


class LocalEngine:
    """Engine that runs forward, backward and the optimizer of an objective in this process.

    Order of preparation: activation checkpointing, device, compile (blocks see their checkpointing), optimizer.
    """

    kind = "local"
    share = (0, 1)  # rank and number of the processes that write a checkpoint together

    def __init__(self, config: DeviceConfig, optim: OptimConfig):
        self.config, self.optim_config = config, optim
        self.device_context = Device(config)
        # Whether a step was skipped: on a GPU, the host waits for the device only if the optimizer cannot skip by
        # itself.
        self.decides_on_host = self.device_context.device.type == "cpu" or not optim.skips_non_finite

    @property
    def device(self) -> torch.device:
        return self.device_context.device

    def prepare(self, objective: Objective) -> None:
        """Take over `objective`: move it to the device, compile it if configured, and build its optimizer."""
        self.objective = self.device_context.prepare_objective(objective)
        self.wrap(objective)
        self.optimizer = build_optimizer(self.optim_config, objective, self.kind)
        # After wrapping, because engines of several ranks wrap the module from outside.
        self._names = {id(p): name for name, p in objective.named_parameters()}
        self._param_groups = objective.param_groups()  # once: later steps do not collect names
        self._unclipped = {key for key, name in self._names.items() if name in self._param_groups.unclipped}
        self._stepped = False

    def wrap(self, objective: Objective) -> None:
        """Wrap the objective for several ranks, after compile and before the optimizer. Default: no wrapping."""

    def forward(self, batch: Batch, progress: Progress, *, last: bool) -> Loss:
        """Return the objective's loss of a batch, under autocast if the recipe sets bf16."""
        with self.device_context.autocast(), self.device_context.attention(), self.device_context.clock.running():
            return self.objective(self.device_context.to_device(batch), progress)

    def embed(self, batch: Batch, *, last: bool) -> Embeddings:
        """Return a coupled objective's embeddings of a batch, computed as in `forward`."""
        assert isinstance(self.objective, CoupledObjective)
        with self.device_context.autocast(), self.device_context.attention(), self.device_context.clock.running():
            return Embeddings(
                self.objective.embed(self.device_context.to_device(batch)), tuple(self.objective.loss_parameters())
            )

    def backward(self, total: Tensor, *, last: bool) -> None:
        """Accumulate gradients. `last` marks the final micro-batch; a single process has nothing to synchronise then."""
        with self.device_context.attention():  # recomputed activations use the kernels of the forward
            total.backward()

    def step(self, progress: Progress) -> StepReport:
        """Clip the gradient, step if it is finite, and run the objective's `after_step`.

        An optimizer with `skips_non_finite` on a GPU is never waited for: its kernel leaves weights, moments and step count unchanged if
        the gradient is not finite. With any other, the host reads the norm and decides.
        """
        # Records of skipped steps contain the learning rate, too.
        lr = set_rates(self.optimizer, self.optim_config, progress)
        without = self._without_gradient()
        for p in self.objective.frozen_this_step(progress):
            # None instead of zero: AdamW would still move the parameter by its moments and decay it.
            p.grad = None
        param_norms = self._norms()
        norm, norms = total_norms(self._param_groups.norm_groups, param_norms)
        applied: bool | Tensor = norm.isfinite()
        if self.decides_on_host:
            applied = bool(applied)
        if applied is not False:
            clip_gradients(self.optim_config, self._local_gradients(), param_norms, norm, self._unclipped)
            if isinstance(applied, Tensor):
                # The fused kernel's own switch, as used by torch's GradScaler.
                self.optimizer.found_inf = (~applied).float()  # type: ignore[attr-defined]
            self.optimizer.step()
            self.objective.after_step(progress, APPLIED if applied is True else applied)
        # None instead of zero, so that a parameter that the next step does not reach is left unchanged.
        self.optimizer.zero_grad(set_to_none=True)
        return StepReport(lr, norm, applied, norms, without)

    def _without_gradient(self) -> tuple[str, ...]:
        """Return the trainable parameters that have no gradient, once per process."""
        if self._stepped:
            return ()
        self._stepped = True
        params = (p for group in self.optimizer.param_groups for p in group["params"])
        return tuple(self._names[id(p)] for p in params if p.requires_grad and p.grad is None)

    def _local_gradients(self) -> dict[int, Tensor]:
        """Return this rank's shards of the gradients, writable, by the id of their parameter."""
        return {key: Span.from_tensor(gradient).local for key, gradient in self._gradients().items()}

    def _norms(self) -> dict[int, Tensor]:
        """Return the norm of each gradient, by the id of its parameter."""
        gradients = self._gradients()
        param_norms = torch._foreach_norm(list(gradients.values()))  # pyright: ignore[reportPrivateImportUsage]  as get_total_norm does
        return dict(zip(gradients, param_norms, strict=True))

    def _gradients(self) -> dict[int, Tensor]:
        """Return gradients by the id of their parameter."""
        return {id(p): p.grad for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None}

    def full_model(self) -> AbstractContextManager[Objective]:
        """Return the objective as an ordinary module in evaluation mode."""
        return self._evaluating()

    @contextmanager
    def _evaluating(self) -> Iterator[Objective]:
        # The trained module itself, because a copy would double the memory only to disable dropout.
        self.objective.eval()
        try:
            yield self.objective
        finally:
            self.objective.train()

    def pieces(self) -> Pieces:
        """Return what this rank writes: `model`, parameters and buffers by name; `optimizer`, `NAME/exp_avg` ….

        Raises:
            ConfigError: the optimizer keeps other tensors than `OptimConfig.state_names` says, so that no run could resume.
        """
        expected_names = self._state_names()
        for p, entries in self.optimizer.state.items():
            if entries and set(entries) != expected_names[id(p)]:
                raise ConfigError(
                    f"optim.kind={self.optim_config.kind}: state_names must list the state that the optimizer keeps "
                    f"({', '.join(sorted(entries))}), got {', '.join(sorted(expected_names[id(p)])) or 'nothing'}. Correct "
                    f"state_names of {type(self.optim_config).__name__}."
                )
        optimizer = {
            f"{self._names[id(p)]}/{key}": value
            for p, entries in self.optimizer.state.items()
            for key, value in entries.items()
        }
        parts = {"model": self.objective.state_dict(), "optimizer": optimizer}
        return {part: select_pieces(tensors, *self.share) for part, tensors in parts.items()}

    def load(self, source: CheckpointReader) -> None:
        """Load this rank's share of a checkpoint, whatever engine wrote it on however many ranks.

        Raises:
            CheckpointError: parameter names or shapes differ, or the moments are of another optimizer.
        """
        # Copy into the existing tensors, because the optimizer and the wrappers hold them.
        load_tensors(source, "model", self.objective.state_dict())
        params_by_name = {self._names[id(p)]: p for group in self.optimizer.param_groups for p in group["params"]}
        state_tensors: dict[str, Tensor] = {}
        self._refuse_foreign_moments(source, params_by_name)
        for key in source.names("optimizer"):
            name, _, entry = key.rpartition("/")
            if (p := params_by_name.get(name)) is not None:
                shape = source.shape("optimizer", key)
                # `step` is 0-d whatever the parameter's shape.
                like = p.detach() if shape == tuple(p.shape) else torch.zeros(shape, device=p.device)
                # Create the state here, because a new optimizer has none before its first step.
                self.optimizer.state[p][entry] = state_tensors[key] = torch.zeros_like(like)
        load_tensors(source, "optimizer", state_tensors)

    def _state_names(self) -> dict[int, set[str]]:
        """Return the names of the tensors that the optimizer keeps for each parameter, by its id."""
        groups = self.optimizer.param_groups
        return {id(p): set(self.optim_config.group_state_names(group)) for group in groups for p in group["params"]}

    def _refuse_foreign_moments(self, source: CheckpointReader, params_by_name: Mapping[str, Tensor]) -> None:
        """Raise `CheckpointError` if a parameter's entries are not those of this optimizer. A parameter without a step has no entries."""
        expected_entries = self._state_names()
        stored_entries: dict[str, set[str]] = {}
        for key in source.names("optimizer"):
            name, _, entry = key.rpartition("/")
            stored_entries.setdefault(name, set()).add(entry)
        listed = self._param_groups.adamw_only
        for name, entries in stored_entries.items():
            if name in params_by_name and entries != expected_entries[id(params_by_name[name])]:
                # No key can undo this: the model itself names these parameters, and that of an older version did not.
                gone = name in listed and "momentum_buffer" in entries
                remedy = (
                    "The model now leaves this parameter to AdamW, so this run cannot continue. Start a new run with start_from."
                    if gone
                    else "Set optim.kind as before."
                )
                raise CheckpointError(
                    f"checkpoint: the optimizer state of parameter {name!r} contains {', '.join(sorted(entries))}, but this optimizer keeps "
                    f"{', '.join(sorted(expected_entries[id(params_by_name[name])]))}. {remedy}"
                )


ENGINE = EngineKind(
    LocalEngineConfig, lambda config, optim, _ranks: LocalEngine(config, optim), replicated_costs, one_process=True
)
