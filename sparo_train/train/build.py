"""From a recipe to objects."""

from __future__ import annotations

import torch

from ..core.contracts import Engine, Objective
from ..core.distributed import Ranks, World
from ..core.errors import ConfigError
from ..core.rng import torch_seed
from ..data.crops import CropExamples
from ..data.loader import Pipeline
from ..data.pairs import PairExamples
from ..data.sources import DataConfig
from ..data.text import VOCABULARY, ClipTokenizer
from ..engine.ddp import DdpEngine
from ..engine.deepspeed import DeepSpeedEngine
from ..engine.fsdp2 import Fsdp2Engine
from ..engine.local import LocalEngine
from ..models.vit_config import DROP_RANGE
from ..objectives.clip import ClipObjective, ClipObjectiveConfig
from ..objectives.dino import DinoObjective, DinoObjectiveConfig
from .run import RunConfig

_ALONE = World()


def build_objective(config: RunConfig) -> Objective:
    """The objective with its modules initialised from the run's seed."""
    torch.manual_seed(torch_seed(config.seed, "init"))
    if isinstance(config.objective, DinoObjectiveConfig):
        return DinoObjective(config.objective)
    return ClipObjective(config.objective)


def build_pipeline(config: RunConfig, world: World = _ALONE) -> Pipeline:
    """The training data of a run, as one of its ranks reads it."""
    objective = config.objective
    crops = isinstance(objective, DinoObjectiveConfig)
    examples = _crops(objective, config.data) if crops else _pairs(objective, config.data)
    return Pipeline(config.data, config.batch_size, examples, config.seed, world.rank, world.size)


def _crops(objective: DinoObjectiveConfig, data: DataConfig) -> CropExamples:
    model = objective.model
    paths = 2 * model.blocks if model.drop_path else 0
    return CropExamples(data, objective.crops, model.image_size, paths, DROP_RANGE)


def _pairs(objective: ClipObjectiveConfig, data: DataConfig) -> PairExamples:
    model = objective.model
    if model.text.vocab_size < VOCABULARY:
        raise ConfigError(
            f"objective.model.text.vocab_size={model.text.vocab_size}: CLIP's tokenizer has {VOCABULARY} ids; remove the key"
        )
    return PairExamples(
        data,
        model.vision.image_size,
        model.text.context_length,
        ClipTokenizer(model.text.context_length),
        (model.vision.tokens - 1, model.vision.kept_patches) if model.vision.patch_dropout else None,
    )


def build_ranks(config: RunConfig, world: World) -> Ranks:
    """Join the other ranks.

    Raises:
        ConfigError: an engine of one process among several, or not the recipe's world size.
    """
    engine = config.engine
    if config.world_size not in (None, world.size):
        raise ConfigError(
            f"world_size={config.world_size}: {world.size} rank(s) were started; start that many, or change the key"
        )
    if engine.kind == "local":
        if world.size > 1:
            raise ConfigError(
                f"engine.kind=local runs in one process and {world.size} were started; use engine.kind=ddp, fsdp2 or deepspeed"
            )
        return Ranks(world, "gloo", 0.0)
    on_gpu = engine.device == "cuda" or (engine.device == "auto" and torch.cuda.is_available())
    return Ranks(world, "cpu:gloo,cuda:nccl" if on_gpu else "gloo", engine.timeout)


def build_engine(config: RunConfig, ranks: Ranks) -> Engine:
    """The recipe's engine on this rank."""
    if config.engine.kind == "local":
        return LocalEngine(config.engine, config.optim)
    if config.engine.kind == "ddp":
        return DdpEngine(config.engine, config.optim, ranks)
    if config.engine.kind == "fsdp2":
        return Fsdp2Engine(config.engine, config.optim, ranks)
    return DeepSpeedEngine(config.engine, config.optim, ranks)
