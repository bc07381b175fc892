"""Which frames of an episode a clip takes: drawn with the visit's own stream, so a resumed run takes the same."""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np

from ...core.config import Frozen, between, field
from ...core.errors import BadSampleError


class FramesConfig(Frozen):
    """Of an episode's frames a clip takes so many, at equal steps."""

    count: int = field(6, "T, of a clip", gt=0, le=10_000)
    stride: Annotated[tuple[int, int], between(1, 10_000, rising=True)] = field(
        (1, 1), "frames from one to the next: drawn between these, as far as the episode is long enough"
    )
    starts: Literal["any", "tiles"] = field(
        "any", "where clips begin: anywhere, or at multiples of their own length (SAVi's random strided window)"
    )

    def window(self, length: int, rng: np.random.Generator) -> range:
        """Frames of a clip of an episode of `length`.

        Raises:
            BadSampleError: the episode is too short.
        """
        low, high = self.stride
        if self.reach(low) > length:
            raise BadSampleError(f"shorter than frames.count={self.count}" + (f" at stride {low}" if low > 1 else ""))
        # The largest stride that still fits: short episodes give slow clips, not none.
        most = min(high, (length - 1) // (self.count - 1)) if self.count > 1 else high
        stride = int(rng.integers(low, most + 1))
        last, step = length - self.reach(stride), self.reach(stride) if self.starts == "tiles" else 1
        start = step * int(rng.integers(0, last // step + 1))
        return range(start, start + self.reach(stride), stride)

    def reach(self, stride: int) -> int:
        """Frames from a clip's first to its last, both counted."""
        return (self.count - 1) * stride + 1
