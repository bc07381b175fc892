"""Examples for distillation: a crop for the student, and the teacher's view of the same image or its cached tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from ..core.contracts import DeviceContext
from ..core.distributed import Ranks
from ..core.errors import BadSampleError, ConfigError
from ..data.examples.image_transforms import (
    Picture,
    eval_pixels,
    flip,
    get_size,
    planes,
    random_resized_crop_box,
    resized_crop,
)
from ..data.examples.multi_crop import gray, jitter
from ..data.examples.samples import decode_for_training, decode_image, image_bytes
from ..data.read.loader import Examples, OnStage, ignore_stage
from ..data.read.token_cache import TokenCache, compute_digest
from ..data.sources.base import DataConfig, Source
from ..models.vit_config import DROP_RANGE
from .distill_config import DistillObjectiveConfig
from .token_cache_builder import (
    Prepared,
    SampleRange,
    cache_image_tokens,
    fill_token_cache,
    on_engine_device,
    sample_ranges,
)

BOX_UNIT = 1 << 20  # parts of the side of the teacher's view in which boxes are given


class TeacherFacts(NamedTuple):
    """Sizes of a teacher.

    Attributes:
        label: name for messages.
        image_size: pixels per side of its view.
        grid: patches per side of its view; 0: it has none.
        width: channels of its tokens.
        memory: bytes of its weights.
        identity: hash of everything that determines its tokens.
    """

    label: str
    image_size: int
    grid: int
    width: int
    memory: int
    identity: str

    def check_tokens(self, tokens: Tensor) -> None:
        """Raise `ConfigError` if a plug-in's teacher returns other tokens than its `facts` describe."""
        expected = (1 + self.grid**2, self.width)
        if tokens.ndim != 3 or tokens.shape[1:] != expected:
            raise ConfigError(
                f"objective.teacher: {self.label} must return tokens (b, {expected[0]}, {expected[1]}), the class token first, "
                f"by its facts; got {tuple(tokens.shape)}. Correct the teacher."
            )


class Teacher(Protocol):
    """A frozen teacher, as `build` of an entry of sparo.teachers returns it; `facts` of the entry returns its sizes.

    Attributes:
        module: the model.
    """

    module: nn.Module

    def __call__(self, pixels: Tensor) -> Tensor:
        """Return tokens (B, 1 + grid * grid, width), the class token first, for (B, 3, S, S) uint8; moves to their device."""
        ...


class DistillExamples(Examples):
    """Crops of the central square of images; captions are not read.

    Batches contain `image` (B, 3, S, S) uint8, `box` (B, 4) int32 (left, top, width and height of the crop in
    1 / BOX_UNIT of the square; a flipped crop begins at its right edge and has a negative width), the teacher's `tokens`
    (B, N, D) with a cache, otherwise its `view` (B, 3, T, T) uint8, and with drop path `drop` (B, paths) int32.
    """

    def __init__(self, objective: DistillObjectiveConfig, config: DataConfig):
        self.objective, self.config, self.image_size = objective, config, objective.model.image_size
        self.paths = 2 * objective.model.blocks if objective.model.drop_path else 0
        self.reads_model, self.teacher = objective.cache is not None, objective.teacher.facts()
        # A run that resumes must have the same teacher, wherever its file is.
        self.fingerprint = {"teacher": self.teacher.identity[:16]}
        self.tokens: TokenCache | None = None

    def ready(self, objective: Any, sources: Sequence[Source], device_context: DeviceContext, ranks: Ranks) -> None:
        """Compute missing tokens of the teacher, in parts that are distributed over the ranks, and open the cache.

        Raises:
            DataError: the folder cannot be written, or the teacher gives values that are not finite.
        """
        cache = self.objective.cache
        assert cache is not None
        teacher: Teacher = self.objective.teacher.build()
        facts = {
            "teacher": self.teacher.identity,
            "precision": device_context.precision,
            "pixels": f"central square, {self.teacher.image_size} of {self._decoded_size}",
            "decode": self.config.decode,
            "scaled_decoding": self.config.scaled_decoding,
            "pixel_range": self.config.pixel_range,
        }
        tokens = ranks.call_on_all(lambda: TokenCache(Path(cache.folder) / "teacher", facts, cache.dtype))
        start = partial(self._start, tokens, teacher, device_context)
        size_note = partial(cache.size_note, (1 + self.teacher.grid**2) * self.teacher.width)
        fill_token_cache(tokens, "image", sample_ranges(sources), ranks, start, size_note)
        self.tokens = tokens

    @contextmanager
    def _start(
        self, tokens: TokenCache, teacher: Teacher, device_context: DeviceContext
    ) -> Iterator[Callable[[SampleRange], None]]:
        with on_engine_device(teacher.module, teacher, device_context) as encode:

            def checked(pixels: Tensor) -> Tensor:
                found = encode(pixels)
                self.teacher.check_tokens(found)
                return found

            yield lambda samples: cache_image_tokens(tokens, samples, self._view, checked, self.config.workers)

    @property
    def _decoded_size(self) -> int:
        """Return the size for scaled decoding, which is the same with and without a cache."""
        return max(self.image_size, self.teacher.image_size)

    def _picture(self, data: bytes) -> Picture:
        return decode_for_training(data, self.config, self._decoded_size)

    def _view(self, fields: dict[str, bytes], source: Source) -> list[Prepared]:
        data = image_bytes(fields, source.config.image_keys)
        # The digest is that of the file's bytes, so that finding tokens needs no image decoding.
        return [Prepared(compute_digest(data), self._teacher_view(self._picture(data)))]

    def _teacher_view(self, picture: Picture) -> np.ndarray:
        return planes(eval_pixels(picture, self.teacher.image_size))

    def prepare(
        self, fields: dict[str, bytes], source: Source, rng: np.random.Generator, on_stage: OnStage = ignore_stage
    ) -> dict[str, np.ndarray]:
        """Return the example of a sample; raises `BadSampleError` with the reason."""
        if self.reads_model and self.tokens is None:
            raise ConfigError(
                "objective.cache: only `sparo train` can read cached tokens. For this command, set objective.cache=null."
            )
        data = image_bytes(fields, source.config.image_keys)
        example: dict[str, np.ndarray] = {}
        if self.tokens is not None:
            rows = self.tokens.read(compute_digest(data))
            if rows is None:
                decode_image(data, pixel_range=self.config.pixel_range)  # report a broken image as such
                raise BadSampleError("no cached tokens of the teacher")
            example["tokens"] = rows
        picture = self._picture(data)
        on_stage("decode")
        if self.tokens is None:
            example["view"] = self._teacher_view(picture)
        pixels, example["box"] = self._crop(picture, rng)
        example["image"] = planes(pixels)
        if self.paths:
            # From the sample's stream, so that dropped paths do not depend on the rank that reads the sample.
            example["drop"] = rng.integers(0, DROP_RANGE, self.paths, dtype=np.int32)
        on_stage("augment")
        return example

    def _crop(self, picture: Picture, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Return the student's crop (S, S, 3) uint8 and its box."""
        c, (width, height) = self.objective.crops, get_size(picture)
        side = min(width, height)
        box = random_resized_crop_box((side, side), c.scale, rng)
        inside = box._replace(left=box.left + (width - side) // 2, top=box.top + (height - side) // 2)
        pixels = resized_crop(picture, inside, self.image_size)
        left, extent = box.left, box.width
        if rng.random() < c.hflip:
            pixels, left, extent = flip(pixels), box.left + box.width, -box.width
        if rng.random() < c.jitter_prob:
            pixels = jitter(pixels, c.jitter, rng)
        if rng.random() < c.gray_prob:
            pixels = gray(pixels)
        places = np.array([left, box.top, extent, box.height], np.float64) / side * BOX_UNIT
        return pixels, places.round().astype(np.int32)

    def stack(self, examples: Sequence[Any]) -> dict[str, Tensor]:
        return {key: torch.from_numpy(np.stack([e[key] for e in examples])) for key in examples[0]}
