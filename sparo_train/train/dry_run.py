"""`sparo train --dry-run`: parameters, memory and data of a recipe, without reading pixels or allocating weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..core.contracts import Footprint, Objective
from ..core.errors import ConfigError, DataError
from ..core.registries import ENGINES
from ..data.read.loader import number_of_streams
from ..data.read.plan import epoch_sizes, repetition_warning
from ..data.sources.base import SourceConfig, open_source
from ..engine.engine_kind import Sizes
from ..engine.optim import OptimConfig, build_optimizer
from .build import build_objective
from .run_config import RunConfig

# Bytes per token and channel that a pre-norm block keeps for backward: in fp32 twice those of Korthikanti et al. (2022,
# Eq. 1, without scores); under autocast two more than theirs, because norms are computed in fp32.
_BLOCK_FP32, _BLOCK_BF16 = 68, 36
_BLOCK_BACKWARD = 8  # and those of the gradients inside one block
_WORKSPACES = 2 << 25  # of cuBLAS on a Hopper GPU: 32 MiB for each of the threads of forward and backward


class SourceFacts(NamedTuple):
    """One source. `samples` is None, with a reason, if its shards are not on this machine."""

    name: str
    shards: int | None
    samples: int | None
    weight: float
    share: float | None
    passes: float | None
    problem: str | None


class DryRun(NamedTuple):
    """Everything that `--dry-run` prints: bytes are estimates, counts are exact.

    `encoding`, and the estimates that need it, are None if the objective has no `footprint`.
    """

    parameters: dict[str, int]
    trained: int
    tokens: dict[str, int]
    encoding: int | None
    sources: list[SourceFacts]
    epoch_size: int | None
    steps: int | None
    samples: int | None
    memory: dict[str, int]
    warnings: list[str]


def meta_objective(config: RunConfig) -> Objective:
    """Return a recipe's objective on the meta device, where a model of any size takes no memory.

    Raises:
        ConfigError: nothing would be trained, or a parameter group matches no parameter.
    """
    with torch.device("meta"):
        objective = build_objective(config)
        build_optimizer(config.optim, objective, config.engine.kind)
    return objective


def dry_run(config: RunConfig) -> DryRun:
    """Resolve everything that can be known before the first step."""
    objective = meta_objective(config)
    footprint = objective.footprint(config.batch_size // (config.world_size or 1), config.batch_size)
    number_of_streams(config.data, config.batch_size, config.world_size or 1)  # training would refuse the same
    facts = [_source(name, source) for name, source in config.data.sources.items()]
    available = [f for f in facts if f.samples is not None]
    whole = sum(epoch_sizes([f.samples or 0 for f in available], [f.weight for f in available]))
    # A sum over the available sources only would be a wrong epoch, not an estimate.
    epoch = whole if len(available) == len(facts) else config.samples_per_epoch
    try:
        steps = config.total_steps(epoch or 0) if config.epochs is None or epoch else None
    except ConfigError:
        # If shards are elsewhere, the length is unknown, which is not a mistake in the recipe.
        if all(f.samples is not None for f in facts):
            raise
        steps = None
    if steps is not None:
        objective.refuse_length(steps)
    samples = steps * config.batch_size if steps else None
    facts = [_describe_sharing(f, epoch, samples) for f in facts]
    return DryRun(
        parameters_by_module(objective),
        sum(p.numel() for p in objective.parameters() if p.requires_grad),
        {} if footprint is None else footprint.tokens,
        None if footprint is None else footprint.encoding,
        facts,
        epoch,
        steps,
        samples,
        memory_estimate(
            config.engine,
            config.optim,
            config.world_size or 1,
            config.micro_batch(config.world_size or 1),
            objective,
            footprint,
        ),
        _warnings(config, facts),
    )


def _warnings(config: RunConfig, sources: Sequence[SourceFacts]) -> list[str]:
    lines = config.optim.unused_keys()
    # If a source is elsewhere, the number of samples is unknown.
    totals = [f.samples for f in sources if f.samples is not None]
    if len(totals) == len(sources):
        lines += filter(None, [repetition_warning(totals, [f.weight for f in sources], config.batch_size)])
    return lines


def parameters_by_module(objective: Objective) -> dict[str, int]:
    """Return the number of parameters per part; the entries sum to the total."""
    # Three levels of names: fewer would merge the towers, more would fill more than a screen.
    out: dict[str, int] = {}
    for name, p in objective.named_parameters():
        key = ".".join(name.split(".")[:3]).removeprefix("model.")
        out[key] = out.get(key, 0) + p.numel()
    return out


def memory_estimate(
    engine: Any,
    optim: OptimConfig,
    world_size: int,
    micro_batch: int,
    objective: Objective,
    footprint: Footprint | None,
) -> dict[str, int]:
    """Return the bytes that one rank needs on a GPU: state kept by the engine, activations of a micro-batch, and the loss.

    The peak is at the start of backward. With an engine for one process, gradients do not exist yet at that time, so
    `gradients` counts only what exceeds the activations, which they replace.

    Args:
        engine, optim: blocks of the recipe.
        world_size: number of ranks.
        micro_batch: samples per forward and rank.
        objective: on the meta device.
        footprint: size of one sample.
    """
    sizes = Sizes.from_objective(objective, len(set(optim.state_names) - {"step"}))
    engine_costs = ENGINES.get(engine.kind).costs(engine, sizes, world_size)
    states = {name: int(getattr(engine_costs, name)) for name in ("weights", "gradients", "optimizer", "gathered")}
    if footprint is None:
        return states
    half, towers = engine.precision == "bf16", footprint.towers
    block = _BLOCK_BF16 if half else _BLOCK_FP32
    largest = max((size for size, _ in towers), default=0)
    if engine.grad_checkpointing:  # the input of every block, and one whole block that is recomputed at a time
        block_inputs = sum((2 if half else 4) * size * blocks for size, blocks in towers)
        # The largest block counts: while it is recomputed, the others keep only their inputs.
        activations = block_inputs + block * largest
    else:
        activations = sum(block * size * blocks for size, blocks in towers) + _BLOCK_BACKWARD * largest
    activations += (2 if half else 4) * footprint.written
    memory = {**states, "activations": micro_batch * activations, "loss": footprint.loss, "workspaces": _WORKSPACES}
    if ENGINES.get(engine.kind).one_process:
        memory["gradients"] = max(0, memory["gradients"] - memory["activations"] - memory["loss"])
    return memory


def _source(name: str, source: SourceConfig) -> SourceFacts:
    try:
        source_data = open_source(name, source)
    except (ConfigError, DataError) as error:
        return SourceFacts(name, None, None, source.weight, None, None, str(error))
    # Truncated shards are reported but not fatal here, because a dry run exists to report them.
    broken = (
        f"{len(source_data.incomplete_storages())} incomplete shard(s)" if source_data.incomplete_storages() else None
    )
    return SourceFacts(name, len(source_data.storages), source_data.samples, source.weight, None, None, broken)


def _describe_sharing(facts: SourceFacts, epoch: int | None, samples: int | None) -> SourceFacts:
    if facts.samples is None or not epoch or not samples:
        return facts
    share = facts.samples * facts.weight / epoch
    return facts._replace(share=share, passes=samples * share / facts.samples)
