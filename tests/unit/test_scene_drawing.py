"""Rays rendered from slots: NeRF and a loop over slots, SlotMixer and OSRT's own, invariance to rotations, and scores of views."""

import pytest
import torch
from torch.nn import functional as F

from object_centric.scenes3d.field_layers import TileRows
from object_centric.scenes3d.nerf import NerfConfig
from object_centric.scenes3d.radiance_field import Points
from object_centric.scenes3d.ray_decoder import RayBroadcastConfig
from object_centric.scenes3d.rays import Rays, fourier_features
from object_centric.scenes3d.slot_mixer import SlotMixerConfig
from sparo_train.core.config import resolve

DECODERS = {
    "nerf": {"kind": "nerf", "bins": 5, "near": 1.0, "far": 9.0},
    "nerf_all": {"kind": "nerf", "bins": 5, "static": True, "sky": True, "shadows": True, "background": True},
    "nerf_box": {"kind": "nerf", "bins": 5, "sky": True, "box": [[-2, -3, 0], [2, 3, 1]]},
    "nerf_cut": {"kind": "nerf", "bins": 5, "static": True, "background": True, "density": "relu"},
    "nerf_cut_shadows": {"kind": "nerf", "bins": 5, "sky": True, "shadows": True, "density": "relu"},
    "psb": {"kind": "slot_mixer", "fourier_bands": 4},
    "osrt": {"kind": "slot_mixer", "preset": "osrt", "fourier_bands": 4},
    "broadcast": {"kind": "broadcast", "fourier_bands": 4, "hidden": [16, 16]},
    "at_distances": {"kind": "slot_mixer", "points": {"near": 1.0, "far": 9.0, "count": 3, "fourier_bands": 2}},
    "at_heights": {
        "kind": "broadcast",
        "hidden": [16, 16],
        "points": {"by": "height", "near": 0.0, "far": 1.0, "count": 2},
    },
}
CONFIGS = {"nerf": NerfConfig, "slot_mixer": SlotMixerConfig, "broadcast": RayBroadcastConfig}


def decoder(name, width=24):
    torch.manual_seed(0)
    tree = DECODERS[name]
    return resolve(CONFIGS[tree["kind"]], tree, "here").build(width)


def given(count=17, width=24, slots=3, dtype=torch.float32):
    torch.manual_seed(1)
    rays = Rays(3 * torch.randn(2, count, 3), F.normalize(torch.randn(2, count, 3), dim=-1), torch.rand(2, count))
    return torch.randn(2, slots, width, dtype=dtype), Rays(*(t.to(dtype) for t in rays))


@pytest.mark.parametrize("name", DECODERS)
def test_rotations_change_nothing_and_weights_sum_to_one(name):
    module, (slots, rays) = decoder(name), given()
    slots.requires_grad_()

    def run(most):
        module.zero_grad()
        slots.grad = None
        module.max_activations = most
        found = module(slots, rays)
        found.colours.square().sum().backward()
        return found, [slots.grad, *(p.grad for p in module.parameters() if p.grad is not None)]

    whole, gradients = run(1 << 40)
    parts, others = run(module.numbers(3) * 2 * 5)
    assert torch.allclose(whole.colours, parts.colours, atol=1e-6) and torch.allclose(
        whole.shares, parts.shares, atol=1e-6
    )
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(gradients, others, strict=True))
    assert whole.shares.shape == (2, 17, 3 + len(module.others))
    total = whole.shares.sum(-1)
    assert (total < 1 + 1e-5).all() and (
        name in ("nerf", "nerf_cut") or torch.allclose(total, torch.ones(2, 17), atol=1e-5)
    )
    alone = module.render_per_slot(slots, rays)
    assert alone.shape == (2, 17, 3, 3) and alone.isfinite().all()


def literal(module, slots, rays):
    """Compute the paper's formulas, slot by slot and point by point (Section 3.2, D.4.3)."""
    c, near_far = module.config, module.sample_points(rays)
    told, places = near_far.positions, near_far.distances

    def blocks(m, x):
        x = m.norm(x)
        for block in m.blocks:
            x = x + block(x)
        return x

    def field(m, slot):
        x = m.position(told) if slot is None else m.position(told) + slot[:, None, None]
        h = blocks(m.density_mlp, x)
        turned = m.direction(near_far.directions)[:, :, None].expand(-1, -1, c.bins, -1)
        colour = torch.sigmoid(m.colour(blocks(m.colour_mlp, h + turned)))
        shade = torch.sigmoid(m.shadow(h))[..., 0] if m.shadow is not None else None
        return {"relu": F.relu, "softplus": F.softplus}[c.density](m.density(h))[..., 0], colour, shade

    fields = [
        field(module.ground if module.ground is not None and k == 0 else module.objects, slots[:, k])
        for k in range(slots.shape[1])
    ]
    fields += [] if module.static is None else [field(module.static, None)]
    sigma = sum(f[0] for f in fields)
    colour = (
        sum(f[0][..., None] * f[1] for f in fields) / sigma.clamp(min=1e-30)[..., None]
    )  # empty space has no colour
    if c.shadows:
        colour = torch.stack([f[2] for f in fields]).prod(0)[..., None] * colour
    through, total = torch.ones_like(sigma[..., 0]), torch.zeros(*sigma.shape[:2], 3, dtype=sigma.dtype)
    for i in range(c.bins):
        alpha = 1 - torch.exp(-sigma[..., i] * (places[..., i + 1] - places[..., i]))
        total = total + (through * alpha)[..., None] * colour[..., i, :]
        through = through * (1 - alpha)
    if module.sky is not None:
        total = total + through[..., None] * torch.sigmoid(module.sky(near_far.directions))
    return total


@pytest.mark.parametrize("rows", [50, 2048])  # tiles of three rays and of one and a half scenes, or one tile
@pytest.mark.parametrize("name", ["nerf", "nerf_all", "nerf_box", "nerf_cut", "nerf_cut_shadows"])
def test_fields_equal_the_loop_over_slots(name, rows, monkeypatch):
    monkeypatch.setattr("object_centric.scenes3d.radiance_field.CPU_ROWS", rows)
    module, (slots, rays) = decoder(name).double(), given(dtype=torch.float64)
    slots.requires_grad_()
    found, wanted = module(slots, rays).colours, literal(module, slots, rays)
    assert torch.allclose(found.double(), wanted, atol=1e-6)  # the sum along a ray is fp32
    parameters = [slots, *module.parameters()]
    ours, theirs = (torch.autograd.grad(t.square().sum(), parameters, allow_unused=True) for t in (found, wanted))
    for a, b in zip(ours, theirs, strict=True):
        assert (a is None) == (b is None) and (a is None or torch.allclose(a, b, atol=1e-4, rtol=1e-3))


def test_empty_space_is_skipped_and_nan_is_kept():
    module, (slots, rays) = decoder("nerf_cut"), given()
    seen, old = [], TileRows.add_directions
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TileRows, "add_directions", lambda rows, x, g: (seen.append(len(x)), old(rows, x, g))[1])
        density = module.fields(module.precompute(slots), module.sample_points(rays))[0]
        lit, computed = (density > 0).sum(), sum(seen)
        assert lit <= computed < 0.7 * density.numel()
        with torch.no_grad():
            module.objects.density.bias.fill_(-100.0)
            module.ground.density.bias.fill_(-100.0)
            module.static.density.bias.fill_(-100.0)
        drawn = module(slots.requires_grad_(), rays)
        assert (drawn.colours == 0).all()
        drawn.colours.sum().backward()
        assert (slots.grad == 0).all()
    module.objects.density.bias.data.fill_(float("nan"))
    assert module(slots, rays).colours.isnan().all()


def test_fields_in_autocast_are_as_accurate_as_the_loop():
    module, (slots, rays) = decoder("nerf_all"), given()
    exact = literal(module, slots.requires_grad_(), rays)
    with torch.autocast("cpu", torch.bfloat16):
        found, loop = module(slots, rays).colours, literal(module, slots, rays)
    assert (found - exact).abs().max() < 2 * (loop - exact).abs().max() + 1e-3
    ours, theirs = (torch.autograd.grad(t.float().square().sum(), slots)[0] for t in (found, exact))
    assert F.cosine_similarity(ours.flatten(), theirs.flatten(), dim=0) > 0.999


def test_every_bin_has_one_point_and_depth_is_that_of_the_wall():
    module, (_, rays) = decoder("nerf"), given()
    points = module.sample_points(rays)
    edges = torch.linspace(1.0, 9.0, 7)
    assert (points.distances >= edges[:-1] - 1e-6).all() and (points.distances <= edges[1:] + 1e-6).all()
    within = (points.distances - edges[:-1]) / (8 / 6)
    assert within.std(-1).min() > 0.05  # each ray has another offset
    middles = module.sample_points(Rays(rays.origins, rays.directions)).distances
    assert torch.allclose(middles, (edges[:-1] + edges[1:]) / 2)
    density = torch.zeros(2, 17, 5, 1)
    density[:, :, 3] = 1e4
    drawn = module.composite(density, torch.ones(2, 17, 5, 3) * density, None, points)
    assert torch.allclose(drawn.depth, points.distances[..., 3]) and torch.allclose(drawn.colours, torch.ones(2, 17, 3))
    nothing = module.composite(0 * density, torch.zeros(2, 17, 5, 3), None, points)
    assert torch.allclose(nothing.depth, points.distances[..., -1]) and nothing.shares.abs().max() == 0
    assert isinstance(points, Points)


def osrt(weights, slots, origins, directions, heads):
    """Compute stelzner/osrt's SlotMixerDecoder by its formulas, with weights under its names."""

    def linear(name, x):
        return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    def normed(name, x):
        return F.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"])

    at = "allocation_transformer"
    query = torch.cat([fourier_features(origins, 15), fourier_features(directions, 15)], -1)
    query = linear(f"{at}.input_mlp.2", F.relu(linear(f"{at}.input_mlp.0", query)))
    x = query
    for layer in range(2):
        name = f"{at}.transformer.layers.{layer}"
        q = linear(f"{name}.0.fn.to_q", normed(f"{name}.0.norm", x))
        k, v = linear(f"{name}.0.fn.to_kv", slots).chunk(2, -1)
        q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (q, k, v))
        taken = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).softmax(-1) @ v
        x = x + linear(f"{name}.0.fn.to_out.0", taken.transpose(1, 2).flatten(2))
        hidden = F.gelu(linear(f"{name}.1.fn.net.0", normed(f"{name}.1.norm", x)))
        x = x + linear(f"{name}.1.fn.net.3", hidden)
    scores = linear("mixing_block.to_q", x) @ linear("mixing_block.to_k", slots).transpose(1, 2)
    share = (scores * slots.shape[-1] ** -0.5).softmax(2)
    drawn = torch.cat([(share[..., None] * slots[:, None]).sum(2), query], -1)
    for number in (0, 2, 4, 6):
        drawn = F.leaky_relu(linear(f"render_mlp.{number}", drawn))
    return linear("render_mlp.8", drawn).sigmoid(), share


def test_slot_mixer_records_from_before_activation_keep_their_relus():
    record = SlotMixerConfig(preset="osrt").model_dump(mode="json")
    assert record["activation"] == "leaky_relu" and record["bounded"]
    del record["activation"]
    record["bounded"] = False
    older = SlotMixerConfig.model_validate(record)
    assert older.activation == "relu" and not older.bounded
    with pytest.raises(ValueError, match="applies to layers=plain only"):
        SlotMixerConfig(preset="psb", activation="leaky_relu")


def test_slot_mixer_is_osrts_with_its_weights():
    """Count parameters at OSRT's size: slots of width 1,536, rays of width 180."""
    torch.manual_seed(0)
    module = SlotMixerConfig(preset="osrt").build(1536)
    for parameter in module.parameters():  # norms and biases that change the result
        if parameter.ndim == 1:
            parameter.data += 0.1 * torch.randn_like(parameter)
    own = dict(module.named_parameters())
    names = {
        "query.0": "allocation_transformer.input_mlp.0",
        "query.2": "allocation_transformer.input_mlp.2",
        "input_proj": "render_mlp.0",
        "colour": "render_mlp.8",
    }
    names |= {"to_q": "mixing_block.to_q", "to_k": "mixing_block.to_k"} | {
        f"render_mlp.{2 * i - 1}": f"render_mlp.{2 * i}" for i in (1, 2, 3)
    }
    for i in range(2):
        theirs = f"allocation_transformer.transformer.layers.{i}"
        names |= {
            f"blocks.{i}.norm_attention": f"{theirs}.0.norm",
            f"blocks.{i}.norm_mlp": f"{theirs}.1.norm",
            f"blocks.{i}.to_q": f"{theirs}.0.fn.to_q",
        }
        names |= {
            f"blocks.{i}.out": f"{theirs}.0.fn.to_out.0",
            f"blocks.{i}.mlp.0": f"{theirs}.1.fn.net.0",
            f"blocks.{i}.mlp.2": f"{theirs}.1.fn.net.3",
        }
    weights = {
        f"{theirs}.{part}": own[f"{name}.{part}"]
        for name, theirs in names.items()
        for part in ("weight", "bias")
        if f"{name}.{part}" in own
    }
    for i in range(2):
        weights[f"allocation_transformer.transformer.layers.{i}.0.fn.to_kv.weight"] = torch.cat(
            [own[f"blocks.{i}.to_{x}.weight"] for x in "kv"]
        )
    assert sum(w.numel() for w in weights.values()) == sum(p.numel() for p in module.parameters())
    slots, rays = torch.randn(1, 5, 1536), given(20)[1].chunk(0, 20)
    origins, directions = rays.origins[:1], rays.directions[:1]
    with torch.no_grad():
        found, (colours, shares) = (
            module(slots, Rays(origins, directions)),
            osrt(weights, slots, origins, directions, 12),
        )
    assert torch.allclose(found.colours, colours, atol=2e-5) and torch.allclose(found.shares, shares, atol=2e-5)
