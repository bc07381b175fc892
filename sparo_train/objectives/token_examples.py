"""CLIP on cached tokens: the output of frozen blocks is computed once, and training reads it (`objective.cache`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core.contracts import DeviceContext
from ..core.disk.metrics import Sample
from ..core.distributed import Ranks
from ..core.errors import BadSampleError, ConfigError
from ..data.examples.image_text import ImageTextExamples
from ..data.examples.image_transforms import eval_pixels, planes
from ..data.examples.samples import caption, decode_for_training, decode_image, image_bytes, list_captions
from ..data.read.loader import OnStage, ignore_stage
from ..data.read.token_cache import TokenCache, compute_digest
from ..data.sources.base import Source
from .clip_config import CacheConfig
from .token_cache_builder import (
    Prepared,
    SampleRange,
    cache_image_tokens,
    cache_text_tokens,
    fill_token_cache,
    on_engine_device,
    sample_ranges,
    tower_facts,
)


class TokenExamples(ImageTextExamples):
    """Image-text pairs; at least one side is read as tokens.

    Batches contain `image_tokens` (B, N, d) in place of `image`, and `text_tokens` (B, T, d) in addition to `text`,
    fp16 or fp32, for the towers whose blocks are frozen.

    Args:
        cache: the recipe's `objective.cache`.
        images, texts: which towers are frozen.
        others: further arguments of `ImageTextExamples`.
    """

    reads_model = True

    def __init__(self, cache: CacheConfig, images: bool, texts: bool, *others: Any):
        super().__init__(*others)
        self.cache, self._frozen = cache, [kind for kind, is_so in (("image", images), ("text", texts)) if is_so]
        self.token_caches: dict[str, TokenCache] = {}

    def ready(
        self,
        objective: Any,
        sources: Sequence[Source],
        device_context: DeviceContext,
        ranks: Ranks,
    ) -> None:
        """Compute missing tokens, in parts that are distributed over the ranks, and open the cache.

        Raises:
            DataError: the folder cannot be written, or a tower gives values that are not finite.
        """
        ranges = sample_ranges(sources)
        for kind in self._frozen:
            tower = objective.model.visual if kind == "image" else objective.model.text
            facts = tower_facts(tower, self._sizes(objective.config, kind), device_context.precision)
            token_cache = ranks.call_on_all(
                lambda f=facts, k=kind: TokenCache(Path(self.cache.folder) / k, f, self.cache.dtype)
            )
            start = partial(self._start, kind, token_cache, tower, objective, device_context)
            vision = objective.config.model.vision
            size_note = partial(self.cache.size_note, vision.tokens * vision.width if kind == "image" else None)
            fill_token_cache(token_cache, kind, ranges, ranks, start, size_note)
            self.token_caches[kind] = token_cache

    @contextmanager
    def _start(
        self, kind: str, token_cache: TokenCache, tower: Any, objective: Any, device_context: DeviceContext
    ) -> Iterator[Callable[[SampleRange], None]]:
        workers = self.config.workers
        with on_engine_device(tower, tower.hidden, device_context) as encode:
            if kind == "text":
                yield lambda samples: cache_text_tokens(token_cache, samples, self._texts, encode, workers)
            else:
                yield lambda samples: cache_image_tokens(
                    token_cache, samples, self._image, lambda x: encode(objective.pixels(x)), workers
                )

    def _sizes(self, config: Any, kind: str) -> dict[str, Any]:
        """Return what determines a tower's tokens besides its weights, including the preprocessing of images."""
        tower = config.model.vision if kind == "image" else config.model.text
        sizes = tower.model_dump(mode="json", exclude={"init_from", "freeze", "patch_dropout"})
        sizes["quick_gelu"] = config.model.quick_gelu
        if kind == "text":
            return sizes
        pixels = {"pixels": "shortest side, middle", "scaled_decoding": self.config.scaled_decoding}
        if self.config.decode != "exact":  # caches of earlier versions have no such entry
            pixels["decode"] = self.config.decode
        decoding = {"decoding": 2, "pixel_range": self.config.pixel_range}  # 2: upright, transparency on white
        return {**sizes, **pixels, **decoding, "mean": config.mean, "std": config.std}

    def _image(self, fields: dict[str, bytes], source: Source) -> list[Prepared]:
        data, size = image_bytes(fields, source.config.image_keys), self.image_size
        picture = decode_for_training(data, self.config, size)
        # The digest is that of the file's bytes, so that finding tokens needs no image decoding.
        return [Prepared(compute_digest(data), planes(eval_pixels(picture, size)))]

    def _texts(self, fields: dict[str, bytes], source: Source) -> list[Prepared]:
        ids = [np.array(self.tokenize(text), np.int64) for text in list_captions(fields, source.config)]
        return [Prepared(compute_digest(row.tobytes()), row) for row in ids]

    def prepare(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, fields: dict[str, bytes], source: Source, rng: np.random.Generator, on_stage: OnStage = ignore_stage
    ) -> dict[str, np.ndarray]:
        """Return the tokens of a sample, with pixels if its image tower is trained; raises `BadSampleError` with the reason."""
        if len(self.token_caches) < len(self._frozen):
            raise ConfigError(
                "objective.cache: only `sparo train` can read cached tokens; this command reads pixels. Set "
                "objective.cache=null."
            )
        out: dict[str, np.ndarray] = {}
        if "image" in self.token_caches:
            ids = self.tokenize(caption(fields, source.config, rng))
            data = image_bytes(fields, source.config.image_keys)
            rows = self.token_caches["image"].read(compute_digest(data))
            if rows is None:
                decode_image(
                    data, pixel_range=self.config.pixel_range
                )  # there are none for a broken image, so report the image
            out["image_tokens"] = self._require_tokens("image", rows)
        else:
            pair = super().prepare(fields, source, rng, on_stage)
            out["image"], ids = pair.pixels, pair.tokens
            if pair.patches is not None:
                out["patches"] = pair.patches
        out["text"] = np.array(ids, np.int64)
        if "text" in self.token_caches:
            out["text_tokens"] = self._require_tokens(
                "text", self.token_caches["text"].read(compute_digest(out["text"].tobytes()))
            )
        on_stage("tokens")
        return out

    @staticmethod
    def _require_tokens(kind: str, rows: np.ndarray | None) -> np.ndarray:
        if rows is None:  # it could not be read when tokens were computed, or was written later
            raise BadSampleError(f"no {kind} tokens")
        return rows

    def stack(self, examples: Sequence[Any]) -> dict[str, Tensor]:
        """Stack examples; texts and their tokens are padded with zeros to the context length."""
        batch = {}
        for key, value in examples[0].items():
            if key.startswith("text"):
                rows = np.zeros((len(examples), self.context_length, *value.shape[1:]), value.dtype)
                for row, example in zip(rows, examples, strict=True):
                    row[: len(example[key])] = example[key]
                batch[key] = torch.from_numpy(rows)
            else:
                batch[key] = torch.from_numpy(np.stack([example[key] for example in examples]))
        return batch

    def finish(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        batch = super().finish(batch)
        if "text_tokens" in batch:
            batch["text_tokens"] = batch["text_tokens"][:, : batch["text"].shape[1]].contiguous()
        return batch

    def preview(self, batch: Mapping[str, Tensor], count: int) -> list[Sample]:
        return super().preview(batch, count) if "image" in batch else []  # pixels are not used
