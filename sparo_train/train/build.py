"""Builders: objective, data pipeline, ranks and engine from a recipe, each by its registry entry."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..core.accelerator import collectives, find_device, uses_nccl
from ..core.contracts import Engine, Objective
from ..core.distributed import Ranks
from ..core.errors import ConfigError
from ..core.registries import ENGINES, METHODS
from ..core.rng import torch_seed
from ..core.world import World
from ..data.read.loader import Pipeline
from ..engine.optim import OptimConfig
from ..engine.ranked import RankedEngineConfig, record_collectives
from .run_config import RunConfig

_SINGLE_PROCESS = World()


def build_objective(config: RunConfig, weights: Mapping[str, Tensor] | None = None) -> Objective:
    """Return the objective with its modules initialised from the run's seed.

    Args:
        config: the recipe.
        weights: trained weights that will be loaded into it, so that files which only training needs may be absent;
            None: for training.
    """
    # Every rank builds the same weights, so they need not be broadcast. For a model that only loads weights, the random
    # generators of GPUs belong to the caller.
    (torch.manual_seed if weights is None else torch.default_generator.manual_seed)(torch_seed(config.seed, "init"))
    method = METHODS.get(config.objective.kind)
    if weights is None or method.objective_of_weights is None:
        objective = method.objective(config.objective)
    else:
        objective = method.objective_of_weights(config.objective, weights)
    # Patterns instead of prefixes, because often one kind of parameter is frozen in every block.
    for pattern in config.freeze:
        # Match all names of a parameter: one that two towers share has a name in each.
        matches = [p for name, p in objective.named_parameters(remove_duplicate=False) if fnmatchcase(name, pattern)]
        if not matches:
            names = [name for name, _ in objective.named_parameters()]
            raise ConfigError(f"freeze: {pattern} matches no parameter; names look like {names[0]} and {names[-1]}")
        for p in matches:
            p.requires_grad_(False)
    return objective


def build_pipeline(config: RunConfig, world: World = _SINGLE_PROCESS) -> Pipeline:
    """Return the training data of a run, as this rank reads it."""
    # The method defines its examples, because only it knows which inputs it needs.
    examples = METHODS.get(config.objective.kind).examples(config.objective, config.data)
    return Pipeline(config.data, config.batch_size, examples, config.seed, world.rank, world.size)


def num_trained_parameters(config: RunConfig, weights: Mapping[str, Tensor] | None = None) -> int:
    """Return the number of parameters that a recipe trains, counted on the meta device, where a model of any size takes no memory.

    For `weights`, see `build_objective`.
    """
    with torch.device("meta"):
        return sum(p.numel() for p in build_objective(config, weights).parameters() if p.requires_grad)


def build_ranks(engine: Any, world_size: int | None, world: World, folder: Path | None = None) -> Ranks:
    """Join the other ranks.

    Args:
        engine: the recipe's `engine` block.
        world_size: the recipe's required number of ranks; None: any.
        world: the ranks that the launcher started.
        folder: the run folder, for the collectives before a timeout; None: they are not written.

    Raises:
        ConfigError: an engine of one process was started on several ranks, or the number of ranks differs from
            `world_size`.
    """
    if world_size not in (None, world.size):
        raise ConfigError(
            f"world_size={world_size}: {world.size} rank(s) were started. Start as many ranks as world_size says, or change world_size."
        )
    if ENGINES.get(engine.kind).one_process:
        if world.size > 1:
            raise ConfigError(
                f"engine.kind={engine.kind} runs in one process, got {world.size}. Use engine.kind=ddp, fsdp2 or deepspeed."
            )
        return Ranks(world, "gloo", 0.0)
    # Gloo in addition to nccl: messages of the loop between ranks must not wait for a GPU.
    device = find_device(engine.device, "engine.device")
    if folder is not None and uses_nccl(device) and isinstance(engine, RankedEngineConfig):
        record_collectives(engine.flight_recorder, folder)
    return Ranks(world, collectives(device), engine.timeout, getattr(engine, "join_timeout", None))


def build_engine(engine: Any, optim: OptimConfig, ranks: Ranks) -> Engine:
    """Return the recipe's engine on this rank."""
    return ENGINES.get(engine.kind).build(engine, optim, ranks)
