"""Zero-shot classification with prompt templates, as CLIP and open_clip do it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from ..results import Result


def prompts(classnames: Sequence[str], templates: Sequence[str]) -> list[str]:
    """Class after class, every template filled in; `{c}` is the class name."""
    return [template.replace("{c}", name) for name in classnames for template in templates]


def classifier(text: Tensor, classes: int) -> Tensor:
    """Class vectors from prompt encodings (classes * templates, D): mean over templates, one global L2 norm; (classes, D).

    With SPARO the slots of a class vector are not normalised again (sparo-clip does the same): a slot whose prompts disagree counts less.
    """
    per_class = F.normalize(text.float(), dim=-1).view(classes, -1, text.shape[-1])
    return F.normalize(per_class.mean(dim=1), dim=-1)


def score(image: Tensor, weights: Tensor, labels: Tensor) -> Result:
    """acc1, acc5 (from five classes on) and mean per-class recall of image encodings (n, D) against class vectors (C, D)."""
    logits = F.normalize(image.float(), dim=-1) @ weights.T
    top = logits.topk(min(5, len(weights)), dim=1).indices
    right = top == labels[:, None]
    metrics = {"acc1": right[:, 0].float().mean().item()}
    if len(weights) > 5:
        metrics["acc5"] = right.any(dim=1).float().mean().item()
    recalls = [right[labels == c, 0].float().mean() for c in labels.unique()]
    metrics["mean_per_class_recall"] = torch.stack(recalls).mean().item()
    return Result("zeroshot", len(labels), "acc1", metrics, 1 / len(weights))
