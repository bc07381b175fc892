"""Image-text pairs for CLIP: pixels, and token ids of CLIP's byte-pair tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...core.disk.metrics import Sample
from ...core.errors import BadSampleError, DataError
from ..read.loader import Examples, OnStage, as_samples, ignore_stage
from ..sources.base import DataConfig, Source
from .image_transforms import planes, train_pixels
from .samples import MAX_CAPTION_CHARS, MAX_WORD_CHARS, caption, decode_for_training, image_bytes

if TYPE_CHECKING:
    from open_clip.tokenizer import SimpleTokenizer

SOT, EOT = 49406, 49407
VOCABULARY = EOT + 1


@lru_cache(maxsize=1)
def byte_pairs() -> SimpleTokenizer:
    """Return open_clip's tokenizer, whose vocabulary ours uses."""
    from open_clip.tokenizer import (
        SimpleTokenizer,
    )  # it imports all of open_clip, which would delay showing a recipe by seconds

    return SimpleTokenizer()


@lru_cache(maxsize=1 << 16)
def _word_ids(word: str) -> tuple[int, ...]:
    bpe = byte_pairs()
    letters = "".join(bpe.byte_encoder[byte] for byte in word.encode("utf-8"))
    return tuple(bpe.encoder[part] for part in bpe.bpe(letters).split(" "))


class ClipTokenizer:
    """Tokenizer that returns the ids of `open_clip.get_tokenizer`: SOT, byte pairs, EOT; a long caption is cut and keeps EOT last.

    Args:
        context_length: largest number of ids.
    """

    def __init__(self, context_length: int):
        self.context_length = context_length

    def __call__(self, caption: str) -> list[int]:
        """Return the ids of one caption, without padding.

        Raises:
            BadSampleError: the caption, or a word of it, is longer than in any language. Merging byte pairs takes
                quadratic time in a word's length (10,000 letters: a minute).
        """
        return [SOT, *self._ids(caption), EOT]

    def _ids(self, caption: str) -> list[int]:
        """Encode like `SimpleTokenizer.encode`, word by word, but only up to the context length."""
        bpe, ids, max_ids = byte_pairs(), list[int](), self.context_length - 2
        # In printable ASCII, ftfy changes nothing, and entities begin with an ampersand.
        plain = caption.isascii() and caption.isprintable() and "&" not in caption
        text = " ".join(caption.split()).lower() if plain else bpe.clean_fn(caption)
        if len(caption) > MAX_CAPTION_CHARS:
            raise BadSampleError(f"a caption with more than {MAX_CAPTION_CHARS} characters")
        for match in bpe.pat.finditer(text):
            word = match.group()
            if len(ids) >= max_ids:
                break
            if len(word) > MAX_WORD_CHARS:
                raise BadSampleError(f"a word with more than {MAX_WORD_CHARS} characters")
            ids += _word_ids(word)
        return ids[:max_ids]

    def batch(self, captions: Sequence[str]) -> Tensor:
        """Return (n, context_length) int64, padded with 0. Raises `DataError` naming a caption that cannot be encoded."""
        out = torch.zeros(len(captions), self.context_length, dtype=torch.long)
        for row, text in zip(out, captions, strict=True):
            try:
                ids = torch.tensor(self(text))
            except BadSampleError as bad:
                raise DataError(f"caption {text[:60]!r}…: {bad}. Shorten it.") from None
            row[: len(ids)] = ids
        return out


def decode_words(ids: Sequence[int]) -> list[tuple[str, int]]:
    """Return the words of a caption, each with its number of ids; SOT and EOT are `[start]` and `[end]`."""
    words: list[tuple[str, int]] = []
    begin = 0
    for place, number in enumerate(ids, 1):
        # the vocabulary marks the last piece of a word; a truncated caption may end within a word
        if (
            number in (SOT, EOT)
            or byte_pairs().decoder[number].endswith("</w>")
            or place == len(ids)
            or ids[place] == EOT
        ):
            special = {SOT: "[start]", EOT: "[end]"}.get(number)
            words.append((special or byte_pairs().decode(list(ids[begin:place])).strip(), place - begin))
            begin = place
    return words


Tokenize = Callable[[str], Sequence[int]]  # caption -> token ids, including SOT and EOT


class ImageText(NamedTuple):
    """Pixels (3, S, S) uint8, token ids, and, with patch dropout, the patches to keep."""

    pixels: np.ndarray
    tokens: Sequence[int]
    patches: np.ndarray | None


class ImageTextExamples(Examples):
    """Images with captions.

    Batches contain `image` (B, 3, S, S) uint8 and `text` (B, T) int64, where T is context_length or, with `trim_text`,
    the longest caption of the batch rounded up to a multiple of eight; and with `patches` the kept ones, (B, K) int64,
    ascending.

    Args:
        config: the recipe's `data` block.
        image_size: pixels per side.
        context_length: length of a row of tokens; longer captions keep EOT at the last position.
        tokenize: caption -> ids; called in the workers.
        patches: (P, K) with patch dropout: K of the P patches of each image are drawn from the sample's own random
            stream.
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
        """Decode, augment and tokenise a sample; raises `BadSampleError` with the reason."""
        c, size = self.config, self.image_size
        text = caption(fields, source.config, rng)
        picture = decode_for_training(image_bytes(fields, source.config.image_keys), c, size)
        on_stage("decode")
        pixels = planes(train_pixels(picture, size, c.crop_scale, c.hflip, rng))
        patch_ids = None if self.patches is None else np.sort(rng.permutation(self.patches[0])[: self.patches[1]])
        on_stage("augment")
        tokens = self.tokenize(text)
        on_stage("tokenise")
        return ImageText(pixels, tokens, patch_ids)

    def stack(self, examples: Sequence[ImageText]) -> dict[str, Tensor]:
        """Stack images with captions to a batch: text padded with 0 to the context length, and patches if there are any."""
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
        """Cut the rows after the batch's longest caption."""
        if self.config.trim_text:
            longest = int(batch["text"].argmax(dim=1).max()) + 1
            batch["text"] = batch["text"][:, : min(self.context_length, -(-longest // 8) * 8)].contiguous()
        return batch
