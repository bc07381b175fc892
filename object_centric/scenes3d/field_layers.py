"""A radiance field's layers for the rows of one tile, forward and backward, with the first layer done per point and per slot."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_EPS = 1e-5
Low = torch.dtype | None  # what products are done in; None: as they are


class Layers(NamedTuple):
    """Weights (out, in) and biases of a field, norms' own multiplied into the layer behind them. `first` is done before (`Given`); `through`
    is what its norm's bias gives; `look` has a row per number that is told of the first blocks' result; the last two, colours."""

    norm: Tensor
    norm_bias: Tensor
    through: Tensor
    first_bias: Tensor
    first_back: Tensor
    first_back_bias: Tensor
    second: Tensor
    second_bias: Tensor
    second_back: Tensor
    second_back_bias: Tensor
    tint_norm: Tensor
    tint_norm_bias: Tensor
    tint: Tensor
    tint_bias: Tensor
    look: Tensor
    colour: Tensor
    colour_tint: Tensor


class Given(NamedTuple):
    """Of Q rays: embedded points (Q, B, D) and what the first layer makes of them, slots (Q, F, D) and the same, directions (Q, D)."""

    points: Tensor
    points_first: Tensor
    slots: Tensor
    slots_first: Tensor
    directions: Tensor


class TileRows(NamedTuple):
    """Points in slots of the rays from `begin` to `end`, ray by ray and point by point: all of them, or those that `at` (m) counts."""

    begin: int
    end: int
    at: Tensor | None

    def sums(self, given: Given) -> tuple[Tensor, Tensor]:
        """Points plus slots (rows, D), and what the first layer makes of that."""
        pairs = (given.points, given.slots), (given.points_first, given.slots_first)
        return tuple(self._sum(*pair) for pair in pairs)  # pyright: ignore[reportReturnType]

    def _sum(self, points: Tensor, slots: Tensor) -> Tensor:
        points, slots = points[self.begin : self.end], slots[self.begin : self.end]
        if self.at is None:
            return (points[:, :, None] + slots[:, None]).flatten(0, 2)
        bins, fields = points.shape[1], slots.shape[1]
        ray = self.at // (bins * fields)
        return points.flatten(0, 1)[self.at // fields] + slots.flatten(0, 1)[ray * fields + self.at % fields]

    def turned(self, result: Tensor, given: Given) -> Tensor:
        """TileRows (rows, D) plus their rays' directions."""
        directions = given.directions[self.begin : self.end]
        if self.at is not None:
            return result + directions[self.at // (given.points.shape[1] * given.slots.shape[1])]
        # All of a ray's points and slots have one direction.
        return (result.view(len(directions), -1, result.shape[1]) + directions[:, None]).flatten(0, 1)

    def scattered(self, g: Tensor, given: Given) -> Tensor:
        """A gradient of rows as one of all points in slots (rays, B, F, D), of which those that do not count have none."""
        shape = (self.end - self.begin, given.points.shape[1], given.slots.shape[1], g.shape[1])
        if self.at is None:
            return g.view(shape)
        return g.new_zeros(shape[0] * shape[1] * shape[2], shape[3]).index_copy_(0, self.at, g).view(shape)


class FieldActivations(NamedTuple):
    """Of a tile's rows, what backward needs of the first two blocks: what each has within it and gives."""

    first: Tensor
    middle: Tensor
    second: Tensor
    result: Tensor


def seen(rows: TileRows, given: Given, m: Layers, low: Low) -> FieldActivations:
    """A norm, and two residual blocks: LayerNorm, linear, ReLU, linear."""
    x, through = rows.sums(given)
    x, _, rstd = _normed(x, m.norm, m.norm_bias)
    # Of x's own norm the deviation is all that is left to do: its layer was centred, and went through what `x` is a sum of.
    raw = torch.addcmul(m.through, through, rstd)
    first = relu(torch.addcmul(m.first_bias, raw, _normed(x)[2]), low)
    middle = x.add_(m.first_back_bias).add_(times(first, m.first_back.T, low))
    second = relu(times(_normed(middle)[0], m.second.T, low).add_(m.second_bias), low)
    result = times(second, m.second_back.T, low).add_(m.second_back_bias).add_(middle)
    return FieldActivations(first, middle, second, result)


def seen_back(
    g: Tensor,
    own: FieldActivations,
    rows: TileRows,
    given: Given,
    d_given: Given,
    m: Layers,
    d: Layers,
    low: Low,
) -> None:
    """`g` (rows, D) is the gradient of `own.result`, and is written over."""
    _add_layer(d.second_back, d.second_back_bias, g, own.second, low)
    inner = times(g, m.second_back, low).mul_(own.second > 0)
    z, mean, rstd = _normed(own.middle)
    _add_layer(d.second, d.second_bias, inner, z, low)
    g.add_(_normed_back(times(inner, m.second, low), own.middle, mean, rstd)[0])

    _add_layer(d.first_back, d.first_back_bias, g, own.first, low)
    inner = times(g, m.first_back, low).mul_(own.first > 0)
    d.first_bias.add_(inner.sum(0))
    u, through = rows.sums(given)
    x, mean, rstd = _normed(u, m.norm, m.norm_bias)
    _, x_mean, x_rstd = _normed(x)
    inner.mul_(x_rstd)
    d.through.add_(inner.sum(0))
    d_rstd = (inner * through).sum(-1, keepdim=True)
    d_x_rstd = (d_rstd * rstd + (inner @ m.through)[:, None]) / x_rstd
    _split(rows.scattered(inner.mul_(rstd), given), d_given.points_first, d_given.slots_first, rows)
    # Of rstd the derivative is its cube over minus the number of its terms, times what is centred.
    g.addcmul_(x.sub_(x_mean), d_x_rstd * x_rstd**3, value=-1 / x.shape[1])
    g, d_norm, d_bias = _normed_back(g, u, mean, rstd, m.norm, m.norm_bias)
    d.norm.add_(d_norm)
    d.norm_bias.add_(d_bias)
    g.addcmul_(u.sub_(mean), d_rstd * rstd**3, value=-1 / x.shape[1])
    _split(rows.scattered(g, given), d_given.points, d_given.slots, rows)


Normed = tuple[Tensor, Tensor, Tensor]  # of a LayerNorm: what it gives, and the rows' means and reciprocal deviations


def tinted(result: Tensor, rows: TileRows, given: Given, m: Layers) -> tuple[Tensor, Normed, Normed]:
    """What was seen with the ray's direction, its norm, and the norm of that without weights."""
    turned = rows.turned(result, given)
    y = _normed(turned, m.tint_norm, m.tint_norm_bias)
    return turned, y, _normed(y[0])


def tinted_back(
    shades: Tensor,
    tint: Tensor,
    result: Tensor,
    rows: TileRows,
    given: Given,
    d_given: Given,
    m: Layers,
    d: Layers,
    low: Low,
) -> Tensor:
    """From a gradient of colours (rows, 3) to that of what was seen with its direction (rows, D)."""
    turned, (y, mean, rstd), (z, z_mean, z_rstd) = tinted(result, rows, given, m)
    d.colour_tint.add_(times(shades.T, tint, low))
    d.colour.add_(times(shades.T, y, low))
    inner = times(shades, m.colour_tint, low).mul_(tint > 0)
    _add_layer(d.tint, d.tint_bias, inner, z, low)
    g = _normed_back(times(inner, m.tint, low), y, z_mean, z_rstd)[0].add_(times(shades, m.colour, low))
    g, d_norm, d_bias = _normed_back(g, turned, mean, rstd, m.tint_norm, m.tint_norm_bias)
    d.tint_norm.add_(d_norm)
    d.tint_norm_bias.add_(d_bias)
    d_given.directions[rows.begin : rows.end] = rows.scattered(g, given).sum((1, 2))
    return g


def times(x: Tensor, y: Tensor, low: Low) -> Tensor:
    return x @ y if low is None else (x.to(low) @ y.to(low)).to(torch.promote_types(y.dtype, torch.float32))


def relu(x: Tensor, low: Low) -> Tensor:
    """Kept as the next product takes it."""
    return x.relu_() if low is None else x.relu_().to(low)


def _add_layer(d_weight: Tensor, d_bias: Tensor, g: Tensor, x: Tensor, low: Low) -> None:
    d_weight.add_(times(g.T, x, low))
    d_bias.add_(g.sum(0))


def _normed(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Normed:
    if weight is None:  # told ones and zeros: without, torch's CPU kernel takes three times as long
        weight, bias = x.new_ones(x.shape[1]), x.new_zeros(x.shape[1])
    return torch.native_layer_norm(x, x.shape[1:], weight, bias, _EPS)


def _normed_back(
    g: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None = None, bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    mask = (True, weight is not None, weight is not None)
    return torch.ops.aten.native_layer_norm_backward(g, x, x.shape[1:], mean, rstd, weight, bias, mask)


def _split(g: Tensor, points: Tensor, slots: Tensor, rows: TileRows) -> None:
    """The gradient of sums of points and slots (rays, B, F, D) to either."""
    points[rows.begin : rows.end], slots[rows.begin : rows.end] = g.sum(2), g.sum(1)
