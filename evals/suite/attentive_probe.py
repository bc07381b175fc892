"""Readouts as attentive probes: tokens of a frozen encoder are computed once and stored, and a readout is trained on them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from sparo_train.core.config import field
from sparo_train.core.errors import ConfigError
from sparo_train.core.registries import READOUTS
from sparo_train.core.registry import FromRegistry
from sparo_train.models.readout import Placement, ReadOut, normalize_slots

from ..encoders.capabilities import TokensEncoder
from ..encoders.encoder import Encoder
from ..feature_store.feature_table import Features, View
from ..sets.open_set import open_labelled
from ..sets.task_config import LabelledTaskConfig
from ..tasks import attentive
from ..tasks.probe import Labelled
from ..tasks.result import Result
from .labelled_tasks import check_labelled
from .scoring import Scoring, attach_data_info, chance, collect_labels, training_details
from .task import Task


class AttentiveTaskConfig(LabelledTaskConfig):
    """A readout of `sparo.readouts` and a linear layer on frozen tokens. The defaults are ours."""

    task: Literal["attentive_probe"] = field("attentive_probe", "Kind of the task: an entry of sparo.tasks.")
    head: Annotated[Any, FromRegistry(READOUTS, default="ep")] = Field(
        default_factory=lambda: READOUTS.get("ep")(), description="Readout of the tokens: an entry of sparo.readouts."
    )
    lr: float = field(1e-3, "Peak learning rate of AdamW.", gt=0)
    weight_decay: float = field(1e-4, "Weight decay of weight matrices. Biases and norms have none.", ge=0)
    epochs: int = field(20, "Passes over the training images.", ge=1)
    warmup_epochs: float = field(1.0, "Epochs of linear warm-up.", ge=0)
    batch_size: int = field(256, "Images per step.", ge=2)
    seed: int = field(0, "Seed of the initial weights and the order of images.")


class Head(nn.Module):
    """Readout of tokens (B, N, d) after the tower's last norm to encodings (B, width).

    Args:
        readout: None: use the first token.
        prefix: number of tokens before the patches, including the class token.
    """

    def __init__(self, readout: ReadOut | None, place: Placement, prefix: int):
        super().__init__()
        self.readout, self.place, self.skip = readout, place, 0 if place.attend_cls else prefix

    def forward(self, tokens: Tensor) -> Tensor:
        if self.readout is None:
            return tokens[:, 0]
        slots = self.readout(tokens[:, self.skip :])
        if self.place.normalize:
            slots = normalize_slots(slots, self.place.weighting, self.place.representation)
        return slots.values.flatten(1)


def build_head(config: Any, dim: int, prefix: int, has_cls: bool = True) -> tuple[Head, int]:
    """Return the head of a block, and its width. Raises `ConfigError` for one that needs a missing class token, or texts."""
    if config.conditioned:
        raise ConfigError(
            f"head.kind={config.kind}: needs texts for pooling, but a probe has none. Use head.kind=map or head.kind=ep."
        )
    # A probe standardises its input, so slots are not normalized, unless the block sets it.
    config = config.resolve_defaults(normalize=False)
    place, readout = config.placement, config.build(dim, None, dim).image
    if config.reads_cls and not has_cls:
        raise ConfigError(f"head.kind={config.kind}: needs a class token, which this encoder lacks. Use head.kind=gap.")
    slots, width = (1, dim) if readout is None else (readout.slots, readout.width)
    if readout is not None and place.normalize:  # a learned weight is not part of the encoding
        slots, width = config.shape(dim)
    return Head(readout, place, prefix), slots * width


def run_attentive(scoring: Scoring, task: AttentiveTaskConfig) -> Result:
    """Train on one rank, while the others wait for the result."""
    encoder = scoring.encoder
    assert isinstance(encoder, TokensEncoder)  # encoders with `tokens`
    train_set, test_set = open_labelled(task)
    size, prefix = encoder.image_size, encoder.prefix_tokens
    # Use a black image, because only the model knows its number of registers and patches.
    length, dim = encoder.tokens(torch.zeros(1, len(encoder.mean), size, size, dtype=torch.uint8)).shape[1:]
    view = View("tokens", lambda pixels: encoder.tokens(pixels).flatten(1))
    train, test = scoring.features(
        [train_set, test_set], task.workers, encoder.transform_with_resize(task.resize), view
    )
    label_sets = [collect_labels(features, source) for features, source in ((train, train_set), (test, test_set))]
    classes = 1 + int(torch.cat(label_sets).max())
    how = attentive.AttentiveTraining(
        task.lr, task.weight_decay, task.epochs, task.batch_size, task.warmup_epochs, task.seed, encoder.device
    )
    sets = [_tokens(features, labels, length, dim) for features, labels in zip((train, test), label_sets, strict=True)]

    def train_and_score() -> Result:
        probe = attentive.train_attentive(
            # Created inside, after seeding, because the initial weights depend on it.
            lambda: attentive.AttentiveProbe(*build_head(task.head, dim, prefix, encoder.has_class_token), classes),
            sets[0],
            how,
        )
        result = attentive.score(probe, sets[1], classes, encoder.device)
        head = sum(p.numel() for p in probe.head.parameters())
        return result._replace(
            chance=chance(label_sets),
            options={"head": task.head.kind, "head_parameters": head, "lr": task.lr, "weight_decay": task.weight_decay,
                     "epochs": task.epochs, "batch_size": task.batch_size, "seed": task.seed,
                     "steps": task.epochs * -(-len(label_sets[0]) // task.batch_size)}
        )  # fmt: skip

    return attach_data_info(
        scoring.ranks.rank0_broadcast(train_and_score),
        test,
        test_set,
        training_details(train_set, test_set, task.resize),
    )


def _tokens(features: Features, labels: Tensor, length: int, dim: int) -> Labelled:
    return Labelled(lambda numbers: features.rows(numbers).view(-1, length, dim), labels)


def _incompatibility(task: AttentiveTaskConfig, encoder: Encoder) -> str | None:
    """Return why the head cannot read this encoder's tokens, before they are encoded, or before a training starts."""
    if not isinstance(encoder, TokensEncoder) or getattr(encoder, "token_width", None) is None:
        return None  # a plug-in's encoder may not know its width; then the first image shows it
    try:
        with torch.device("meta"):
            build_head(task.head, encoder.token_width, encoder.prefix_tokens, encoder.has_class_token)
    except (ConfigError, ValueError, AssertionError, RuntimeError) as error:
        message = str(error).replace("readout.", "head.") or f"does not match tokens of width {encoder.token_width}"
        return message if message.startswith("head") else f"head={task.head.kind}: {message}"
    return None


ATTENTIVE = Task(
    AttentiveTaskConfig, run_attentive, check_labelled, needs=("tokens",), incompatibility=_incompatibility
)
