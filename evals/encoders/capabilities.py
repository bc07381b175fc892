"""What an encoder may do beside encoding images: each a base class of its own, by which tasks ask for it (`Encoder.offers`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from sparo_train.core.contracts import Objective


class TrainingRun(NamedTuple):
    """What an encoder was made of, where it is a run's: the whole objective, and the run's recipe (a `RunConfig`)."""

    objective: Objective
    config: Any


class BlocksEncoder(ABC):
    """What an `Encoder` whose last blocks can be read also is."""

    @abstractmethod
    def probe(self, pixels: Tensor, n: int = 4, avgpool: bool = False) -> Tensor:
        """What DINO's linear probe reads of the last `n` blocks: (n, 3, S, S) uint8 -> fp32 (n, width)."""


class MasksEncoder(ABC):
    """What an `Encoder` that cuts images into objects also is; its `transform` is a `Pixels`.

    `masks_are`: whose they are, in words that stand beside a score.
    """

    masks_are = "the encoder's own"

    @abstractmethod
    def masks(self, pixels: Tensor) -> Tensor:
        """(n, 3, S, S) uint8 -> fp32 (n, S * S), row by row: which slot a pixel is of, a whole number; NaN where nobody can say."""


class ClipsEncoder(ABC):
    """What an `Encoder` that cuts videos into objects also is; its `transform` is a `Pixels`, of every frame.

    `masks_are`: whose they are, in words that stand beside a score.  `trained_frames`: how long its training's clips were.
    `conditional`: it is told the first frame's objects, by a fourth plane of clips: their numbers, below `slots`.
    `windowed`: whether a frame's slots can be made of its last frames alone.  `frame_scores`: what its frames' errors are told as.
    `generates`: its frames are said token by token, which takes long, so that `clips` draws them where it is asked to.
    """

    masks_are = "the encoder's own"
    trained_frames: int
    conditional: bool = False
    windowed: bool = True
    frame_scores: tuple[str, ...] = ("mse", "psnr")
    generates: bool = False

    @abstractmethod
    def clips(self, video: Tensor, window: int | None = None, generated: bool = False) -> Tensor:
        """(n, T, 3 or 4, S, S) uint8 -> fp32 (n, T * S * S + T): frame by frame which slot a pixel is of, a whole number, or NaN; then
        the mean squared error of every frame as it is drawn, in 0..1, or -1 where its pixels are not.

        Args:
            window: slots of a frame see so many of the last ones; None: the encoder's own way.
            generated: errors are those of frames that are said token by token, of an encoder that `generates`.
        """

    @abstractmethod
    def clip_slots(self, video: Tensor, window: int | None = None) -> Tensor:
        """Slots of every frame, (n, T, K, D)."""

    @abstractmethod
    def untrained(self) -> Any:
        """The same with weights that were never trained: what scores are to be compared with."""


class ViewsEncoder(ABC):
    """What an `Encoder` of scenes that several posed cameras see also is; posed views are (…, 9, S, S) fp32: colours in 0..1, and the
    origin and direction of every pixel's ray.

    `trained_frames`, `trained_views`: how long its training's clips were, and how many views were shown.
    `predicts_depth`: whether it says how far away things are.  `ends`: the nearest and the farthest distance that it can say.
    `windowed`: whether a time's slots can be made of its last times alone.
    """

    image_size: int
    trained_frames: int
    trained_views: int
    windowed: bool = True
    predicts_depth: bool = False
    ends: tuple[float, float] | None = None

    @abstractmethod
    def scenes(self, posed: Tensor, num_context_views: int, window: int | None = None) -> Tensor:
        """(n, T, V, 9, S, S), of whose views the first `num_context_views` are seen, to fp32 rows of T * V * (4 + S * S), or 4 + 2 * S * S where it
        `predicts_depth`: of every view mean squared error, SSIM, and the mean squared errors of the nearest shown view and of the shown views'
        mean colour in its place; then which slot a pixel is of (K and on: of none); then depth.

        Args:
            window: slots of a time see so many of the last ones; None: the encoder's own way.
        """

    @abstractmethod
    def scene_slots(self, posed: Tensor, window: int | None = None) -> Tensor:
        """Slots of every time, (n, T, K, D), of views (n, T, V, 9, S, S) that are all shown."""

    @abstractmethod
    def untrained(self) -> Any:
        """The same with weights that were never trained."""


class DrawingEncoder(ABC):
    """What an `Encoder` that draws images again also is.

    `draws`: "pixels", or which network's features, so that errors in different ones are told apart.  `numbers`: of an image's.
    """

    draws: str
    numbers: int

    @abstractmethod
    def squared_error(self, pixels: Tensor) -> Tensor:
        """(n, 3, S, S) uint8 -> fp32 (n, 1), mean over what is drawn of an image; pixels count in 0..1, whatever it was trained on."""


class TokensEncoder(ABC):
    """What an `Encoder` whose last tokens can be read also is.

    `prefix_tokens`: how many stand before the patches, the first of them the class token where it `has_class_token`; `token_width`: d.
    """

    image_size: int
    prefix_tokens: int = 1
    has_class_token: bool = True
    token_width: int

    @abstractmethod
    def tokens(self, pixels: Tensor) -> Tensor:
        """All tokens behind the last block and its norm: (n, 3, S, S) uint8 -> fp32 (n, N, d)."""


class ConditionedEncoder(ABC):
    """What an `Encoder` whose images can be pooled by texts may also be; `pools_by_text`: whether this one is."""

    pools_by_text: bool = False

    @abstractmethod
    def patches(self, pixels: Tensor) -> Tensor:
        """Projected patches: (n, 3, S, S) uint8 -> fp32 (n, N, D)."""

    @abstractmethod
    def queries(self, captions: Sequence[str]) -> Tensor:
        """Return the projected text embeddings before normalization, fp32 (n, D) on the CPU."""

    @abstractmethod
    def conditioned(self, patches: Tensor, queries: Tensor) -> Tensor:
        """Return the cosines (n, T), fp32 on the CPU, of texts (T, D of `queries`) with images (n, N * D of `patches`) as they pool them."""


class PatchesEncoder(ABC):
    """What an `Encoder` whose patches can be read also is."""

    @abstractmethod
    def patch_tokens(self, normalised: Tensor) -> Tensor:
        """Normalised pixels (n, 3, H, W) to the tokens of patches behind the last block and its norm, (n, N, D), row by row."""


class ObjectsEncoder(ABC):
    """What an `Encoder` that lists the objects of images also is."""

    @abstractmethod
    def objects(self, pixels: Tensor) -> Tensor:
        """(n, 3, S, S) uint8 -> fp32 (n, K * WIDTH), rows of evals/sets/objects.py, the last entry how sure it is of an object."""
