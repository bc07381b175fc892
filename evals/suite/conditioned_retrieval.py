"""Retrieval where every text pools every image (FLAIR's own way of scoring), beside the one by encodings."""

from __future__ import annotations

from typing import Literal

import torch

from sparo_train.core.config import field
from sparo_train.core.errors import DataError

from ..encoders.capabilities import ConditionedEncoder
from ..feature_store.feature_table import View
from ..sets.open_set import open_set
from ..tasks import retrieval
from ..tasks.result import Result
from .image_text_tasks import CaptionedTaskConfig, captions_of
from .scoring import Scoring, attach_data_info
from .task import Task

_IMAGES = 64  # pooled at a time


class ConditionedRetrievalTaskConfig(CaptionedTaskConfig):
    """Images to captions and back, each image as the caption pools its patches."""

    task: Literal["conditioned_retrieval"] = field("conditioned_retrieval", "a row of sparo.tasks")


def run_conditioned(scoring: Scoring, task: ConditionedRetrievalTaskConfig) -> Result:
    """Patches are encoded by all ranks and kept; the first rank scores."""
    encoder = scoring.encoder
    assert isinstance(encoder, ConditionedEncoder)  # what offers `conditioned`
    source = open_set(task, "captions")
    view = View("patches", lambda pixels: encoder.patches(pixels).flatten(1))
    (images,) = scoring.features([source], task.workers, None, view)
    texts, owner = captions_of(images, task.k, source)

    def scored() -> Result:
        queries = encoder.queries(texts)
        if not queries.isfinite().all():
            raise DataError(f"{encoder.label}: some text embeddings are not finite; the checkpoint cannot be scored")
        # Some images at a time: (images, texts, patches) at once would not fit.
        rows = [encoder.conditioned(images.rows(some), queries) for some in torch.arange(len(images)).split(_IMAGES)]
        return retrieval.score_table(torch.cat(rows), owner, task.k)

    return attach_data_info(scoring.ranks.rank0_broadcast(scored), images, source, {"image": "as the text pools it"})


CONDITIONED_RETRIEVAL = Task(
    ConditionedRetrievalTaskConfig,
    run_conditioned,
    lambda task: open_set(task, "captions").check(),
    ("texts", "conditioned"),
    "captions",
)
