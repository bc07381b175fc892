"""Trained slot models of posed scenes as encoders: slots of context views, and renderings of any view."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from evals.encoders.capabilities import ViewsEncoder
from evals.encoders.encoder import Encoder
from evals.encoders.pixels import MappedPixels, Pixels
from evals.sets.view_set import Views
from evals.tasks.objects.reconstruction import ssim
from sparo_train.core.errors import ConfigError
from sparo_train.data.video.cameras import cut_lens

from ..grouping.slot_attention import GroupingOutput
from ..scenes3d.novel_views import NovelViews
from ..scenes3d.ray_decoder import RenderedRays
from ..scenes3d.rays import Rays, pixel_rays
from ..scenes3d.scene_model import SceneModel

_UNKNOWN = -2.0  # in place of a missing score; SSIM itself is at least -1


@dataclass(frozen=True)
class EveryView:
    """Transform of `Views` to (T, V, S, S, 9) fp32: images as in `of`, with colours in 0..1, origin and direction of rays."""

    to_pixels: Pixels

    def __call__(self, views: Any) -> np.ndarray:
        assert isinstance(views, Views)
        width, height = views.images[0][0].size
        size = self.to_pixels.size
        colours = (
            np.stack([np.stack([self.to_pixels(image) for image in row]) for row in views.images]).astype(np.float32)
            / 255
        )
        # Crop lenses like the images, or rays would not match their pixels.
        lenses = np.stack([cut_lens(lens, width, height, size) for lens in views.lenses])
        shape = views.poses.shape[:2]
        poses, lens = torch.from_numpy(views.poses), torch.from_numpy(np.broadcast_to(lenses, (*shape, 4)).copy())
        rays = pixel_rays(poses.float(), lens.float(), size)
        return np.concatenate([colours, rays.numpy()], axis=-1)


class RenderedViews(NamedTuple):
    """Renderings of n views: colours (n, 3, S, S) in 0..1, labels (n, S, S), depth (n, S, S) or None, shares (n, K + E, S, S)."""

    colours: Tensor
    labels: Tensor
    depth: Tensor | None
    shares: Tensor


class SceneEncoder(Encoder, ViewsEncoder):
    """Encoder whose initial slots come from one sample, the same for every scene; rays are sampled at the centres of bins."""

    takes_images = False

    def __init__(self, model: SceneModel, trained_frames: int, trained_views: int, label: str = "", seed: int = 0):
        super().__init__(model, (0.0,) * 3, (1.0,) * 3, label)
        self.model: Any
        c = model.config
        self.image_size, self.slots = c.image_size, c.grouping.slots
        self.transform = MappedPixels(self.image_size, self.image_size, rgb_first=True)
        self.trained_frames, self.trained_views = trained_frames, trained_views
        self.noise = torch.randn(c.noise, generator=torch.Generator().manual_seed(seed))
        self.seed = seed

    @property
    def windowed(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.model.config.grouping.binder is not None

    @property
    def predicts_depth(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.model.config.bounds is not None

    @property
    def ends(self) -> tuple[float, float] | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        bounds = self.model.config.bounds
        return None if bounds is None else (bounds.near, bounds.far)

    @property
    def width(self) -> int:
        return self.slots * self.model.config.grouping.width

    @property
    def architecture(self) -> str:
        return f"{self.model.config.model_dump_json()} noise {self.seed}"

    def encode(self, pixels: Tensor) -> Tensor:
        raise ConfigError(
            f"{self.label}: needs views with cameras, got images. Score it with `task: view_masks` or `task: scene_probe`."
        )

    def untrained(self) -> SceneEncoder:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = SceneModel(self.model.config).to(self.device).eval()
        made = SceneEncoder(model, self.trained_frames, self.trained_views, f"{self.label}, untrained")
        made.precision = self.precision
        return made

    @torch.inference_mode()
    def encode_slots(self, posed: Tensor, window: int | None = None) -> Tensor:
        """Return slots (T, K, D) of the context views (T, V, 9, S, S) of one scene; for a binder, those of each time from its last `window` times."""
        if window is not None and not self.windowed:
            raise ConfigError(
                f"context_frames={window}: only a binder can limit the number of earlier time steps, but this model "
                "has no binder. Remove context_frames."
            )
        noise = self.noise.to(self.device)[None]
        with self.autocast():
            # Time by time, so that memory does not depend on the length of an episode.
            tokens = torch.cat([self.model.tower.tokens(row[None, None]) for row in posed.to(self.device)], 1)
            grouping, last = self.model.tower.grouping, (window or self.trained_frames) if self.windowed else None
            if last is None or tokens.shape[1] <= last:
                return grouping(tokens, noise).slots[0].float()
            outputs = [grouping(tokens[:, :last], noise)]
            for end in range(last + 1, tokens.shape[1] + 1):
                output: GroupingOutput = grouping(tokens[:, end - last : end], noise)
                outputs.append(GroupingOutput(*(table[:, -1:] for table in output)))
            return torch.cat([one.slots for one in outputs], 1)[0].float()

    def scene_slots(self, posed: Tensor, window: int | None = None) -> Tensor:
        return torch.stack([self.encode_slots(scene, window) for scene in posed])

    @torch.inference_mode()
    def render(self, slots: Tensor, rays: Tensor) -> RenderedViews:
        """Render slots (n, K, D) along rays (n, 6, S, S)."""
        with self.autocast():
            rendered: RenderedRays = self.model.decoder(slots, flat_rays(rays.to(self.device)))
        side = rays.shape[-1]
        shares = rendered.shares.float().transpose(1, 2).unflatten(-1, (side, side))
        # What no field covers (densities cut off at zero, no sky) is not a slot, and gets a number after them.
        nobody = shares.amax(1) <= 0
        labels = shares.argmax(1).masked_fill(nobody, shares.shape[1]).float()
        labels = labels.masked_fill(~shares.isfinite().all(1), torch.nan)
        # Infinity would be clipped to white, which can be scored.
        colours = rendered.colours.float().masked_fill(~rendered.colours.isfinite(), torch.nan)
        colours = colours.clamp(0, 1).transpose(1, 2).unflatten(-1, (side, side))
        depth = None if rendered.depth is None else rendered.depth.float().unflatten(-1, (side, side))
        return RenderedViews(colours, labels, depth, shares)

    @torch.inference_mode()
    def render_slots(self, slots: Tensor, rays: Tensor) -> Tensor:
        """Render every slot alone on white: (n, K, 3, S, S)."""
        side, flat, parts = rays.shape[-1], flat_rays(rays.to(self.device)), []
        step = max(1, self.model.decoder.max_rays(slots) // slots.shape[1])  # one image per slot instead of one
        for begin in range(0, side * side, step):
            with self.autocast():
                parts.append(self.model.decoder.render_per_slot(slots, flat.chunk(begin, begin + step)).float())
        return torch.cat(parts, 1).clamp(0, 1).permute(0, 2, 3, 1).unflatten(-1, (side, side))

    @torch.inference_mode()
    def scenes(self, posed: Tensor, num_context_views: int, window: int | None = None) -> Tensor:
        rows = []
        for scene in posed:
            slots = self.encode_slots(scene[:, :num_context_views], window)
            facts, labels, depths = [], [], []
            for own, views in zip(slots, scene.to(self.device), strict=True):
                # All views of a time step, context views and others, are rendered from the slots of that step.
                rendered = self.render(own.expand(len(views), -1, -1), views[:, 3:])
                target = views[:, :3]
                # Images smaller than SSIM's window have no SSIM; NaN for any other reason is kept, and refused later.
                similarity = ssim(rendered.colours, target)
                similarity = similarity if similarity.isfinite().any() else torch.full_like(similarity, _UNKNOWN)
                facts.append(
                    torch.stack(
                        [_mse(rendered.colours, target), similarity, *copy_baselines(views, num_context_views)], -1
                    )
                )
                labels.append(rendered.labels)
                depths += [] if rendered.depth is None else [rendered.depth]
            metrics = torch.stack(facts)
            rows.append(torch.cat([metrics.flatten(), *(torch.stack(t).flatten() for t in (labels, depths) if t)]))
        return torch.stack(rows)


def flat_rays(rays: Tensor) -> Rays:
    """Rearrange (n, 6, S, S), origins and directions, to rays row by row."""
    origins, directions = rays.flatten(2).transpose(1, 2).split(3, -1)
    return Rays(origins.contiguous(), directions.contiguous())


def copy_baselines(views: Tensor, num_context_views: int) -> tuple[Tensor, Tensor]:
    """Return the errors (V,) of baselines for every view (V, 9, S, S): the context view with the nearest camera, and the context views' mean colour."""
    side = views.shape[-1]
    eyes, ahead = views[:, 3:6, 0, 0], views[:, 6:, side // 2, side // 2]
    scale = torch.cdist(eyes, eyes).max().clamp(min=1e-6)
    # Position and direction weigh equally, because two cameras at one position may see different walls.
    camera_distance = torch.cdist(eyes, eyes) / scale + torch.cdist(ahead, ahead)
    camera_distance[torch.arange(num_context_views), torch.arange(num_context_views)] = (
        torch.inf
    )  # a context view is not its own copy
    nearest = camera_distance[:, :num_context_views].argmin(1)
    target, mean = views[:, :3], views[:num_context_views, :3].mean((0, 2, 3))
    return _mse(views[nearest, :3], target), _mse(mean[None, :, None, None].expand_as(target), target)


def _mse(first: Tensor, second: Tensor) -> Tensor:
    return (first - second).square().flatten(1).mean(1)


def scene_encoder(objective: NovelViews) -> SceneEncoder:
    """Return the encoder of a trained objective."""
    c = objective.config
    return SceneEncoder(objective.model, c.frames.count, c.views.context)


def row_parts(
    row: np.ndarray, shape: tuple[int, int], size: int
) -> tuple[Sequence[np.ndarray], np.ndarray, np.ndarray | None]:
    """Split a row of `SceneEncoder.scenes` for (T, V) views into four tables (T, V), labels (T, V, S, S), and depth or None."""
    views, pixels = shape[0] * shape[1], shape[0] * shape[1] * size * size
    facts = row[: 4 * views].reshape(*shape, 4)
    rest = row[4 * views :]
    labels = rest[:pixels].reshape(*shape, size, size).astype(np.int64)
    depth = rest[pixels:].reshape(*shape, size, size) if len(rest) > pixels else None
    return [np.where(facts[..., i] == _UNKNOWN, np.nan, facts[..., i]) for i in range(4)], labels, depth
