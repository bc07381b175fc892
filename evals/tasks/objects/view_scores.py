"""Scores of scenes' slots: consistency of masks over time and cameras, and accuracy of rendered views."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from ..result import Result
from .segmentation import adjusted_rand, count_pixels, metric_means

HEADLINE = "psnr_held_out"


class ViewedClip(NamedTuple):
    """A scored scene.

    Attributes:
        true, predicted: label maps (T, V, H, W).
        errors, ssim: (T, V) of each rendered view.
        nearest, mean: (T, V), mean squared error of two baselines: the nearest context view, and the context views'
            mean colour.
        depth, true_depth: (T, V, H, W), NaN if unknown.
    """

    true: np.ndarray
    predicted: np.ndarray
    errors: np.ndarray
    ssim: np.ndarray
    nearest: np.ndarray
    mean: np.ndarray
    depth: np.ndarray
    true_depth: np.ndarray


def scene_scores(
    clip: ViewedClip, num_context_views: int, far: float, background: int | None = 0, ignore: int | None = None
) -> dict[str, float]:
    """Return one scene's scores; NaN without objects, or without held-out views.

    `image_fg_ari`: per view and time, then averaged. `video_fg_ari`: per camera over all times. `camera_fg_ari`: per
    time over all cameras. `scene_fg_ari`: over everything together, so that a slot must follow its object everywhere
    (Singh et al. 2024, Section 5.2.1). `psnr_…`, `ssim_…`, `mse_…`: held-out views, and context views. `psnr_nearest`,
    `psnr_mean`: the baselines, on held-out views. `depth_error`: mean absolute error divided by the true depth, on
    held-out views where that is below `far`.
    """
    t, p = clip.true, clip.predicted
    times, views = t.shape[:2]

    def ari(pairs: Iterable[tuple[np.ndarray, np.ndarray]]) -> float:
        return _mean([adjusted_rand(count_pixels(true, own, background, ignore).objects) for true, own in pairs])

    held_out, context, whole = (
        slice(num_context_views, None),
        slice(None, num_context_views),
        count_pixels(t, p, background, ignore),
    )
    valid_depth = clip.true_depth[:, held_out] < far  # false for NaN
    relative_error = np.abs(clip.depth[:, held_out] - clip.true_depth[:, held_out]) / np.maximum(
        clip.true_depth[:, held_out], 1e-6
    )
    return {
        "image_fg_ari": ari((t[i, v], p[i, v]) for i in range(times) for v in range(views)),
        "video_fg_ari": ari((t[:, v], p[:, v]) for v in range(views)),
        "camera_fg_ari": ari((t[i], p[i]) for i in range(times)),
        "scene_fg_ari": adjusted_rand(whole.objects),
        # For a scene without masks, it would treat all pixels as one object.
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
    ignore: int | None = None,
) -> Result:
    """Return means over scenes of `scene_scores`; intervals resample scenes.

    Args:
        clips, num_context_views, far, background: scenes and options.
        ignore: see `count_pixels`.
        ends: range of distances that a model samples; `counts` has the number of scenes with something outside of it.
    """
    scores, outside = [], 0
    for clip in clips:
        scores.append(scene_scores(clip, num_context_views, far, background, ignore))
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
            "ignore": ignore,
            "mean": "over scenes",
            "interval": "bootstrap over scenes",
            "empty": "excluded from ARIs",
        },
        {"scenes": len(scores), "empty": empty, **({} if ends is None else {"scenes_beyond_rays": outside})},
        {name: column.astype(np.float32) for name, column in means.columns.items()},
    )


def _exceeds_depth_range(depth: np.ndarray, ends: tuple[float, float], far: float) -> bool:
    """Return whether something of a scene, except the sky, is outside the sampled distances; a tolerance of a thousandth covers rounding in files."""
    scene_depth = depth[depth < far]
    return bool(((scene_depth < ends[0] * 0.999) | (scene_depth > ends[1] * 1.001)).any())


def _psnr(errors: np.ndarray) -> float:
    """Return the PSNR of each view, averaged."""
    return _mean(-10 * np.log10(np.maximum(errors, 1e-10)))


def _mean(values: object) -> float:
    table = np.asarray(values, float)
    return float(table[~np.isnan(table)].mean()) if (~np.isnan(table)).any() else float("nan")
