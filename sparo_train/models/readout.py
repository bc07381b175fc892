"""What a read-out is, how slots become an encoding, and what a tower has to know to hold one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..core.config import Frozen, field

Weighting = Literal["const", "norm", "softmax", "sqrtsoftmax"]
Representation = Literal["cont", "sem", "sqrtsem"]
LEARNED = ("softmax", "sqrtsoftmax")  # weightings that need a number more of every slot


class Slots(NamedTuple):
    """What every read-out returns. A named tuple, so that torch.compile and pytrees take it as it is.

    values: (B, L, V).  attention: (B, L, N) or None.
    """

    values: Tensor
    attention: Tensor | None = None

    def flat(self) -> Tensor:
        """The encoding: (B, L*V), slot after slot."""
        return self.values.flatten(1)


class ReadOut(nn.Module, ABC):
    """Turns tokens (B, N, d) into L slots of V numbers."""

    slots: int
    width: int
    # Matrices that are tables, queries or many small ones in one: Muon would make them orthogonal as if they were one map.
    adamw_only_parameters: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def forward(self, tokens: Tensor, keep: Tensor | None = None, *, need_attention: bool = False) -> Slots:
        """Tokens (B, N, d), of which `keep` (B, N) bool may be read (None: all), to slots, not normalised."""


class ReadOutPair(NamedTuple):
    """The read-outs of both towers; None where a tower keeps its own pooling. They may share modules."""

    image: ReadOut | None
    text: ReadOut | None


class Placement(NamedTuple):
    """How towers hold a read-out.

    replaced: transformer blocks that it takes the place of.
    norm: what the tower's last norm runs on: every token before it, the slots behind it, or nothing.
    attend_cls: an image's class token is among its tokens.
    normalize: each slot as `representation` says, times its weight (Eq. 2: unit norm, one weight for all).
    projected: the tower's own projection follows, to `embed_dim` numbers.
    text: the text tower is read by one, too; false leaves it to EOS.
    shared: both towers' modules have to be built together.
    """

    replaced: int = 0
    norm: Literal["tokens", "slots", "nothing"] = "tokens"
    attend_cls: bool = True
    normalize: bool = True
    weighting: Weighting = "const"
    representation: Representation = "cont"
    projected: bool = False
    text: bool = True
    shared: bool = False


class ReadOutConfig(Frozen, ABC):
    """A row of `sparo.readouts`: the recipe's `readout` block. Its `kind` is the name of the modules in a state dict, too."""

    kind: Any = field(..., "Entry of sparo.readouts.")  # a Literal of one name, in each of them
    reads_cls: ClassVar[bool] = False  # an image's class token alone: there has to be one
    conditioned: ClassVar[bool] = False  # texts pool its image tokens, by a loss of CLIP's own
    inference_note: ClassVar[str] = ""  # what weights of the same shapes may also be, and a score would not look wrong

    @property
    def placement(self) -> Placement:
        """What towers have to know."""
        return Placement()

    def resolved(self, normalize: bool) -> Self:
        """With the method's own choice where the recipe makes none: CLIP normalises slots, DINO's head takes them as they are."""
        return self

    @abstractmethod
    def shape(self, embed_dim: int) -> tuple[int, int]:
        """L and V of the encoding of a model of this `embed_dim`."""

    @abstractmethod
    def build(self, image_dim: int | None, text_dim: int | None, embed_dim: int) -> ReadOutPair:
        """Read-outs for tokens of these widths; None for a tower that is not there, or is built by itself."""

    @classmethod
    def infer(cls, weights: Mapping[str, Tensor], replaced: int) -> dict[str, Any]:
        """The keys of the block that weights (named below `kind`) tell by their shapes, for towers with `replaced` blocks fewer.

        `embed_dim` among them is the model's, where no projection of a tower tells it.
        """
        return {}


class TwinReadOut(ReadOutConfig):
    """The same kind of module on every tower that it reads, nothing in common."""

    @abstractmethod
    def module(self, dim: int, embed_dim: int) -> ReadOut:
        """The read-out of one tower with tokens of `dim` numbers."""

    def build(self, image_dim: int | None, text_dim: int | None, embed_dim: int) -> ReadOutPair:
        text = text_dim if self.placement.text else None
        return ReadOutPair(*(None if dim is None else self.module(dim, embed_dim) for dim in (image_dim, text)))


class NoReadOut(ReadOutConfig):
    """The towers' own pooling, under its own names."""

    reads_cls: ClassVar[bool] = True

    @property
    def placement(self) -> Placement:
        return Placement(projected=True, text=False)

    def shape(self, embed_dim: int) -> tuple[int, int]:
        return 1, embed_dim

    def build(self, image_dim: int | None, text_dim: int | None, embed_dim: int) -> ReadOutPair:
        return ReadOutPair(None, None)


def normalize_slots(slots: Slots, weighting: Weighting = "const", representation: Representation = "cont") -> Slots:
    """Each slot to norm one, times its weight; the squared weights add up to one, so that the flat encoding has norm one. Always in fp32.

    The default is the paper's (Sec. 3.3, Eq. 2): L2 norm 1/sqrt(L) for all, so that the cosine of two encodings is the mean of their
    slots' cosines. The others are the sparo-clip repository's (`sparo_type`).

    Args:
        slots: values (B, L, V) of any float dtype; (B, L, 1 + V), the weight's logit first, where weights are learned.
        weighting: `const`: 1/sqrt(L); `norm`: a slot's share of the whole norm; `softmax`, `sqrtsoftmax`: learned, the softmax over
            slots to norm one, or its root.
        representation: `cont`: values over their norm; `sem`: their softmax over its norm; `sqrtsem`: its root.

    Returns:
        values (B, L, V) in fp32 (float64 stays float64).
    """
    # In fp32 at least: a norm over sixty numbers of sixteen bits is off in the third digit. The oracles of the tests run in fp64.
    values = slots.values if slots.values.dtype.itemsize >= 4 else slots.values.float()
    weights = None
    if weighting in LEARNED:
        logits, values = values[..., :1], values[..., 1:]
        probabilities = logits.softmax(1)
        weights = F.normalize(probabilities, dim=1) if weighting == "softmax" else probabilities.sqrt()
    elif weighting == "norm" and representation == "cont":
        weights = F.normalize(values.norm(dim=-1, keepdim=True), dim=1)
    elif weighting == "norm":
        # The norm of exp(x / 2) within that of all slots, without the overflow.
        weights = values.flatten(1).softmax(-1).view_as(values).sum(-1, keepdim=True).sqrt()
    if representation == "cont":
        values = F.normalize(values, dim=-1)
    else:
        share = values.softmax(-1)
        values = F.normalize(share, dim=-1) if representation == "sem" else share.sqrt()
    return slots._replace(values=values * (values.shape[1] ** -0.5 if weights is None else weights))


def read_slots(
    readout: nn.Module,
    place: Placement,
    norm: nn.Module,
    x: Tensor,
    keep: Tensor | None,
    need_attention: bool,
    prefix: int = 1,
) -> Slots:
    """What a tower does with its last block's tokens (B, N, d), class token first: norm, read-out, one norm per slot.

    Args:
        prefix: tokens before the patches, which are left out where the class token is.
    """
    tokens = norm(x) if place.norm == "tokens" else x
    slots: Slots = readout(tokens if place.attend_cls else tokens[:, prefix:], keep, need_attention=need_attention)
    if place.norm == "slots":
        slots = slots._replace(values=norm(slots.values))
    return normalize_slots(slots, place.weighting, place.representation) if place.normalize else slots


def project_tokens(tokens: Tensor, proj: Tensor | None, prefix: int) -> Tensor:
    """Class token and patches of normed tokens (B, N, d), each through a tower's projection (d, D): what texts pool."""
    assert proj is not None  # a conditioned read-out's placement
    return torch.cat([tokens[:, :1], tokens[:, prefix:]], dim=1) @ proj
