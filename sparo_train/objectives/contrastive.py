"""Contrastive losses over the global batch, with the same gradients as in one process that holds the whole batch.

Softmax, as in CLIP (Radford et al. 2021, Fig. 3), for B pairs with z_ij = scale * <x_i, y_j>:

    1/(2B) sum_i [lse_j z_ij - z_ii] + 1/(2B) sum_j [lse_i z_ij - z_jj]

Sigmoid, as in SigLIP (Zhai et al. 2023, Eq. 1), with z_ij = scale * <x_i, y_j> + bias:

    -1/B sum_ij log sigmoid(t_ij z_ij),  t_ij = 1 on the diagonal, -1 off it

Every rank holds b of the B pairs. In a ring, each rank keeps its images, and the texts of the other ranks pass by one
rank at a time. A block of b x b logits (in tiles of rows) contributes to the log-sum-exp of the local images and to that
of the visiting texts, which travels with them. Backward repeats this with blocks of dL/dz and gradients. This takes one
product of features per block in forward and three in backward; computing all rows of both takes two and four.

Ranks average their gradients afterwards (DDP, FSDP2 and DeepSpeed do), so each rank's loss is its share of the global
loss times the number of ranks: the mean of losses is the global loss, and the mean of gradients is its gradient.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Literal, NamedTuple, Self

import torch
from pydantic import model_validator
from torch import Tensor
from torch.nn import functional as F

from ..core.config import Frozen, field
from ..core.distributed import Ring
from ..core.first_order import first_order

Exchange = Literal["auto", "gather", "ring"]
_TILE = 1 << 22  # number of logits in a tile
# `auto` gathers up to this many values: 64 MiB and 2 GiB in fp32. At 1,024 ranks, a ring launches 25 times as many kernels.
_CPU_TABLE, _GPU_TABLE = 1 << 24, 1 << 29


class Contrast(NamedTuple):
    """Result of a contrastive loss.

    Attributes:
        total: this rank's share of the loss times the number of ranks.
        correct: (b,) bool, image i is nearer to text i than to any other text.
    """

    total: Tensor
    correct: Tensor


class ContrastiveLoss(Frozen):
    """The recipe's `objective.loss` block: a loss of the logits between all images and texts of the global batch.

    An entry of `sparo.losses` derives from it and adds `kind`, its own keys and `mean_loss`. The caller gathers the
    encodings of all ranks and computes logits in fp32 as `exp(logit_scale) * <image, text>`.
    """

    # Add the loss of texts against images and take the mean of both. False if the rows of images contain every term
    # already.
    symmetric: ClassVar[bool] = True
    # Add `model.logit_bias`, a trained scalar, to the logits.
    uses_bias: ClassVar[bool] = False
    # The same loss in tiles, for `exchange: ring`: apply(image, text, scale, bias, ring, rows of a tile) -> (loss,
    # correct). None: always gather.
    tiled: ClassVar[type[torch.autograd.Function] | None] = None

    kind: str = field(..., "Kind of the loss: an entry of sparo.losses.")
    exchange: Exchange = field(
        "auto",
        "Exchange of encodings between ranks: gather (all_gather, fewest kernel launches), ring (tiles passed from "
        "rank to rank, least memory), or auto (gather if the gathered encodings of one modality and a rank's rows "
        "of logits each take at most 2 GiB on a GPU or 64 MiB on a CPU, otherwise ring).",
    )
    exchange_dtype: Literal["fp32", "bf16"] = field(
        "fp32",
        "Dtype in which encodings are sent between ranks. bf16 halves these bytes; the loss is then that of encodings "
        "rounded to bf16, on any number of ranks. Gradients are sent in fp32.",
    )

    @abstractmethod
    def mean_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of this rank's rows, 0-d.

        Args:
            logits: (b, B) fp32 or fp64, this rank's b images (or texts) against all B texts (or images).
            targets: (b,) int64, the column of each row's pair.
        """

    @model_validator(mode="after")
    def _check_exchange(self) -> Self:
        if self.exchange == "ring" and self.tiled is None:
            raise ValueError(
                f"loss.exchange=ring: loss.kind={self.kind} cannot be computed in tiles. Set loss.exchange=gather."
            )
        return self


def uses_gather(loss: ContrastiveLoss, own: int, total: int, width: int, on_gpu: bool) -> bool:
    """Return whether ranks with `own` of `total` pairs gather all encodings of `width` values, instead of passing them around a ring."""
    if loss.tiled is None or loss.exchange != "auto":
        return loss.exchange != "ring"
    # Sizes alone decide, so that all ranks agree and a resumed run adds in the same order.
    return total * max(own, width) <= (_GPU_TABLE if on_gpu else _CPU_TABLE)


def peak_bytes(loss: ContrastiveLoss, own: int, total: int, width: int) -> int:
    """Estimate the bytes that the loss of `own` of `total` pairs needs on a GPU besides their own encodings."""
    if not uses_gather(loss, own, total, width, on_gpu=True):
        # Visiting texts and their gradients, each while it leaves, arrives and is used.
        return 4 * (4 * min(own, max(1, _TILE // own)) * own + 6 * own * width)
    # Encodings of both modalities, and the gradient of one of them; what arrives in bf16 is converted.
    gathered = (14 if loss.exchange_dtype == "bf16" else 12) * total * width if total > own else 0
    return 16 * own * total + gathered


def contrastive(
    image: Tensor,
    text: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    loss: ContrastiveLoss | None = None,
    ring: Ring | None = None,
) -> Contrast:
    """Compute the loss of this rank's pairs within the global batch.

    Args:
        image, text: (b, D) encodings, the same b on every rank; computed in fp32 (fp64 if given in fp64).
        scale: 0-d factor of the logits (not its logarithm).
        bias: 0-d, added to the logits if the loss uses it; None: 0.
        loss: default: softmax. Its `exchange` is `ring` (as above), `gather` (all features and this rank's rows at
            once), or `auto` (gather while that is small).
        ring: the ranks; default: those of the default process group.
    """
    loss = loss or SoftmaxLoss()
    ring = exchange_ring(loss, ring)
    image, text = round_for(ring, image), round_for(ring, text)
    wide = torch.float64 if image.dtype == torch.float64 else torch.float32
    # One dtype throughout, because tests compare the loss with a single process in fp64.
    image, text, scale = image.to(wide), text.to(wide), scale.to(wide)
    bias = torch.zeros_like(scale) if bias is None else bias.to(wide)
    own, width = image.shape
    with torch.autocast(image.device.type, enabled=False):
        if loss.tiled is None or uses_gather(loss, own, own * ring.size, width, on_gpu=image.device.type != "cpu"):
            return _gather_loss(image, text, scale, bias, loss, ring)
        tile = max(1, _TILE // len(image))
        total, correct = loss.tiled.apply(image, text, scale, bias, ring, tile)  # type: ignore[misc]
    return Contrast(total, correct)


def exchange_ring(loss: ContrastiveLoss, ring: Ring | None = None) -> Ring:
    """Return the ranks, which send encodings in the dtype of the loss."""
    ring = ring or Ring()
    return ring if loss.exchange_dtype == "fp32" else Ring(ring.group, torch.bfloat16)


def round_for(ring: Ring, x: Tensor) -> Tensor:
    """Return encodings rounded to the dtype in which they are sent, so that all ranks compare the same values; the gradient passes unchanged."""
    return x if ring.dtype is None else x + (x.to(ring.dtype).to(x.dtype) - x).detach()


def _gather_loss(
    image: Tensor, text: Tensor, scale: Tensor, bias: Tensor, loss: ContrastiveLoss, ring: Ring
) -> Contrast:
    own = torch.arange(len(image), device=image.device) + ring.rank * len(image)
    logits = scale * image @ ring.gather(text).T
    scores = logits.detach()
    # Compare with the best of the others, so that ties do not count as correct.
    correct = scores.gather(1, own[:, None])[:, 0] > scores.scatter(1, own[:, None], -torch.inf).amax(dim=1)
    total = loss.mean_loss(logits + bias if loss.uses_bias else logits, own)
    if not loss.symmetric:
        return Contrast(total, correct)
    # Each rank computes its own rows of both directions; the columns include other ranks' samples.
    logits = scale * text @ ring.gather(image).T
    total = total + loss.mean_loss(logits + bias if loss.uses_bias else logits, own)
    return Contrast(total / 2, correct)


class _RingSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, image: Tensor, text: Tensor, scale: Tensor, bias: Tensor, ring: Ring, tile: int) -> Any:
        b = len(image)
        # logaddexp ignores minus infinity.
        rows, rival, diagonal = (image.new_full((b,), -torch.inf) for _ in range(3))
        visiting, columns = text.to(ring.dtype or text.dtype), None
        for step in range(ring.size):
            # Send before the result is needed, so that the exchange overlaps with the product of this block.
            following = ring.shift(visiting) if step + 1 < ring.size else None
            others = visiting.to(text.dtype)
            here = image.new_full((b,), -torch.inf)
            for part in _tiles(b, tile):
                z = (image[part] @ others.T).mul_(scale)
                rows[part] = torch.logaddexp(rows[part], z.logsumexp(dim=1))
                here = torch.logaddexp(here, z.logsumexp(dim=0))
                if step == 0:
                    diagonal[part] = z.diagonal(part.start)
                    # Exclude the pair itself from its competitors.
                    z.diagonal(part.start).fill_(-torch.inf)
                rival[part] = torch.maximum(rival[part], z.amax(dim=1))
            if columns is not None:
                here = torch.logaddexp(here, columns.wait()[0])
            columns = ring.shift(here)  # one step later than its texts; after the last step, it is back on its rank
            if following is not None:
                (visiting,) = following.wait()
        assert columns is not None
        (own,) = columns.wait()
        ctx.save_for_backward(image, text, scale, rows, own)
        ctx.ring, ctx.tile = ring, tile
        correct = diagonal > rival
        ctx.mark_non_differentiable(correct)
        return ((rows - diagonal).mean() + (own - diagonal).mean()) / 2, correct

    @staticmethod
    @first_order
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        image, text, scale, rows, columns = ctx.saved_tensors

        def weigh(z: Tensor, part: slice, home: bool, columns: Tensor) -> Tensor:
            # Two softmaxes of the same logits, over rows and over columns, share one tile.
            g = (z - rows[part, None]).exp_()
            g += (z - columns).exp_()
            if home:
                # Minus one for each direction.
                g.diagonal(part.start).sub_(2)
            return g

        factor = gradients[0] / (2 * len(image))
        # If backward is called inside an autocast block, its products would be in 16 bits.
        with torch.autocast(image.device.type, enabled=False):
            d_image, d_text, d_scale, _ = _backward(
                image, text, (columns,), scale, None, factor, weigh, ctx.ring, ctx.tile
            )
        return d_image, d_text, d_scale, None, None, None


class _RingSigmoid(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, image: Tensor, text: Tensor, scale: Tensor, bias: Tensor, ring: Ring, tile: int) -> Any:
        b = len(image)
        total = image.new_zeros(())
        rival, diagonal = (image.new_full((b,), -torch.inf) for _ in range(2))
        visiting = text.to(ring.dtype or text.dtype)
        for step in range(ring.size):
            following = ring.shift(visiting) if step + 1 < ring.size else None
            others = visiting.to(text.dtype)
            for part in _tiles(b, tile):
                # In place, because a tile is the largest tensor here.
                z = (image[part] @ others.T).mul_(scale).add_(bias)
                if step == 0:  # the pairs themselves are the positives
                    diagonal[part] = z.diagonal(part.start)
                    total -= F.logsigmoid(diagonal[part]).sum()
                    z.diagonal(part.start).fill_(-torch.inf)
                rival[part] = torch.maximum(rival[part], z.amax(dim=1))
                total -= F.logsigmoid(-z).sum()
            if following is not None:
                (visiting,) = following.wait()
        correct = diagonal > rival
        ctx.save_for_backward(image, text, scale, bias)
        ctx.ring, ctx.tile = ring, tile
        ctx.mark_non_differentiable(correct)
        return total / b, correct

    @staticmethod
    @first_order
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        image, text, scale, bias = ctx.saved_tensors

        def weigh(z: Tensor, part: slice, home: bool) -> Tensor:
            g = z.sigmoid()
            if home:
                g.diagonal(part.start).sub_(1)
            return g

        factor = gradients[0] / len(image)
        with torch.autocast(image.device.type, enabled=False):
            return *_backward(image, text, (), scale, bias, factor, weigh, ctx.ring, ctx.tile), None, None


def _backward(
    image: Tensor,
    text: Tensor,
    facts: tuple[Tensor, ...],
    scale: Tensor,
    bias: Tensor | None,
    factor: Tensor,
    weigh: Callable[..., Tensor],
    ring: Ring,
    tile: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of image, text, scale and bias.

    `weigh(z, rows, at_home, *facts)` returns dL/dz of a tile, up to `factor`. Texts travel with their `facts`, and
    their gradient follows one step behind them.
    """
    b = len(image)
    d_image, d_scale, d_bias = torch.zeros_like(image), torch.zeros_like(scale), torch.zeros_like(scale)
    visiting, text_grad_shift = (text.to(ring.dtype or text.dtype), *facts), None
    for step in range(ring.size):
        following = ring.shift(*visiting) if step + 1 < ring.size else None
        here, others = torch.zeros_like(text), visiting[0].to(text.dtype)
        for part in _tiles(b, tile):
            product = image[part] @ others.T
            z = product * scale if bias is None else product * scale + bias
            g = weigh(z, part, step == 0, *visiting[1:])
            # As one dot product, which avoids a third tile.
            d_scale += torch.linalg.vecdot(g.flatten(), product.flatten())
            d_bias += g.sum()
            d_image[part] += g @ others
            here += g.T @ image[part]
        if text_grad_shift is not None:
            here += text_grad_shift.wait()[0]
        text_grad_shift = ring.shift(here)
        if following is not None:
            visiting = following.wait()
    assert text_grad_shift is not None
    (d_text,) = text_grad_shift.wait()
    # Once at the end, because the scale is the same for all tiles.
    spread = factor * scale
    return d_image.mul_(spread), d_text.mul_(spread), d_scale * factor, d_bias * factor


def _tiles(rows: int, tile: int) -> list[slice]:
    return [slice(begin, min(rows, begin + tile)) for begin in range(0, rows, tile)]


class SoftmaxLoss(ContrastiveLoss):
    """CLIP's cross-entropy of each image's text among all texts, and the reverse (Radford et al. 2021, Fig. 3)."""

    tiled: ClassVar[type[torch.autograd.Function] | None] = _RingSoftmax

    kind: Literal["softmax"] = field("softmax", "Kind of the loss: an entry of sparo.losses.")  # pyright: ignore[reportIncompatibleVariableOverride]

    def mean_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits, targets)


class SigmoidLoss(ContrastiveLoss):
    """SigLIP's binary cross-entropy of every pair (Zhai et al. 2023, Eq. 1). Needs `model.init_logit_bias`."""

    symmetric: ClassVar[bool] = False
    uses_bias: ClassVar[bool] = True
    tiled: ClassVar[type[torch.autograd.Function] | None] = _RingSigmoid

    kind: Literal["sigmoid"] = field("sigmoid", "Kind of the loss: an entry of sparo.losses.")  # pyright: ignore[reportIncompatibleVariableOverride]

    def mean_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        # One value per logit: targets of 1 and -1 need no second matrix.
        sign = torch.full_like(logits, -1.0).scatter_(1, targets[:, None], 1.0)
        return -F.logsigmoid(sign * logits).sum() / len(logits)
