"""`task: masks`: how well a slot model's masks follow the objects of a set that says which pixel is whose."""

from __future__ import annotations

from typing import Literal, cast

import numpy as np
from PIL import Image

from evals.encoders.pixels import Pixels
from evals.sets.opening import open_set
from evals.sets.task_config import SetTaskConfig
from evals.store.feature_table import View
from evals.suite.scoring import Scoring, described
from evals.suite.task import Task
from evals.tasks import segmentation
from evals.tasks.result import Result
from sparo_train.core.config import setting

from .slot_encoder import SlotEncoder


class MasksTaskConfig(SetTaskConfig):
    """Images with `.mask.png`: an object's number per pixel."""

    task: Literal["masks"] = setting("masks", "a row of sparo.tasks")
    background: int | None = setting(0, "the label that is no object; null: all of them are")
    headline: Literal["ari", "fg_ari", "fg_ari_savi", "miou", "mbo_i"] = setting("fg_ari", "the score that tables show")


def run_masks(scoring: Scoring, task: MasksTaskConfig) -> Result:
    """ARI, FG-ARI, mIoU and mBO of the decoder's masks at the model's size; true masks are brought to it by their nearest pixel."""
    source = open_set(task, "masks")
    encoder = cast(SlotEncoder, scoring.encoder)
    view = View("masks of the decoder", encoder.masks)
    (found,) = scoring.features([source], task.workers, view=view)
    size = encoder.image_size

    def score() -> Result:
        predicted = (row.numpy().astype(np.int64).reshape(size, size) for block in found.blocks(256) for row in block)
        true = (resized(np.asarray(fact), size, encoder.transform) for fact in found.facts)
        return segmentation.score(zip(true, predicted, strict=True), task.background)._replace(headline=task.headline)

    options = {
        "mask_size": size,
        "resampling": "nearest",
        "masks": "decoder",
        "slots": encoder.slots,
        "noise": encoder.seed,
    }
    return described(scoring.ranks.first(score), found, source, options)


def resized(mask: np.ndarray, size: int, transform: object) -> np.ndarray:
    """A label map cut and scaled as the image was, by the nearest pixel: labels have no mean."""
    if mask.shape == (size, size):
        return mask
    resize = transform.resize if isinstance(transform, Pixels) else size
    height, width = mask.shape
    scale = resize / min(height, width)
    whole = Image.fromarray(mask.astype(np.int32)).resize(
        (max(1, round(width * scale)), max(1, round(height * scale))), Image.Resampling.NEAREST
    )
    left, top = round((whole.width - size) / 2), round((whole.height - size) / 2)
    return np.asarray(whole.crop((left, top, left + size, top + size)))


MASKS = Task(MasksTaskConfig, run_masks, lambda task: open_set(task, "masks").check(), needs=("masks",))
