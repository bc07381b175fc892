"""Features of a trained ViT that is not trained on: what DINOSAUR groups and draws again (Seitzer et al. 2023)."""

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
from torch._subclasses import FakeTensor  # what FLOPs are counted with has no pixels

from sparo_train.core.config import Frozen, field, resumable_field
from sparo_train.core.errors import ConfigError, DataError
from sparo_train.core.files import write_whole


class FeatureCache:
    """A folder FOLDER/KEY/ab/cdef….npy, by the hash of a picture's pixels.

    Args:
        key: of what computes them: its weights, architecture and precision.

    Raises:
        DataError: the folder cannot be written.
    """

    def __init__(self, folder: Path, key: str):
        self.folder = folder / key
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DataError(f"encoder.cache: {self.folder} cannot be made ({error}); name another folder") from None

    def paths(self, pixels: Tensor) -> list[Path]:
        """Where the features of pictures (b, 3, S, S) uint8 are."""
        rows = pixels.cpu().contiguous().numpy()
        digests = [xxhash.xxh3_128_hexdigest(row.tobytes()) for row in rows]
        # In folders of two letters: a million files in one are slow to list.
        return [self.folder / digest[:2] / f"{digest[2:]}.npy" for digest in digests]

    @staticmethod
    def read(path: Path, shape: tuple[int, ...]) -> Tensor | None:
        """(N, D) as they were written; None where there are none, or a file that was cut off."""
        try:
            features = np.load(path, allow_pickle=False)
        except Exception:  # a damaged header raises anything
            return None
        return torch.from_numpy(features) if features.dtype == np.float32 and features.shape == shape else None

    @staticmethod
    def write(path: Path, features: Tensor) -> None:
        """Whole or not at all, whoever else writes the same; what is no number is not kept.

        Raises:
            DataError: nothing can be written.
        """
        if not features.isfinite().all():
            return  # an overflow once must not be one for every run to come
        buffer = io.BytesIO()
        np.save(buffer, features.float().cpu().numpy())
        try:
            write_whole(path, buffer.getvalue())
        except OSError as error:
            raise DataError(
                f"encoder.cache: {path} cannot be written ({error}); make room, or set cache: null"
            ) from None


class FrozenConfig(Frozen):
    """Patch tokens behind the last block and its norm, without CLS. Images come in 0..1."""

    kind: Literal["frozen"] = field("frozen", "Entry of sparo.slot_encoders.")
    checkpoint: str = field(
        ...,
        "Backbone: a DINO run of this project, an official DINO file, timm:NAME@FILE, or anything with patches that "
        "`sparo eval` loads.",
    )
    width: int = field(384, "Token width of the backbone.", gt=0)
    patch: int = field(16, "Patch side in pixels.", gt=0)
    cache: str | None = resumable_field(
        None,
        "Folder that caches features in fp32 by image content, for all runs. Default: compute features each time.",
        examples=["data/features"],
    )

    def side(self, image_size: int) -> int:
        """Patches per side."""
        return image_size // self.patch

    def cost(self, image_size: int) -> int:
        """Numbers that are kept for an image: nothing is, beside the features."""
        return self.side(image_size) ** 2 * self.width

    def build(self) -> nn.Module:
        return FrozenPatches(self)


class FrozenPatches(nn.Module):
    """Images (b, 3, S, S) in 0..1 to features (b, s, s, width).

    Raises:
        CheckpointError: the checkpoint cannot be read.
        ConfigError: it has no patches, or others than the config says.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, config: FrozenConfig):
        super().__init__()
        from evals.encoders.capabilities import PatchesEncoder  # a config is made without them
        from evals.encoders.encoder import Encoder
        from evals.encoders.loading import load_encoder

        self.config = config
        # Whoever builds a model without weights, to count with it, reads these all the same; and what a run of ours
        # seeds when it is built must not be what the rest of this model begins from.
        with torch.device("cpu"), torch.random.fork_rng(devices=[]):
            encoder = load_encoder(config.checkpoint)
        if not isinstance(encoder, PatchesEncoder):
            raise ConfigError(
                f"encoder.checkpoint={config.checkpoint}: has no patch tokens; give a ViT's: DINO's, or timm's"
            )
        assert isinstance(encoder, Encoder)
        self.model = encoder.model.requires_grad_(False)
        self._tokens = encoder.patch_tokens
        self.identity = f"{encoder.weights} {encoder.architecture} patches"
        self._feature_caches: dict[str, FeatureCache] = {}  # by what they are computed with
        self.register_buffer("mean", encoder.mean.clone(), persistent=False)
        self.register_buffer("std", encoder.std.clone(), persistent=False)

    def fit_to(self, image_size: int) -> None:
        """Take images of this size: positions of one of timm's ViTs are interpolated once, as timm does it."""
        model: Any = self.model
        img_size = getattr(getattr(model, "patch_embed", None), "img_size", None)
        if img_size is not None and tuple(img_size) != (image_size, image_size) and hasattr(model, "set_input_size"):
            with torch.device("cpu"), torch.no_grad():
                model.set_input_size(img_size=(image_size, image_size))
            self.model.requires_grad_(False)  # they are parameters anew

    def train(self, mode: bool = True) -> Self:
        """It stays in evaluation mode."""
        # Whoever calls `.train()` on the model that holds it means the rest.
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
        # By the pixels as bytes: what was decoded alike is the same picture, whatever file it lay in.
        paths = cache.paths((images * 255).round().to(torch.uint8))
        features = [cache.read(path, (side, side, self.config.width)) for path in paths]
        if any(one is None for one in features):
            # All of the batch: a picture's features then depend on the plan, and not on what happens to be kept.
            computed = self._features(images).float()
            for number, (name, one) in enumerate(zip(paths, features, strict=True)):
                if one is None:
                    cache.write(name, computed[number])
                    features[number] = computed[number].cpu()
        return torch.stack([one for one in features if one is not None]).to(images.device)

    def _features(self, images: Tensor) -> Tensor:
        try:
            tokens = self._tokens((images - self.mean) / self.std)
        except AssertionError as error:  # timm's, of a model that takes one size
            raise ConfigError(
                f"encoder.checkpoint={self.config.checkpoint}: {error}; set objective.model.image_size to it"
            ) from None
        side = math.isqrt(tokens.shape[1])
        expected_shape = (self.config.side(images.shape[-1]) ** 2, self.config.width)
        if tuple(tokens.shape[1:]) != expected_shape or side * side != tokens.shape[1]:
            raise ConfigError(
                f"encoder: {self.config.checkpoint} has {tokens.shape[1]} tokens of width {tokens.shape[2]} at {images.shape[-1]} pixels, and "
                f"width={self.config.width}, patch={self.config.patch} say {expected_shape[0]} of {expected_shape[1]}"
            )
        return tokens.unflatten(1, (side, side))
