"""Base classes of encoders of images, and of texts for models with a text tower, in batches of equal length."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol, Self

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from sparo_train.core.accelerator import tf32_enabled
from sparo_train.core.errors import BadSampleError, ConfigError, DataError
from sparo_train.core.files import read_bytes
from sparo_train.core.world import stop_here
from sparo_train.data.decode.bands import PixelRange
from sparo_train.data.decode.decoding import (
    TRAINING,
    UNCONVERTED,
    Decoding,
    band_values,
    decode_own,
    from_array,
    postprocess,
    to_8bit,
)
from sparo_train.data.examples.image_transforms import normalise
from sparo_train.models.weight_files.weights import hash_again_if_changed, weights_sha256

from ..sets.base import Transform
from .capabilities import (
    BlocksEncoder,
    ClipsEncoder,
    ConditionedEncoder,
    DrawingEncoder,
    MasksEncoder,
    ObjectsEncoder,
    TokensEncoder,
    TrainingRun,
    ViewsEncoder,
)
from .dense import DenseEncoder
from .pixels import BandPixels, FlooredPixels, LibraryPixels, MappedPixels, Pixels, SquarePixels, as_array


def texts_per_batch(device: torch.device) -> int:
    """Return how many captions are encoded at once: few on a CPU, so that they stay in its caches."""
    return 64 if device.type == "cpu" else 2048


def as_list(values: Iterable[Any], what: str) -> list[Any]:
    """Return captions or images as a list. Raises `DataError` for a single one, whose parts would be taken for several, and for none."""
    pixels = isinstance(values, Tensor) or (isinstance(values, np.ndarray) and values.dtype.kind not in "OSU")
    if isinstance(values, str | bytes | Path | Image.Image) or (pixels and getattr(values, "ndim", 4) < 4):
        raise DataError(f"{what}: expected a list, got a single {type(values).__name__}. Put it in a list.")
    if not (listed := list(values)):
        raise DataError(f"{what}: the list is empty. Give at least one.")
    return listed


def encode_texts(
    captions: Sequence[str],
    tokenize: Callable[[list[str]], Tensor],
    encode: Callable[[Tensor], Tensor],
    batch: int,
    cut: bool = True,
    normalize: bool = True,
) -> Tensor:
    """Return fp32 encodings (n, D), unit-norm by default, on the device of `encode`; each distinct caption is encoded once, in batches sorted by length.

    Args:
        captions: the texts.
        tokenize: texts to ids (n, N) whose largest id is EOT.
        encode: ids to encodings.
        batch: texts per batch.
        cut: shorten a batch after its last EOT, which is exact if attention is causal and EOT is the token that is
            read.
        normalize: return unit vectors.

    Raises:
        StoppedError: a signal asked the run to stop.
    """
    captions = as_list(captions, "captions")
    if odd := [caption for caption in captions if not isinstance(caption, str)]:
        raise DataError(f"captions: expected strings, got {odd[0]!r}. Remove or convert it.")
    # SugarCrepe uses each caption of an image in many pairs.
    distinct = sorted(set(captions))
    tokens = tokenize(distinct)
    # EOT is the largest id.
    lengths = tokens.argmax(dim=1) + 1
    # Batches of equal lengths, so that short captions are not padded to the longest.
    order = lengths.argsort(stable=True) if cut else torch.arange(len(distinct))
    parts = []
    for rows in order.split(batch):
        stop_here()  # 80 prompts for each of 1,000 classes take minutes
        length = int(lengths[rows].max()) if cut else tokens.shape[1]
        encoded = encode(tokens[rows, :length]).float()
        parts.append(F.normalize(encoded, dim=-1) if normalize else encoded)
    encodings = torch.cat(parts)
    # Restore the order of `distinct`, because batches are sorted by length.
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order))
    where = {caption: int(i) for caption, i in zip(distinct, place, strict=True)}
    return encodings[[where[c] for c in captions]]


Precision = Literal["fp32", "tf32", "bf16", "fp16"]
_AMP = {"fp32": None, "tf32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class ReadingConfig(Protocol):
    """The keys of a `data` block that an encoder must follow."""

    @property
    def bands(self) -> tuple[int, ...] | None: ...

    @property
    def pixel_range(self) -> PixelRange: ...


class Encoder(ABC):
    """A model in evaluation mode with its preprocessing.

    Args:
        model: it is put into evaluation mode and not changed otherwise.
        mean, std: per-channel normalisation of pixels in 0..1.
        label: its origin.

    Attributes:
        transform: converts an image to the input of `encode`.
        slots: L of flattened (L, V) encodings, otherwise 1.
        precision: of the model (bf16 and fp16: under autocast); encodings are always fp32.
    """

    image_size: int
    transform: Transform
    decoding: Decoding = TRAINING  # for a user's own images on pages
    slots = 1
    takes_images = True  # False: it needs more than an image, and `encode` raises
    precision: Precision = "fp32"
    fixed_precision: str | None = None  # of an encoder whose precision cannot be chosen
    trained: TrainingRun | None = None  # of a run, while its objective is available

    def __init__(self, model: nn.Module, mean: Sequence[float], std: Sequence[float], label: str = ""):
        self.model, self.label = model.eval(), label
        self.pooling = ""  # how another library's model pools its tokens
        self.assumed = ""  # assumptions about facts that the file does not contain
        self.exported_from = ""  # SHA-256 of the weights from which an ONNX program was exported
        self._hashes: dict[str, Any] = {}
        self.device = next(iter(model.parameters())).device
        # In a shape that broadcasts over (n, 3, S, S).
        self.mean = torch.tensor(mean, device=self.device).view(-1, 1, 1)
        self.std = torch.tensor(std, device=self.device).view(-1, 1, 1)

    def to(self, device: str) -> Self:
        """Move model and normalisation."""
        self.model.to(device)
        self.device = next(iter(self.model.parameters())).device
        self.mean, self.std = self.mean.to(device), self.std.to(device)
        return self

    @property
    def offers(self) -> frozenset[str]:
        """Return the capabilities that tasks may need (`evals/suite/task.py`, NEEDS)."""
        capabilities = {
            "images": self.takes_images,
            "texts": isinstance(self, TextEncoder),
            "blocks": isinstance(self, BlocksEncoder),
            "tokens": isinstance(self, TokensEncoder),
            "dense": isinstance(self, DenseEncoder) and self.encodes_patches,
            "conditioned": isinstance(self, ConditionedEncoder) and self.pools_by_text,
            "slots": self.slots > 1,
            "masks": isinstance(self, MasksEncoder),
            "objects": isinstance(self, ObjectsEncoder),
            "clips": isinstance(self, ClipsEncoder),
            "views": isinstance(self, ViewsEncoder),
            "drawing": isinstance(self, DrawingEncoder),
            "loss": self.trained is not None,
        }
        return frozenset(word for word, here in capabilities.items() if here)

    @property
    def width(self) -> int:
        """Return the number of values in one encoding."""
        return self._encoding_width

    @cached_property
    def _encoding_width(self) -> int:
        size = self.image_size
        return self.encode(torch.zeros(1, len(self.mean), size, size, dtype=torch.uint8)).numel()

    @property
    @abstractmethod
    def architecture(self) -> str:
        """Return the architecture, in words or JSON, which is part of the identity of stored features."""

    @abstractmethod
    def encode(self, pixels: Tensor) -> Tensor:
        """Encode (n, 3, S, S) uint8 to fp32 (n, D), or (n, L, D) with separate slots, on the encoder's device."""

    def images(self, pictures: Sequence[Image.Image | np.ndarray | str | Path]) -> Tensor:
        """Return `encode` of images, preprocessed as in evaluation. EXIF orientation is applied, and transparent pixels become white.

        Args:
            pictures: paths of files, PIL images, or arrays (H, W) or (H, W, 3) of uint8, uint16 or floats. Other than 8-bit pixels are mapped by the run's
                `data.pixel_range`; by default 16 bits to their upper byte, and floats from 0..1. Models of other libraries convert files and
                PIL images as their library does. If the run has `data.bands`, it chooses them from a file, or from arrays (H, W, bands).

        Raises:
            DataError: not a list of images, arrays of another shape or dtype, or numbers that `data.pixel_range` does not map.
        """
        encodings = self.encode(self.stack(self.preprocess(pictures)))
        return encodings.clone()  # an ordinary tensor, with which a probe can be trained

    def preprocess(self, pictures: Sequence[Image.Image | np.ndarray | str | Path]) -> list[np.ndarray]:
        """Return the pixels (S, S, C) uint8 of images; arguments and errors are those of `images`."""
        rows = []
        for number, picture in enumerate(as_list(pictures, "images")):
            try:
                rows.append(np.asarray(self.transform(self.open_image(picture))))
            except BadSampleError as bad:
                raise DataError(f"image {number}: cannot be encoded by {self.label}: {bad.full_message()}") from None
        return rows

    def open_image(self, picture: Image.Image | np.ndarray | str | Path) -> Any:
        """Return the input of `transform` for a path, an image or an array."""
        how = self.decoding
        if isinstance(picture, str | Path):
            data = read_bytes(picture, DataError)
            return decode_own(data) if how.bands is None else band_values(data)
        if how.bands is not None:
            return picture
        if isinstance(picture, Image.Image):
            # Another library's transform converts palettes and more than 8 bits itself.
            if isinstance(self.transform, LibraryPixels | FlooredPixels | SquarePixels):
                return postprocess(picture, UNCONVERTED)
            return postprocess(to_8bit(picture, how.pixel_range or "by_type"), TRAINING)
        return postprocess(from_array(as_array(picture), how.pixel_range or "by_type"), UNCONVERTED)

    @property
    def weights(self) -> str:
        """Return the hex SHA-256 over all parameters and buffers, whatever file they came from."""
        return hash_again_if_changed(
            self._hashes, "weights", self.model, lambda: weights_sha256(self.model.state_dict())
        )

    def transform_with_resize(self, resize: int | None) -> Transform:
        """Return `transform` with another resize of the shorter side before the centre crop; None: unchanged."""
        if resize is None:
            return self.transform
        if not isinstance(self.transform, Pixels):
            raise ConfigError(f"resize={resize}: {self.label} has its own transform. Remove resize.")
        return replace(self.transform, resize=resize)

    def read_like(self, data: ReadingConfig) -> None:
        """Read bands and map 16-bit, 32-bit and float pixels to 8 bits as in training, instead of clipping them like Pillow."""
        self.decoding = TRAINING._replace(pixel_range=data.pixel_range, bands=data.bands)
        if isinstance(self.transform, Pixels):
            t = self.transform
            if data.bands is None:
                self.transform = MappedPixels(t.size, t.resize, t.rgb_first, data.pixel_range)
            else:
                self.transform = BandPixels(t.size, t.resize, pixel_range=data.pixel_range, bands=data.bands)

    @staticmethod
    def stack(rows: Sequence[np.ndarray]) -> Tensor:
        """Stack (S, S, C) uint8 images to (n, C, S, S)."""
        return torch.from_numpy(np.stack(rows)).permute(0, 3, 1, 2)

    def normalize(self, pixels: Tensor) -> Tensor:
        """Normalise (n, 3, S, S) uint8 to the input of the model."""
        # On the device, because uint8 needs a quarter of the transfer.
        return normalise(pixels.to(self.device), self.mean, self.std)

    def to_store(self) -> tuple[Encoder, Callable[[Tensor], Tensor] | None]:
        """Return the encoder whose encodings are stored, and the function from these to this encoder's (None: they are equal)."""
        return self, None

    def autocast(self) -> AbstractContextManager[object]:
        """Return the context in which the model runs."""
        if self.precision not in _AMP:
            raise ConfigError(f"precision: expected one of {', '.join(_AMP)}, got {self.precision}")
        if (dtype := _AMP[self.precision]) is not None:
            return torch.autocast(self.device.type, dtype)
        return tf32_enabled() if self.precision == "tf32" else nullcontext()


class TextEncoder(ABC):
    """An `Encoder` with a text tower."""

    label: str
    precision: Precision

    @property
    @abstractmethod
    def text_weights(self) -> str:
        """Return the identity of the text tower: weights and architecture."""

    @abstractmethod
    def text(self, captions: Sequence[str]) -> Tensor:
        """Return unit-norm fp32 encodings (n, D) of captions in the space of the images, on the device of the encoder."""


class TwoTowerEncoder(Encoder, TextEncoder):
    """A model with open_clip's `encode_image` and `encode_text`; encodings have unit norm.

    Attributes:
        tokenize: texts to ids (n, N).
        causal: a batch of texts may be cut after its last EOT.
    """

    model: Any
    tokenize: Callable[[list[str]], Tensor]
    causal = True

    @property
    def text_weights(self) -> str:
        return hash_again_if_changed(self._hashes, "text", self.model, self._hash_text_side)

    def _hash_text_side(self) -> str:
        """Return the hash of all weights outside `visual.` except logit scale and bias, and of the architecture."""
        weights = weights_sha256(self.model.state_dict(), lambda name: not name.startswith(("visual.", "logit_")))
        return hashlib.sha256(f"{weights}\n{self.architecture}".encode()).hexdigest()

    @torch.inference_mode()
    def encode(self, pixels: Tensor) -> Tensor:
        with self.autocast():
            return self.model.encode_image(self.normalize(pixels), normalize=True).float()

    def text(self, captions: Sequence[str], batch: int | None = None) -> Tensor:
        """Return unit-norm fp32 encodings (n, D); each distinct caption is encoded once, together with others of its length."""
        return encode_texts(captions, self.tokenize, self._texts, batch or texts_per_batch(self.device), self.causal)

    def texts_at_limit(self, captions: Sequence[str]) -> int:
        """Return how many captions fill the whole context, so that their end may be cut."""
        blocks = (self.tokenize(list(captions[begin : begin + 1024])) for begin in range(0, len(captions), 1024))
        return sum(int((block[:, -1] != 0).sum()) for block in blocks)

    @torch.inference_mode()
    def _texts(self, tokens: Tensor) -> Tensor:
        with self.autocast():
            return self.model.encode_text(tokens.to(self.device), normalize=True)
