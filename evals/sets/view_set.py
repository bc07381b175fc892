"""Evaluation sets of episodes: clips with masks of their objects, and scenes seen by several posed cameras."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from sparo_train.core.errors import BadSampleError, DataError
from sparo_train.data.video.episode import Episode
from sparo_train.data.video.views import MultiViewScene

from .base import sha256
from .objects import object_annotations
from .wds import WdsSet


class ClipSet(WdsSet):
    """ROOT/test/nshards.txt and ROOT/test/0.tar … of episodes; facts are their label maps (T, H, W).

    Args:
        frames: so many of every episode, from its first; None: all of the first one's, which all others have to have.
        conditioning_slots: where above 0, the first frame's labels come behind its images as one more, and have to be below it.

    Raises:
        DataError: files that are missing.
    """

    def __init__(self, root: str | Path, frames: int | None, split: str = "test", conditioning_slots: int = 0):
        super().__init__(root, "clips", split)
        self.conditioning_slots = conditioning_slots
        self._alike, self.frames = frames is None, frames if frames is not None else len(self._episode(0)[2])

    def read(self, number: int) -> tuple[str, Any, np.ndarray]:
        """Key, images of the frames, and labels."""
        key, where, episode = self._episode(number)
        if len(episode) < self.frames:
            raise DataError(
                f"{where}: has {len(episode)} frames, and {self.frames} are scored; set frames: {len(episode)} or less, or take it out"
            )
        if self._alike and len(episode) > self.frames:
            raise DataError(
                f"{where}: has {len(episode)} frames, and the first sample {self.frames}; set frames: {self.frames} or less"
            )
        try:
            images = [episode.picture(t) for t in range(self.frames)]
            labels = [episode.labels(t) for t in range(self.frames)]
        except BadSampleError as bad:
            raise DataError(f"{where}: {bad}; scores need every frame: repair it, or take it out") from None
        sizes = {(image.height, image.width) for image in images} | {t.shape for t in labels}
        if len(sizes) > 1:
            raise DataError(
                f"{where}: frames and masks of unequal size ({', '.join(f'{w} x {h}' for h, w in sorted(sizes))})"
            )
        if self.conditioning_slots:
            if (most := int(labels[0].max())) >= self.conditioning_slots:
                raise DataError(
                    f"{where}: its first frame has object {most}, and the model has {self.conditioning_slots} slots for the ground and what is told; "
                    "score a model with more of them, or take it out"
                )
            # As one more image, so that it is cut and scaled by the same steps.
            images.append(Image.fromarray(labels[0].astype(np.uint8)))
        return key, images, np.stack(labels)

    def identity(self) -> str:
        return sha256("clips", str(self.frames), super().identity())

    def _episode(self, number: int) -> tuple[str, str, Episode]:
        storage, ordinal = self.at(number)
        key = f"number {ordinal}"
        try:
            key, fields = storage.read(ordinal)
            return key, f"{storage.url}: sample {key}", Episode(fields, pixel_range=None)  # mapped by the encoder
        except BadSampleError as bad:
            raise DataError(
                f"{storage.url}: sample {key}: {bad}; scores need every sample: repair it, or take it out"
            ) from None


class ObjectClipSet(ClipSet):
    """The same, whose facts say of the objects what the episode's json does (`object_annotations`)."""

    def read(self, number: int) -> tuple[str, Any, Any]:
        key, images, _ = super().read(number)
        _, where, episode = self._episode(number)
        return key, images, object_annotations(episode, self.frames, where)

    def identity(self) -> str:
        return sha256("objects", super().identity())


class Views(NamedTuple):
    """images: by time, then view.  poses: (T, V, 4, 4), camera to world, OpenGL's.  lenses: (V, 4), fx, fy, cx, cy in their pixels."""

    images: list[list[Image.Image]]
    poses: np.ndarray
    lenses: np.ndarray


class ViewSet(WdsSet):
    """ROOT/test/nshards.txt and ROOT/test/0.tar … of scenes; facts are fp32 (2, T, V, H, W): an object's number per pixel, and the distance
    along its ray (NaN where no scene says it).

    Args:
        frames: so many times of every episode, from its first; None: all of the first one's, which all others have to have.
        views: so many cameras, from the first; None: all of the first scene's, which all others have to have.

    Raises:
        DataError: files that are missing.
    """

    def __init__(self, root: str | Path, frames: int | None, views: int | None, split: str = "test"):
        super().__init__(root, "views", split)
        # Only where something is not told: reading a scene to count its views takes a moment on a slow disk.
        first = self._scene(0)[2] if frames is None or views is None else None
        self._alike, self._views_alike = frames is None, views is None
        self.frames = frames if frames is not None else first.frames  # type: ignore[union-attr]
        self.views = views if views is not None else len(first.views)  # type: ignore[union-attr]

    def read(self, number: int) -> tuple[str, Any, Any]:
        """Key, `Views` and facts."""
        key, where, scene = self._whole(number)
        try:
            every = [[(t, v) for v in range(self.views)] for t in range(self.frames)]
            images = [[scene.views[v].picture(t) for t, v in row] for row in every]
            # A scene without masks has no objects to score.
            width, height = images[0][0].size
            blank: np.ndarray = np.zeros((height, width), np.uint8)
            # Of any of them: then a missing one is damage, and not a set without masks.
            masked = any(view.has("mask") for view in scene.views)
            labels = [[scene.views[v].labels(t) if masked else blank for t, v in row] for row in every]
            sizes = {image.size for row in images for image in row} | {p.shape[::-1] for row in labels for p in row}
            if len(sizes) > 1:
                raise BadSampleError(f"views of unequal size ({', '.join(f'{w} x {h}' for w, h in sorted(sizes))})")
            has_depth = any(view.has("depth") for view in scene.views)
            depth = [
                [scene.views[v].depth(t) if has_depth else np.full((height, width), np.nan) for t, v in row]
                for row in every
            ]
            if odd := {d.shape for row in depth for d in row if d.shape != (height, width)}:
                raise BadSampleError(f"a plane of depth {odd.pop()} beside pictures of {(height, width)} pixels")
            poses = np.stack([[scene.pose(v, t) for t, v in row] for row in every])
            lenses = np.stack([scene.lens(v, width, height) for v in range(self.views)])
        except BadSampleError as bad:
            raise DataError(f"{where}: {bad}; scores need every view: repair it, or take it out") from None
        return key, Views(images, poses, lenses), np.stack([np.asarray(labels), np.asarray(depth)]).astype(np.float32)

    def identity(self) -> str:
        return sha256("views", f"{self.frames} {self.views}", super().identity())

    def _whole(self, number: int) -> tuple[str, str, MultiViewScene]:
        """A scene with as many times and cameras as are scored."""
        key, where, scene = self._scene(number)
        if self._alike and scene.frames > self.frames:
            raise DataError(
                f"{where}: has {scene.frames} frames, and the first sample {self.frames}; set frames: {self.frames} or less"
            )
        if self._views_alike and len(scene.views) > self.views:
            raise DataError(
                f"{where}: has {len(scene.views)} views, and the first sample {self.views}; set views: {self.views} or less"
            )
        if scene.frames < self.frames or len(scene.views) < self.views:
            raise DataError(
                f"{where}: has {scene.frames} frames of {len(scene.views)} views, and {self.frames} of {self.views} are scored; "
                "set frames and views to less, or take it out"
            )
        return key, where, scene

    def _scene(self, number: int) -> tuple[str, str, MultiViewScene]:
        storage, ordinal = self.at(number)
        key = f"number {ordinal}"
        try:
            key, fields = storage.read(ordinal)
            return (
                key,
                f"{storage.url}: sample {key}",
                MultiViewScene(fields, pixel_range=None),
            )  # mapped by the encoder
        except BadSampleError as bad:
            raise DataError(
                f"{storage.url}: sample {key}: {bad}; scores need every sample: repair it, or take it out"
            ) from None


class ObjectViewSet(ViewSet):
    """The same, whose facts say of the objects what the scene's json does (`object_annotations`)."""

    def read(self, number: int) -> tuple[str, Any, Any]:
        key, views, _ = super().read(number)
        _, where, scene = self._whole(number)
        return key, views, object_annotations(scene.views[0], self.frames, where)

    def identity(self) -> str:
        return sha256("objects", super().identity())
