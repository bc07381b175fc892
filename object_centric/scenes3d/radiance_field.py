"""Radiance field at points: embedded points and slots to densities, colours and shadows (Singh et al. 2024, Tables 10 and 11)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.nn import functional as F

from sparo_train.core.first_order import first_order

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

# Points in slots per tile: 1.5 MB per table of width 192, which fits a CPU's caches; a GPU needs more to be busy.
CPU_ROWS, GPU_ROWS = 1 << 11, 1 << 17


# A radiance field at points in one differentiable pass, tile by tile. It takes four products of full width per point
# and slot, where separate layers take six, and stores five tables for backward, which recomputes the rest. Embedded
# points are added to slots, and the first norms and the first layer of that sum are linear except for two deviations,
# so that layer is computed once per point and once per slot. The last layer and the colour layer are merged. If the
# density is cut off at zero, the colour needs neither forward nor backward: three products of twelve remain.
def evaluate_field(inputs: FieldInputs, layers: Layers, density_bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the outputs of the density head for the first blocks' result (Q, B, F, E), and colours before their bias and sigmoid (Q, B, F, 3).

    Products use autocast's dtype, or that of 16-bit weights; everything else is fp32 at least.

    Args:
        inputs, layers: inputs and weights.
        density_bias: (1,), added to the first output of the head. If the sum is not positive, colours stay zero and get
            no gradient. For a density that is cut off at zero and is the only output of the head.
    """
    device = inputs.points.device.type
    matmul_dtype = layers.block2_fc1.dtype if layers.block2_fc1.dtype.itemsize < 4 else None
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
    """Rebuild the structures, because autograd functions take a flat list of tensors."""
    return FieldInputs(*tensors[: len(FieldInputs._fields)]), Layers(*tensors[len(FieldInputs._fields) : _NUM_TENSORS])


class _FieldFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, matmul_dtype: torch.dtype | None, track_grad: bool, density_bias: Tensor | None, *tensors: Tensor
    ) -> tuple[Tensor, Tensor]:
        inputs, m = _unpack(tensors)
        (count, bins, _), fields = inputs.points.shape, inputs.slots.shape[1]
        if isinstance(inputs.points, FakeTensor):
            density_bias = None  # FLOP counting has no values to select rows by, so all rows count
        head_outputs = m.density_head.new_empty(count, bins, fields, len(m.density_head))
        colours = m.density_head.new_empty(count, bins, fields, 3)
        saved_activations: list[Tensor] = []
        for begin, end in _tiles(inputs):
            rows = TileRows(begin, end, None)
            activations = density_forward(rows, inputs, m, matmul_dtype)
            tile_outputs = matmul(activations.result, m.density_head.T, matmul_dtype)
            head_outputs[begin:end] = tile_outputs.view(-1, bins, fields, len(m.density_head))
            if density_bias is not None:
                # NaN counts as active, so that it becomes visible.
                rows = TileRows(begin, end, _active_rows(~(tile_outputs[:, 0] + density_bias <= 0)))
                activations = FieldActivations(*(table[rows.indices] for table in activations))
            y, z = color_forward(activations.result, rows, inputs, m)[1:3]
            tint = relu(matmul(z[0], m.block3_fc1.T, matmul_dtype).add_(m.block3_fc1_bias), matmul_dtype)
            color_logits = matmul(y[0], m.colour.T, matmul_dtype) + matmul(tint, m.colour_block3.T, matmul_dtype)
            colours[begin:end] = rows.scatter(color_logits, inputs)
            if track_grad:
                saved_activations += (
                    [*activations, tint] if rows.indices is None else [*activations, tint, rows.indices]
                )
        ctx.low, ctx.cut = matmul_dtype, density_bias is not None
        ctx.save_for_backward(*tensors, *saved_activations)
        return head_outputs, colours

    @staticmethod
    @first_order
    def backward(ctx: Any, d_head_outputs: Tensor, d_colours: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        # If backward is called inside an autocast block, `low` alone determines which products are in 16 bits.
        with torch.autocast(d_head_outputs.device.type, enabled=False):
            return None, None, None, *_gradients(ctx.saved_tensors, d_head_outputs, d_colours, ctx.low, ctx.cut)


def _gradients(
    saved: Sequence[Tensor],
    d_head_outputs: Tensor,
    d_colours: Tensor,
    matmul_dtype: torch.dtype | None,
    has_indices: bool,
) -> tuple[Tensor, ...]:
    """Return the gradients of the tables, from `saved`: the tables and what forward kept of each tile."""
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
        d.density_head.add_(matmul(d_tile_outputs.T, activations.result, matmul_dtype))
        g.add_(matmul(d_tile_outputs, m.density_head, matmul_dtype))
        density_backward(g, activations, rows, inputs, d_inputs, m, d, matmul_dtype)
    return *d_inputs, *d


def _active_rows(active: Tensor) -> Tensor:
    """Return the rows (m) of a tile to compute: active ones, and inactive ones to pad to one of few sizes, which change nothing."""
    indices = active.nonzero()[:, 0]
    # A CPU compiles a kernel for each new product size, so there are 16 sizes per tile, which recur.
    more = -len(indices) % -(-len(active) // 16)
    return torch.cat([indices, (~active).nonzero()[:more, 0]])


def _tiles(inputs: FieldInputs) -> list[tuple[int, int]]:
    """Yield where each tile of whole rays begins and ends."""
    count, bins, _ = inputs.points.shape
    rows = CPU_ROWS if inputs.points.device.type == "cpu" else GPU_ROWS
    size = max(1, rows // (bins * inputs.slots.shape[1]))
    return [(begin, min(begin + size, count)) for begin in range(0, count, size)]


Density = Literal["softplus", "relu"]
# Initial biases: a scene begins as thin mist without shadows, equally thin for either density.
_FIRST_DENSITY, _FIRST_SHADOW = {"softplus": -3.0, "relu": -0.5}, 3.0


class Points(NamedTuple):
    """Points of rays: embedded points (n, R, B, E), embedded directions (n, R, E), distances along the ray (n, R, B + 1)."""

    positions: Tensor
    directions: Tensor
    distances: Tensor


class FieldOutput(NamedTuple):
    """For points in F fields: density (n, R, B, F), colours (n, R, B, F, 3), and the share that its shadow transmits (n, R, B, F)."""

    density: Tensor
    colours: Tensor
    shadow: Tensor | None


def concat_fields(first: FieldOutput, second: FieldOutput) -> FieldOutput:
    """Concatenate fields of two kinds."""
    shadow = None if first.shadow is None or second.shadow is None else torch.cat([first.shadow, second.shadow], -1)
    return FieldOutput(
        torch.cat([first.density, second.density], -1), torch.cat([first.colours, second.colours], -2), shadow
    )


class Field(nn.Module):
    """Field of embedded points, and slots (n, F, D) or None for a single field without slots."""

    def __init__(self, wide: int, embed_width: int, shadows: bool, density_activation: Density = "softplus"):
        super().__init__()
        self.density_activation: Density = density_activation
        self.position, self.direction = nn.Linear(embed_width, wide), nn.Linear(embed_width, wide)
        self.density_mlp, self.colour_mlp = ResidualBlocks(wide, 2), ResidualBlocks(wide, 1)
        self.density, self.colour = nn.Linear(wide, 1), nn.Linear(wide, 3)
        self.shadow = nn.Linear(wide, 1) if shadows else None
        nn.init.constant_(self.density.bias, _FIRST_DENSITY[density_activation])
        if self.shadow is not None:
            nn.init.constant_(self.shadow.bias, _FIRST_SHADOW)

    def forward(self, points: Points, slots: Tensor | None) -> FieldOutput:
        n, count = points.directions.shape[:2]
        # Points and directions are embedded once, whatever the number of slots.
        point_features, direction_features = (
            self.position(points.positions).flatten(0, 1),
            self.direction(points.directions).flatten(0, 1),
        )
        slot_inputs = point_features.new_zeros(n, 1, point_features.shape[-1]) if slots is None else slots
        first, layers = self.fold_layers()
        of_slots, of_slots_first = (
            t[:, None].expand(-1, count, -1, -1).flatten(0, 1) for t in (slot_inputs, slot_inputs @ first.T)
        )
        # Shadows may also fall from points without density.
        density_bias = self.density.bias if self.density_activation == "relu" and self.shadow is None else None
        outputs = evaluate_field(
            FieldInputs(point_features, point_features @ first.T, of_slots, of_slots_first, direction_features),
            layers,
            density_bias,
        )
        head_outputs, colours = (table.unflatten(0, (n, count)) for table in outputs)
        density = (F.relu if self.density_activation == "relu" else F.softplus)(
            head_outputs[..., 0] + self.density.bias
        )
        shadow = None if self.shadow is None else (head_outputs[..., 1] + self.shadow.bias).sigmoid()
        return FieldOutput(density, (colours + self.colour_bias()).sigmoid(), shadow)

    def fold_layers(self) -> tuple[Tensor, Layers]:
        """Return the first layer, for points and slots separately, and the remaining layers, each merged with the norm before it."""
        one, two, three = self._blocks()
        norm, block3_norm, density_head = self.density_mlp.norm, self.colour_mlp.norm, self.density.weight
        (weight, block1_fc1_bias), (second, block2_fc1_bias), (tint, block3_fc1_bias) = map(
            _fold_norm, (one, two, three)
        )
        # A norm removes the mean, so its layer can be centred: once for the block's norm, once for that of the sum.
        weight = weight - weight.mean(1, keepdim=True)
        first = weight * norm.weight
        if self.shadow is not None:
            density_head = torch.cat([density_head, self.shadow.weight])
        return first - first.mean(1, keepdim=True), Layers(
            block1_norm=norm.weight,
            block1_norm_bias=norm.bias,
            norm_offset=weight @ norm.bias,
            block1_fc1_bias=block1_fc1_bias,
            block1_fc2=one[3].weight,
            block1_fc2_bias=one[3].bias,
            block2_fc1=second,
            block2_fc1_bias=block2_fc1_bias,
            block2_fc2=two[3].weight,
            block2_fc2_bias=two[3].bias,
            block3_norm=block3_norm.weight,
            block3_norm_bias=block3_norm.bias,
            block3_fc1=tint,
            block3_fc1_bias=block3_fc1_bias,
            density_head=density_head,
            colour=self.colour.weight,
            colour_block3=self.colour.weight @ three[3].weight,
        )

    def colour_bias(self) -> Tensor:
        return self.colour.bias + self.colour.weight @ self._blocks()[2][3].bias

    def _blocks(self) -> list[Any]:
        return [*self.density_mlp.blocks, *self.colour_mlp.blocks]


def _fold_norm(block: Any) -> tuple[Tensor, Tensor]:
    """Return weight and bias of a block's first layer, with its norm's weights multiplied in."""
    norm, linear = block[0], block[1]
    return linear.weight * norm.weight, linear.bias + linear.weight @ norm.bias


class ResidualBlocks(nn.Module):
    """A LayerNorm, and residual blocks of LayerNorm, linear, ReLU, linear (Tables 10 to 12)."""

    def __init__(self, wide: int, count: int):
        super().__init__()
        self.norm = nn.LayerNorm(wide)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(wide), nn.Linear(wide, wide), nn.ReLU(), nn.Linear(wide, wide))
            for _ in range(count)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        for block in self.blocks:
            x = x + block(x)
        return x
