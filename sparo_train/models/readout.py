"""Readouts: their interface, the normalization of slots to an encoding, and their placement in a tower."""

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
LEARNED = ("softmax", "sqrtsoftmax")  # weightings that need one more value per slot


class Slots(NamedTuple):
    """Output of every readout, a named tuple, which torch.compile and pytrees support.

    Attributes:
        values: (B, L, V).
        attention: (B, L, N) or None.
    """

    values: Tensor
    attention: Tensor | None = None

    def flat(self) -> Tensor:
        """Return the encoding (B, L*V), slot after slot."""
        return self.values.flatten(1)


class ReadOut(nn.Module, ABC):
    """Module that turns tokens (B, N, d) into L slots of V values."""

    slots: int
    width: int
    # Matrices that are tables, queries, or stacks of many small matrices: Muon would orthogonalize each as a single
    # map.
    adamw_only_parameters: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def forward(self, tokens: Tensor, keep: Tensor | None = None, *, need_attention: bool = False) -> Slots:
        """Read slots, not normalised, from tokens (B, N, d), limited to those in `keep` (B, N), bool (None: all)."""


def readouts(module: nn.Module) -> list[ReadOut]:
    """Return the readouts within a module."""
    return [part for part in module.modules() if isinstance(part, ReadOut)]


class ReadOutPair(NamedTuple):
    """Readouts of both towers; None if a tower keeps its own pooling. They may share modules."""

    image: ReadOut | None
    text: ReadOut | None


class Placement(NamedTuple):
    """Placement of a readout in a tower.

    Attributes:
        replaced: number of transformer blocks that it replaces.
        norm: input of the tower's last norm: every token before the readout, the slots after it, or nothing.
        attend_cls: an image's class token is among the tokens.
        normalize: normalize each slot as `representation` describes, times its weight (Eq. 2: unit norm, one weight for
            all).
        projected: the tower's own projection follows, to `embed_dim` values.
        text: the text tower has a readout, too; False: it uses EOS.
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
    """Entry of `sparo.readouts`: the recipe's `readout` block. Its `kind` is also the name of its modules in a state dict."""

    kind: Any = field(..., "Kind of the readout: an entry of sparo.readouts.")  # each entry has a Literal with one name
    reads_cls: ClassVar[bool] = False  # reads only an image's class token, which must exist
    conditioned: ClassVar[bool] = False  # texts pool its image tokens, which needs a separate loss
    inference_note: ClassVar[str] = (
        ""  # what else weights with the same shapes could be; a wrong choice would give plausible scores
    )

    @property
    def placement(self) -> Placement:
        """Return its placement in a tower."""
        return Placement()

    def resolve_defaults(self, normalize: bool) -> Self:
        """Return this block with the method's default for normalization: CLIP normalises slots, DINO's head takes them unchanged."""
        return self

    @abstractmethod
    def shape(self, embed_dim: int) -> tuple[int, int]:
        """Return L and V of the encoding for a model with this `embed_dim`."""

    @abstractmethod
    def build(self, image_dim: int | None, text_dim: int | None, embed_dim: int) -> ReadOutPair:
        """Return readouts for tokens of these widths; None for a tower that does not exist or is built separately."""

    @classmethod
    def infer(cls, weights: Mapping[str, Tensor], replaced: int) -> dict[str, Any]:
        """Return the keys of the block that weights (named below `kind`) imply by their shapes, for towers with `replaced` fewer blocks.

        An `embed_dim` among them is the model's, in case no projection of a tower shows it.
        """
        return {}


class TwinReadOut(ReadOutConfig):
    """Readout with one module of the same kind, and nothing in common, on every tower that it reads."""

    @abstractmethod
    def module(self, dim: int, embed_dim: int) -> ReadOut:
        """Return the module of one tower with tokens of `dim` values."""

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
    """Normalize each slot and multiply it by its weight, in fp32; the squared weights sum to one, so the flat encoding has unit norm.

    The default is the paper's (Sec. 3.3, Eq. 2): L2 norm 1/sqrt(L) for all slots, so that the cosine of two encodings
    is the mean of their slots' cosines. The others are those of the sparo-clip repository (`sparo_type`).

    Args:
        slots: values (B, L, V) of any float dtype; (B, L, 1 + V), the logit of the weight first, if weights are
            learned.
        weighting: `const`: 1/sqrt(L); `norm`: a slot's share of the whole norm; `softmax`, `sqrtsoftmax`: learned, the
            softmax over slots scaled to unit norm, or its square root.
        representation: `cont`: values divided by their norm; `sem`: their softmax divided by its norm; `sqrtsem`: its
            square root.

    Returns:
        values (B, L, V) in fp32 (float64 stays float64).
    """
    # In fp32 at least, because a norm over sixty 16-bit values is wrong in the third digit. The oracles of the tests
    # run in fp64.
    values = slots.values if slots.values.dtype.itemsize >= 4 else slots.values.float()
    weights = None
    if weighting in LEARNED:
        logits, values = values[..., :1], values[..., 1:]
        probabilities = logits.softmax(1)
        weights = F.normalize(probabilities, dim=1) if weighting == "softmax" else probabilities.sqrt()
    elif weighting == "norm" and representation == "cont":
        weights = F.normalize(values.norm(dim=-1, keepdim=True), dim=1)
    elif weighting == "norm":
        # The norm of exp(x / 2) divided by the norm over all slots, without overflow.
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
    """Read slots from the last block's tokens (B, N, d), class token first: norm, readout, normalization per slot.

    Args:
        readout, place: the module and its placement.
        norm: the tower's last norm.
        x, keep: tokens, and which of them may be read.
        need_attention: also return attention.
        prefix: number of tokens before the patches, which are excluded together with the class token.
    """
    tokens = norm(x) if place.norm == "tokens" else x
    slots: Slots = readout(tokens if place.attend_cls else tokens[:, prefix:], keep, need_attention=need_attention)
    if place.norm == "slots":
        slots = slots._replace(values=norm(slots.values))
    return normalize_slots(slots, place.weighting, place.representation) if place.normalize else slots


def project_tokens(tokens: Tensor, proj: Tensor | None, prefix: int) -> Tensor:
    """Project the class token and patches of normed tokens (B, N, d) with a tower's projection (d, D), for pooling by texts."""
    assert proj is not None  # placement of a conditioned readout
    return torch.cat([tokens[:, :1], tokens[:, prefix:]], dim=1) @ proj
