"""Image-text pairs as CLIP trains on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...core.disk.metrics import Sample
from ..read.loader import Examples, OnStage, as_samples, ignore_stage
from ..read.sources import DataConfig, Source
from .image_transforms import train_pixels
from .samples import caption, decode_image, image_bytes
from .tokenizer import EOT, decode_words

Tokenize = Callable[[str], Sequence[int]]  # caption -> token ids, SOT and EOT included


class ImageText(NamedTuple):
    """Pixels (3, S, S) uint8, token ids, and, under patch dropout, the patches that are kept."""

    pixels: np.ndarray
    tokens: Sequence[int]
    patches: np.ndarray | None


class ImageTextExamples(Examples):
    """Images with captions.

    Args:
        config: the recipe's `data` block.
        image_size: pixels per side.
        context_length: length of a token row; longer captions keep EOT at the last position.
        tokenize: caption -> ids; called in the workers.
        patches: (P, K) under patch dropout: K of the P patches of each image are drawn with the sample's own stream.

    Batches hold `image` (B, 3, S, S) uint8 and `text` (B, T) int64, T = context_length or, with `trim_text`, the
    longest caption of the batch rounded up to eight; and with `patches` the kept ones, (B, K) int64, ascending.
    """

    def __init__(
        self,
        config: DataConfig,
        image_size: int,
        context_length: int,
        tokenize: Tokenize,
        patches: tuple[int, int] | None = None,
    ):
        self.config, self.image_size, self.context_length = config, image_size, context_length
        self.tokenize, self.patches = tokenize, patches

    def prepare(
        self, fields: dict[str, bytes], source: Source, rng: np.random.Generator, on_stage: OnStage = ignore_stage
    ) -> ImageText:
        """Decode, augment and tokenise; raises `BadSampleError` with the reason."""
        c, size = self.config, self.image_size
        text = caption(fields, source.config, rng)
        image = decode_image(
            image_bytes(fields, source.config.image_keys), 2 * size if c.scaled_decoding else None, c.pixel_range
        )
        on_stage("decode")
        pixels = train_pixels(image, size, c.crop_scale, c.hflip, rng)
        patch_ids = None if self.patches is None else np.sort(rng.permutation(self.patches[0])[: self.patches[1]])
        pixels = np.ascontiguousarray(pixels.transpose(2, 0, 1))
        on_stage("augment")
        tokens = self.tokenize(text)
        on_stage("tokenise")
        return ImageText(pixels, tokens, patch_ids)

    def stack(self, examples: Sequence[ImageText]) -> dict[str, Tensor]:
        """Images with captions to a batch: text padded with 0 to the context length, patches where there are any."""
        batch = {"image": torch.from_numpy(np.stack([e.pixels for e in examples]))}
        text = np.zeros((len(examples), self.context_length), dtype=np.int64)
        for row, example in zip(text, examples, strict=True):
            row[: len(example.tokens)] = example.tokens
        batch["text"] = torch.from_numpy(text)
        if self.patches is not None:
            batch["patches"] = torch.from_numpy(np.stack([e.patches for e in examples if e.patches is not None]))
        return batch

    def preview(self, batch: Mapping[str, Tensor], count: int) -> list[Sample]:
        captions = []
        for ids in batch["text"][:count].tolist():
            words = decode_words(ids[: ids.index(EOT) + 1] if EOT in ids else ids)
            captions.append(" ".join(word for word, _ in words[1:-1]))
        return as_samples(batch["image"][:count], captions)

    def finish(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Cut the rows behind the batch's longest caption."""
        if self.config.trim_text:
            longest = int(batch["text"].argmax(dim=1).max()) + 1
            batch["text"] = batch["text"][:, : min(self.context_length, -(-longest // 8) * 8)].contiguous()
        return batch
