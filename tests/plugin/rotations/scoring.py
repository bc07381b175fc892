"""Encoder, task and export of the method."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from evals.encoders.encoder import Encoder
from evals.encoders.pixels import Pixels
from evals.interop.exporting import Export, TrainedWeights
from evals.sets.open_set import open_set
from evals.sets.task_config import SetTaskConfig
from evals.suite.scoring import Scoring, attach_data_info, collect_labels
from evals.suite.task import Task, TaskPictures
from evals.tasks.result import Result

from . import Rotations


class RotationsEncoder(Encoder):
    def __init__(self, objective: Rotations):
        super().__init__(objective.backbone, (0.5,) * 3, (0.5,) * 3)
        config = objective.config.model
        self.image_size, self.slots = config.image_size, config.slots
        self.transform = Pixels(config.image_size, config.image_size)

    @property
    def architecture(self) -> str:
        return self.model.config.model_dump_json()

    @torch.inference_mode()
    def encode(self, pixels: Tensor) -> Tensor:
        """Separate slots (n, L, V)."""
        return self.model(self.normalize(pixels)).unflatten(1, (self.slots, -1)).float()


class NeighbourConfig(SetTaskConfig):
    task: Literal["neighbour"] = "neighbour"


def neighbour(scoring: Scoring, task: NeighbourConfig) -> Result:
    """Computes how often the image with the most similar slots has the same label."""
    source = open_set(task, "label")
    (images,) = scoring.features([source], task.workers)
    labels = collect_labels(images, source)

    def score() -> Result:
        slots = F.normalize(images.in_memory(), dim=-1)  # (n, L, V)
        alike = torch.einsum("ilv,jlv->ij", slots, slots).fill_diagonal_(-torch.inf)
        right = float((labels[alike.argmax(1)] == labels).float().mean())
        return Result("neighbour", len(labels), "acc1", {"acc1": right}, 1 / int(labels.max() + 1))

    return attach_data_info(scoring.ranks.rank0_broadcast(score), images, source, {})


def _write(trained: TrainedWeights, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = trained.weights.items()
    backbone = {n.removeprefix("backbone."): t.contiguous() for n, t in tensors if n.startswith("backbone.")}
    save_file(backbone, path)
    return path


def drawn(encoder: Encoder, task: NeighbourConfig, count: int) -> TaskPictures:
    """Draws the first images of the set in a row."""
    source = open_set(task, "label")
    images = [source.read(i)[1].resize((32, 32)) for i in range(min(count, len(source)))]
    sheet = Image.new("RGB", (32 * len(images), 32))
    for number, image in enumerate(images):
        sheet.paste(image, (32 * number, 0))
    return TaskPictures(sheet)


TASK = Task(
    NeighbourConfig,
    neighbour,
    lambda task: open_set(task, "label").check(),
    needs=("slots",),
    pictures="rotations.scoring:drawn",
)
EXPORT = Export(_write, "rotations.safetensors")
