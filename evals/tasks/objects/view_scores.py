"""How well slots of scenes follow objects over time and over cameras, and how near the views are that they draw."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from ..result import Result
from .segmentation import adjusted_rand, count_pixels, metric_means

HEADLINE = "psnr_held_out"


class ViewedClip(NamedTuple):
    """true, predicted: label maps (T, V, H, W).  errors, ssim: (T, V) of each view as it is drawn.  nearest, mean: (T, V), mean squared
    error of the nearest shown view in its place, and of the shown views' mean colour.  depth, true_depth: (T, V, H, W), NaN where nobody says it.
    """

    true: np.ndarray
    predicted: np.ndarray
    errors: np.ndarray
    ssim: np.ndarray
    nearest: np.ndarray
    mean: np.ndarray
    depth: np.ndarray
    true_depth: np.ndarray


def scene_scores(clip: ViewedClip, num_context_views: int, far: float, background: int | None = 0) -> dict[str, float]:
    """One scene's scores; NaN where it has no object, or nothing is held out.

    `image_fg_ari`: of each view of each time, then the mean. `video_fg_ari`: of each camera over all times. `camera_fg_ari`: of each time over
    all cameras. `scene_fg_ari`: all together, so that a slot has to be with its object everywhere (Singh et al. 2024, Section 5.2.1).
    `psnr_…`, `ssim_…`, `mse_…`: views that were held out, and shown ones. `psnr_nearest`, `psnr_mean`: the nearest shown view, or the shown
    views' mean colour, in the place of a held-out one.
    `depth_error`: mean absolute error over the true depth, of held-out views where that is below `far`.
    """
    t, p = clip.true, clip.predicted
    times, views = t.shape[:2]

    def ari(pairs: Iterable[tuple[np.ndarray, np.ndarray]]) -> float:
        return _mean([adjusted_rand(count_pixels(true, own, background).objects) for true, own in pairs])

    held_out, context, whole = (
        slice(num_context_views, None),
        slice(None, num_context_views),
        count_pixels(t, p, background),
    )
    valid_depth = clip.true_depth[:, held_out] < far  # NaN is not
    relative_error = np.abs(clip.depth[:, held_out] - clip.true_depth[:, held_out]) / np.maximum(
        clip.true_depth[:, held_out], 1e-6
    )
    return {
        "image_fg_ari": ari((t[i, v], p[i, v]) for i in range(times) for v in range(views)),
        "video_fg_ari": ari((t[:, v], p[:, v]) for v in range(views)),
        "camera_fg_ari": ari((t[i], p[i]) for i in range(times)),
        "scene_fg_ari": adjusted_rand(whole.objects),
        # Of a scene whose masks nobody told, it would say that all pixels are one object.
        "ari": adjusted_rand(whole.table) if len(whole.objects) else float("nan"),
        "psnr_held_out": _psnr(clip.errors[:, held_out]),
        "psnr_shown": _psnr(clip.errors[:, context]),
        "psnr_nearest": _psnr(clip.nearest[:, held_out]),
        "psnr_mean": _psnr(clip.mean[:, held_out]),
        "ssim_held_out": _mean(clip.ssim[:, held_out]),
        "ssim_shown": _mean(clip.ssim[:, context]),
        "mse": _mean(clip.errors[:, held_out]),
        "depth_error": _mean(relative_error[valid_depth]),
    }


def score(
    clips: Iterable[ViewedClip],
    num_context_views: int,
    far: float,
    background: int | None = 0,
    ends: tuple[float, float] | None = None,
) -> Result:
    """Means over scenes of `scene_scores`; intervals resample scenes.

    Args:
        ends: distances between which a model looks; `counts` says how many scenes have something nearer than them, or farther.
    """
    scores, outside = [], 0
    for clip in clips:
        scores.append(scene_scores(clip, num_context_views, far, background))
        outside += ends is not None and _exceeds_depth_range(clip.true_depth, ends, far)
    means = metric_means(scores)
    empty = int(np.isnan(means.columns["scene_fg_ari"]).sum()) if scores else 0
    return Result(
        "view_masks",
        len(scores),
        HEADLINE,
        means.metrics,
        0.0,
        means.intervals,
        {
            "background": background,
            "mean": "over scenes",
            "interval": "bootstrap over scenes",
            "empty": "left out of ARIs",
        },
        {"scenes": len(scores), "empty": empty, **({} if ends is None else {"scenes_beyond_rays": outside})},
        {name: column.astype(np.float32) for name, column in means.columns.items()},
    )


def _exceeds_depth_range(depth: np.ndarray, ends: tuple[float, float], far: float) -> bool:
    """Whether something of a scene, the sky aside, lies where a model does not look; a thousandth is what files round away."""
    scene_depth = depth[depth < far]
    return bool(((scene_depth < ends[0] * 0.999) | (scene_depth > ends[1] * 1.001)).any())


def _psnr(errors: np.ndarray) -> float:
    """Of each view, then the mean."""
    return _mean(-10 * np.log10(np.maximum(errors, 1e-10)))


def _mean(values: object) -> float:
    table = np.asarray(values, float)
    return float(table[~np.isnan(table)].mean()) if (~np.isnan(table)).any() else float("nan")
