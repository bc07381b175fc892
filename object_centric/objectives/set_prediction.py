"""Set prediction: an image to the set of its objects, one slot each, matched to the ground truth (Locatello et al. 2020, Section 4.2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Self

import numpy as np
import torch
from pydantic import model_validator
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn
from torch.nn import functional as F

from evals.sets.objects import REACH, WIDTH, attribute_columns, object_rows
from sparo_train.core.config import Frozen, field
from sparo_train.core.contracts import Batch, Footprint, Loss, Objective, Progress
from sparo_train.core.errors import BadSampleError, DataError
from sparo_train.data.read.loader import Examples, OnStage, ignore_stage
from sparo_train.data.sources.base import DataConfig, Source
from sparo_train.models.precision import at_least_fp32
from sparo_train.objectives.method import Method, RecipeBlocks

from .slot_tower import SlotExamples, SlotTower, SlotTowerConfig, TowerOutput, refuse_signed


class SetModelConfig(SlotTowerConfig):
    """A tower, and an MLP that reads an object from each slot."""

    head_width: int = field(64, "Hidden units of the head that predicts an object from a slot.", gt=0)


class SetPredictionConfig(Frozen):
    """Prediction of an object from each slot, matched to the scene's objects (Locatello et al. 2020, Sec. 3.2)."""

    kind: Literal["set_prediction"] = field("set_prediction", "Training method: an entry of sparo.methods.")
    model: SetModelConfig = field(SetModelConfig(), "Encoder, grouping and head.")
    huber: float = field(1.0, "Difference up to which the Huber loss is quadratic.", gt=0)
    signed: bool = field(True, "Scale pixels to -1..1 (Locatello et al. 2020). false: 0..1.")

    @model_validator(mode="after")
    def _check_signed(self) -> Self:
        refuse_signed(self.signed, self.model)
        return self


class SetModelOutput(NamedTuple):
    """Predicted objects (b, K, WIDTH) in 0..1, whose last value is the confidence that there is an object, and the tower's output."""

    objects: Tensor
    tower_output: TowerOutput


class SetModel(nn.Module):
    """Model of images (b, 3, S, S) and noise (b, *config.noise) that predicts objects."""

    def __init__(self, config: SetModelConfig):
        super().__init__()
        self.config = config
        self.tower = SlotTower(config)
        wide = config.grouping.width
        self.head = nn.Sequential(nn.Linear(wide, config.head_width), nn.ReLU(), nn.Linear(config.head_width, WIDTH))

    def forward(self, images: Tensor, noise: Tensor) -> SetModelOutput:
        tower_output = self.tower(images, noise)
        return SetModelOutput(torch.sigmoid(at_least_fp32(self.head(tower_output.slots))), tower_output)


class SetPrediction(Objective):
    """Objective for batches of `image` (B, 3, S, S) uint8, `noise` (B, *config.model.noise) fp32, `objects` (B, K, WIDTH) fp32, padded with zeros."""

    exact_inputs = True

    def __init__(self, config: SetPredictionConfig):
        super().__init__()
        self.config = config
        self.model = SetModel(config.model)

    def pixels(self, image: Tensor) -> Tensor:
        """Convert uint8 to the range of the encoder."""
        scaled = image.to(torch.float32) / 255
        return scaled * 2 - 1 if self.config.signed else scaled

    def forward(self, batch: Batch, progress: Progress) -> Loss:
        for key in ("image", "noise", "objects"):
            if key not in batch:
                raise DataError(f"objective set_prediction: the batch has no {key!r}, got {', '.join(batch)}")
        predicted = self.model(self.pixels(batch["image"]), batch["noise"]).objects
        # Every slot against every object; the matching minimizes the loss itself. The mean over an object's values is
        # that of `tf.keras.losses.huber` in google-research/slot_attention, so published losses and clipping values
        # carry over.
        pairwise_loss = F.huber_loss(
            *torch.broadcast_tensors(predicted[:, :, None], batch["objects"][:, None]),
            reduction="none",
            delta=self.config.huber,
        ).mean(-1)
        # Match without gradients, because the choice of pairs is not differentiable.
        rows, columns = cheapest_pairs(pairwise_loss.detach()).unbind(1)
        batch_index = torch.arange(len(predicted), device=predicted.device)[:, None]
        total = pairwise_loss[batch_index, rows, columns].sum(1).mean()
        return Loss(
            total, self._agreement(predicted[batch_index, rows].detach(), batch["objects"][batch_index, columns])
        )

    @staticmethod
    def _agreement(predicted: Tensor, target: Tensor) -> dict[str, Tensor]:
        """Return means over the objects that are present: the distance, and whether all attributes are correct."""
        present = target[..., -1] > 0.5
        count = present.sum().clamp(min=1)
        # Positions are in 0..1 of twice the range.
        distance = (predicted[..., :3] - target[..., :3]).norm(dim=-1) * (2 * REACH)
        correct = present.clone()
        for columns in attribute_columns().values():
            correct &= predicted[..., columns].argmax(-1) == target[..., columns].argmax(-1)
        return {"position_error": (distance * present).sum() / count, "attributes_right": correct.sum() / count}

    def shard_units(self) -> Sequence[nn.Module]:
        # Separate units where they are large; the MLP is one with the root.
        return [self.model.tower.encoder, self.model.tower.grouping, self.model.head]

    def footprint(self, batch: int, world_batch: int) -> Footprint:
        m = self.config.model
        tokens, encoding = m.encoder.side(m.image_size) ** 2, m.grouping.slots * m.grouping.width
        return Footprint({"image": tokens}, [], encoding, 0, m.encoder.cost(m.image_size))


@torch.library.custom_op("sparo::cheapest_pairs", mutates_args=())
def cheapest_pairs(cost: Tensor) -> Tensor:
    """Return rows and columns (b, 2, K) int64 of the cheapest pairs of costs (b, K, K): one copy to the host, Kuhn's algorithm per image.

    Costs that are not finite are matched arbitrarily; the loss is not finite either, and the loop skips such a step.
    """
    # Kuhn's algorithm does not terminate on NaN.
    finite_cost = np.nan_to_num(cost.float().cpu().numpy(), nan=1e9, posinf=1e9)
    return torch.from_numpy(np.stack([np.stack(linear_sum_assignment(one)) for one in finite_cost])).to(cost.device)


@cheapest_pairs.register_fake
def _(cost: Tensor) -> Tensor:
    return cost.new_empty((cost.shape[0], 2, cost.shape[1]), dtype=torch.int64)


class SetExamples(Examples):
    """Images, noise, and the objects of their scenes; a scene with more objects than slots is a bad sample."""

    def __init__(self, config: DataConfig, model: SetModelConfig):
        self.images, self.slots = SlotExamples(config, model), model.grouping.slots

    def prepare(
        self, fields: dict[str, bytes], source: Source, rng: np.random.Generator, on_stage: OnStage = ignore_stage
    ) -> Any:
        if "json" not in fields:
            raise BadSampleError("no .json with the scene's objects")
        rows = object_rows(fields["json"])
        if len(rows) > self.slots:
            raise BadSampleError(
                f"the scene has {len(rows)} objects, more than objective.model.grouping.slots={self.slots}"
            )
        # A missing object is a row of zeros, which a slot has to predict, too.
        padded = np.zeros((self.slots, WIDTH), np.float32)
        padded[: len(rows)] = rows
        return *self.images.prepare(fields, source, rng, on_stage), padded

    def stack(self, examples: Sequence[Any]) -> dict[str, Tensor]:
        batch = self.images.stack([example[:2] for example in examples])
        return {**batch, "objects": torch.from_numpy(np.stack([example[2] for example in examples]))}


def _rules(recipe: RecipeBlocks[SetPredictionConfig]) -> None:
    if recipe.data.hflip or recipe.data.crop_scale != (1.0, 1.0):
        raise ValueError(
            "data: images must not be cropped or mirrored, because positions of objects refer to whole images. Set "
            "data.crop_scale: [1.0, 1.0] and data.hflip: 0."
        )


METHOD = Method(
    SetPredictionConfig,
    SetPrediction,
    lambda config, data: SetExamples(data, config.model),
    _rules,
    loss_keys=("huber", "signed"),
)
