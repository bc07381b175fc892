"""A radiance field per slot, rendered along rays (Singh et al. 2024, Section 3.2 and D.4.3, after Mildenhall et al. 2020).

Choices that the paper leaves open: densities are softplus or ReLU, colours and shadows sigmoids; there is one point in
each of equal bins between `near` and `far`; embeddings of a point go through a linear layer to the width of slots.
"""

from __future__ import annotations

from typing import Literal, Self

import torch
from pydantic import model_validator
from torch import Tensor, nn

from sparo_train.core.config import Frozen, field
from sparo_train.models.precision import at_least_fp32, in_fp32

from .radiance_field import Density, Field, Points, ResidualBlocks, concat_fields
from .ray_decoder import RayDecoder, RenderedRays
from .rays import Bounds, Rays, positional_encoding


class NerfConfig(Frozen):
    """Fields of slots, of the static scene, and of the sky, summed along a ray."""

    kind: Literal["nerf"] = field("nerf", "Kind of the ray decoder: an entry of sparo.ray_decoders.")
    bins: int = field(64, "Points per ray.", gt=0, le=4096)
    near: float = field(0.5, "Distance at which rays begin, in world units.", ge=0)
    far: float = field(20.0, "Distance at which rays end.", gt=0)
    box: tuple[tuple[float, float, float], tuple[float, float, float]] | None = field(
        None,
        "Opposite corners of a box in world units, smaller coordinates first. Points are sampled where a ray is inside the box and between near and far.",
        examples=[[[-6, -6, 0], [6, 6, 2]]],
    )
    reach: float = field(
        10.0,
        "Largest absolute coordinate, in world units, up to which encodings of points are unique: half the period "
        "of the slowest sine in the encoding.",
        gt=0,
    )
    fourier_bands: int = field(
        8,
        "Number of sine-cosine pairs that encode each coordinate. Each pair has half the period of the previous pair.",
        gt=0,
        le=30,
    )
    width: int | None = field(None, "Width of the MLPs. Default: the slot width.", gt=0, examples=[192])
    density: Density = field(
        "softplus",
        "Activation of densities, which must not be negative. relu (uORF): if shadows=false, colours of points with zero density are not computed.",
    )
    static: bool = field(False, "Additional field, independent of the slots, for content that all scenes share.")
    sky: bool = field(False, "Add a background at infinity, whose colour depends on a ray's direction only.")
    shadows: bool = field(
        False, "Let the field of each slot cast shadows, which darken the colours of the other fields."
    )
    background: bool = field(False, "The first slot represents the background and has its own density MLP (uORF).")
    max_activations: int = field(
        1 << 27,
        "Maximum number of activations (floats) for all points rendered at once. If a batch of "
        "rays needs more, the rays are rendered in parts to limit memory.",
        gt=0,
    )

    @model_validator(mode="after")
    def _range(self) -> Self:
        if self.far <= self.near:
            raise ValueError(f"far={self.far}: must exceed near={self.near}")
        if self.box is not None and not all(low < high for low, high in zip(*self.box, strict=True)):
            raise ValueError(f"box={self.box}: the first corner must be lower than the second on all three axes")
        return self

    def build(self, width: int) -> RayDecoder:
        return Nerf(self, width)


class Nerf(RayDecoder):
    """Radiance field per slot, integrated along rays (Singh et al. 2024, Sec. 3.3; uORF)."""

    def __init__(self, config: NerfConfig, width: int):
        super().__init__()
        self.config, c = config, config
        wide, embed_width = c.width or width, 6 * c.fourier_bands
        self.max_activations = c.max_activations
        self.slot_proj = nn.Identity() if wide == width else nn.Linear(width, wide)
        self.objects = Field(wide, embed_width, c.shadows, c.density)
        self.ground = Field(wide, embed_width, c.shadows, c.density) if c.background else None
        self.static = Field(wide, embed_width, c.shadows, c.density) if c.static else None
        self.sky = (
            nn.Sequential(nn.Linear(embed_width, wide), ResidualBlocks(wide, 2), nn.Linear(wide, 3)) if c.sky else None
        )
        self.others = (*(("static",) if c.static else ()), *(("sky",) if c.sky else ()))

    def numbers(self, slots: int) -> int:
        wide = self.objects.position.out_features
        # Values per point in a field with its backward, as measured (4.9 to 6.4, most for the first slot's field).
        return self.config.bins * (slots + len(self.others)) * 7 * wide

    def precompute(self, slots: Tensor) -> Tensor:
        return self.slot_proj(slots)

    def near_far(self, rays: Rays) -> tuple[Tensor, Tensor]:
        """Return the range of distances (n, R) in which rays are sampled; both are one if a ray misses the box."""
        c = self.config
        return Bounds(c.near, c.far, c.box).near_far(rays.origins, rays.directions)

    def sample_points(self, rays: Rays) -> Points:
        """Return sample positions: one point in each of B + 1 bins, where the last only ends the one before it."""
        c = self.config
        number = torch.arange(c.bins + 1, device=rays.origins.device)
        # A ray has one random number; multiples of the golden ratio spread it evenly over the bins.
        offsets = rays.origins.new_full((1, 1), 0.5) if rays.offsets is None else rays.offsets
        turned = number * (0.0 if rays.offsets is None else 0.6180339887498949)
        jitter = (offsets[..., None] + turned) % 1
        near, far = self.near_far(rays)
        distances = near[..., None] + (number + jitter) / (c.bins + 1) * (far - near)[..., None]
        positions = rays.origins[:, :, None] + distances[..., :-1, None] * rays.directions[:, :, None]
        return Points(
            positional_encoding(positions, c.fourier_bands, c.reach),
            positional_encoding(rays.directions, c.fourier_bands, 1.0),
            distances,
        )

    def fields(self, slots: Tensor, points: Points) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return densities, emission and transmitted light of the slots' fields, followed by the static field.

        Densities are (n, R, B, F). Emission (n, R, B, 3) is density times colour, summed over fields. The share of
        light that shadows transmit is (n, R, B), or None without shadows.
        """
        field_outputs = [
            self.objects(points, slots)
            if self.ground is None
            else concat_fields(self.ground(points, slots[:, :1]), self.objects(points, slots[:, 1:]))
        ]
        field_outputs += [] if self.static is None else [self.static(points, None)]
        density = torch.cat([own.density for own in field_outputs], -1)
        emission = torch.cat([own.colours for own in field_outputs], -2)
        emission = (density[..., None] * emission).sum(-2)
        if not self.config.shadows:
            return density, emission, None
        shadow_factor = torch.cat([own.shadow for own in field_outputs if own.shadow is not None], -1)
        return density, emission, shadow_factor.prod(-1)

    def render(self, slots: Tensor, rays: Rays, slot_cache: Tensor) -> RenderedRays:
        with torch.autocast(slots.device.type, enabled=False):
            points = self.sample_points(rays)
        density, emission, shadow_factor = self.fields(slot_cache, points)
        with torch.autocast(slots.device.type, enabled=False):
            return self.composite(
                at_least_fp32(density),
                at_least_fp32(emission),
                None if shadow_factor is None else at_least_fp32(shadow_factor),
                points,
            )

    def composite(
        self, density: Tensor, emission: Tensor, shadow_factor: Tensor | None, points: Points
    ) -> RenderedRays:
        """Composite densities and emissions from front to back: sum of T_i alpha_i c_i, and the sky behind."""
        distances = points.distances
        total, steps = density.sum(-1), distances[..., 1:] - distances[..., :-1]
        optical_depths = total * steps
        # The transmittance of a point depends on earlier points only; the paper's index includes the point itself,
        # which is a mistake.
        transmittance = torch.exp(-(optical_depths.cumsum(-1) - optical_depths))
        weight = transmittance * -torch.expm1(-optical_depths)  # T_i alpha_i
        density_weight = weight / total.clamp(min=1e-10)
        color_weight = density_weight if shadow_factor is None else density_weight * shadow_factor
        colours = (color_weight[..., None] * emission).sum(-2)
        shares = (density_weight[..., None] * density).sum(-2)
        final_transmittance = torch.exp(-optical_depths.sum(-1))
        if self.sky is not None:
            colours = colours + final_transmittance[..., None] * in_fp32(self.sky, points.directions).sigmoid()
            shares = torch.cat([shares, final_transmittance[..., None]], -1)
        # Rays that meet nothing end at the far distance.
        depth = (weight * distances[..., :-1]).sum(-1) + final_transmittance * distances[..., -1]
        return RenderedRays(colours, shares, depth)

    def render_per_slot(self, slots: Tensor, rays: Rays) -> Tensor:
        slot_cache, slot_images = self.precompute(slots), []
        points = self.sample_points(rays)
        for number in range(slots.shape[1]):
            slot_field = self.ground if self.ground is not None and number == 0 else self.objects
            field_output = slot_field(points, slot_cache[:, number : number + 1])
            rendering = self.composite(
                field_output.density, field_output.density * field_output.colours[..., 0, :], None, points
            )
            # On white, as in other pictures of slots; the sky belongs to no slot.
            share = rendering.shares[..., :1]
            colours = rendering.colours if self.sky is None else self._without_sky(rendering, points)
            slot_images.append(colours + 1 - share)
        return torch.stack(slot_images, 2)

    def _without_sky(self, rendering: RenderedRays, points: Points) -> Tensor:
        assert self.sky is not None
        return rendering.colours - rendering.shares[..., -1:] * in_fp32(self.sky, points.directions).sigmoid()
