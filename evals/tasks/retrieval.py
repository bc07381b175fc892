"""Image-text retrieval: hit rates at 1, 5 and 10 in both directions."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ..results import Result

KS = (1, 5, 10)
_CHUNK = 1024


def score(image: Tensor, text: Tensor, image_of_text: Tensor) -> Result:
    """R@k: is any right item among the k nearest?

    Args:
        image: (I, D) encodings.  text: (T, D) encodings.  image_of_text: (T,) index of each text's image.

    Returns:
        `text_R@k`: image query, texts ranked (images without a text are not queries); `image_R@k`: text query, images
        ranked; headline `mean_R@5`, the mean of both directions.
    """
    image, text = F.normalize(image.float(), dim=-1), F.normalize(text.float(), dim=-1)
    to_image = _hits(text, image, lambda rows, found: found == image_of_text[rows, None])
    to_text = _hits(image, text, lambda rows, found: image_of_text[found] == rows[:, None])
    asked = torch.isin(torch.arange(len(image)), image_of_text)
    metrics = {f"text_R@{k}": to_text[k][asked].mean().item() for k in to_text}
    metrics |= {f"image_R@{k}": to_image[k].mean().item() for k in to_image}
    k = 5 if 5 in to_text and 5 in to_image else max(to_text.keys() & to_image.keys())
    metrics[f"mean_R@{k}"] = (metrics[f"text_R@{k}"] + metrics[f"image_R@{k}"]) / 2
    return Result("retrieval", int(asked.sum()), f"mean_R@{k}", metrics, min(1.0, k / len(image)))


def _hits(queries: Tensor, items: Tensor, right) -> dict[int, Tensor]:  # type: ignore[no-untyped-def]
    """Per k (no larger than the number of items), 1.0 where a right item is among the k nearest."""
    ks = [k for k in KS if k <= len(items)]
    parts = []
    for begin in range(0, len(queries), _CHUNK):
        rows = torch.arange(begin, min(begin + _CHUNK, len(queries)))
        found = (queries[rows] @ items.T).topk(max(ks), dim=1).indices
        parts.append(right(rows, found))
    table = torch.cat(parts)
    return {k: table[:, :k].any(dim=1).float() for k in ks}
