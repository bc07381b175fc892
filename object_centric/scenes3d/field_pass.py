"""A radiance field at points in one differentiable pass, tile by tile: four products of the full width for a point in a slot, where the
layers one by one take six, and five tables kept for backward, which makes the rest again.

What is left out: embedded points are added to slots, and the first norms and layer of that sum are linear but for two deviations, so that
layer is done once per point and once per slot; the last layer and the colour's are one. Where a density that is cut off at zero says that
there is nothing, there is no colour to be found, and nothing to go back through: three products of twelve are left.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from .field_layers import FieldActivations, Given, Layers, TileRows, relu, seen, seen_back, times, tinted, tinted_back

# Points in slots of a tile: 1.5 MB per table of width 192, which a CPU's caches hold; a GPU needs more to be busy.
CPU_ROWS, GPU_ROWS = 1 << 11, 1 << 17


def field_at(given: Given, layers: Layers, cut: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """What `look` says of the first blocks' result (Q, B, F, E), and colours before their bias and sigmoid (Q, B, F, 3).

    Products are in autocast's type, or in that of 16-bit weights; all else is fp32 at least.

    Args:
        cut: (1,), what is added to the first number that is looked at; where the sum is not above zero, colours are left zero, and no
            gradient goes back. For a density that is cut off at zero, and the only number that is looked at.
    """
    device = given.points.device.type
    low = layers.second.dtype if layers.second.dtype.itemsize < 4 else None
    if torch.is_autocast_enabled(device):
        low = torch.get_autocast_dtype(device)
    with torch.autocast(device, enabled=False):
        exact = torch.promote_types(given.points.dtype, torch.float32)
        tables = [table.to(exact) for table in (*given, *layers)]
        learns = torch.is_grad_enabled() and any(table.requires_grad for table in tables)
        return _Pass.apply(low, learns, None if cut is None else cut.detach(), *tables)  # type: ignore[misc]


_TABLES = len(Given._fields) + len(Layers._fields)


def _named(tables: Sequence[Tensor]) -> tuple[Given, Layers]:
    """Autograd hands on a row of tensors."""
    return Given(*tables[: len(Given._fields)]), Layers(*tables[len(Given._fields) : _TABLES])


class _Pass(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, low: torch.dtype | None, learns: bool, cut: Tensor | None, *tables: Tensor
    ) -> tuple[Tensor, Tensor]:
        given, m = _named(tables)
        (count, bins, _), fields = given.points.shape, given.slots.shape[1]
        if isinstance(given.points, FakeTensor):
            cut = None  # where FLOPs are counted there are no numbers to tell apart; all rows are counted
        looked = m.look.new_empty(count, bins, fields, len(m.look))
        colours = m.look.new_empty(count, bins, fields, 3)
        kept: list[Tensor] = []
        for begin, end in _tiles(given):
            rows = TileRows(begin, end, None)
            own = seen(rows, given, m, low)
            found = times(own.result, m.look.T, low)
            looked[begin:end] = found.view(-1, bins, fields, len(m.look))
            if cut is not None:
                # What is no number counts: it has to be seen.
                rows = TileRows(begin, end, _counting(~(found[:, 0] + cut <= 0)))
                own = FieldActivations(*(table[rows.at] for table in own))
            y, z = tinted(own.result, rows, given, m)[1:3]
            tint = relu(times(z[0], m.tint.T, low).add_(m.tint_bias), low)
            shades = times(y[0], m.colour.T, low) + times(tint, m.colour_tint.T, low)
            colours[begin:end] = rows.scattered(shades, given)
            if learns:
                kept += [*own, tint] if rows.at is None else [*own, tint, rows.at]
        ctx.low, ctx.cut = low, cut is not None
        ctx.save_for_backward(*tables, *kept)
        return looked, colours

    @staticmethod
    def backward(ctx: Any, d_looked: Tensor, d_colours: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        # Where backward is called inside an autocast block, `low` alone says which products are in 16 bits.
        with torch.autocast(d_looked.device.type, enabled=False):
            return None, None, None, *_gradients(ctx.saved_tensors, d_looked, d_colours, ctx.low, ctx.cut)


def _gradients(
    saved: Sequence[Tensor], d_looked: Tensor, d_colours: Tensor, low: torch.dtype | None, cut: bool
) -> tuple[Tensor, ...]:
    """Gradients of the tables, from `saved`: the tables and what forward kept of each tile."""
    (given, m), kept = _named(saved), iter(saved[_TABLES:])
    d_given, d = Given(*map(torch.empty_like, given)), Layers(*map(torch.zeros_like, m))
    for begin, end in _tiles(given):
        own = FieldActivations(*(next(kept) for _ in FieldActivations._fields))
        tint, at = next(kept), next(kept) if cut else None
        rows = TileRows(begin, end, at)
        looked, shades = (t[begin:end].flatten(0, 2) for t in (d_looked, d_colours))
        if at is not None:
            looked, shades = looked[at], shades[at]
        g = tinted_back(shades, tint, own.result, rows, given, d_given, m, d, low)
        d.look.add_(times(looked.T, own.result, low))
        g.add_(times(looked, m.look, low))
        seen_back(g, own, rows, given, d_given, m, d, low)
    return *d_given, *d


def _counting(lit: Tensor) -> Tensor:
    """Which rows (m) of a tile are computed: those that are lit, and as many dark ones as make one of few sizes, which change nothing."""
    at = lit.nonzero()[:, 0]
    # A CPU's products of a size that was never seen first write themselves a program: 16 sizes for a tile, and each is met again.
    more = -len(at) % -(-len(lit) // 16)
    return torch.cat([at, (~lit).nonzero()[:more, 0]])


def _tiles(given: Given) -> list[tuple[int, int]]:
    """Whole rays: where each tile begins and ends."""
    count, bins, _ = given.points.shape
    rows = CPU_ROWS if given.points.device.type == "cpu" else GPU_ROWS
    size = max(1, rows // (bins * given.slots.shape[1]))
    return [(begin, min(begin + size, count)) for begin in range(0, count, size)]
