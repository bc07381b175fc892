"""Layers of a radiance field for the rows of one tile, forward and backward, with the first layer computed per point and per slot."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_EPS = 1e-5
MatmulDtype = torch.dtype | None  # dtype of products; None: unchanged


class Layers(NamedTuple):
    """Weights (out, in) and biases of a radiance field, with each norm's weight multiplied into the layer that follows it.

    Blocks 1 and 2 give the density, block 3 the colour. The first layer of block 1 is applied before (`FieldInputs`);
    `norm_offset` is that layer applied to its norm's bias. `density_head` has a row for the density and one for the
    shadow, if there are shadows; `colour_block3` is the colour layer times the second layer of block 3.
    """

    block1_norm: Tensor
    block1_norm_bias: Tensor
    norm_offset: Tensor
    block1_fc1_bias: Tensor
    block1_fc2: Tensor
    block1_fc2_bias: Tensor
    block2_fc1: Tensor
    block2_fc1_bias: Tensor
    block2_fc2: Tensor
    block2_fc2_bias: Tensor
    block3_norm: Tensor
    block3_norm_bias: Tensor
    block3_fc1: Tensor
    block3_fc1_bias: Tensor
    density_head: Tensor
    colour: Tensor
    colour_block3: Tensor


class FieldInputs(NamedTuple):
    """For Q rays: embedded points (Q, B, D) with the output of the first layer, slots (Q, F, D) with the same, and directions (Q, D)."""

    points: Tensor
    points_first: Tensor
    slots: Tensor
    slots_first: Tensor
    directions: Tensor


class TileRows(NamedTuple):
    """Points in slots of the rays from `begin` to `end`, ray by ray and point by point: all of them, or those in `indices` (m)."""

    begin: int
    end: int
    indices: Tensor | None

    def add_slots(self, inputs: FieldInputs) -> tuple[Tensor, Tensor]:
        """Return points plus slots (rows, D), and the output of the first layer for it."""
        pairs = (inputs.points, inputs.slots), (inputs.points_first, inputs.slots_first)
        return tuple(self._sum(*pair) for pair in pairs)  # pyright: ignore[reportReturnType]

    def _sum(self, points: Tensor, slots: Tensor) -> Tensor:
        points, slots = points[self.begin : self.end], slots[self.begin : self.end]
        if self.indices is None:
            return (points[:, :, None] + slots[:, None]).flatten(0, 2)
        bins, fields = points.shape[1], slots.shape[1]
        ray = self.indices // (bins * fields)
        return points.flatten(0, 1)[self.indices // fields] + slots.flatten(0, 1)[ray * fields + self.indices % fields]

    def add_directions(self, result: Tensor, inputs: FieldInputs) -> Tensor:
        """Return rows (rows, D) plus the directions of their rays."""
        directions = inputs.directions[self.begin : self.end]
        if self.indices is not None:
            return result + directions[self.indices // (inputs.points.shape[1] * inputs.slots.shape[1])]
        # All points and slots of a ray have one direction.
        return (result.view(len(directions), -1, result.shape[1]) + directions[:, None]).flatten(0, 1)

    def scatter(self, g: Tensor, inputs: FieldInputs) -> Tensor:
        """Scatter a gradient of rows to all points in slots (rays, B, F, D), with zeros for those that were skipped."""
        shape = (self.end - self.begin, inputs.points.shape[1], inputs.slots.shape[1], g.shape[1])
        if self.indices is None:
            return g.view(shape)
        return g.new_zeros(shape[0] * shape[1] * shape[2], shape[3]).index_copy_(0, self.indices, g).view(shape)


class FieldActivations(NamedTuple):
    """Activations of a tile's rows in the first two blocks that backward needs."""

    first: Tensor
    middle: Tensor
    second: Tensor
    result: Tensor


def density_forward(rows: TileRows, inputs: FieldInputs, m: Layers, matmul_dtype: MatmulDtype) -> FieldActivations:
    """Compute a norm and two residual blocks: LayerNorm, linear, ReLU, linear."""
    x, through = rows.add_slots(inputs)
    x, _, rstd = _layer_norm(x, m.block1_norm, m.block1_norm_bias)
    # Of x's own norm, only the deviation is left to apply: the layer was centred and distributed over the sum.
    raw = torch.addcmul(m.norm_offset, through, rstd)
    first = relu(torch.addcmul(m.block1_fc1_bias, raw, _layer_norm(x)[2]), matmul_dtype)
    middle = x.add_(m.block1_fc2_bias).add_(matmul(first, m.block1_fc2.T, matmul_dtype))
    second = relu(matmul(_layer_norm(middle)[0], m.block2_fc1.T, matmul_dtype).add_(m.block2_fc1_bias), matmul_dtype)
    result = matmul(second, m.block2_fc2.T, matmul_dtype).add_(m.block2_fc2_bias).add_(middle)
    return FieldActivations(first, middle, second, result)


def density_backward(
    g: Tensor,
    activations: FieldActivations,
    rows: TileRows,
    inputs: FieldInputs,
    d_inputs: FieldInputs,
    m: Layers,
    d: Layers,
    matmul_dtype: MatmulDtype,
) -> None:
    """Backpropagate `g` (rows, D), the gradient of `activations.result`, which is overwritten."""
    _add_linear_grad(d.block2_fc2, d.block2_fc2_bias, g, activations.second, matmul_dtype)
    inner = matmul(g, m.block2_fc2, matmul_dtype).mul_(activations.second > 0)
    z, mean, rstd = _layer_norm(activations.middle)
    _add_linear_grad(d.block2_fc1, d.block2_fc1_bias, inner, z, matmul_dtype)
    g.add_(_layer_norm_backward(matmul(inner, m.block2_fc1, matmul_dtype), activations.middle, mean, rstd)[0])

    _add_linear_grad(d.block1_fc2, d.block1_fc2_bias, g, activations.first, matmul_dtype)
    inner = matmul(g, m.block1_fc2, matmul_dtype).mul_(activations.first > 0)
    d.block1_fc1_bias.add_(inner.sum(0))
    u, through = rows.add_slots(inputs)
    x, mean, rstd = _layer_norm(u, m.block1_norm, m.block1_norm_bias)
    _, x_mean, x_rstd = _layer_norm(x)
    inner.mul_(x_rstd)
    d.norm_offset.add_(inner.sum(0))
    d_rstd = (inner * through).sum(-1, keepdim=True)
    d_x_rstd = (d_rstd * rstd + (inner @ m.norm_offset)[:, None]) / x_rstd
    _split_grad(rows.scatter(inner.mul_(rstd), inputs), d_inputs.points_first, d_inputs.slots_first, rows)
    # The derivative of rstd is its cube divided by minus the number of terms, times the centred values.
    g.addcmul_(x.sub_(x_mean), d_x_rstd * x_rstd**3, value=-1 / x.shape[1])
    g, d_norm, d_bias = _layer_norm_backward(g, u, mean, rstd, m.block1_norm, m.block1_norm_bias)
    d.block1_norm.add_(d_norm)
    d.block1_norm_bias.add_(d_bias)
    g.addcmul_(u.sub_(mean), d_rstd * rstd**3, value=-1 / x.shape[1])
    _split_grad(rows.scatter(g, inputs), d_inputs.points, d_inputs.slots, rows)


LayerNormOutput = tuple[Tensor, Tensor, Tensor]  # output of a LayerNorm, with the rows' means and reciprocal deviations


def color_forward(
    result: Tensor, rows: TileRows, inputs: FieldInputs, m: Layers
) -> tuple[Tensor, LayerNormOutput, LayerNormOutput]:
    """Return the features with the ray's direction, their norm, and the norm without weights."""
    color_input = rows.add_directions(result, inputs)
    y = _layer_norm(color_input, m.block3_norm, m.block3_norm_bias)
    return color_input, y, _layer_norm(y[0])


def color_backward(
    d_color_logits: Tensor,
    tint: Tensor,
    result: Tensor,
    rows: TileRows,
    inputs: FieldInputs,
    d_inputs: FieldInputs,
    m: Layers,
    d: Layers,
    matmul_dtype: MatmulDtype,
) -> Tensor:
    """Backpropagate a gradient of colours (rows, 3) to the features with direction (rows, D)."""
    color_input, (y, mean, rstd), (z, z_mean, z_rstd) = color_forward(result, rows, inputs, m)
    d.colour_block3.add_(matmul(d_color_logits.T, tint, matmul_dtype))
    d.colour.add_(matmul(d_color_logits.T, y, matmul_dtype))
    inner = matmul(d_color_logits, m.colour_block3, matmul_dtype).mul_(tint > 0)
    _add_linear_grad(d.block3_fc1, d.block3_fc1_bias, inner, z, matmul_dtype)
    g = _layer_norm_backward(matmul(inner, m.block3_fc1, matmul_dtype), y, z_mean, z_rstd)[0].add_(
        matmul(d_color_logits, m.colour, matmul_dtype)
    )
    g, d_norm, d_bias = _layer_norm_backward(g, color_input, mean, rstd, m.block3_norm, m.block3_norm_bias)
    d.block3_norm.add_(d_norm)
    d.block3_norm_bias.add_(d_bias)
    d_inputs.directions[rows.begin : rows.end] = rows.scatter(g, inputs).sum((1, 2))
    return g


def matmul(x: Tensor, y: Tensor, matmul_dtype: MatmulDtype) -> Tensor:
    """Return `x @ y`, computed in `matmul_dtype` and returned with at least 32 bits; None: in the inputs' dtype."""
    return (
        x @ y
        if matmul_dtype is None
        else (x.to(matmul_dtype) @ y.to(matmul_dtype)).to(torch.promote_types(y.dtype, torch.float32))
    )


def relu(x: Tensor, matmul_dtype: MatmulDtype) -> Tensor:
    """Apply ReLU, in the dtype of the next product."""
    return x.relu_() if matmul_dtype is None else x.relu_().to(matmul_dtype)


def _add_linear_grad(d_weight: Tensor, d_bias: Tensor, g: Tensor, x: Tensor, matmul_dtype: MatmulDtype) -> None:
    d_weight.add_(matmul(g.T, x, matmul_dtype))
    d_bias.add_(g.sum(0))


def _layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> LayerNormOutput:
    if weight is None:  # with ones and zeros given: without, torch's CPU kernel takes three times as long
        weight, bias = x.new_ones(x.shape[1]), x.new_zeros(x.shape[1])
    return torch.native_layer_norm(x, x.shape[1:], weight, bias, _EPS)


def _layer_norm_backward(
    g: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None = None, bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    mask = (True, weight is not None, weight is not None)
    return torch.ops.aten.native_layer_norm_backward(g, x, x.shape[1:], mean, rstd, weight, bias, mask)


def _split_grad(g: Tensor, points: Tensor, slots: Tensor, rows: TileRows) -> None:
    """Split the gradient of sums of points and slots (rays, B, F, D) into the gradients of both."""
    points[rows.begin : rows.end], slots[rows.begin : rows.end] = g.sum(2), g.sum(1)
