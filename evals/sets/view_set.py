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
    """ROOT/test/nshards.txt and ROOT/test/0.tar … of episodes, annotated by label maps (T, H, W).

    Args:
        frames: number of frames per episode, from its first; None: all of the first episode's, which the others must
            match.
        conditioning_slots: if positive, the first frame's labels are appended as one more image, and must be below it.

    Raises:
        DataError: files are missing.
    """

    def __init__(self, root: str | Path, frames: int | None, split: str = "test", conditioning_slots: int = 0):
        super().__init__(root, "clips", split)
        self.conditioning_slots = conditioning_slots
        self._alike, self.frames = frames is None, frames if frames is not None else len(self._episode(0)[2])

    def read(self, number: int) -> tuple[str, Any, np.ndarray]:
        """Return key, images of the frames, and labels."""
        key, where, episode = self._episode(number)
        if len(episode) < self.frames:
            raise DataError(
                f"{where}: has {len(episode)} frames, but {self.frames} are scored. Set frames: {len(episode)} or less, "
                "or remove this sample."
            )
        if self._alike and len(episode) > self.frames:
            raise DataError(
                f"{where}: has {len(episode)} frames, but the first sample has {self.frames}. Set frames: {self.frames} "
                "or less."
            )
        try:
            images = [episode.picture(t) for t in range(self.frames)]
            labels = [episode.labels(t) for t in range(self.frames)]
        except BadSampleError as bad:
            raise DataError(
                f"{where}: {bad}. Scores need every frame of a sample. Repair this sample, or remove it from the set."
            ) from None
        sizes = {(image.height, image.width) for image in images} | {t.shape for t in labels}
        if len(sizes) > 1:
            raise DataError(
                f"{where}: frames and masks have unequal sizes ({', '.join(f'{w} x {h}' for w, h in sorted(sizes))})"
            )
        if self.conditioning_slots:
            hint = np.where(labels[0] == 255, 0, labels[0])  # void pixels belong to no object
            if (most := int(hint.max())) >= self.conditioning_slots:
                raise DataError(
                    f"{where}: the first frame has an object with number {most}, but the model has {self.conditioning_slots} slots including the "
                    "background. Score a model with more slots, or remove this sample."
                )
            # As one more image, so that it is cropped and resized by the same steps.
            images.append(Image.fromarray(hint.astype(np.uint8)))
        return key, images, np.stack(labels)

    def identity(self) -> str:
        return sha256("clips", str(self.frames), super().identity())

    def stamp(self) -> str:
        # Stored features of a set whose lengths were given must not hide that its lengths differ.
        return f"{super().stamp()}{' equal lengths' if self._alike else ''}"

    def _episode(self, number: int) -> tuple[str, str, Episode]:
        storage, ordinal = self.locate(number)
        key = f"number {ordinal}"
        try:
            key, fields = storage.read(ordinal)
            return key, f"{storage.url}: sample {key}", Episode(fields, pixel_range=None)  # mapped by the encoder
        except BadSampleError as bad:
            raise DataError(
                f"{storage.url}: sample {key}: {bad}. Scoring skips no sample. Repair this one, or remove it from the set."
            ) from None


class ObjectClipSet(ClipSet):
    """The same, annotated by the episode's JSON (`object_annotations`)."""

    def read(self, number: int) -> tuple[str, Any, Any]:
        key, images, _ = super().read(number)
        _, where, episode = self._episode(number)
        return key, images, object_annotations(episode, self.frames, where)

    def identity(self) -> str:
        return sha256("objects", super().identity())


class Views(NamedTuple):
    """Images by time, then view; poses (T, V, 4, 4), camera to world, OpenGL's; lenses (V, 4), fx, fy, cx, cy in pixels."""

    images: list[list[Image.Image]]
    poses: np.ndarray
    lenses: np.ndarray


class ViewSet(WdsSet):
    """ROOT/test/nshards.txt and ROOT/test/0.tar … of scenes.

    Annotations are fp32 (2, T, V, H, W): object number per pixel, and distance along its ray (NaN if no scene has it).

    Args:
        frames: number of times per episode, from its first; None: all of the first one's, which the others must match.
        views: number of cameras, from the first; None: all of the first scene's, which the others must match.

    Raises:
        DataError: files are missing.
    """

    def __init__(self, root: str | Path, frames: int | None, views: int | None, split: str = "test"):
        super().__init__(root, "views", split)
        # Only if a number is missing, because reading a scene to count its views takes a moment on a slow disk.
        first = self._scene(0)[2] if frames is None or views is None else None
        self._alike, self._views_alike = frames is None, views is None
        self.frames = frames if frames is not None else first.frames  # type: ignore[union-attr]
        self.views = views if views is not None else len(first.views)  # type: ignore[union-attr]

    def read(self, number: int) -> tuple[str, Any, Any]:
        """Return key, `Views` and annotations."""
        key, where, scene = self._read_scene(number)
        try:
            every = [[(t, v) for v in range(self.views)] for t in range(self.frames)]
            images = [[scene.views[v].picture(t) for t, v in row] for row in every]
            # A scene without masks has no objects to score.
            width, height = images[0][0].size
            blank: np.ndarray = np.zeros((height, width), np.uint8)
            # If any scene has them: then a missing one is damage instead of a set without masks.
            masked = any(view.has("mask") for view in scene.views)
            labels = [[scene.views[v].labels(t) if masked else blank for t, v in row] for row in every]
            sizes = {image.size for row in images for image in row} | {p.shape[::-1] for row in labels for p in row}
            if len(sizes) > 1:
                raise BadSampleError(f"views have unequal sizes ({', '.join(f'{w} x {h}' for w, h in sorted(sizes))})")
            has_depth = any(view.has("depth") for view in scene.views)
            depth = [
                [scene.views[v].depth(t) if has_depth else np.full((height, width), np.nan) for t, v in row]
                for row in every
            ]
            if odd := {d.shape for row in depth for d in row if d.shape != (height, width)}:
                raise BadSampleError(f"a depth plane of {odd.pop()} does not match images of {(height, width)} pixels")
            poses = np.stack([[scene.pose(v, t) for t, v in row] for row in every])
            lenses = np.stack([scene.lens(v, width, height) for v in range(self.views)])
        except BadSampleError as bad:
            raise DataError(
                f"{where}: {bad}. Scores need every view of a sample. Repair this sample, or remove it from the set."
            ) from None
        return key, Views(images, poses, lenses), np.stack([np.asarray(labels), np.asarray(depth)]).astype(np.float32)

    def identity(self) -> str:
        return sha256("views", f"{self.frames} {self.views}", super().identity())

    def stamp(self) -> str:
        # As in `ClipSet`.
        equal = [name for name, alike in (("frames", self._alike), ("views", self._views_alike)) if alike]
        return " ".join([super().stamp(), *(f"equal {name}" for name in equal)])

    def _read_scene(self, number: int) -> tuple[str, str, MultiViewScene]:
        """Return a scene with the scored numbers of times and cameras."""
        key, where, scene = self._scene(number)
        if self._alike and scene.frames > self.frames:
            raise DataError(
                f"{where}: has {scene.frames} frames, but the first sample has {self.frames}. Set frames: {self.frames} "
                "or less."
            )
        if self._views_alike and len(scene.views) > self.views:
            raise DataError(
                f"{where}: has {len(scene.views)} views, but the first sample has {self.views}. Set views: {self.views} "
                "or less."
            )
        if scene.frames < self.frames or len(scene.views) < self.views:
            raise DataError(
                f"{where}: has {scene.frames} frames and {len(scene.views)} views, but {self.frames} frames and "
                f"{self.views} views are scored. Reduce frames and views, or remove this sample."
            )
        return key, where, scene

    def _scene(self, number: int) -> tuple[str, str, MultiViewScene]:
        storage, ordinal = self.locate(number)
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
                f"{storage.url}: sample {key}: {bad}. Scoring skips no sample. Repair this one, or remove it from the set."
            ) from None


class ObjectViewSet(ViewSet):
    """The same, annotated by the scene's JSON (`object_annotations`)."""

    def read(self, number: int) -> tuple[str, Any, Any]:
        key, views, _ = super().read(number)
        _, where, scene = self._read_scene(number)
        return key, views, object_annotations(scene.views[0], self.frames, where)

    def identity(self) -> str:
        return sha256("objects", super().identity())
