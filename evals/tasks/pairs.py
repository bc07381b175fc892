"""True caption against false caption, as SugarCrepe scores it: strictly greater similarity wins, ties lose."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from ..results import Result


def score(image: Tensor, true: Tensor, false: Tensor, kinds: Sequence[str]) -> Result:
    """Accuracy per kind, their unweighted mean (`macro`, the paper's average) and over all pairs (`micro`).

    Args:
        image, true, false: (n, D) encodings of each pair's image and captions.  kinds: its kind, e.g. `swap_att`.
    """
    image = F.normalize(image.float(), dim=-1)
    margin = (image * (F.normalize(true.float(), dim=-1) - F.normalize(false.float(), dim=-1))).sum(dim=1)
    right = (margin > 0).float()
    metrics: dict[str, float] = {}
    for kind in dict.fromkeys(kinds):
        here = torch.tensor([k == kind for k in kinds])
        metrics[kind] = right[here].mean().item()
    macro = sum(metrics.values()) / len(metrics)
    return Result(
        "pairs",
        len(kinds),
        "micro",
        {
            "micro": right.mean().item(),
            "macro": macro,
            **metrics,
            "ties": (margin == 0).float().mean().item(),
        },
        0.5,
    )
