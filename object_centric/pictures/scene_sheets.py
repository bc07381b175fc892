"""Pictures of a model of posed scenes: every camera's image with its rendering, depth, single slots, and a turntable."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from evals.encoders.pixels import Pixels
from evals.sets.base import EvalSet
from sparo_train.data.video.cameras import look_at

from ..scenes3d.rays import common_point, pixel_rays
from ..tasks.mask_task import transform_mask
from ..tasks.scene_encoder import EveryView, SceneEncoder
from .panels import arrange_sheet, background_label, colour_labels, colour_slots


def scene_sheet(
    encoder: SceneEncoder,
    posed: Tensor,
    true_masks: np.ndarray,
    num_context_views: int,
    tile: int = 64,
    window: int | None = None,
) -> Image.Image:
    """Draw one row per view of the first and the last time: image, true masks, predicted masks, rendering, depth, every slot alone.

    Args:
        encoder: the model.
        posed: (T, V, 9, S, S).
        true_masks: (T, V, H, W) object numbers.
        num_context_views: number of first views from which slots are computed.
        tile: pixels per side of each tile.
        window: number of context frames, as in the task.
    """
    slots = encoder.encode_slots(posed[:, :num_context_views], window)
    # In a static scene, these are the same.
    times = sorted({0, len(posed) - 1})
    heads = ["view", "true", "masks", "rendered", *(["depth"] if encoder.predicts_depth else [])]
    heads += [f"slot {k}" for k in range(encoder.slots)]
    rows, names = [], []
    background = None
    for t in times:
        for number, view in enumerate(posed[t]):
            own, rays = slots[t : t + 1], view[None, 3:]
            rendered, slot_images = encoder.render(own, rays), encoder.render_slots(own, rays)[0]
            labels = rendered.labels[0].nan_to_num(0).long().cpu().numpy()
            background = background_label(labels) if background is None else background  # that of the first view
            parts = [
                view[:3],
                colour_labels(transform_mask(encoder, true_masks[t, number])),
                colour_slots(labels, background),
                rendered.colours[0],
            ]
            parts += [] if rendered.depth is None else [_grey(rendered.depth[0])]
            rows.append([*parts, *slot_images])
            names.append(f"t {t}, {'context' if number < num_context_views else 'held out'}")
    return arrange_sheet(rows, heads, tile, names)


def turntable(
    encoder: SceneEncoder,
    posed: Tensor,
    num_context_views: int,
    turns: int = 24,
    tile: int = 64,
    window: int | None = None,
) -> list[Image.Image]:
    """Render on a circle: the whole scene, depth, and every slot alone, from the slots of the last time.

    The circle is around the point that the context cameras look at or, if they look away from each other, around
    themselves.
    """
    # Slots of the last time include all earlier ones.
    slots = encoder.encode_slots(posed[:, :num_context_views], window)[-1:]
    poses = orbit_poses(posed[-1, :num_context_views], turns)
    side = posed.shape[-1]
    lens = infer_intrinsics(posed[-1, 0])
    heads = ["rendered", *(["depth"] if encoder.predicts_depth else []), *(f"slot {k}" for k in range(encoder.slots))]
    sheets = []
    for pose in poses:
        rays = pixel_rays(torch.from_numpy(pose).float(), lens, side).movedim(-1, 0)[None]
        rendered, slot_images = encoder.render(slots, rays), encoder.render_slots(slots, rays)[0]
        sheets.append(
            arrange_sheet(
                [[rendered.colours[0], *([] if rendered.depth is None else [_grey(rendered.depth[0])]), *slot_images]],
                heads,
                tile,
            )
        )
    return sheets


def read_sample(encoder: SceneEncoder, source: EvalSet, number: int) -> tuple[str, Tensor, np.ndarray]:
    """Return a key, posed views (T, V, 9, S, S), and true object numbers (T, V, H, W) of a scene."""
    views: Any
    assert isinstance(encoder.transform, Pixels)
    key, views, fact = source.read(number)
    posed = torch.from_numpy(EveryView(encoder.transform)(views)).movedim(-1, -3)
    return key, posed, np.asarray(fact)[0].astype(np.int64)


def orbit_poses(views: Tensor, turns: int) -> list[np.ndarray]:
    """Return poses (4, 4) on a circle: at the cameras' mean distance and height around the point nearest to their axes.

    If that point is behind them, the circle is around their own centre, looking outwards.

    Args:
        views: (V, 9, S, S), whose rays contain the cameras.
        turns: number of poses.
    """
    side = views.shape[-1]
    eyes = views[:, 3:6, 0, 0].double().cpu().numpy()
    ahead = views[:, 6:, side // 2, side // 2].double().cpu().numpy()
    middle = common_point(eyes, ahead)
    angles = 2 * np.pi * np.arange(turns) / turns
    around = np.stack([np.cos(angles), np.sin(angles), np.zeros(turns)], 1)
    spread = np.linalg.norm(eyes - eyes.mean(0), axis=1).mean()
    # Cameras that look away from each other surround nothing; a single one may look past the origin.
    if ((middle - eyes) * ahead).sum(1).mean() <= max(spread, 1e-3):
        return [look_at(eyes.mean(0), eyes.mean(0) + step + [0, 0, ahead[:, 2].mean()]) for step in around]
    reach, high = np.hypot(*(eyes - middle)[:, :2].T).mean(), eyes[:, 2].mean()
    return [look_at([*(middle[:2] + reach * step[:2]), high], middle) for step in around]


def infer_intrinsics(view: Tensor) -> Tensor:
    """Return (4,) fx, fy, cx, cy of a view (9, S, S), from its rays; the central ray points ahead."""
    side = view.shape[-1]
    rays = view[6:].double()
    right = rays[:, side // 2, -1] - rays[:, side // 2, 0]
    ahead = (rays[:, 0, 0] + rays[:, -1, -1] + rays[:, 0, -1] + rays[:, -1, 0]) / 4
    ahead, right = ahead / ahead.norm(), right / right.norm()
    # From the outermost ray, which is the most accurate: a neighbour's angle would be a difference of two similar
    # numbers.
    edge = rays[:, side // 2, -1]
    focal = (side / 2 - 0.5) / ((edge @ right) / (edge @ ahead))
    return torch.tensor([focal, focal, side / 2, side / 2], dtype=torch.float32)


def _grey(depth: Tensor) -> Tensor:
    """Return a grey image in which near is bright, scaled per image."""
    low, high = depth.min(), depth.max()
    return (1 - (depth - low) / (high - low).clamp(min=1e-6)).expand(3, -1, -1)
