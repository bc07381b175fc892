"""Tasks of slot models on images: `masks`, `objects` and `reconstruction`."""

from __future__ import annotations

from typing import Literal

import numpy as np
from PIL import Image

from evals.encoders.capabilities import ClipsEncoder, DrawingEncoder, MasksEncoder, ObjectsEncoder
from evals.encoders.encoder import Encoder
from evals.encoders.pixels import Pixels
from evals.feature_store.feature_table import View
from evals.sets.objects import REACH, WIDTH, attribute_columns
from evals.sets.open_set import open_set
from evals.sets.task_config import SetTaskConfig
from evals.suite.scoring import Scoring, attach_data_info
from evals.suite.task import Task
from evals.tasks.objects import average_precision, reconstruction, segmentation
from evals.tasks.result import Result
from sparo_train.core.config import field
from sparo_train.core.errors import DataError

from .cropped_set import CroppedTaskConfig, open_masks


class ObjectsTaskConfig(SetTaskConfig):
    """Images whose `.json` has `objects` with position, size, material, shape and color."""

    task: Literal["objects"] = field("objects", "Kind of the task: an entry of sparo.tasks.")
    match: average_precision.Match = field(
        "nearest",
        "How predictions are matched with objects. nearest: with the nearest object; if that object is already "
        "matched with a more confident prediction, the less confident one is wrong (Locatello et al. 2020). dspn: "
        "with the nearest object that is not matched yet (Zhang et al. 2022).",
    )


def run_objects(scoring: Scoring, task: ObjectsTaskConfig) -> Result:
    """Compute AP at six distances, from the predictions of all images together."""
    source = open_set(task, "objects")
    encoder = scoring.encoder
    assert isinstance(encoder, ObjectsEncoder)  # encoders with `objects`
    (features,) = scoring.features([source], task.workers, view=View("objects listed", encoder.objects, measured=True))

    def score() -> Result:
        predicted = [row.view(-1, WIDTH).numpy() for block in features.blocks(256) for row in block]
        # An empty list is an image without objects, which still counts.
        true = [np.asarray(fact).reshape(-1, WIDTH) for fact in features.facts]
        if not sum(map(len, true)):
            raise DataError(f"{source.root}: no image has an object, but average precision needs some")
        return average_precision.score(predicted, true, attribute_columns(), 2 * REACH, task.match)

    options = {"slots": scoring.encoder.slots, "distances": "world units, positions within 3"}
    return attach_data_info(scoring.ranks.rank0_broadcast(score), features, source, options)


OBJECTS = Task(
    ObjectsTaskConfig, run_objects, lambda task: open_set(task, "objects").check(), needs=("objects",), facts="objects"
)


class MasksTaskConfig(CroppedTaskConfig):
    """Images with `.mask.png`: object number per pixel."""

    task: Literal["masks"] = field("masks", "Kind of the task: an entry of sparo.tasks.")
    background: int | None = field(0, "Label of the background, which is not an object. null: all labels are objects.")
    ignore: int | None = field(255, "Label of pixels that are excluded from scores. null: none.")
    headline: Literal["ari", "fg_ari", "fg_ari_savi", "fg_ari_videosaur", "miou", "mbo_i", "mbo_c"] = field(
        "fg_ari", "Metric that tables show."
    )


def run_masks(scoring: Scoring, task: MasksTaskConfig) -> Result:
    """Compute ARI, FG-ARI, mIoU and mBO of the decoder's masks at the model's size; true masks are resized by nearest neighbours."""
    source = open_masks(task)
    encoder = scoring.encoder
    assert isinstance(encoder, MasksEncoder)  # encoders with `masks`
    (features,) = scoring.features(
        [source], task.workers, view=View(f"masks: {encoder.masks_are}", encoder.masks, measured=True)
    )
    size = encoder.image_size

    def score() -> Result:
        predicted = (row.long().view(size, size).numpy() for block in features.blocks(256) for row in block)
        facts = (np.asarray(fact) for fact in features.facts)
        # One by one, because label maps of a whole set would not fit in memory next to its features.
        planes = ([transform_mask(encoder, plane) for plane in fact.reshape(-1, *fact.shape[-2:])] for fact in facts)
        pairs = (
            segmentation.Masked(true[0], own, true[1] if len(true) > 1 else None)
            for true, own in zip(planes, predicted, strict=True)
        )
        # A plug-in's encoder may have masks without slots.
        result = segmentation.score(pairs, task.background, task.ignore, encoder.slots if encoder.slots > 1 else None)
        # fg_ari_savi of a set without objects is 1.
        if task.headline not in result.metrics or not result.n:
            if task.headline == "mbo_c" and result.n:
                raise DataError(f"{source.root}: no image has a .semantic.png, which mbo_c needs. Set headline: mbo_i.")
            raise DataError(
                f"{source.root}: no image has an object. Label {task.background} counts as background. If that "
                "label is an object, correct the key `background`."
            )
        return result.with_headline(task.headline)

    options = {
        "mask_size": size,
        "resampling": "nearest",
        "masks": encoder.masks_are,
        "slots": encoder.slots,
        **({} if task.crop_area is None else {"crop_area": task.crop_area}),
    }
    return attach_data_info(scoring.ranks.rank0_broadcast(score), features, source, options)


def transform_mask(encoder: Encoder, mask: np.ndarray) -> np.ndarray:
    """Resize and crop a label map like the encoder's images, by nearest neighbours, because labels cannot be averaged."""
    assert isinstance(encoder.transform, Pixels)  # encoders with masks have it
    return encoder.transform.labels(Image.fromarray(mask.astype(np.int32)))


def conditional_incompatibility(encoder: Encoder) -> str | None:
    """Return why images cannot be scored, if slots start from objects of a clip's first frame; otherwise None."""
    if not (isinstance(encoder, ClipsEncoder) and encoder.conditional):
        return None
    return "root: these slots start from the first frame's objects (hint), which images lack. Score clips (task: video_masks)."


MASKS = Task(
    MasksTaskConfig,
    run_masks,
    lambda task: open_masks(task).check(),
    needs=("masks",),
    facts="masks",
    incompatibility=lambda task, encoder: conditional_incompatibility(encoder),
    pictures="object_centric.pictures.evaluated:draw_images",
)


class ReconstructionTaskConfig(CroppedTaskConfig):
    """Images with `.mask.png`, whose masks are ignored, so that one set serves both tasks."""

    task: Literal["reconstruction"] = field("reconstruction", "Kind of the task: an entry of sparo.tasks.")


def run_reconstruction(scoring: Scoring, task: ReconstructionTaskConfig) -> Result:
    """Compute MSE and PSNR of the reconstruction; for features, MSE only."""
    source = open_masks(task)
    encoder = scoring.encoder
    assert isinstance(encoder, DrawingEncoder)  # encoders with `drawing`
    view = View(f"squared error of the reconstruction: {encoder.draws}", encoder.squared_error, measured=True)
    (features,) = scoring.features([source], task.workers, view=view)

    def score() -> Result:
        errors = np.concatenate([block[:, 0].numpy() for block in features.blocks(4096)])
        return reconstruction.score(errors, encoder.numbers, encoder.draws == "pixels")

    return attach_data_info(scoring.ranks.rank0_broadcast(score), features, source, {"drawn": encoder.draws})


def _incompatibility(task: ReconstructionTaskConfig, encoder: Encoder) -> str | None:
    if isinstance(encoder, ClipsEncoder) and isinstance(encoder, DrawingEncoder) and not encoder.frame_scores:
        return f"root: this model reconstructs {encoder.draws}, which a single image lacks. Score clips (task: video_masks)."
    return conditional_incompatibility(encoder)


RECONSTRUCTION = Task(
    ReconstructionTaskConfig,
    run_reconstruction,
    lambda task: open_masks(task).check(),
    needs=("drawing",),
    facts="masks",
    incompatibility=_incompatibility,
)
