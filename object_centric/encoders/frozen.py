"""Features of a trained, frozen ViT, which DINOSAUR groups and reconstructs (Seitzer et al. 2023)."""

from __future__ import annotations

import hashlib
import io
import math
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
import xxhash
from torch import Tensor, nn
from torch._subclasses import FakeTensor  # encoders whose FLOPs are counted have no pixels

from sparo_train.core.config import Frozen, field, resumable_field
from sparo_train.core.errors import ConfigError, DataError
from sparo_train.core.files import write_whole


class FeatureCache:
    """Cache with files FOLDER/KEY/ab/cdef….npy, named by the hash of an image's pixels.

    Args:
        folder: the folder.
        key: hash of what determines the features: weights, architecture and precision.

    Raises:
        DataError: the folder cannot be written.
    """

    def __init__(self, folder: Path, key: str):
        self.folder = folder / key
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DataError(f"encoder.cache: {self.folder} cannot be created ({error}). Name another folder.") from None

    def paths(self, pixels: Tensor) -> list[Path]:
        """Return the paths of the features of images (b, 3, S, S) uint8."""
        rows = pixels.cpu().contiguous().numpy()
        digests = [xxhash.xxh3_128_hexdigest(row.tobytes()) for row in rows]
        # Subfolders of two letters, because listing a million files in one folder is slow.
        return [self.folder / digest[:2] / f"{digest[2:]}.npy" for digest in digests]

    @staticmethod
    def read(path: Path, shape: tuple[int, ...]) -> Tensor | None:
        """Return features (N, D) as they were written; None if there are none, or the file is truncated."""
        try:
            features = np.load(path, allow_pickle=False)
        except Exception:  # a damaged header may raise anything
            return None
        return torch.from_numpy(features) if features.dtype == np.float32 and features.shape == shape else None

    @staticmethod
    def write(path: Path, features: Tensor) -> None:
        """Write features atomically, even if another process writes the same; features that are not finite are not cached.

        Raises:
            DataError: the folder cannot be written.
        """
        if not features.isfinite().all():
            return  # one overflow must not affect every later run
        buffer = io.BytesIO()
        np.save(buffer, features.float().cpu().numpy())
        try:
            write_whole(path, buffer.getvalue())
        except OSError as error:
            raise DataError(
                f"encoder.cache: {path} cannot be written ({error}). Free space, or set cache: null."
            ) from None


class FrozenConfig(Frozen):
    """Patch tokens after the last block and its norm, without CLS, for images in 0..1."""

    kind: Literal["frozen"] = field("frozen", "Kind of the image encoder: an entry of sparo.slot_encoders.")
    checkpoint: str = field(
        ...,
        "Backbone: a DINO run of this project, an official DINO file, timm:NAME@FILE, or any other encoder with patch tokens that "
        "`sparo eval` can load.",
    )
    width: int = field(384, "Token width of the backbone.", gt=0)
    patch: int = field(16, "Patch side in pixels.", gt=0)
    cache: str | None = resumable_field(
        None,
        "Folder of the fp32 feature cache, which is keyed by image content and shared by all runs. Default: compute features each time.",
        examples=["data/features"],
    )

    def side(self, image_size: int) -> int:
        """Return the number of patches per side."""
        return image_size // self.patch

    def cost(self, image_size: int) -> int:
        """Return the number of values that are kept for an image; nothing but the features."""
        return self.side(image_size) ** 2 * self.width

    def build(self) -> nn.Module:
        return FrozenPatches(self)


class FrozenPatches(nn.Module):
    """Frozen ViT that maps images (b, 3, S, S) in 0..1 to features (b, s, s, width).

    Raises:
        CheckpointError: the checkpoint cannot be read.
        ConfigError: it has no patch tokens, or their number or width differs from the config.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, config: FrozenConfig):
        super().__init__()
        from evals.encoders.capabilities import PatchesEncoder  # imported here, because configs are made without it
        from evals.encoders.encoder import Encoder
        from evals.encoders.loading import load_encoder

        self.config = config
        encoder = load_encoder(config.checkpoint)
        if not isinstance(encoder, PatchesEncoder):
            raise ConfigError(
                f"encoder.checkpoint={config.checkpoint}: has no patch tokens. Give a ViT's checkpoint, such as DINO's or timm's."
            )
        assert isinstance(encoder, Encoder)
        self.model = encoder.model.requires_grad_(False)
        self._tokens = encoder.patch_tokens
        self.identity = f"{encoder.weights} {encoder.architecture} patches"
        self._feature_caches: dict[str, FeatureCache] = {}  # everything that determines the features
        self.register_buffer("mean", encoder.mean.clone(), persistent=False)
        self.register_buffer("std", encoder.std.clone(), persistent=False)

    def fit_to(self, image_size: int) -> None:
        """Accept images of this size: positions of timm's ViTs are interpolated once, as in timm."""
        model: Any = self.model
        img_size = getattr(getattr(model, "patch_embed", None), "img_size", None)
        if img_size is not None and tuple(img_size) != (image_size, image_size) and hasattr(model, "set_input_size"):
            with torch.device("cpu"), torch.no_grad():
                model.set_input_size(img_size=(image_size, image_size))
            self.model.requires_grad_(False)  # interpolation replaced the parameters

    def train(self, mode: bool = True) -> Self:
        """Keep it in evaluation mode."""
        # `.train()` on the model that contains it applies to the other modules only.
        return super().train(False)

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        if self.config.cache is None or isinstance(images, FakeTensor):
            return self._features(images)
        amp = (
            torch.get_autocast_dtype(images.device.type)
            if torch.is_autocast_enabled(images.device.type)
            else torch.float32
        )
        cache_key = f"{self.identity} {amp} {next(self.model.parameters()).dtype}"
        if cache_key not in self._feature_caches:
            self._feature_caches[cache_key] = FeatureCache(
                Path(self.config.cache), hashlib.sha256(cache_key.encode()).hexdigest()
            )
        cache, side = self._feature_caches[cache_key], self.config.side(images.shape[-1])
        # By the pixels as bytes, so that equal images share features, whatever their files.
        paths = cache.paths((images * 255).round().to(torch.uint8))
        features = [cache.read(path, (side, side, self.config.width)) for path in paths]
        if any(one is None for one in features):
            # Compute the whole batch, so that features depend on the plan and not on the content of the cache.
            computed = self._features(images).float()
            for number, (name, one) in enumerate(zip(paths, features, strict=True)):
                if one is None:
                    cache.write(name, computed[number])
                    features[number] = computed[number].cpu()
        return torch.stack([one for one in features if one is not None]).to(images.device)

    def _features(self, images: Tensor) -> Tensor:
        try:
            tokens = self._tokens((images - self.mean) / self.std)
        except AssertionError as error:  # raised by timm for a model with a fixed size
            raise ConfigError(
                f"encoder.checkpoint={self.config.checkpoint}: {error}. Set objective.model.image_size to the size that this checkpoint needs."
            ) from None
        side = math.isqrt(tokens.shape[1])
        expected_shape = (self.config.side(images.shape[-1]) ** 2, self.config.width)
        if tuple(tokens.shape[1:]) != expected_shape or side * side != tokens.shape[1]:
            raise ConfigError(
                f"encoder: {self.config.checkpoint} gives {tokens.shape[1]} tokens of width {tokens.shape[2]} at "
                f"{images.shape[-1]} pixels, but width={self.config.width} and patch={self.config.patch} mean "
                f"{expected_shape[0]} tokens of width {expected_shape[1]}. Set width and patch to those of the checkpoint."
            )
        return tokens.unflatten(1, (side, side))
