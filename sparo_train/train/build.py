"""From a recipe to objects."""

from __future__ import annotations

import torch

from ..core.contracts import Objective
from ..core.errors import ConfigError
from ..core.rng import torch_seed
from ..data.loader import ClipPipeline
from ..data.text import VOCABULARY, ClipTokenizer
from ..engine.local import LocalEngine
from ..objectives.clip import ClipObjective
from .run import RunConfig


def build_objective(config: RunConfig) -> Objective:
    """The objective with its modules initialised from the run's seed."""
    torch.manual_seed(torch_seed(config.seed, "init"))
    return ClipObjective(config.objective)


def build_pipeline(config: RunConfig) -> ClipPipeline:
    """The training data of a run."""
    model = config.objective.model
    if model.text.vocab_size < VOCABULARY:
        raise ConfigError(
            f"objective.model.text.vocab_size={model.text.vocab_size}: CLIP's tokenizer has {VOCABULARY} ids; remove the key"
        )
    tokenizer = ClipTokenizer(model.text.context_length)
    return ClipPipeline(
        config.data,
        config.batch_size,
        model.vision.image_size,
        model.text.context_length,
        tokenizer,
        config.seed,
        (model.vision.tokens - 1, model.vision.kept_patches) if model.vision.patch_dropout else None,
    )


def build_engine(config: RunConfig) -> LocalEngine:
    return LocalEngine(config.engine, config.optim)
