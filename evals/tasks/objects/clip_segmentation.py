"""How well masks follow the objects of videos: a slot has to stay with its object, or not; all from counts of pixels."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from ..result import Result
from .segmentation import adjusted_rand, count_pixels, image_scores, metric_means

HEADLINE = "video_fg_ari"


class MaskedClip(NamedTuple):
    """Label maps (T, H, W) of one shape.  errors: (T,) mean squared error of every frame as it is drawn, NaN where nothing is."""

    true: np.ndarray
    predicted: np.ndarray
    errors: np.ndarray


def clip_scores(
    clip: MaskedClip, background: int | None = 0, ignore: int | None = None, pixels: bool = True
) -> dict[str, float]:
    """One clip's scores; NaN where it has no object.

    `video_fg_ari`, `video_mbo`, `video_miou`, `ari`: of all T * H * W pixels together, an object one label, so that a slot which goes over
    to another object counts as wrong.  `video_fg_ari_savi`: the same as `video_fg_ari`, with 1 where there is no foreground.
    `image_fg_ari`, `image_mbo`: of each frame on its own, then the mean of those with an object.  `mse`, `psnr`: mean over frames;
    of errors that are not of `pixels` there is no `psnr`.
    """
    # A clip as one picture of T frames: an object that changes slots loses.
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
        # Of each frame, then the mean: the PSNR of a mean is another number.
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
    """Means over clips of `clip_scores`; intervals resample clips.

    Args:
        pixels: whether errors are of pixels in 0..1.
        first_frame: count it; SAVi's code does where slots were told its boxes, its paper says it does not.
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
            "empty": "left out; video_fg_ari_savi: 1",
            "mean": "over clips",
            "interval": "bootstrap over clips",
        },
        {"clips": len(scores), "empty": empty},
        {name: column.astype(np.float32) for name, column in means.columns.items()},
    )


def _mean(values: object) -> float:
    table = np.asarray(values, float)
    return float(table[~np.isnan(table)].mean()) if (~np.isnan(table)).any() else float("nan")
