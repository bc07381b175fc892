"""Scenes with several cameras: NeRF of slots and SlotMixer compared with their literal forms, rays, and memory of a rendered view.

    python benchmarks/scenes3d.py [--quick] [--json FILE] [--device cpu] [--rounds 5]

NeRF has six slots, fields of width 192 and 64 points per ray, at initialisation; forward and backward. With `density:
relu`, the colour is not computed where the density is 0 (three quarters of the points); with softplus, it is computed
everywhere. The literal form of NeRF is the paper's loop over slots, in which each slot embeds points and directions again.
SlotMixer has OSRT's size; its literal form is the computation of stelzner/osrt with the same weights. Colours of both forms
agree to 1e-5, which is checked. Memory is the peak above the start, in a separate process whose malloc returns every
block above 1 MB when it is freed: otherwise the resident size of the same step varies between 600 and 1,000 MB, because of
fragments. The last two rows render a view of 128 x 128 pixels with six slots, with 64 and 256 points per ray, and compare
its memory with 1.5 GB.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import numpy as np
import torch
from common import interleave, parser, peak_growth, report, row, seconds
from torch import Tensor
from torch.nn import functional as F

from object_centric.scenes3d.nerf import Nerf, NerfConfig
from object_centric.scenes3d.radiance_field import Density, Field, ResidualBlocks
from object_centric.scenes3d.rays import Rays, camera_rays, pixel_rays, positional_encoding, ray_fourier_features
from object_centric.scenes3d.slot_mixer import SlotMixer, SlotMixerConfig
from object_centric.scenes3d.view_encoder import ViewEncoderConfig
from sparo_train.engine.device_context import keep_freed_memory

D, K = 192, 6
Calls = tuple[Callable[[], Tensor], Callable[[], Tensor]]


def rays_of(count: int, device: str) -> Rays:
    torch.manual_seed(1)
    directions = F.normalize(torch.randn(1, count, 3, device=device), dim=-1)
    return Rays(3 * torch.randn(1, count, 3, device=device), directions, torch.rand(1, count, device=device))


def nerf(device: str, bins: int = 64, density: Density = "softplus") -> Nerf:
    torch.manual_seed(0)
    made = NerfConfig(bins=bins, density=density).build(D).to(device)
    assert isinstance(made, Nerf)
    return made


def literal_nerf(module: Nerf, slots: Tensor, rays: Rays) -> Tensor:
    """Render slot by slot, every point with its direction."""

    def blocks(m: ResidualBlocks, x: Tensor) -> Tensor:
        x = m.norm(x)
        for block in m.blocks:
            x = x + block(x)
        return x

    c, field = module.config, module.objects
    assert isinstance(field, Field)
    places = module.sample_points(rays).distances
    at = rays.origins[:, :, None] + places[..., :-1, None] * rays.directions[:, :, None]
    density, colour = [], []
    for slot in slots.unbind(1):
        h = blocks(
            field.density_mlp, field.position(positional_encoding(at, c.fourier_bands, c.reach)) + slot[:, None, None]
        )
        ahead = rays.directions[:, :, None].expand_as(at)
        turned = field.direction(positional_encoding(ahead, c.fourier_bands, 1.0))
        density.append((F.relu if field.density_activation == "relu" else F.softplus)(field.density(h)))
        colour.append(torch.sigmoid(field.colour(blocks(field.colour_mlp, h + turned))))
    total = torch.stack(density).sum(0)
    mixed = (torch.stack(density) * torch.stack(colour)).sum(0) / total.clamp(min=1e-30)
    alpha = 1 - torch.exp(-total[..., 0] * (places[..., 1:] - places[..., :-1]))
    through = torch.cat([torch.ones_like(alpha[..., :1]), (1 - alpha).cumprod(-1)[..., :-1]], -1)
    return ((through * alpha)[..., None] * mixed).sum(-2)


def mixer(device: str) -> SlotMixer:
    torch.manual_seed(0)
    made = SlotMixerConfig(preset="osrt").build(1536).to(device)
    assert isinstance(made, SlotMixer)
    return made


def literal_mixer(module: Any, slots: Tensor, rays: Rays) -> Tensor:
    """Project keys and values, compute the queries of every ray, and mix the slots of every ray before it is rendered."""
    query = module.query(ray_fourier_features(rays.origins, rays.directions, module.config.fourier_bands))
    x = query
    for block in module.blocks:
        m: Any = block
        q, k, v = (
            layer(t).unflatten(-1, (m.heads, -1)).transpose(1, 2)
            for layer, t in ((m.to_q, m.norm_attention(x)), (m.to_k, slots), (m.to_v, slots))
        )
        taken = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).softmax(-1) @ v
        x = x + m.out(taken.transpose(1, 2).flatten(2))
        x = x + m.mlp(m.norm_mlp(x))
    scores = torch.einsum("bid,bsd->bis", module.to_q(x), module.to_k(slots)) * slots.shape[-1] ** -0.5
    mixed = (scores.softmax(2)[..., None] * slots[:, None]).sum(2)
    mixes: Any = module.first
    return module.colour(module.draw(mixes(torch.cat([mixed, query], -1))))


def pair_of(which: str, count: int, device: str) -> Calls:
    """Return functions for the colours of `count` rays: ours, and the literal form; called with gradients."""
    module: Any = mixer(device) if which == "mixer" else nerf(device, density="relu" if which == "relu" else "softplus")
    slots = torch.randn(1, K, 1536 if which == "mixer" else D, device=device, requires_grad=True)
    rays, literal = rays_of(count, device), literal_mixer if which == "mixer" else literal_nerf
    return (lambda: module(slots, rays).colours), (lambda: literal(module, slots, rays))


def step(call: Callable[[], Tensor], device: str) -> Callable[[], float]:
    def run() -> None:
        call().square().mean().backward()
        if device == "cuda":
            torch.cuda.synchronize()

    return lambda: seconds(run)


def _grown(which: str, mine: bool, count: int, device: str) -> float:
    """Return the peak bytes of forward and backward; runs in a separate process."""
    call = pair_of(which, count, device)[0 if mine else 1]
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call().square().mean().backward()
        return torch.cuda.max_memory_allocated() - before
    pair_of(which, 8, device)[0 if mine else 1]().square().mean().backward()  # what libraries take once
    return peak_growth(lambda: call().square().mean().backward())


def peak(which: str, mine: bool, count: int, device: str) -> Callable[[], float]:
    def run() -> float:
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            return pool.submit(_grown, which, mine, count, device).result() / 1e6

    return run


def _rendered(bins: int, device: str) -> float:
    """Return the peak bytes of rendering a view of 128 x 128 pixels; runs in a separate process."""
    module, slots = nerf(device, bins), torch.randn(1, K, D, device=device)
    pose, lens = torch.eye(4, device=device), torch.tensor([128.0, 128.0, 64.0, 64.0], device=device)
    told = pixel_rays(pose, lens, 128).flatten(0, 1)[None]
    rays = Rays(told[..., :3].contiguous(), told[..., 3:].contiguous())

    def run() -> None:
        with torch.inference_mode():
            module(slots, rays)

    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        run()
        return torch.cuda.max_memory_allocated()
    return peak_growth(run)


def rendered(bins: int, device: str) -> float:
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(_rendered, bins, device).result() / 1e6


def rays_in_a_step(device: str) -> tuple[Callable[[], float], Callable[[], float]]:
    """Return two timers: sampling 64 pixels of each of five views, their rays and points; and the whole step with that."""
    poses, lens = torch.eye(4, device=device).expand(1, 5, 4, 4), torch.full((1, 5, 4), 32.0, device=device)
    at = torch.rand(1, 5, 64, device=device) * 64
    rng, fields, rays = np.random.default_rng(0), nerf(device), rays_of(320, device)
    encoder = ViewEncoderConfig(preset="slsr").build().to(device)
    call = pair_of("nerf", 320, device)[0]
    views = torch.rand(1, 5, 9, 64, 64, device=device)

    def made() -> None:
        for _ in range(5):
            rng.choice(64 * 64, 64, replace=False, shuffle=False)
        pixel_rays(poses, lens, 64)
        camera_rays(poses, lens, at, at)
        fields.sample_points(rays)

    def whole() -> None:
        made()
        (encoder(views).mean() + call().mean()).backward()

    return (lambda: seconds(made, device)), (lambda: seconds(whole, device))


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--device", default="cpu")
    flags.add_argument("--rounds", type=int, default=5)
    options = flags.parse_args()
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(1 << 20)  # of the processes that measure memory, which begin later
    rounds, device = 1 if options.quick else options.rounds, options.device
    keep_freed_memory()  # as training does
    rows = []
    for which, name, count, bar in (
        ("relu", "NeRF of six slots, density: relu", 192, 2.0),
        ("nerf", "NeRF of six slots, density: softplus", 192, None),
        ("mixer", "SlotMixer (OSRT's)", 2304, 1.2),
    ):
        if options.quick and bar is None:
            continue
        ours, theirs = pair_of(which, count, device)
        with torch.no_grad():
            assert torch.allclose(ours(), theirs(), atol=1e-5)
        both = interleave(step(ours, device), step(theirs, device), rounds)
        rates = [(count / a, count / b) for a, b in both]
        rows.append(row(f"{name} against literal", rates, bar, "rays/s", True))
        if options.quick:  # four processes that start
            continue
        memory = interleave(peak(which, True, count, device), peak(which, False, count, device), min(rounds, 3))
        rows.append(row(f"{name}: its peak memory", memory, None if which == "mixer" else 2.0, "MB", False))
    if not options.quick:
        made, whole = rays_in_a_step(device)
        rows.append(
            row(
                "rays, pixels and points against the step that draws them",
                interleave(made, whole, min(rounds, 2)),
                33.0,
                "s",
                False,
            )
        )
    for bins in (32,) if options.quick else (64, 256):  # the bound is for any number of them
        rows.append(
            row(f"a view of 128 x 128 by {bins} points a ray", [(rendered(bins, device), 1500.0)], 1.0, "MB", False)
        )
    report("posed scenes", rows, options.json)


if __name__ == "__main__":
    main()
