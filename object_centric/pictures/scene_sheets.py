"""Pictures of a model of posed scenes: what it draws of every camera beside the truth, depth, single slots, and a turn around the scene."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from evals.encoders.pixels import Pixels
from evals.sets.base import EvalSet
from sparo_train.data.clips.cameras import looking

from ..scenes3d.rays import common_point, pixel_rays
from ..tasks.mask_task import seen_by
from ..tasks.scene_encoder import EveryView, SceneEncoder
from .panels import coloured, sheet_of


def scene_sheet(
    encoder: SceneEncoder, posed: Tensor, true: np.ndarray, shown: int, tile: int = 64, window: int | None = None
) -> Image.Image:
    """A row for each view of the first and of the last time: it, its true masks, the model's, what it draws, depth, every slot alone.

    Args:
        posed: (T, V, 9, S, S).  true: (T, V, H, W) numbers of objects.  shown: so many of the views, the first, are what slots are made of.
        window: as of the task that is drawn.
    """
    slots = encoder.slots_of(posed[:, :shown], window)
    # Of a still scene these are one.
    times = sorted({0, len(posed) - 1})
    heads = ["view", "true", "masks", "drawn", *(["depth"] if encoder.tells_depth else [])]
    heads += [f"slot {k}" for k in range(encoder.slots)]
    rows, names = [], []
    for t in times:
        for number, view in enumerate(posed[t]):
            own, rays = slots[t : t + 1], view[None, 3:]
            found, alone = encoder.drawn(own, rays), encoder.alone(own, rays)[0]
            parts = [
                view[:3],
                coloured(seen_by(encoder, true[t, number])),
                coloured(found.labels[0].cpu().numpy() + 1),
                found.colours[0],
            ]
            parts += [] if found.depth is None else [_grey(found.depth[0])]
            rows.append([*parts, *alone])
            names.append(f"t {t}, {'shown' if number < shown else 'held out'}")
    return sheet_of(rows, heads, tile, names)


def turntable(
    encoder: SceneEncoder, posed: Tensor, shown: int, turns: int = 24, tile: int = 64, window: int | None = None
) -> list[Image.Image]:
    """Pictures on a circle: the whole, depth, and every slot alone, of the slots of the last time; around what the shown cameras look at, or
    where they look away from each other, around themselves."""
    # Of the last time, which has seen all that came before.
    slots = encoder.slots_of(posed[:, :shown], window)[-1:]
    poses = circle(posed[-1, :shown], turns)
    side = posed.shape[-1]
    lens = lens_of(posed[-1, 0])
    heads = ["drawn", *(["depth"] if encoder.tells_depth else []), *(f"slot {k}" for k in range(encoder.slots))]
    sheets = []
    for pose in poses:
        rays = pixel_rays(torch.from_numpy(pose).float(), lens, side).movedim(-1, 0)[None]
        found, alone = encoder.drawn(slots, rays), encoder.alone(slots, rays)[0]
        sheets.append(
            sheet_of(
                [[found.colours[0], *([] if found.depth is None else [_grey(found.depth[0])]), *alone]], heads, tile
            )
        )
    return sheets


def sample_of(encoder: SceneEncoder, source: EvalSet, number: int) -> tuple[str, Tensor, np.ndarray]:
    """Of a set of scenes a key, posed views (T, V, 9, S, S), and true numbers of objects (T, V, H, W)."""
    seen: Any
    assert isinstance(encoder.transform, Pixels)
    key, seen, fact = source.read(number)
    posed = torch.from_numpy(EveryView(encoder.transform)(seen)).movedim(-1, -3)
    return key, posed, np.asarray(fact)[0].astype(np.int64)


def circle(views: Tensor, turns: int) -> list[np.ndarray]:
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
        return [looking(eyes.mean(0), eyes.mean(0) + step + [0, 0, ahead[:, 2].mean()]) for step in around]
    reach, high = np.hypot(*(eyes - middle)[:, :2].T).mean(), eyes[:, 2].mean()
    return [looking([*(middle[:2] + reach * step[:2]), high], middle) for step in around]


def lens_of(view: Tensor) -> Tensor:
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
