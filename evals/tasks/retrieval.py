"""Image-text retrieval in both directions: hit rates (what tables call R@k), precision and true recall, named apart."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from .knn import Nearest, merge, normalize_rows, select_best
from .result import Result, bootstrap, percentiles

KS = (1, 5, 10)
_BLOCK = 2**25  # similarities stored at once: 128 MiB


def score(image: Tensor, text: Tensor, image_of_text: Tensor, ks: Sequence[int] = KS) -> Result:
    """Return R@k: whether any right item is among the k nearest.

    Args:
        image: (I, D) encodings.
        text: (T, D) encodings.
        image_of_text: (T,) index of each text's image.
        ks: values larger than the number of candidates are skipped.

    Returns:
        `text_R@k`: image query, texts ranked; `image_R@k`: text query, images ranked; headline `mean_R@5`, the mean of
        both. `text_precision@k`: the share of the k texts that are right (how Section 4.2 of the SPARO paper describes
        its R@5); `text_recall@k`: the share of the image's texts that are among the k. Predictions have, per image,
        each metric's sum and the number of its queries. Images without a text are not queries and are counted
        (clip-benchmark counts them as misses). Intervals resample images, each with its texts.
    """
    most = _largest_k(ks, len(image), len(text))
    return _result_from_neighbours(find_nearest_both(image, text, *most), len(image), image_of_text, ks, most)


def score_table(table: Tensor, image_of_text: Tensor, ks: Sequence[int] = KS) -> Result:
    """Return the same for similarities (I, T) that are not products of encodings."""
    most = _largest_k(ks, *table.shape)
    neighbours = select_best(table, most[0], 0), select_best(table.T.contiguous(), most[1], 0)
    return _result_from_neighbours(neighbours, len(table), image_of_text, ks, most)


def _largest_k(ks: Sequence[int], images: int, texts: int) -> tuple[int, int]:
    """Return how many texts of an image, and images of a text, must be found."""
    if min(ks) > min(texts, images):
        raise ValueError(f"k={list(ks)}: all exceed the {min(texts, images)} candidates")
    one, other = (max((k for k in ks if k <= n), default=1) for n in (texts, images))
    return one, other


def _result_from_neighbours(
    neighbours: tuple[Nearest, Nearest], images: int, image_of_text: Tensor, ks: Sequence[int], most: tuple[int, int]
) -> Result:
    (retrieved_texts, retrieved_images), (largest_text, largest_image) = (n.row.cpu() for n in neighbours), most
    right_texts = image_of_text[retrieved_texts] == torch.arange(images)[:, None]
    right_images = retrieved_images == image_of_text[:, None]
    texts_per_image = torch.bincount(image_of_text, minlength=images)
    is_query = texts_per_image > 0
    columns: dict[str, tuple[Tensor, Tensor]] = {}  # per image: sum, and number of queries
    for k in [k for k in ks if k <= largest_text]:
        num_hits = right_texts[:, :k].sum(1).double() * is_query
        columns[f"text_R@{k}"] = (num_hits > 0).double(), is_query.double()
        columns[f"text_precision@{k}"] = num_hits / k, is_query.double()
        columns[f"text_recall@{k}"] = num_hits / texts_per_image.clamp(min=1), is_query.double()
    for k in [k for k in ks if k <= largest_image]:
        hit = right_images[:, :k].any(1).double()
        columns[f"image_R@{k}"] = (
            torch.zeros(images).double().index_add_(0, image_of_text, hit),
            texts_per_image.double(),
        )
    metrics = {name: (total.sum() / of.sum()).item() for name, (total, of) in columns.items()}
    sums, counts = (torch.stack(list(column), 1).numpy() for column in zip(*columns.values(), strict=True))
    draws = bootstrap(sums, counts)
    by_name = dict(zip(columns, draws.T, strict=True))
    both = [k for k in ks if f"text_R@{k}" in metrics and f"image_R@{k}" in metrics]
    for k in both:
        metrics[f"mean_R@{k}"] = (metrics[f"text_R@{k}"] + metrics[f"image_R@{k}"]) / 2
        by_name[f"mean_R@{k}"] = (by_name[f"text_R@{k}"] + by_name[f"image_R@{k}"]) / 2
    head = 5 if 5 in both else max(both, default=0)
    return Result(
        "retrieval",
        int(is_query.sum()),
        f"mean_R@{head}" if both else next(iter(metrics)),
        metrics,
        min(1.0, head / images),
        {name: percentiles(found) for name, found in by_name.items()},
        options={"recall": "hit rate", "interval": "bootstrap over images"},
        counts={"images": images, "texts": len(image_of_text), "images_without_caption": int((~is_query).sum())},
        predictions={
            "texts_found": retrieved_texts.numpy().astype(np.int32),
            "images_found": retrieved_images.numpy().astype(np.int32),
            "columns": np.asarray(list(columns)),
            "sums": sums.astype(np.float32),
            "counts": counts.astype(np.float32),
        },
    )


def find_nearest_both(image: Tensor, text: Tensor, texts: int, images: int) -> tuple[Nearest, Nearest]:
    """Return the nearest `texts` texts of every image, and the nearest `images` images of every text; each similarity is computed once."""
    image, text = (normalize_rows(x, image.device) for x in (image, text))
    rows = min(len(text), max(64, _BLOCK // len(image) // 64 * 64))  # round numbers can be divided into equal groups
    buffer = image.new_empty(rows * len(image))
    by_image: list[Nearest] = []
    by_text: list[Nearest] = []
    for first, part in zip(range(0, len(text), rows), text.split(rows), strict=True):
        product = torch.mm(part, image.T, out=buffer[: len(part) * len(image)].view(len(part), len(image)))
        by_text.append(select_best(product, images, 0))
        by_image = [merge([*by_image, select_best(product.T, texts, first)], texts)]
    return by_image[0], Nearest(*(torch.cat(parts) for parts in zip(*by_text, strict=True)))
