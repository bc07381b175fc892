"""What is at a point: embedded points and slots to densities, colours and shadows (Singh et al. 2024, Tables 10 and 11)."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .field_layers import FieldInputs, Layers
from .field_pass import evaluate_field

Density = Literal["softplus", "relu"]
# Biases: a scene begins as thin mist without shadows, as thin by either density.
_FIRST_DENSITY, _FIRST_SHADOW = {"softplus": -3.0, "relu": -0.5}, 3.0


class Points(NamedTuple):
    """Of rays: embedded points (n, R, B, E), embedded directions (n, R, E), places along the ray (n, R, B + 1)."""

    positions: Tensor
    directions: Tensor
    distances: Tensor


class FieldOutput(NamedTuple):
    """Of points in F fields: density (n, R, B, F), colours (n, R, B, F, 3), and what its shadow leaves (n, R, B, F)."""

    density: Tensor
    colours: Tensor
    shadow: Tensor | None


def concat_fields(first: FieldOutput, second: FieldOutput) -> FieldOutput:
    """Fields of two kinds beside each other."""
    shadow = None if first.shadow is None or second.shadow is None else torch.cat([first.shadow, second.shadow], -1)
    return FieldOutput(
        torch.cat([first.density, second.density], -1), torch.cat([first.colours, second.colours], -2), shadow
    )


class Field(nn.Module):
    """Embedded points, and slots (n, F, D) or None for one field without, to what is there."""

    def __init__(self, wide: int, embed_width: int, shadows: bool, density_activation: Density = "softplus"):
        super().__init__()
        self.density_activation: Density = density_activation
        self.place, self.direction = nn.Linear(embed_width, wide), nn.Linear(embed_width, wide)
        self.seen, self.tinted = ResidualBlocks(wide, 2), ResidualBlocks(wide, 1)
        self.density, self.colour = nn.Linear(wide, 1), nn.Linear(wide, 3)
        self.shadow = nn.Linear(wide, 1) if shadows else None
        nn.init.constant_(self.density.bias, _FIRST_DENSITY[density_activation])
        if self.shadow is not None:
            nn.init.constant_(self.shadow.bias, _FIRST_SHADOW)

    def forward(self, points: Points, slots: Tensor | None) -> FieldOutput:
        n, count = points.directions.shape[:2]
        # A point and a direction are embedded once, whatever the number of slots.
        point_features, direction_features = (
            self.place(points.positions).flatten(0, 1),
            self.direction(points.directions).flatten(0, 1),
        )
        slot_inputs = point_features.new_zeros(n, 1, point_features.shape[-1]) if slots is None else slots
        first, layers = self.fold_layers()
        of_slots, of_slots_first = (
            t[:, None].expand(-1, count, -1, -1).flatten(0, 1) for t in (slot_inputs, slot_inputs @ first.T)
        )
        # A shadow falls from where there is nothing, too.
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
        """The first layer, for points and slots on their own, and what is behind it, each layer with the norm before it."""
        one, two, three = self._blocks()
        norm, tint_norm, look = self.seen.norm, self.tinted.norm, self.density.weight
        (weight, first_bias), (second, second_bias), (tint, tint_bias) = map(_fold_norm, (one, two, three))
        # A norm takes the mean away, so its layer may be blind to it: once for the block's norm, once for that of the sum.
        weight = weight - weight.mean(1, keepdim=True)
        first = weight * norm.weight
        if self.shadow is not None:
            look = torch.cat([look, self.shadow.weight])
        return first - first.mean(1, keepdim=True), Layers(
            norm=norm.weight,
            norm_bias=norm.bias,
            through=weight @ norm.bias,
            first_bias=first_bias,
            first_back=one[3].weight,
            first_back_bias=one[3].bias,
            second=second,
            second_bias=second_bias,
            second_back=two[3].weight,
            second_back_bias=two[3].bias,
            tint_norm=tint_norm.weight,
            tint_norm_bias=tint_norm.bias,
            tint=tint,
            tint_bias=tint_bias,
            look=look,
            colour=self.colour.weight,
            colour_tint=self.colour.weight @ three[3].weight,
        )

    def colour_bias(self) -> Tensor:
        return self.colour.bias + self.colour.weight @ self._blocks()[2][3].bias

    def _blocks(self) -> list[Any]:
        return [*self.seen.blocks, *self.tinted.blocks]


def _fold_norm(block: Any) -> tuple[Tensor, Tensor]:
    """A block's first layer with its norm's weights multiplied in: weight and bias."""
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
