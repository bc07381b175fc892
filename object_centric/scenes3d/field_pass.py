"""A radiance field at points in one differentiable pass, tile by tile: four products of the full width for a point in a slot, where the
layers one by one take six, and five tables kept for backward, which makes the rest again.

What is left out: embedded points are added to slots, and the first norms and layer of that sum are linear but for two deviations, so that
layer is done once per point and once per slot; the last layer and the colour's are one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Points in slots of a tile: 1.5 MB per table of width 192, which a CPU's caches hold; a GPU needs more to be busy.
CPU_ROWS, GPU_ROWS = 1 << 11, 1 << 17
_EPS = 1e-5


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

    def rows(self, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """Points in slots (rows, D) of these rays: the sum, and what the first layer makes of it."""
        return tuple(  # pyright: ignore[reportReturnType]
            (points[begin:end, :, None] + slots[begin:end, None]).flatten(0, 2)
            for points, slots in ((self.points, self.slots), (self.points_first, self.slots_first))
        )


def field_at(given: Given, layers: Layers) -> tuple[Tensor, Tensor]:
    """What `look` says of the first blocks' result (Q, B, F, E), and colours before their bias and sigmoid (Q, B, F, 3).

    Products are in autocast's type, or in that of 16-bit weights; all else is fp32 at least.
    """
    device = given.points.device.type
    low = layers.second.dtype if layers.second.dtype.itemsize < 4 else None
    if torch.is_autocast_enabled(device):
        low = torch.get_autocast_dtype(device)
    with torch.autocast(device, enabled=False):
        exact = torch.promote_types(given.points.dtype, torch.float32)
        tables = [table.to(exact) for table in (*given, *layers)]
        learns = torch.is_grad_enabled() and any(table.requires_grad for table in tables)
        return _Pass.apply(low, learns, *tables)  # type: ignore[misc]


_TABLES = len(Given._fields) + len(Layers._fields)


def _named(tables: Sequence[Tensor]) -> tuple[Given, Layers]:
    """Autograd hands on a row of tensors."""
    return Given(*tables[: len(Given._fields)]), Layers(*tables[len(Given._fields) : _TABLES])


class _Pass(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, low: torch.dtype | None, learns: bool, *tables: Tensor) -> tuple[Tensor, Tensor]:
        given, m = _named(tables)
        (count, bins, _), fields = given.points.shape, given.slots.shape[1]
        looked = m.look.new_empty(count, bins, fields, len(m.look))
        colours = m.look.new_empty(count, bins, fields, 3)
        kept: list[Tensor] = []
        for begin, end in _tiles(given):
            own = _seen(given, m, low, begin, end)
            y, z = _tinted(own.result, given, m, begin, end)[1:3]
            tint = _relu(_times(z[0], m.tint.T, low).add_(m.tint_bias), low)
            looked[begin:end] = _times(own.result, m.look.T, low).view(-1, bins, fields, len(m.look))
            shades = _times(y[0], m.colour.T, low) + _times(tint, m.colour_tint.T, low)
            colours[begin:end] = shades.view(-1, bins, fields, 3)
            kept += [*own, tint] if learns else []
        ctx.low = low
        ctx.save_for_backward(*tables, *kept)
        return looked, colours

    @staticmethod
    def backward(ctx: Any, d_looked: Tensor, d_colours: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        saved, low = ctx.saved_tensors, ctx.low  # once: a checkpoint makes them again for who asks
        (given, m), kept = _named(saved), saved[_TABLES:]
        d_given, d = Given(*map(torch.empty_like, given)), Layers(*map(torch.zeros_like, m))
        for number, (begin, end) in enumerate(_tiles(given)):
            *own, tint = kept[5 * number : 5 * number + 5]
            seen = FieldActivations(*own)
            rows = len(seen.result)
            looked, shades = d_looked[begin:end].reshape(rows, -1), d_colours[begin:end].reshape(rows, 3)
            g = _tinted_back(shades, tint, seen.result, given, m, d, low, begin, end)
            d_given.directions[begin:end] = g.view(end - begin, -1, g.shape[1]).sum(1)
            d.look.add_(_times(looked.T, seen.result, low))
            g.add_(_times(looked, m.look, low))
            _seen_back(g, seen, given, d_given, m, d, low, begin, end)
        return None, None, *d_given, *d


class FieldActivations(NamedTuple):
    """Of a tile's rows, what backward needs of the first two blocks: what each has within it and gives."""

    first: Tensor
    middle: Tensor
    second: Tensor
    result: Tensor


def _seen(given: Given, m: Layers, low: torch.dtype | None, begin: int, end: int) -> FieldActivations:
    """A norm, and two residual blocks: LayerNorm, linear, ReLU, linear."""
    x, through = given.rows(begin, end)
    x, _, rstd = _normed(x, m.norm, m.norm_bias)
    # Of x's own norm the deviation is all that is left to do: its layer was centred, and went through what `x` is a sum of.
    raw = torch.addcmul(m.through, through, rstd)
    first = _relu(torch.addcmul(m.first_bias, raw, _normed(x)[2]), low)
    middle = x.add_(m.first_back_bias).add_(_times(first, m.first_back.T, low))
    second = _relu(_times(_normed(middle)[0], m.second.T, low).add_(m.second_bias), low)
    result = _times(second, m.second_back.T, low).add_(m.second_back_bias).add_(middle)
    return FieldActivations(first, middle, second, result)


def _seen_back(
    g: Tensor,
    seen: FieldActivations,
    given: Given,
    d_given: Given,
    m: Layers,
    d: Layers,
    low: torch.dtype | None,
    begin: int,
    end: int,
) -> None:
    """`g` (rows, D) is the gradient of `seen.result`, and is written over."""
    _add_layer(d.second_back, d.second_back_bias, g, seen.second, low)
    inner = _times(g, m.second_back, low).mul_(seen.second > 0)
    z, mean, rstd = _normed(seen.middle)
    _add_layer(d.second, d.second_bias, inner, z, low)
    g.add_(_normed_back(_times(inner, m.second, low), seen.middle, mean, rstd)[0])

    _add_layer(d.first_back, d.first_back_bias, g, seen.first, low)
    inner = _times(g, m.first_back, low).mul_(seen.first > 0)
    d.first_bias.add_(inner.sum(0))
    u, through = given.rows(begin, end)
    x, mean, rstd = _normed(u, m.norm, m.norm_bias)
    _, x_mean, x_rstd = _normed(x)
    inner.mul_(x_rstd)
    d.through.add_(inner.sum(0))
    d_rstd = (inner * through).sum(-1, keepdim=True)
    d_x_rstd = (d_rstd * rstd + (inner @ m.through)[:, None]) / x_rstd
    _split(inner.mul_(rstd), d_given.points_first, d_given.slots_first, begin, end)
    # Of rstd the derivative is its cube over minus the number of its terms, times what is centred.
    g.addcmul_(x.sub_(x_mean), d_x_rstd * x_rstd**3, value=-1 / x.shape[1])
    g, d_norm, d_bias = _normed_back(g, u, mean, rstd, m.norm, m.norm_bias)
    d.norm.add_(d_norm)
    d.norm_bias.add_(d_bias)
    g.addcmul_(u.sub_(mean), d_rstd * rstd**3, value=-1 / x.shape[1])
    _split(g, d_given.points, d_given.slots, begin, end)


Normed = tuple[Tensor, Tensor, Tensor]  # of a LayerNorm: what it gives, and the rows' means and reciprocal deviations


def _tinted(result: Tensor, given: Given, m: Layers, begin: int, end: int) -> tuple[Tensor, Normed, Normed]:
    """What was seen with the ray's direction, its norm, and the norm of that without weights."""
    # All of a ray's points and slots have one direction.
    turned = (result.view(end - begin, -1, result.shape[1]) + given.directions[begin:end, None]).flatten(0, 1)
    y = _normed(turned, m.tint_norm, m.tint_norm_bias)
    return turned, y, _normed(y[0])


def _tinted_back(
    shades: Tensor,
    tint: Tensor,
    result: Tensor,
    given: Given,
    m: Layers,
    d: Layers,
    low: torch.dtype | None,
    begin: int,
    end: int,
) -> Tensor:
    """From a gradient of colours (rows, 3) to that of what was seen with its direction (rows, D)."""
    turned, (y, mean, rstd), (z, z_mean, z_rstd) = _tinted(result, given, m, begin, end)
    d.colour_tint.add_(_times(shades.T, tint, low))
    d.colour.add_(_times(shades.T, y, low))
    inner = _times(shades, m.colour_tint, low).mul_(tint > 0)
    _add_layer(d.tint, d.tint_bias, inner, z, low)
    g = _normed_back(_times(inner, m.tint, low), y, z_mean, z_rstd)[0].add_(_times(shades, m.colour, low))
    g, d_norm, d_bias = _normed_back(g, turned, mean, rstd, m.tint_norm, m.tint_norm_bias)
    d.tint_norm.add_(d_norm)
    d.tint_norm_bias.add_(d_bias)
    return g


def _tiles(given: Given) -> list[tuple[int, int]]:
    """Whole rays: where each tile begins and ends."""
    count, bins, _ = given.points.shape
    rows = CPU_ROWS if given.points.device.type == "cpu" else GPU_ROWS
    size = max(1, rows // (bins * given.slots.shape[1]))
    return [(begin, min(begin + size, count)) for begin in range(0, count, size)]


def _times(x: Tensor, y: Tensor, low: torch.dtype | None) -> Tensor:
    return x @ y if low is None else (x.to(low) @ y.to(low)).to(torch.promote_types(y.dtype, torch.float32))


def _relu(x: Tensor, low: torch.dtype | None) -> Tensor:
    """Kept as the next product takes it."""
    return x.relu_() if low is None else x.relu_().to(low)


def _add_layer(d_weight: Tensor, d_bias: Tensor, g: Tensor, x: Tensor, low: torch.dtype | None) -> None:
    d_weight.add_(_times(g.T, x, low))
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


def _split(g: Tensor, points: Tensor, slots: Tensor, begin: int, end: int) -> None:
    """The gradient of a sum of points and slots to either."""
    table = g.view(end - begin, points.shape[1], slots.shape[1], -1)
    points[begin:end], slots[begin:end] = table.sum(2), table.sum(1)
