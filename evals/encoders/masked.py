"""A selection or a mask around an encoder is an encoder: its encodings are the inner one's times numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sparo_train.core.errors import ConfigError
from sparo_train.models.weight_files.weights import weights_sha256

from .encoder import Encoder, TextEncoder


class MaskedEncoder(Encoder):
    """Image encodings times a mask (Section 5.2 of the SPARO paper); texts are as they were.

    Args:
        inner: the encoder.
        mask: (D,), or (L,) for one number per slot; zeros and ones make a selection of slots (Section 5.1).
        label: what to call it.

    A cosine with a text is then that of the masked image encoding and the whole text, up to a factor per image.
    Features are stored of `inner` alone; `of` does to them what `encode` does to images.
    """

    def __init__(self, inner: Encoder, mask: Tensor, label: str = ""):
        width, slots = inner.width, inner.slots
        if mask.shape not in ((width,), (slots,)):
            raise ConfigError(
                f"{inner.label}: a mask of {tuple(mask.shape)}; its encodings take ({width},) or ({slots},)"
            )
        super().__init__(inner.model, inner.mean.flatten().tolist(), inner.std.flatten().tolist(), label or inner.label)
        self.inner, self.transform, self.image_size, self.slots = inner, inner.transform, inner.image_size, slots
        self.precision, self.decoding = inner.precision, inner.decoding
        # One number of a slot stands for all of its numbers.
        self.mask = mask.float().repeat_interleave(width // slots) if mask.shape == (slots,) else mask.float()

    @classmethod
    def of_slots(cls, inner: Encoder, slots: Sequence[int]) -> MaskedEncoder:
        """Only these slots."""
        mask = torch.zeros(inner.slots)
        mask[list(slots)] = 1
        return _with_text(inner)(inner, mask, f"{inner.label} slots {','.join(map(str, slots))}")

    @property
    def width(self) -> int:
        return self.inner.width

    @property
    def architecture(self) -> str:
        return f"{self.inner.architecture} mask {weights_sha256({'mask': self.mask})}"

    def of(self, encodings: Tensor) -> Tensor:
        """Encodings (n, D) of the inner encoder, masked."""
        return encodings * self.mask.to(encodings.device)

    def stored(self) -> tuple[Encoder, Callable[[Tensor], Tensor] | None]:
        return self.inner, self.of

    def encode(self, pixels: Tensor) -> Tensor:
        return self.of(self.inner.encode(pixels))


class MaskedTextEncoder(MaskedEncoder, TextEncoder):
    """The same around an encoder with a text tower."""

    @property
    def text_weights(self) -> str:
        return self._texts.text_weights

    def text(self, captions: Sequence[str]) -> Tensor:
        return self._texts.text(captions)

    @property
    def _texts(self) -> TextEncoder:
        assert isinstance(self.inner, TextEncoder)
        return self.inner


def masked(inner: Encoder, mask: Tensor, label: str = "") -> MaskedEncoder:
    """`inner` behind a mask, with its texts where it has any."""
    return _with_text(inner)(inner, mask, label)


def _with_text(inner: Encoder) -> type[MaskedEncoder]:
    return MaskedTextEncoder if isinstance(inner, TextEncoder) else MaskedEncoder
