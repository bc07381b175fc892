"""Images to rows of patch pixels, for patch embeddings written as matrix products."""

from __future__ import annotations

from torch import Tensor


def patchify(x: Tensor, patch: int) -> Tensor:
    """(B, C, H, W) -> (B, H//patch * W//patch, C * patch * patch), in the order of a convolution's weight; a rest is cut off."""
    rows, columns = x.shape[-2] // patch, x.shape[-1] // patch
    x = x[..., : rows * patch, : columns * patch].reshape(len(x), x.shape[1], rows, patch, columns, patch)
    return x.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
