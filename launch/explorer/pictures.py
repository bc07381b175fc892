"""The images that the page shows: some of a task's, and those that a person adds."""

from __future__ import annotations

import threading
from typing import NamedTuple

from PIL import Image

from evals.encoders.encoder import Encoder
from evals.sets.base import EvalSet, decode_image
from evals.sets.task_config import TaskConfig
from evals.slots.attend import captions_of
from evals.slots.eval_inputs import open_images
from evals.slots.overlay import ImageCrop, jpeg, thumbnail
from evals.slots.page_arrays import limited
from sparo_train.core.errors import ConfigError
from sparo_train.data.read.decoding import to_8bit

SIZE = 320  # pixels of the longest side that a page gets
MAX_ADDED_IMAGES = 100  # images that may be added
_MAX_BYTES = 256 << 20  # of all of them together, as files
_MAX_ASPECT_RATIO = 50  # times as long as it is wide: no picture, and much work


class Picture(NamedTuple):
    """An image's name, what is said of it (nothing where the model reads no text), and whether a person added it."""

    key: str
    caption: str
    own: bool


class Pictures:
    """Images by number: first `count` of a task's, evenly spaced, then those that were added.

    `numbers`: which of the task's images they are, in the order of its features.
    """

    def __init__(self, task: TaskConfig, encoder: Encoder, count: int):
        self._decoding = encoder.decoding
        self.source: EvalSet = open_images(limited(task, None))
        count = min(count, len(self.source))
        self.numbers = [i * len(self.source) // count for i in range(count)]
        self._caption = captions_of(task, self.source, "texts" in encoder.offers)
        self.entries: list[Picture] = []
        self._adding = threading.Lock()  # requests come on several threads
        self._own: list[bytes] = []  # as files: decoded, a few would fill a memory

    def set_metadata(self, keys: list[str], facts: list) -> None:
        """What the feature store knows of them: nothing has to be decoded before it is looked at."""
        self.entries = [Picture(keys[i], self._caption(facts[i]) or "", False) for i in self.numbers]

    def image(self, number: int) -> Image.Image:
        """Raises `ConfigError` for a number that is none, `DataError` for an image that cannot be read."""
        self.check(number)
        first = len(self.numbers)
        if number < first:
            return to_8bit(self.source.read(self.numbers[number])[1], self._decoding.pixel_range or "by_type")
        return decode_image(self._own[number - first], self.entries[number].key, self._decoding)

    def check(self, number: int) -> None:
        """Raise `ConfigError` for a number that is none."""
        if not 0 <= number < len(self.entries):
            raise ConfigError(f"image {number}: there are {len(self.entries)}")

    def jpeg(self, number: int, size: int = SIZE) -> bytes:
        """As large as the page shows it."""
        image = self.image(number)
        return jpeg(thumbnail(ImageCrop(image, (0, 0, image.width, image.height)), size))

    def add(self, data: bytes, name: str, caption: str) -> int:
        """One of a person's own; returns its number. Raises `DataError` where it is no image."""
        # Decoded before it is kept: what is no picture is refused at once, not when it is looked at.
        image = decode_image(data, name, self._decoding)
        if max(image.size) > _MAX_ASPECT_RATIO * min(image.size):
            raise ConfigError(f"{name}: {image.width} x {image.height} pixels are a line, no picture; cut it first")
        with self._adding:
            if len(self._own) >= MAX_ADDED_IMAGES:
                raise ConfigError(f"{name}: {MAX_ADDED_IMAGES} images were added already; start again for others")
            # Under the lock: two that come together must not both be the last that fits.
            if sum(map(len, self._own)) + len(data) > _MAX_BYTES:
                raise ConfigError(
                    f"{name}: the images added take more than {_MAX_BYTES >> 20} MB; start again for others"
                )
            self._own.append(data)
            self.entries.append(Picture(name, caption, True))
            return len(self.entries) - 1
