"""Capabilities of encoders in addition to encoding images: base classes by which tasks ask for them (`Encoder.offers`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from sparo_train.core.contracts import Objective


class TrainingRun(NamedTuple):
    """Origin of an encoder that comes from a run: the whole objective, and the run's recipe (a `RunConfig`)."""

    objective: Objective
    config: Any


class BlocksEncoder(ABC):
    """Capability of an `Encoder` that returns features of its last blocks."""

    @abstractmethod
    def probe(self, pixels: Tensor, n: int = 4, avgpool: bool = False) -> Tensor:
        """Return the input of DINO's linear probe from the last `n` blocks: (n, 3, S, S) uint8 -> fp32 (n, width)."""


class MasksEncoder(ABC):
    """Capability of an `Encoder` that divides images into objects; its `transform` is a `Pixels`.

    Attributes:
        masks_are: description of the masks, shown with scores.
    """

    masks_are = "the encoder's own"

    @abstractmethod
    def masks(self, pixels: Tensor) -> Tensor:
        """Return each pixel's slot, fp32 (n, S * S), row by row, for (n, 3, S, S) uint8; NaN if it is undefined."""


class ClipsEncoder(ABC):
    """Capability of an `Encoder` that divides videos into objects; its `transform` is a `Pixels`, applied to every frame.

    Attributes:
        masks_are: description of the masks, shown with scores.
        trained_frames: length of training clips.
        conditional: it needs the first frame's objects, as a fourth plane of clips with object numbers below `slots`.
        windowed: whether a frame's slots can be computed from its last frames only.
        frame_scores: name of the errors of frames.
        generates: frames are generated token by token, which is slow, so `clips` does it on request only.
    """

    masks_are = "the encoder's own"
    trained_frames: int
    conditional: bool = False
    windowed: bool = True
    frame_scores: tuple[str, ...] = ("mse", "psnr")
    generates: bool = False

    @abstractmethod
    def clips(self, video: Tensor, window: int | None = None, generated: bool = False) -> Tensor:
        """Return fp32 (n, T * S * S + T) for (n, T, 3 or 4, S, S) uint8.

        A row has, frame by frame, each pixel's slot or NaN, and then the mean squared error of every reconstructed
        frame in 0..1, or -1 if the model does not reconstruct pixels.

        Args:
            video: the clips.
            window: number of last frames on which a frame's slots depend; None: the encoder's default.
            generated: return the errors of generated frames, for an encoder with `generates`.
        """

    @abstractmethod
    def clip_slots(self, video: Tensor, window: int | None = None) -> Tensor:
        """Return the slots of every frame, (n, T, K, D)."""

    @abstractmethod
    def untrained(self) -> Any:
        """Return the same model with untrained weights, as a baseline."""


class ViewsEncoder(ABC):
    """Capability of an `Encoder` of scenes seen by several posed cameras.

    Posed views are (…, 9, S, S) fp32: colours in 0..1, and the origin and direction of every pixel's ray.

    Attributes:
        trained_frames, trained_views: length of training clips, and number of context views.
        predicts_depth: whether it renders depth.
        ends: nearest and farthest distance that it can render.
        windowed: whether a time's slots can be computed from its last times only.
    """

    image_size: int
    trained_frames: int
    trained_views: int
    windowed: bool = True
    predicts_depth: bool = False
    ends: tuple[float, float] | None = None

    @abstractmethod
    def scenes(self, posed: Tensor, num_context_views: int, window: int | None = None) -> Tensor:
        """Return fp32 rows of T * V * (4 + S * S) values, or 4 + 2 * S * S with `predicts_depth`, for (n, T, V, 9, S, S).

        The first `num_context_views` views are encoded. A row has for every view: mean squared error, SSIM, and the
        mean squared errors of two baselines (the nearest context view, and the context views' mean colour); then each
        pixel's slot (K and more: none); then depth.

        Args:
            posed: the views.
            num_context_views: number of context views.
            window: number of last times on which a time's slots depend; None: the encoder's default.
        """

    @abstractmethod
    def scene_slots(self, posed: Tensor, window: int | None = None) -> Tensor:
        """Return the slots of every time, (n, T, K, D), of views (n, T, V, 9, S, S) that are all context views."""

    @abstractmethod
    def untrained(self) -> Any:
        """Return the same model with untrained weights."""


class DrawingEncoder(ABC):
    """Capability of an `Encoder` that reconstructs images.

    Attributes:
        draws: "pixels", or the name of the network whose features it reconstructs, so that errors in different spaces
            are distinguished.
        numbers: number of reconstructed values per image.
    """

    draws: str
    numbers: int

    @abstractmethod
    def squared_error(self, pixels: Tensor) -> Tensor:
        """Return the mean squared error of each reconstruction, fp32 (n, 1), for (n, 3, S, S) uint8; pixels are compared in 0..1."""


class TokensEncoder(ABC):
    """Capability of an `Encoder` that returns its last tokens.

    Attributes:
        prefix_tokens: number of tokens before the patches; the first is the class token if `has_class_token`.
        token_width: d.
    """

    image_size: int
    prefix_tokens: int = 1
    has_class_token: bool = True
    token_width: int

    @abstractmethod
    def tokens(self, pixels: Tensor) -> Tensor:
        """Return all tokens after the last block and its norm, fp32 (n, N, d), for (n, 3, S, S) uint8."""


class ConditionedEncoder(ABC):
    """Capability of an `Encoder` whose images can be pooled by texts; `pools_by_text` says whether this one can."""

    pools_by_text: bool = False

    @abstractmethod
    def patches(self, pixels: Tensor) -> Tensor:
        """Return projected patches, fp32 (n, N, D), for (n, 3, S, S) uint8."""

    @abstractmethod
    def queries(self, captions: Sequence[str]) -> Tensor:
        """Return the projected text embeddings before normalization, fp32 (n, D) on the CPU."""

    @abstractmethod
    def conditioned(self, patches: Tensor, queries: Tensor) -> Tensor:
        """Return the cosines (n, T), fp32 on the CPU, of texts (T, D of `queries`) with images (n, N * D of `patches`) pooled by these texts."""


class PatchesEncoder(ABC):
    """Capability of an `Encoder` that returns patch tokens."""

    @abstractmethod
    def patch_tokens(self, normalised: Tensor) -> Tensor:
        """Return the tokens of patches after the last block and its norm, (n, N, D), row by row, for normalised pixels (n, 3, H, W)."""


class ObjectsEncoder(ABC):
    """Capability of an `Encoder` that lists the objects of images."""

    @abstractmethod
    def objects(self, pixels: Tensor) -> Tensor:
        """Return fp32 (n, K * WIDTH), rows of evals/sets/objects.py whose last entry is the confidence, for (n, 3, S, S) uint8."""
