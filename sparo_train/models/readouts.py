"""What a read-out is, and how slots become an encoding."""

from __future__ import annotations

from abc import abstractmethod
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn import functional as F


class Slots(NamedTuple):
    """What every read-out returns. A named tuple, so that torch.compile and pytrees take it as it is.

    values: (B, L, V).  attention: (B, L, N) or None.
    """

    values: Tensor
    attention: Tensor | None = None

    def flat(self) -> Tensor:
        """The encoding: (B, L*V), slot after slot."""
        return self.values.flatten(1)


class ReadOut(nn.Module):
    """Turns tokens (B, N, d) into L slots of V numbers."""

    slots: int
    width: int

    @abstractmethod
    def forward(self, tokens: Tensor, keep: Tensor | None = None, *, need_attention: bool = False) -> Slots: ...


def normalize_slots(slots: Slots) -> Slots:
    """Each slot to L2 norm 1/sqrt(L), so that the flat encoding has norm one (Sec. 3.3, Eq. 2). Always in fp32.

    Args:
        slots: values (B, L, V) of any float dtype.

    Returns:
        values (B, L, V) in fp32 (float64 stays float64); the cosine of two encodings is the mean of their slots' cosines.
    """
    values = slots.values if slots.values.dtype.itemsize >= 4 else slots.values.float()
    return slots._replace(values=F.normalize(values, dim=-1) * values.shape[1] ** -0.5)
