"""Scores of masks against the objects of videos, with or without consistency over time; all from counts of pixels."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from ..result import Result
from .segmentation import adjusted_rand, count_pixels, image_scores, metric_means

HEADLINE = "video_fg_ari"


class MaskedClip(NamedTuple):
    """Label maps (T, H, W) of one shape; errors (T,): mean squared error of every reconstructed frame, or NaN."""

    true: np.ndarray
    predicted: np.ndarray
    errors: np.ndarray


def clip_scores(
    clip: MaskedClip, background: int | None = 0, ignore: int | None = None, pixels: bool = True
) -> dict[str, float]:
    """Return one clip's scores; NaN without objects.

    `video_fg_ari`, `video_mbo`, `video_miou`, `ari`: over all T * H * W pixels together, with one label per object, so
    that a slot which changes to another object counts as wrong. `video_fg_ari_savi`: like `video_fg_ari`, with 1 without
    foreground. `image_fg_ari`, `image_mbo`: per frame, averaged over frames with an object. `mse`, `psnr`:
    mean over frames; errors that are not of `pixels` have no `psnr`.
    """
    # A clip is one image of T frames, so an object that changes slots scores lower.
    whole = image_scores(clip.true, clip.predicted, background, ignore)
    frames = [count_pixels(t, p, background, ignore) for t, p in zip(clip.true, clip.predicted, strict=True)]
    frame_aris = [adjusted_rand(counts.objects) for counts in frames]
    boxes = [image_scores(t, p, background, ignore)["mbo_i"] for t, p in zip(clip.true, clip.predicted, strict=True)]
    return {
        "video_fg_ari": whole["fg_ari"],
        "video_fg_ari_savi": whole["fg_ari_savi"],
        "image_fg_ari": _mean(frame_aris),
        "ari": whole["ari"],
        "video_mbo": whole["mbo_i"],
        "image_mbo": _mean(boxes),
        "video_miou": whole["miou"],
        "mse": _mean(clip.errors),
        # Per frame, then averaged, because the PSNR of a mean differs.
        "psnr": _mean(-10 * np.log10(np.maximum(clip.errors, 1e-10))) if pixels else float("nan"),
        "slots_used": whole["slots_used"],
    }


def score(
    clips: Iterable[MaskedClip],
    background: int | None = 0,
    ignore: int | None = None,
    first_frame: bool = True,
    pixels: bool = True,
) -> Result:
    """Return means over clips of `clip_scores`; intervals resample clips.

    Args:
        clips, background, ignore: clips and labels.
        first_frame: include it; SAVi's code does if slots had hints, its paper says it does not.
        pixels: whether errors are of pixels in 0..1.
    """
    scores = []
    for clip in clips:
        frame_slice = slice(None) if first_frame else slice(1, None)
        scores.append(clip_scores(MaskedClip(*(table[frame_slice] for table in clip)), background, ignore, pixels))
    means = metric_means(scores, without=("slots_used",))
    empty = int(np.isnan(means.columns[HEADLINE]).sum()) if scores else 0
    return Result(
        "video_masks",
        len(scores) - empty,
        HEADLINE,
        means.metrics,
        0.0,
        means.intervals,
        {
            "background": background,
            "ignore": ignore,
            "first_frame": first_frame,
            "empty": "excluded; video_fg_ari_savi: 1",
            "mean": "over clips",
            "interval": "bootstrap over clips",
        },
        {"clips": len(scores), "empty": empty},
        {name: column.astype(np.float32) for name, column in means.columns.items()},
    )


def _mean(values: object) -> float:
    table = np.asarray(values, float)
    return float(table[~np.isnan(table)].mean()) if (~np.isnan(table)).any() else float("nan")
