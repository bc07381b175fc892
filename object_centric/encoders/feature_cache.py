"""Features that were computed once, by the content of their pictures: a file each, the same for every run and rank."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import torch
import xxhash
from torch import Tensor

from sparo_train.core.errors import DataError
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
