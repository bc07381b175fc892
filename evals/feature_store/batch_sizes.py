"""How many images fit into a forward: found by halving after running out of memory, and remembered."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from sparo_train.core.errors import SparoError
from sparo_train.core.files import write_whole

from ..encoders.encoder import Encoder

_FIRST = {"cpu": 256, "cuda": 2048}


class BatchSize:
    """Batch sizes by model, precision, view and device.

    Args:
        path: where they are remembered between runs; None: nowhere.
        first: what to begin with by device type.
    """

    def __init__(self, path: Path | None = None, first: dict[str, int] | None = None):
        self.path, self.first = path, first or _FIRST
        self._sizes: dict[str, int] = {}
        if path is not None and path.is_file():
            try:
                self._sizes = {str(k): int(v) for k, v in json.loads(path.read_text(encoding="utf-8")).items()}
            except (ValueError, AttributeError, TypeError):
                self._sizes = {}  # it is only a memory: found again

    def of(self, encoder: Encoder, view: str) -> int:
        """What fits as far as we know."""
        return self._sizes.get(self._key(encoder, view), self.first[encoder.device.type])

    def run(self, encoder: Encoder, view: str, call: Callable[[Tensor], Tensor], pixels: Tensor) -> Tensor:
        """`call(pixels)`, in smaller pieces where the memory does not suffice; what sufficed is remembered.

        Raises:
            SparoError: a single image does not fit.
        """
        size = self.of(encoder, view)
        while True:
            try:
                return torch.cat([call(piece).cpu() for piece in pixels.split(size)])
            except torch.OutOfMemoryError:
                if size == 1:
                    raise SparoError(
                        f"{encoder.label}: one image does not fit into the memory of {encoder.device}"
                    ) from None
            # What the failed forward held is cached in pieces that do not fit.
            torch.cuda.empty_cache()
            size = max(1, min(size, len(pixels)) // 2)
            self._remember(self._key(encoder, view), size)

    def _remember(self, key: str, size: int) -> None:
        self._sizes[key] = size
        if self.path is not None:
            with suppress(OSError):  # it is only a memory
                write_whole(self.path, json.dumps(self._sizes, indent=1))

    def _key(self, encoder: Encoder, view: str) -> str:
        device = torch.cuda.get_device_name(encoder.device) if encoder.device.type == "cuda" else "cpu"
        model = encoder.weights[:16] if self.path is not None else str(id(encoder))  # a hash takes its time
        return f"{model} {encoder.precision} {view} {encoder.image_size} {device}"
