"""DeepSpeed's ZeRO: optimizer state (stage 1), gradients (2) and parameters (3) sharded over the ranks."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..core.config import resumable_field
from ..core.contracts import APPLIED, Batch, CoupledObjective, Embeddings, Loss, Objective, Progress, StepReport
from ..core.disk.pieces import CheckpointReader, Pieces
from ..core.distributed import Ranks
from ..core.errors import ConfigError
from .clipping import clip_gradients, sum_norms, total_norms
from .device_context import Device
from .engine_kind import Costs, EngineKind, Sizes, autocast_bytes
from .optim import OptimConfig, build_optimizer, set_rates
from .ranked import PlainCopy, RankedEngineConfig, Root, assign_gpu, connect_device
from .zero import Zero


class DeepSpeedEngineConfig(RankedEngineConfig):
    """ZeRO with the given `stage`."""

    compile_by_default: ClassVar[bool] = False

    kind: Literal["deepspeed"] = resumable_field("deepspeed", "Kind of the engine: an entry of sparo.engines.")
    stage: Literal[1, 2, 3] = resumable_field(
        2, "ZeRO stage. 1 shards the optimizer state, 2 also gradients, 3 also gradients and parameters."
    )
    bucket_mb: int = resumable_field(200, "Gradient bucket size in MB.", gt=0)
    persistence_threshold: int = resumable_field(
        100_000, "Stage 3 does not shard parameters with fewer elements than this.", ge=0
    )


class _AutocastRoot(Root):
    """`Root` that opens autocast and the attention kernel itself, because DeepSpeed closes an autocast that it did not open."""

    def __init__(self, objective: Objective, contexts: Callable[[], list[AbstractContextManager[Any, Any]]]):
        super().__init__(objective)
        self._contexts = contexts
        self._shapes = [p.shape for p in objective.loss_parameters()]  # before DeepSpeed turns them into vectors

    def forward(self, batch: Batch, progress: Progress | None) -> Any:
        with ExitStack() as stack:
            for context in self._contexts():
                stack.enter_context(context)
            out = super().forward(batch, progress)
        if progress is not None:
            return out
        rows, own = out
        return rows, tuple(p.view(shape) for p, shape in zip(own, self._shapes, strict=True))


class DeepSpeedEngine:
    """Engine with DeepSpeed's ZeRO.

    Order of preparation: activation checkpointing, device, compile, optimizer, `deepspeed.initialize`, which shards
    model and optimizer. Weights are fp32, and bf16 is autocast, as in the other engines. DeepSpeed cannot hold 0-d
    parameters, so they are vectors with one element meanwhile. Checkpoints have our format, with fp32 master weights,
    for any engine and world size.

    Raises:
        ConfigError: DeepSpeed is not installed, there is one rank, the optimizer is not elementwise, or the objective
            freezes parameters in some steps.
    """

    def __init__(self, config: DeepSpeedEngineConfig, optim: OptimConfig, ranks: Ranks):
        self.config, self.optim_config, self.ranks = config, optim, ranks
        self.share, self.device_context = (ranks.rank, ranks.size), Device(config)
        assign_gpu(self.device_context, "deepspeed", ranks)

    @property
    def device(self) -> torch.device:
        return self.device_context.device

    def prepare(self, objective: Objective) -> None:
        if self.ranks.size == 1:
            raise ConfigError("engine.kind=deepspeed needs several ranks, got one. Use engine.kind=local.")
        # Its flat optimizer steps a whole group, so a frozen parameter would still move by its moments.
        self._refuse_frozen_steps(objective, Progress(0, 1, 0))
        connect_device(self.device_context, self.config, self.ranks)
        # Recorded before DeepSpeed flattens them, because checkpoints have the model's shapes.
        self._shapes = {name: tuple(t.shape) for name, t in objective.state_dict().items()}
        self._plain = PlainCopy(objective, self.ranks, self.device)
        self.objective = self.device_context.prepare_objective(objective)
        self.optimizer = self._build_optimizer(objective)
        self._param_groups = objective.param_groups()  # once: later steps do not collect names
        self._unclipped = {id(p) for name, p in objective.named_parameters() if name in self._param_groups.unclipped}

    def _refuse_frozen_steps(self, objective: Objective, progress: Progress) -> None:
        if objective.frozen_this_step(progress):
            raise ConfigError(
                f"engine.kind=deepspeed: {type(objective).__name__} freezes parameters in some steps, which DeepSpeed does not "
                "support. Use objective.freeze_last_layer=0, or engine.kind=ddp or fsdp2."
            )

    def forward(self, batch: Batch, progress: Progress, *, last: bool) -> Loss:
        """Return the objective's loss of this rank's batch; the mean over ranks is the global loss."""
        if isinstance(
            self.objective, CoupledObjective
        ):  # this loss communicates with other ranks, outside the timed part
            return self.objective.loss(*self.embed(batch, last=last), progress)
        return self._run(batch, progress)

    def embed(self, batch: Batch, *, last: bool) -> Embeddings:
        """Return a coupled objective's embeddings of this rank's batch."""
        return Embeddings(*self._run(batch, None))

    def _build_optimizer(self, objective: Objective) -> Any:
        os.environ.setdefault("DS_ACCELERATOR", self.device.type)
        deepspeed = _quiet_deepspeed()
        root = _AutocastRoot(objective, lambda: [self.device_context.autocast(), self.device_context.attention()])
        for p in objective.parameters():
            # Turn them into vectors before the optimizer is built, which would hold the old tensors.
            if p.ndim == 0:
                p.data = p.data.view(1)
        os.environ["LOCAL_RANK"] = str(self.device.index or 0)  # DeepSpeed takes its GPU from it
        # DeepSpeed counts elements, users count bytes.
        elements = self.config.bucket_mb * 1_000_000 // 4
        zero: dict[str, Any] = {"stage": self.config.stage, "reduce_bucket_size": elements, "overlap_comm": False}
        if self.config.stage == 3:
            zero |= {
                "stage3_param_persistence_threshold": self.config.persistence_threshold,
                "memory_efficient_linear": False,
            }
        else:
            zero |= {"allgather_bucket_size": elements, "contiguous_gradients": True}
        with self.ranks.error_context("sharding the model"):
            self._root, *_ = deepspeed.initialize(
                model=root,
                optimizer=build_optimizer(self.optim_config, objective, self.config.kind),
                dist_init_required=False,
                config={
                    "train_micro_batch_size_per_gpu": 1,  # the loop splits batches itself
                    "gradient_accumulation_steps": 1,
                    "gradient_clipping": 0.0 if self._clips_tensors else self.optim_config.clip_grad_norm or 0.0,
                    "steps_per_print": None,
                    "zero_allow_untested_optimizer": True,
                    "zero_force_ds_cpu_optimizer": False,
                    "zero_optimization": zero,
                },
            )
        self._zero = Zero(self._root, self.config.stage, self.optim_config.state_names)
        self._zero.zero_gradients()
        # Parameters that the loss itself reads are gathered by no submodule's hook.
        if self.config.stage == 3:
            for p in objective.loss_parameters():  # used by `Root`, which does not own them
                deepspeed.zero.register_external_parameter(self._root.module, p)
        return self._root.optimizer

    def _run(self, batch: Batch, progress: Progress | None) -> Any:
        device_batch = self.device_context.to_device(batch)
        with self.device_context.clock.running():
            return self._root(device_batch, progress)

    def backward(self, total: Tensor, *, last: bool) -> None:
        """Accumulate gradients; after the `last` micro-batch, each rank holds its shard of the mean over ranks."""
        self._root.set_gradient_accumulation_boundary(last)
        with self.device_context.attention(), self.ranks.error_context("averaging gradients"):
            # The loop weighs micro-batches itself.
            self._root.backward(total, scale_wrt_gas=False)

    def step(self, progress: Progress) -> StepReport:
        """Let DeepSpeed clip, check and step, then run the objective's `after_step` on the master weights of the loss's parameters."""
        self._refuse_frozen_steps(self.objective, progress)
        lr = set_rates(self.optimizer, self.optim_config, progress)
        # Read them before DeepSpeed's step, which scales them in place and releases them.
        gradients = self._local_gradients()
        param_norms = sum_norms(self.objective, gradients, self.ranks, self.device)
        norm, norms = total_norms(self._param_groups.norm_groups, param_norms)
        if self._clips_tensors and bool(norm.isfinite()):
            clip_gradients(self.optim_config, gradients, param_norms, norm, self._unclipped)
        with self.ranks.error_context("stepping"):
            self._root.step()
        applied = self._root.was_step_applied()
        # The moving average follows applied steps only.
        if applied:
            self._after_step(progress)
        self._zero.zero_gradients()
        # DeepSpeed may skip a step for an overflow that the norm of our shards does not show.
        return StepReport(lr, norm if applied else torch.full_like(norm, math.inf), applied, norms)

    def _after_step(self, progress: Progress) -> None:
        """Run the objective's `after_step` on whole parameters of the loss and store the result; averages of other parameters are updated in shards."""
        own = self.objective.loss_parameters()
        pairs = list(self.objective.ema_pairs()) if self.config.stage == 3 else []
        # Whole: the loss's parameters with their averages, and small parameters, which are whole on every rank anyway.
        whole = [*own, *(a for a, p in pairs if any(p is o for o in own) or self._zero.persistent(p))]
        ids = {id(p) for p in whole}
        # By identity: an average may be the source of another one.
        cut = list({id(each): each for a, p in pairs if id(a) not in ids for each in (a, p)}.values())
        saved_data = [(p, p.data) for p in (*whole, *cut)]
        for p in whole:
            p.data = p.detach().clone() if p.numel() else self._zero.gather_parameter(p, tuple(p.ds_shape))  # type: ignore[attr-defined]
        for p in cut:
            # These are views, so an updated average needs no write.
            p.data = self._zero.local_shard(p)[0]
        self.objective.after_step(progress, APPLIED)
        for p, data in saved_data:
            value, p.data = p.data, data
            if id(p) in ids:
                self._zero.write(p, value)

    @property
    def _clips_tensors(self) -> bool:
        """Return whether gradients are clipped per tensor, which DeepSpeed does not support."""
        return self.optim_config.clip_per == "tensor" and self.optim_config.clip_grad_norm is not None

    def _local_gradients(self) -> dict[int, Tensor]:
        named = self._trained_parameters()
        return {id(named[name]): gradient for name, gradient in self._zero.gradients(named)}

    def full_model(self) -> AbstractContextManager[Objective]:
        return self._plain.fill(self._gather_weights)

    def _trained_parameters(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.objective.named_parameters() if p.requires_grad}

    def _gather_weights(self) -> Iterator[tuple[str, Tensor]]:
        parameters = dict(self.objective.named_parameters(remove_duplicate=False))
        for name, shape in self._shapes.items():
            p = parameters.get(name)
            yield name, self.objective.get_buffer(name) if p is None else self._zero.gather_parameter(p, shape)

    def pieces(self) -> Pieces:
        """Return this rank's pieces of the fp32 master weights and the optimizer's moments, as other engines do."""
        return self._zero.pieces(self.objective, self._shapes, self.share)

    def load(self, source: CheckpointReader) -> None:
        """Load this rank's pieces of a checkpoint, whatever engine wrote it on however many ranks.

        Raises:
            CheckpointError: parameter names or shapes differ, or parameters have not taken the same number of steps.
        """
        self._zero.load(self.objective, self._shapes, source)
        with self.ranks.error_context("spreading the weights"):
            self._zero.refresh()


def _quiet_deepspeed() -> Any:
    try:
        import deepspeed
        from deepspeed.utils import groups, logger
    except ImportError as error:
        raise ConfigError(
            f"engine.kind=deepspeed: {error}; pip install -e '.[deepspeed]' in sparo's checkout"
        ) from None
    logger.setLevel("ERROR")  # the loop reports skipped steps
    # An operator for inference only, which would compile for half a minute on CPUs.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if dist.is_initialized():
        groups._WORLD_GROUP = dist.group.WORLD  # otherwise it creates a group with another timeout
    return deepspeed


def _costs(config: DeepSpeedEngineConfig, sizes: Sizes, ranks: int) -> Costs:
    p, t, cast = sizes.parameters, sizes.learning, autocast_bytes(config, sizes)
    sent = (ranks - 1) / ranks * (2 * 4 * p + 4 * t)
    bucket = 1e6 * config.bucket_mb
    if config.stage == 3:
        # DeepSpeed allocates the bucket once, and keeps it. By default it keeps up to 10^9 gathered parameters for backward.
        return Costs(4 * p / ranks, 4 * t / ranks, sizes.moments / ranks, 4 * min(p, 1e9) + cast + bucket, sent)
    gradients = 4 * t if config.stage == 1 else 4 * t / ranks
    # Master weights are stored in addition to the weights for computation, although both are fp32; gradients are
    # all-reduced.
    return Costs(4 * p, gradients, (4 * t + sizes.moments) / ranks, cast, sent)


ENGINE = EngineKind(DeepSpeedEngineConfig, DeepSpeedEngine, _costs)
