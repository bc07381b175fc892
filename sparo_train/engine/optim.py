"""The recipe's `optim` block: optimizers, their parameter groups, and learning rates and weight decay per step."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Annotated, Any, ClassVar, Literal, Protocol

import torch
from pydantic import model_validator
from torch import nn
from torch.distributed.tensor import DTensor

from ..core.config import Frozen, between, field, resumable_field
from ..core.contracts import Objective, Progress
from ..core.errors import ConfigError
from ..core.schedules import cool_down, cosine, linear


class OptimGroupConfig(Frozen):
    """Parameters with their own learning rate."""

    match: tuple[str, ...] = field(
        ...,
        "Patterns of parameter names, as in [model.dvae.*]. A parameter belongs to the first group that matches.",
        min_length=1,
    )
    lr_factor: float = field(1.0, "Factor on optim.lr.", gt=0)
    decay_factor: float = field(1.0, "Factor on optim.weight_decay, for parameters that have weight decay.", ge=0)
    schedule: Literal["shared", "unwarmed", "constant"] = field(
        "shared",
        "Schedule of this group's learning rate. shared: optim.schedule. unwarmed: optim.schedule without warm-up. "
        "constant: lr_factor times optim.lr throughout.",
    )


class Optimizer(Protocol):
    """Interface of an optimizer to engines; every `torch.optim.Optimizer` has it."""

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...
    @property
    def state(self) -> Any: ...
    def step(self) -> Any: ...
    def zero_grad(self, set_to_none: bool = True) -> None: ...


class OptimConfig(Frozen):
    """Keys of every optimizer. An entry of `sparo.optimizers` derives from this class and adds `kind` and its own keys.

    Any engine, sharded or not, may step an optimizer. Its state is stored by parameter name, so a run can resume on
    another engine and another number of ranks.
    """

    # Names of the tensors that the optimizer keeps for each parameter. A checkpoint with other names is refused.
    state_names: ClassVar[tuple[str, ...]]
    # Engines that can step it; None: all of them.
    engines: ClassVar[tuple[str, ...] | None] = None
    # True if `step` leaves weights and state unchanged when the attribute `found_inf` is 1, as torch's fused optimizers
    # do. Otherwise the host waits for the device in every step to learn whether the gradient is finite.
    skips_non_finite: ClassVar[bool] = False

    kind: str = field(..., "Kind of the optimizer: an entry of sparo.optimizers.")
    lr: float = field(5e-4, "Peak learning rate.", gt=0)
    weight_decay: float = field(
        0.2, "Decoupled weight decay. The objective decides to which parameters it applies.", ge=0
    )
    weight_decay_end: float | None = field(
        None,
        "Weight decay at the end of training. The decay moves from weight_decay to this value along a cosine, "
        "without warm-up (DINO). Default: constant weight decay.",
        ge=0,
    )
    schedule: Literal["cosine", "constant", "half_life", "wsd", "cooldown"] = field(
        "cosine",
        "Schedule of the learning rate after warm-up. wsd (warmup-stable-decay): constant, then a decay over the last cooldown_steps. "
        "cooldown: decay from the first step to the last.",
    )
    cooldown_steps: int | None = field(
        None, "For schedule=wsd: final steps in which the learning rate decays to min_lr.", gt=0, examples=[1000]
    )
    cooldown_shape: Literal["linear", "sqrt"] = field(
        "linear",
        "For schedule=wsd or cooldown: shape of the decay, linear or sqrt (1 - sqrt(t), where t is the elapsed fraction of the decay; Hägele et al. 2024).",
    )
    half_life: int = field(
        100_000, "For schedule=half_life: steps in which the learning rate halves; the decay is continuous.", gt=0
    )
    half_life_start: Literal["start", "warmup"] = field(
        "start",
        "For schedule=half_life: decay from the first step (Locatello et al. 2020) or after warm-up (DINOSAUR).",
    )
    warmup_steps: int = field(0, "Steps of linear warm-up.", ge=0)
    # In open_clip, the first step has lr/warmup_steps. In DINO, it has zero, and two steps have the full rate at the
    # end of the warm-up.
    warmup_from_zero: bool = field(False, "Start the warm-up at zero (DINO) instead of lr/warmup_steps (open_clip).")
    min_lr: float = field(0.0, "Final learning rate of schedules that decay.", ge=0)
    clip_grad_norm: float | None = field(
        None, "Largest gradient norm. Default: no clipping, as in the SPARO paper's CLIP.", gt=0
    )
    clip_per: Literal["global", "tensor"] = field(
        "global", "global: clip the norm of all gradients together; tensor: separately per parameter (DINO)."
    )
    max_consecutive_skips: int = resumable_field(
        20,
        "Number of consecutive steps that may be skipped because their gradient is not finite. One more such step ends training.",
        ge=0,
    )
    groups: tuple[OptimGroupConfig, ...] = field(
        (), "Parameters with their own learning rate or weight decay, selected by name."
    )
    layer_decay: float | None = field(
        None,
        "Layer-wise learning rate decay (BEiT): each layer of a tower has the learning rate of the next layer, multiplied by this factor. Default: none.",
        gt=0,
        le=1,
        examples=[0.75],
    )

    @abstractmethod
    def build(self, groups: list[dict[str, Any]]) -> Optimizer:
        """Return the optimizer of these parameter groups.

        Args:
            groups: `params`, `weight_decay`, and `role` from `role_of`, sorted by role. All other entries are needed by
                sparo and must stay in the optimizer's groups.
        """

    def parameter_role(self, name: str, parameter: nn.Parameter, adamw_only: Collection[str]) -> int:
        """Return a number; parameters with different numbers are in different groups. For optimizers that treat some parameters differently.

        Args:
            name: name of the parameter.
            parameter: the parameter.
            adamw_only: names of matrices that are not linear maps (`ParamGroups.adamw_only`).
        """
        return 0

    def group_state_names(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the names of the tensors that the optimizer keeps for each parameter of a group."""
        return self.state_names

    @model_validator(mode="after")
    def _check_min_lr(self) -> OptimConfig:
        if self.min_lr > self.lr:
            raise ValueError(f"optim.min_lr={self.min_lr}: must not be above optim.lr={self.lr}. Lower it.")
        return self

    @model_validator(mode="after")
    def _schedule_keys(self) -> OptimConfig:
        if (self.schedule == "wsd") != (self.cooldown_steps is not None):
            raise ValueError(
                "optim.cooldown_steps: must be set if optim.schedule=wsd, and must not be set otherwise "
                "(optim.schedule=cooldown decays over the whole run). For wsd, set optim.cooldown_steps; otherwise "
                "remove this key."
            )
        if self.schedule == "cooldown" and self.warmup_steps:
            raise ValueError("optim.schedule=cooldown starts at optim.lr. Set optim.warmup_steps=0.")
        return self

    def unused_keys(self) -> list[str]:
        """Return a line for each key that is set but has no effect with the others.

        They cause warnings, not errors: a recipe with another schedule than its parent would have to unset each of
        them.
        """
        of = {
            "half_life": ("schedule=half_life", self.schedule == "half_life"),
            "half_life_start": ("schedule=half_life", self.schedule == "half_life"),
            "cooldown_shape": ("schedule=wsd or cooldown", self.schedule in ("wsd", "cooldown")),
            "min_lr": ("a schedule that falls", self.schedule != "constant"),
            "warmup_from_zero": ("optim.warmup_steps", self.warmup_steps > 0),
            "clip_per": ("optim.clip_grad_norm", self.clip_grad_norm is not None),
        }
        # Compare values, because the stored recipe of a run lists every key.
        non_default = {k: getattr(self, k) for k in of if getattr(self, k) != type(self).model_fields[k].default}
        return [f"optim.{k}={v}: is not read; it belongs to {of[k][0]}" for k, v in non_default.items() if not of[k][1]]


class AdamWConfig(OptimConfig):
    """torch.optim.AdamW with its fused kernel. The defaults are those of open_clip for ViTs."""

    state_names: ClassVar[tuple[str, ...]] = ("step", "exp_avg", "exp_avg_sq")
    skips_non_finite: ClassVar[bool] = True

    kind: Literal["adamw"] = field("adamw", "Kind of the optimizer: an entry of sparo.optimizers.")  # pyright: ignore[reportIncompatibleVariableOverride]
    betas: Annotated[tuple[float, float], between(0, 1 - 1e-9)] = field(
        (0.9, 0.98), "Decay rates of the first and second moment of the gradient."
    )
    eps: float = field(1e-6, "Constant added to the root of the second moment.", gt=0)

    def build(self, groups: list[dict[str, Any]]) -> Optimizer:
        # One kernel for all parameters, and the only one that can skip a step without the host.
        return torch.optim.AdamW(groups, lr=self.lr, betas=self.betas, eps=self.eps, fused=True)


def learning_rate(config: OptimConfig, step: int, total_steps: int, warmup: bool = True) -> float:
    """Return the learning rate of 0-based `step`.

    Linear warm-up, followed by a cosine to `min_lr`, a constant, halving every `half_life` steps down to `min_lr`, or a
    decay to `min_lr` at the end (`wsd`) or from the start (`cooldown`).

    Args:
        config: the `optim` block.
        step, total_steps: position and length of training.
        warmup: False: start with the schedule after the warm-up (a group's `schedule: unwarmed`).
    """
    warm = config.warmup_steps
    halved = config.schedule == "half_life"
    rate = config.lr
    if halved:
        rate *= 0.5 ** (max(step - (warm if config.half_life_start == "warmup" else 0), 0) / config.half_life)
        rate = max(rate, config.min_lr)
    if step < warm and warmup:
        return linear(0.0, rate, step, warm) if config.warmup_from_zero else rate * (step + 1) / warm
    if halved or config.schedule == "constant":
        return rate
    if config.schedule in ("wsd", "cooldown"):
        falling = config.cooldown_steps or total_steps
        return cool_down(rate, config.min_lr, step - (total_steps - falling), falling, config.cooldown_shape)
    return cosine(config.lr, config.min_lr, max(step - warm, 0), total_steps - warm)


def weight_decay(config: OptimConfig, step: int, total_steps: int) -> float:
    """Return the weight decay of 0-based `step` for parameters that are decayed."""
    end = config.weight_decay_end
    return config.weight_decay if end is None else cosine(config.weight_decay, end, step, total_steps)


def set_rates(optimizer: Optimizer, config: OptimConfig, progress: Progress) -> float:
    """Write the learning rate and weight decay of this step to the optimizer's groups; return the rate."""
    at = progress.step, progress.total_steps
    lr, decay = learning_rate(config, *at), weight_decay(config, *at)
    rates = {"shared": lr, "unwarmed": learning_rate(config, *at, warmup=False), "constant": config.lr}
    for group in optimizer.param_groups:
        group["lr"] = group["lr_factor"] * rates[group["schedule"]]
        group["weight_decay"] = group["decay_factor"] * decay  # parameters without decay have a factor of zero
    return lr


def build_optimizer(config: OptimConfig, objective: Objective, engine: str = "local") -> Optimizer:
    """Build the optimizer over the trainable parameters; `objective.param_groups()` lists those without weight decay.

    Args:
        config: the `optim` block.
        objective: holds the parameters.
        engine: kind of the engine that steps the optimizer.

    Raises:
        ConfigError: the engine cannot step this optimizer, nothing is trainable, a pattern of `optim.groups` matches no
            parameter, or the optimizer refuses the parameters.
    """
    if config.engines is not None and engine not in config.engines:
        raise ConfigError(
            f"engine.kind={engine}: cannot step optim.kind={config.kind}. Use engine.kind={' or '.join(config.engines)}"
        )
    apart = objective.param_groups()
    named = {name: p for name, p in objective.named_parameters() if p.requires_grad}
    if not named:
        raise ConfigError("objective: no parameter is trainable")
    if all(p.ndim == 0 for p in named.values()):
        raise ConfigError(f"objective: only {', '.join(named)} would be trained. Freeze less.")
    if config.layer_decay is not None and not apart.layer_ids:
        raise ConfigError(
            f"optim.layer_decay={config.layer_decay}: this objective defines no layers. Remove optim.layer_decay, and use "
            "optim.groups."
        )
    layer_ids = {} if config.layer_decay is None else apart.layer_ids
    param_groups: dict[tuple[int, int, int, bool, bool], list[nn.Parameter]] = {}
    for name, number in group_numbers(config.groups, list(named)).items():
        p = named[name]
        # The fused kernel does not support shards and whole tensors in one group.
        role = config.parameter_role(name, p, apart.adamw_only)
        key = role, number, layer_ids.get(name, 0), name not in apart.no_decay, isinstance(p, DTensor)
        # Decay, factors and kernels belong to an optimizer group, so parameters that share all of them share a group.
        param_groups.setdefault(key, []).append(p)
    group_configs = [OptimGroupConfig(match=("*",)), *config.groups]
    groups: list[dict[str, Any]] = []
    # The same order in every start: checkpoints name parameters, but DeepSpeed slices groups in their order.
    for key in sorted(param_groups):
        role, number, layer_id, decayed, _ = key
        decay_factor = group_configs[number].decay_factor if decayed else 0.0
        groups.append(
            {
                "params": param_groups[key],
                "role": role,
                "decay_factor": decay_factor,
                "lr_factor": group_configs[number].lr_factor * (config.layer_decay or 1.0) ** layer_id,
                "schedule": group_configs[number].schedule,
                "weight_decay": config.weight_decay * decay_factor,
            }
        )
    return config.build(groups)


def group_numbers(groups: Sequence[OptimGroupConfig], names: Sequence[str]) -> dict[str, int]:
    """Return the number of each parameter's group, from 1, or 0 for none. Raises `ConfigError` if a pattern matches no parameter."""
    group_by_name = dict.fromkeys(names, 0)
    for number, group in reversed(list(enumerate(groups, start=1))):  # so that the first matching group wins
        for pattern in group.match:
            matches = [name for name in names if fnmatchcase(name, pattern)]
            if not matches:
                near = f"; names are as {names[0]}, {names[-1]}" if names else ", as none is"
                raise ConfigError(f"optim.groups.{number - 1}.match={pattern}: matches no trained parameter{near}")
            group_by_name |= dict.fromkeys(matches, number)
    for number, group in enumerate(groups, start=1):
        if number not in group_by_name.values():
            raise ConfigError(
                f"optim.groups.{number - 1}.match={list(group.match)}: all matching parameters already belong to "
                "earlier groups. Put this group before those groups."
            )
    return group_by_name
