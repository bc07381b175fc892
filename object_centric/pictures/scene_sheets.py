"""Pictures of a model of posed scenes: what it draws of every camera beside the truth, depth, single slots, and a turn around the scene."""

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
from .panels import coloured, sheet_of


def scene_sheet(
    encoder: SceneEncoder,
    posed: Tensor,
    true_masks: np.ndarray,
    num_context_views: int,
    tile: int = 64,
    window: int | None = None,
) -> Image.Image:
    """A row for each view of the first and of the last time: it, its true masks, the model's, what it draws, depth, every slot alone.

    Args:
        posed: (T, V, 9, S, S).  true_masks: (T, V, H, W) numbers of objects.  num_context_views: so many of the views, the first, are what slots are made of.
        window: as of the task that is drawn.
    """
    slots = encoder.slots_of(posed[:, :num_context_views], window)
    # Of a still scene these are one.
    times = sorted({0, len(posed) - 1})
    heads = ["view", "true", "masks", "drawn", *(["depth"] if encoder.predicts_depth else [])]
    heads += [f"slot {k}" for k in range(encoder.slots)]
    rows, names = [], []
    for t in times:
        for number, view in enumerate(posed[t]):
            own, rays = slots[t : t + 1], view[None, 3:]
            rendered, slot_images = encoder.render(own, rays), encoder.render_slots(own, rays)[0]
            parts = [
                view[:3],
                coloured(transform_mask(encoder, true_masks[t, number])),
                coloured(rendered.labels[0].cpu().numpy() + 1),
                rendered.colours[0],
            ]
            parts += [] if rendered.depth is None else [_grey(rendered.depth[0])]
            rows.append([*parts, *slot_images])
            names.append(f"t {t}, {'shown' if number < num_context_views else 'held out'}")
    return sheet_of(rows, heads, tile, names)


def turntable(
    encoder: SceneEncoder,
    posed: Tensor,
    num_context_views: int,
    turns: int = 24,
    tile: int = 64,
    window: int | None = None,
) -> list[Image.Image]:
    """Pictures on a circle: the whole, depth, and every slot alone, of the slots of the last time; around what the shown cameras look at, or
    where they look away from each other, around themselves."""
    # Of the last time, which has seen all that came before.
    slots = encoder.slots_of(posed[:, :num_context_views], window)[-1:]
    poses = orbit_poses(posed[-1, :num_context_views], turns)
    side = posed.shape[-1]
    lens = intrinsics_of(posed[-1, 0])
    heads = ["drawn", *(["depth"] if encoder.predicts_depth else []), *(f"slot {k}" for k in range(encoder.slots))]
    sheets = []
    for pose in poses:
        rays = pixel_rays(torch.from_numpy(pose).float(), lens, side).movedim(-1, 0)[None]
        rendered, slot_images = encoder.render(slots, rays), encoder.render_slots(slots, rays)[0]
        sheets.append(
            sheet_of(
                [[rendered.colours[0], *([] if rendered.depth is None else [_grey(rendered.depth[0])]), *slot_images]],
                heads,
                tile,
            )
        )
    return sheets


def read_sample(encoder: SceneEncoder, source: EvalSet, number: int) -> tuple[str, Tensor, np.ndarray]:
    """Of a set of scenes a key, posed views (T, V, 9, S, S), and true numbers of objects (T, V, H, W)."""
    views: Any
    assert isinstance(encoder.transform, Pixels)
    key, views, fact = source.read(number)
    posed = torch.from_numpy(EveryView(encoder.transform)(views)).movedim(-1, -3)
    return key, posed, np.asarray(fact)[0].astype(np.int64)


def orbit_poses(views: Tensor, turns: int) -> list[np.ndarray]:
    """Poses (4, 4) that go round: at the cameras' mean distance and height about the point that their axes come nearest to; about their own
    middle, looking outwards, where that point is behind them.

    Args:
        views: (V, 9, S, S), whose rays tell where cameras are.
    """
    side = views.shape[-1]
    eyes = views[:, 3:6, 0, 0].double().cpu().numpy()
    ahead = views[:, 6:, side // 2, side // 2].double().cpu().numpy()
    middle = common_point(eyes, ahead)
    angles = 2 * np.pi * np.arange(turns) / turns
    around = np.stack([np.cos(angles), np.sin(angles), np.zeros(turns)], 1)
    spread = np.linalg.norm(eyes - eyes.mean(0), axis=1).mean()
    # Cameras that look away from each other have what they see around them; one alone may look past the origin.
    if ((middle - eyes) * ahead).sum(1).mean() <= max(spread, 1e-3):
        return [look_at(eyes.mean(0), eyes.mean(0) + step + [0, 0, ahead[:, 2].mean()]) for step in around]
    reach, high = np.hypot(*(eyes - middle)[:, :2].T).mean(), eyes[:, 2].mean()
    return [look_at([*(middle[:2] + reach * step[:2]), high], middle) for step in around]


def intrinsics_of(view: Tensor) -> Tensor:
    """(4,): fx, fy, cx, cy of a view (9, S, S), by what its rays say: ahead is along the one through its middle."""
    side = view.shape[-1]
    rays = view[6:].double()
    right = rays[:, side // 2, -1] - rays[:, side // 2, 0]
    ahead = (rays[:, 0, 0] + rays[:, -1, -1] + rays[:, 0, -1] + rays[:, -1, 0]) / 4
    ahead, right = ahead / ahead.norm(), right / right.norm()
    # From the outermost ray, which is told best: a neighbour's angle would be a difference of two near numbers.
    edge = rays[:, side // 2, -1]
    focal = (side / 2 - 0.5) / ((edge @ right) / (edge @ ahead))
    return torch.tensor([focal, focal, side / 2, side / 2], dtype=torch.float32)


def _grey(depth: Tensor) -> Tensor:
    """Near is bright; the scale is the picture's own."""
    low, high = depth.min(), depth.max()
    return (1 - (depth - low) / (high - low).clamp(min=1e-6)).expand(3, -1, -1)
