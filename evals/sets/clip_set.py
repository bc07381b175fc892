"""Episodes to score on: their first frames, and whose every pixel is; tars in the layout of evaluation sets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from sparo_train.core.errors import BadSampleError, DataError
from sparo_train.data.clips.episode import Episode

from .base import sha256
from .wds import WdsSet

_NUMBERS = {"positions": "position", "velocities": "velocity", "angular_velocities": "angular_velocity"}
_WORDS = ("color", "shape", "material", "size")


class ClipSet(WdsSet):
    """ROOT/test/nshards.txt and ROOT/test/0.tar … of episodes; facts are their label maps (T, H, W).

    Args:
        frames: so many of every episode, from its first; None: all of the first one's, which all others have to have.
        told: where above 0, the first frame's labels come behind its images as one more, and have to be below it.

    Raises:
        DataError: files that are missing.
    """

    def __init__(self, root: str | Path, frames: int | None, split: str = "test", told: int = 0):
        super().__init__(root, "clips", split)
        self.told = told
        self.frames = frames if frames is not None else len(self._episode(0)[2])

    def read(self, number: int) -> tuple[str, Any, np.ndarray]:
        """Key, images of the frames, and labels."""
        key, where, episode = self._episode(number)
        if len(episode) < self.frames:
            raise DataError(
                f"{where}: has {len(episode)} frames, and {self.frames} are scored; set frames: {len(episode)} or less, or take it out"
            )
        try:
            pictures = [episode.image(t) for t in range(self.frames)]
            labels = [episode.labels(t) for t in range(self.frames)]
        except BadSampleError as bad:
            raise DataError(f"{where}: {bad}; scores need every frame: repair it, or take it out") from None
        sizes = {p.shape[:2] for p in pictures} | {t.shape for t in labels}
        if len(sizes) > 1:
            raise DataError(
                f"{where}: frames and masks of unequal size ({', '.join(f'{w} x {h}' for h, w in sorted(sizes))})"
            )
        images = [Image.fromarray(picture) for picture in pictures]
        if self.told:
            if (most := int(labels[0].max())) >= self.told:
                raise DataError(
                    f"{where}: its first frame has object {most}, and the model has {self.told} slots for the ground and what is told; "
                    "score a model with more of them, or take it out"
                )
            images.append(Image.fromarray(labels[0].astype(np.uint8)))
        return key, images, np.stack(labels)

    def identity(self) -> str:
        return sha256("clips", str(self.frames), super().identity())

    def _episode(self, number: int) -> tuple[str, str, Episode]:
        storage, ordinal = self.at(number)
        key = f"number {ordinal}"
        try:
            key, fields = storage.read(ordinal)
            return key, f"{storage.url}: sample {key}", Episode(fields)
        except BadSampleError as bad:
            raise DataError(
                f"{storage.url}: sample {key}: {bad}; scores need every sample: repair it, or take it out"
            ) from None


class ObjectClipSet(ClipSet):
    """The same, whose facts say of the objects what the episode's json does, as plain data: `frames` (T), `position` (T, M, 3), `numbers`
    by name (T, M) or (T, M, c), `words` by name (M)."""

    def read(self, number: int) -> tuple[str, Any, Any]:
        key, images, _ = super().read(number)
        _, where, episode = self._episode(number)
        try:
            objects = episode.facts.get("objects")
        except BadSampleError as bad:
            raise DataError(f"{where}: {bad}; repair it, or take it out") from None
        if not isinstance(objects, list) or not all(isinstance(one, dict) for one in objects):
            raise DataError(
                f"{where}: its json has no list `objects`; probes need what sparo data movi-like and MOVi tell of them"
            )
        tables = {name: [self._table(one, name, len(episode)) for one in objects] for name in _NUMBERS}
        if any(table is None for table in tables["positions"]):
            raise DataError(f"{where}: an object has no positions (a row of three numbers per frame)")
        numbers = {short: _by_time(tables[name]) for name, short in _NUMBERS.items() if None not in tables[name]}
        sizes = [one.get("size") for one in objects]
        if objects and all(isinstance(size, int | float) for size in sizes):  # MOVi's, of which movi-like has words
            numbers["size"] = [[[float(size)] for size in sizes if size is not None] for _ in range(self.frames)]
        words = {
            name: [str(one[name]) for one in objects]
            for name in _WORDS
            if all(isinstance(one.get(name), str) for one in objects)
        }
        position = numbers.pop("position") if objects else []
        return key, images, {"frames": self.frames, "position": position, "numbers": numbers, "words": words}

    def identity(self) -> str:
        return sha256("objects", super().identity())

    def _table(self, one: dict[str, Any], name: str, length: int) -> list[Any] | None:
        """A row of three finite numbers for each frame that is read; None where there is no such table."""
        try:
            table = np.asarray(one.get(name), np.float64)
        except (TypeError, ValueError):
            return None
        return table[: self.frames].tolist() if table.shape == (length, 3) and np.isfinite(table).all() else None


def _by_time(tables: list[Any]) -> list[Any]:
    """(M, T, c) to (T, M, c)."""
    return [list(row) for row in zip(*tables, strict=True)]
