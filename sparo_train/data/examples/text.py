"""CLIP's byte-pair tokenizer (open_clip's; its vocabulary ships in the wheel), one caption at a time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from open_clip.tokenizer import SimpleTokenizer
from torch import Tensor

SOT, EOT = 49406, 49407
VOCABULARY = EOT + 1


@lru_cache(maxsize=1)
def _bpe() -> SimpleTokenizer:
    return SimpleTokenizer()


class ClipTokenizer:
    """Captions to ids, as `open_clip.get_tokenizer` gives them: SOT, byte pairs, EOT; a long caption is cut and keeps EOT last.

    Args:
        context_length: largest number of ids.
    """

    def __init__(self, context_length: int):
        self.context_length = context_length

    def __call__(self, caption: str) -> list[int]:
        """Ids of one caption, without padding."""
        return [SOT, *_bpe().encode(caption)[: self.context_length - 2], EOT]

    def batch(self, captions: Sequence[str]) -> Tensor:
        """(n, context_length) int64, padded with 0."""
        out = torch.zeros(len(captions), self.context_length, dtype=torch.long)
        for row, caption in zip(out, captions, strict=True):
            ids = torch.tensor(self(caption))
            row[: len(ids)] = ids
        return out


def decode_tokens(ids: Sequence[int]) -> list[str]:
    """The text of each id, one by one; SOT and EOT as `[start]` and `[end]`."""
    special = {SOT: "[start]", EOT: "[end]"}
    return [special.get(i) or _bpe().decode([i]).strip() for i in ids]
