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

from .field_layers import (
    FieldActivations,
    FieldInputs,
    Layers,
    TileRows,
    color_backward,
    color_forward,
    density_backward,
    density_forward,
    matmul,
    relu,
)

# Points in slots of a tile: 1.5 MB per table of width 192, which a CPU's caches hold; a GPU needs more to be busy.
CPU_ROWS, GPU_ROWS = 1 << 11, 1 << 17


def evaluate_field(inputs: FieldInputs, layers: Layers, density_bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """What `look` says of the first blocks' result (Q, B, F, E), and colours before their bias and sigmoid (Q, B, F, 3).

    Products are in autocast's type, or in that of 16-bit weights; all else is fp32 at least.

    Args:
        density_bias: (1,), what is added to the first number that is looked at; where the sum is not above zero, colours are left zero, and no
            gradient goes back. For a density that is cut off at zero, and the only number that is looked at.
    """
    device = inputs.points.device.type
    matmul_dtype = layers.second.dtype if layers.second.dtype.itemsize < 4 else None
    if torch.is_autocast_enabled(device):
        matmul_dtype = torch.get_autocast_dtype(device)
    with torch.autocast(device, enabled=False):
        exact = torch.promote_types(inputs.points.dtype, torch.float32)
        tensors = [table.to(exact) for table in (*inputs, *layers)]
        track_grad = torch.is_grad_enabled() and any(table.requires_grad for table in tensors)
        return _FieldFunction.apply(
            matmul_dtype, track_grad, None if density_bias is None else density_bias.detach(), *tensors
        )  # type: ignore[misc]


_NUM_TENSORS = len(FieldInputs._fields) + len(Layers._fields)


def _unpack(tensors: Sequence[Tensor]) -> tuple[FieldInputs, Layers]:
    """Autograd hands on a row of tensors."""
    return FieldInputs(*tensors[: len(FieldInputs._fields)]), Layers(*tensors[len(FieldInputs._fields) : _NUM_TENSORS])


class _FieldFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, matmul_dtype: torch.dtype | None, track_grad: bool, density_bias: Tensor | None, *tensors: Tensor
    ) -> tuple[Tensor, Tensor]:
        inputs, m = _unpack(tensors)
        (count, bins, _), fields = inputs.points.shape, inputs.slots.shape[1]
        if isinstance(inputs.points, FakeTensor):
            density_bias = None  # where FLOPs are counted there are no numbers to tell apart; all rows are counted
        head_outputs = m.look.new_empty(count, bins, fields, len(m.look))
        colours = m.look.new_empty(count, bins, fields, 3)
        saved_activations: list[Tensor] = []
        for begin, end in _tiles(inputs):
            rows = TileRows(begin, end, None)
            activations = density_forward(rows, inputs, m, matmul_dtype)
            tile_outputs = matmul(activations.result, m.look.T, matmul_dtype)
            head_outputs[begin:end] = tile_outputs.view(-1, bins, fields, len(m.look))
            if density_bias is not None:
                # What is no number counts: it has to be seen.
                rows = TileRows(begin, end, _active_rows(~(tile_outputs[:, 0] + density_bias <= 0)))
                activations = FieldActivations(*(table[rows.indices] for table in activations))
            y, z = color_forward(activations.result, rows, inputs, m)[1:3]
            tint = relu(matmul(z[0], m.tint.T, matmul_dtype).add_(m.tint_bias), matmul_dtype)
            color_logits = matmul(y[0], m.colour.T, matmul_dtype) + matmul(tint, m.colour_tint.T, matmul_dtype)
            colours[begin:end] = rows.scatter(color_logits, inputs)
            if track_grad:
                saved_activations += (
                    [*activations, tint] if rows.indices is None else [*activations, tint, rows.indices]
                )
        ctx.low, ctx.cut = matmul_dtype, density_bias is not None
        ctx.save_for_backward(*tensors, *saved_activations)
        return head_outputs, colours

    @staticmethod
    def backward(ctx: Any, d_head_outputs: Tensor, d_colours: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        # Where backward is called inside an autocast block, `low` alone says which products are in 16 bits.
        with torch.autocast(d_head_outputs.device.type, enabled=False):
            return None, None, None, *_gradients(ctx.saved_tensors, d_head_outputs, d_colours, ctx.low, ctx.cut)


def _gradients(
    saved: Sequence[Tensor],
    d_head_outputs: Tensor,
    d_colours: Tensor,
    matmul_dtype: torch.dtype | None,
    has_indices: bool,
) -> tuple[Tensor, ...]:
    """Gradients of the tables, from `saved`: the tables and what forward kept of each tile."""
    (inputs, m), saved_activations = _unpack(saved), iter(saved[_NUM_TENSORS:])
    d_inputs, d = FieldInputs(*map(torch.empty_like, inputs)), Layers(*map(torch.zeros_like, m))
    for begin, end in _tiles(inputs):
        activations = FieldActivations(*(next(saved_activations) for _ in FieldActivations._fields))
        tint, indices = next(saved_activations), next(saved_activations) if has_indices else None
        rows = TileRows(begin, end, indices)
        d_tile_outputs, d_color_logits = (t[begin:end].flatten(0, 2) for t in (d_head_outputs, d_colours))
        if indices is not None:
            d_tile_outputs, d_color_logits = d_tile_outputs[indices], d_color_logits[indices]
        g = color_backward(d_color_logits, tint, activations.result, rows, inputs, d_inputs, m, d, matmul_dtype)
        d.look.add_(matmul(d_tile_outputs.T, activations.result, matmul_dtype))
        g.add_(matmul(d_tile_outputs, m.look, matmul_dtype))
        density_backward(g, activations, rows, inputs, d_inputs, m, d, matmul_dtype)
    return *d_inputs, *d


def _active_rows(active: Tensor) -> Tensor:
    """Which rows (m) of a tile are computed: those that are lit, and as many dark ones as make one of few sizes, which change nothing."""
    indices = active.nonzero()[:, 0]
    # A CPU's products of a size that was never seen first write themselves a program: 16 sizes for a tile, and each is met again.
    more = -len(indices) % -(-len(active) // 16)
    return torch.cat([indices, (~active).nonzero()[:more, 0]])


def _tiles(inputs: FieldInputs) -> list[tuple[int, int]]:
    """Whole rays: where each tile begins and ends."""
    count, bins, _ = inputs.points.shape
    rows = CPU_ROWS if inputs.points.device.type == "cpu" else GPU_ROWS
    size = max(1, rows // (bins * inputs.slots.shape[1]))
    return [(begin, min(begin + size, count)) for begin in range(0, count, size)]
