"""CLIP's byte-pair tokenizer (open_clip's; its vocabulary ships in the wheel), one caption at a time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...core.errors import BadSampleError, DataError
from .samples import MAX_CAPTION_CHARS, MAX_WORD_CHARS

if TYPE_CHECKING:
    from open_clip.tokenizer import SimpleTokenizer

SOT, EOT = 49406, 49407
VOCABULARY = EOT + 1


@lru_cache(maxsize=1)
def _bpe() -> SimpleTokenizer:
    from open_clip.tokenizer import SimpleTokenizer  # with it comes all of open_clip, seconds before a recipe is shown

    return SimpleTokenizer()


class ClipTokenizer:
    """Captions to ids, as `open_clip.get_tokenizer` gives them: SOT, byte pairs, EOT; a long caption is cut and keeps EOT last.

    Args:
        context_length: largest number of ids.
    """

    def __init__(self, context_length: int):
        self.context_length = context_length

    def __call__(self, caption: str) -> list[int]:
        """Ids of one caption, without padding.

        Raises:
            BadSampleError: a caption, or a word that would be encoded, is longer than any of a language: merging byte pairs takes the
                square of a word's length (10,000 letters: a minute).
        """
        return [SOT, *self._ids(caption), EOT]

    def _ids(self, caption: str) -> list[int]:
        """As `SimpleTokenizer.encode`, word by word, and no further than the context reaches."""
        bpe, ids, max_ids = _bpe(), list[int](), self.context_length - 2
        if len(caption) > MAX_CAPTION_CHARS:
            raise BadSampleError(f"a caption of over {MAX_CAPTION_CHARS} characters")
        for match in bpe.pat.finditer(bpe.clean_fn(caption)):
            word = match.group()
            if len(ids) >= max_ids:
                break
            if len(word) > MAX_WORD_CHARS:
                raise BadSampleError(f"a word of over {MAX_WORD_CHARS} characters")
            letters = "".join(bpe.byte_encoder[byte] for byte in word.encode("utf-8"))
            ids += [bpe.encoder[part] for part in bpe.bpe(letters).split(" ")]
        return ids[:max_ids]

    def batch(self, captions: Sequence[str]) -> Tensor:
        """(n, context_length) int64, padded with 0. Raises `DataError` naming a caption that cannot be encoded."""
        out = torch.zeros(len(captions), self.context_length, dtype=torch.long)
        for row, caption in zip(out, captions, strict=True):
            try:
                ids = torch.tensor(self(caption))
            except BadSampleError as bad:
                raise DataError(f"caption {caption[:60]!r}…: {bad}; shorten it") from None
            row[: len(ids)] = ids
        return out


def decode_words(ids: Sequence[int]) -> list[tuple[str, int]]:
    """The words of a caption, each with the number of ids that it is made of; SOT and EOT as `[start]` and `[end]`."""
    words: list[tuple[str, int]] = []
    begin = 0
    for place, number in enumerate(ids, 1):
        # the vocabulary marks the last piece of a word; a caption that was cut may end within one
        if number in (SOT, EOT) or _bpe().decoder[number].endswith("</w>") or place == len(ids) or ids[place] == EOT:
            special = {SOT: "[start]", EOT: "[end]"}.get(number)
            words.append((special or _bpe().decode(list(ids[begin:place])).strip(), place - begin))
            begin = place
    return words
