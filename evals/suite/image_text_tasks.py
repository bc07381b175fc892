"""Tasks of models with a text tower: pairs, retrieval, and retrieval with text-conditioned pooling (FLAIR)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from torch import Tensor

from sparo_train.core.config import between, field
from sparo_train.core.errors import ConfigError, DataError

from ..encoders.capabilities import ConditionedEncoder
from ..encoders.encoder import TwoTowerEncoder
from ..feature_store.feature_table import Features, View
from ..sets.base import EvalSet, Pair
from ..sets.captions import SugarCrepeSet
from ..sets.open_set import open_set
from ..sets.task_config import SetTaskConfig
from ..tasks import pairs, retrieval, textonly
from ..tasks.result import Result
from .scoring import Scoring, attach_data_info
from .task import Task


class CaptionedTaskConfig(SetTaskConfig):
    """Images with captions, and the ranks to report."""

    annotations: str | None = field(
        None, "For layout=karpathy: file with the captions of each image.", examples=["dataset_coco.json"]
    )
    k: Annotated[tuple[int, ...], between(1, 1 << 31)] = field((1, 5, 10), "Ranks k of the metrics R@k.", min_length=1)


class RetrievalTaskConfig(CaptionedTaskConfig):
    """Images to captions and back."""

    task: Literal["retrieval"] = field("retrieval", "Kind of the task: an entry of sparo.tasks.")
    headline: str | None = field(
        None,
        "Metric that tables show. Default: mean_R@5.",
        pattern=r"(mean|text|image)_R@[0-9]+",
        examples=["mean_R@1"],
    )


class PairsTaskConfig(SetTaskConfig):
    """True against false captions; ties lose."""

    task: Literal["pairs"] = field("pairs", "Kind of the task: an entry of sparo.tasks.")
    average: Literal["macro", "micro"] = field(
        "macro",
        "Average over kinds (macro, as in Table B.1 of the SPARO paper) or over pairs (micro, as "
        "SugarCrepe's authors report).",
    )


def run_retrieval(scoring: Scoring, task: RetrievalTaskConfig) -> Result:
    """Compute R@k in both directions over the set's captions."""
    source = open_set(task, "captions")
    (images,) = scoring.features([source], task.workers)
    texts, owner = collect_captions(images, task.k, source)

    def score() -> Result:
        result = retrieval.score(images.in_memory(), scoring.texts(texts), owner, task.k)
        if task.headline is not None:
            result = _choose_headline(result, task, len(images))
        # Padding shows how long captions are; tokenizers of other libraries pad in other ways.
        encoder = scoring.encoder
        if isinstance(encoder, TwoTowerEncoder) and encoder.causal and (count := encoder.texts_at_limit(texts)):
            result = result._replace(counts={**result.counts, "captions_at_limit": count})
        return _count_shared_captions(result, texts, owner)

    return attach_data_info(scoring.ranks.rank0_broadcast(score), images, source, {})


def _count_shared_captions(result: Result, texts: Sequence[str], owner: Tensor) -> Result:
    """Return the result with the number of captions that other images have, too: only one of these images counts as right."""
    owners: dict[str, set[int]] = {}
    for text, image in zip(texts, owner.tolist(), strict=True):
        owners.setdefault(text, set()).add(image)
    count = sum(len(owners[text]) > 1 for text in texts)
    return result._replace(counts={**result.counts, "shared_captions": count}) if count else result


def _choose_headline(result: Result, task: RetrievalTaskConfig, images: int) -> Result:
    """Return the result with the metric that the task names first. Raises `ConfigError` if `k` lacks its rank."""
    if task.headline not in result.metrics:
        raise ConfigError(
            f"headline={task.headline}: k must contain the number after the @, got k={list(task.k)}. Include this "
            "number in the list k."
        )
    return result._replace(headline=task.headline, chance=min(1.0, int(task.headline.rpartition("@")[2]) / images))


def collect_captions(images: Features, ks: Sequence[int], source: EvalSet) -> tuple[list[str], Tensor]:
    """Return all captions of a set, and the number of each one's image (T,). Raises `ConfigError` if there are too few for `ks`."""
    owner = torch.tensor([i for i, lines in enumerate(images.facts) for _ in lines], dtype=torch.int64)
    texts = [line for lines in images.facts for line in lines]
    if not texts:
        raise DataError(f"{source.root}: no image has a caption")
    if min(ks) > min(len(images), len(texts)):
        raise ConfigError(
            f"k={list(ks)}: no value is small enough for {source.root}, got {len(images)} images and {len(texts)} captions. Add a smaller k."
        )
    return texts, owner


def run_pairs(scoring: Scoring, task: PairsTaskConfig) -> Result:
    """Compute the accuracy of true against false captions."""
    source = open_set(task, "pairs")
    (images,) = scoring.features([source], task.workers)
    caption_pairs: list[Pair] = [pair for row in images.facts for pair in row]
    owner = torch.tensor([i for i, row in enumerate(images.facts) for _ in row])

    def score() -> Result:
        # All at once, so that texts on both sides, or with several images, are encoded once.
        both = scoring.texts([p.caption for p in caption_pairs] + [p.negative_caption for p in caption_pairs])
        true, false = both.split(len(caption_pairs))
        texts = [(p.caption, p.negative_caption) for p in caption_pairs]
        kinds = [p.kind for p in caption_pairs]
        # Sets with a row per pair contain an image several times.
        shown = [images.first_copies[i] for i in owner.tolist()]
        result = pairs.score(images.rows(owner), true, false, kinds, task.average, texts, shown)
        choices = [textonly.Choice(both, 0, image) for both, image in zip(texts, shown, strict=True)]
        return textonly.attach(result, choices, kinds, task.average)

    whole = source if source.part_of is None else source.part_of
    options = {"data": whole.version} if isinstance(whole, SugarCrepeSet) else {}
    keys = [f"{images.keys[i]} {p.kind} {p.key}".strip() for i, p in zip(owner.tolist(), caption_pairs, strict=True)]
    return attach_data_info(scoring.ranks.rank0_broadcast(score), images, source, options, keys)


RETRIEVAL = Task(
    RetrievalTaskConfig, run_retrieval, lambda task: open_set(task, "captions").check(), ("texts",), "captions"
)
PAIRS = Task(PairsTaskConfig, run_pairs, lambda task: open_set(task, "pairs").check(), ("texts",), "pairs")


_IMAGES = 64  # images pooled at a time


class ConditionedRetrievalTaskConfig(CaptionedTaskConfig):
    """Images to captions and back; each image is pooled by the caption."""

    task: Literal["conditioned_retrieval"] = field(
        "conditioned_retrieval", "Kind of the task: an entry of sparo.tasks."
    )


def run_conditioned(scoring: Scoring, task: ConditionedRetrievalTaskConfig) -> Result:
    """Score on the first rank; all ranks encode patches, which are stored."""
    encoder = scoring.encoder
    assert isinstance(encoder, ConditionedEncoder)  # encoders with `conditioned`
    source = open_set(task, "captions")
    view = View("patches", lambda pixels: encoder.patches(pixels).flatten(1))
    (images,) = scoring.features([source], task.workers, None, view)
    texts, owner = collect_captions(images, task.k, source)

    def scored() -> Result:
        queries = encoder.queries(texts)
        if not queries.isfinite().all():
            raise DataError(f"{encoder.label}: some text embeddings are not finite. Use an earlier checkpoint.")
        # A few images at a time, because (images, texts, patches) would not fit in memory.
        rows = [encoder.conditioned(images.rows(some), queries) for some in torch.arange(len(images)).split(_IMAGES)]
        return _count_shared_captions(retrieval.score_table(torch.cat(rows), owner, task.k), texts, owner)

    return attach_data_info(scoring.ranks.rank0_broadcast(scored), images, source, {"image": "as the text pools it"})


CONDITIONED_RETRIEVAL = Task(
    ConditionedRetrievalTaskConfig,
    run_conditioned,
    lambda task: open_set(task, "captions").check(),
    ("texts", "conditioned"),
    "captions",
)
