"""Settings of slot attention: each preset compared with its formula; folded compared with plain; frames and their symmetries."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from object_centric.grouping.invariant import FrameConfig, InvariantSlotAttention
from object_centric.grouping.slot_attention import Gru, SlotAttention
from object_centric.grouping.slot_config import PRESETS, SlotAttentionConfig

B, N, IN, K, D = 2, 9, 6, 3, 8


def built(seed=0, **knobs):
    torch.manual_seed(seed)
    module = SlotAttention(SlotAttentionConfig.model_validate({"slots": K, "width": D, **knobs}), IN).double()
    for parameter in module.parameters():  # biases and norms that change the result
        parameter.data += 0.1 * torch.randn_like(parameter)
    drawn = torch.Generator().manual_seed(seed + 1)
    features, noise = (torch.randn(B, n, d, dtype=torch.float64, generator=drawn) for n, d in ((N, IN), (K, D)))
    return module, features, noise


def norm(x, layer):
    """Compute LayerNorm by its formula."""
    apart = x - x.mean(-1, keepdim=True)
    bias = 0 if layer.bias is None else layer.bias
    return apart / (apart.square().mean(-1, keepdim=True) + layer.eps).sqrt() * layer.weight + bias


def gated(x, h, gru):
    """Compute the GRU of Keras, flax and torch, one matrix at a time."""
    wr, wz, wn = gru.weight_ih.chunk(3)
    ur, uz, un = gru.weight_hh.chunk(3)
    br, bz, bn = gru.bias_ih.chunk(3)
    cr, cz, cn = (0, 0, gru.bias_hh) if gru.kind == "flax" else gru.bias_hh.chunk(3)
    r, z = torch.sigmoid(x @ wr.T + br + h @ ur.T + cr), torch.sigmoid(x @ wz.T + bz + h @ uz.T + cz)
    return (1 - z) * torch.tanh(x @ wn.T + bn + r * (h @ un.T + cn)) + z * h


def plain(module, features, noise):
    """Compute one slot, head and sample at a time, as the authors' texts and code describe it."""
    c, found, taken = module.config, [], []
    begun = (
        module.initial_slots.expand(B, -1, -1)
        if c.slot_init == "learned"
        else module.mu + module.log_sigma.exp() * noise
    )
    for x, s in zip(norm(features, module.norm_input), begun, strict=True):
        attention = None
        for i in range(c.iterations):
            r = module.rounds[i if c.layers == "own" else 0]
            if c.gradient == "last":
                s = s.detach()
                if i == c.iterations - 1 and c.straight_through:
                    first = begun[len(found)]
                    s = s + first - first.detach()
            normed, d = norm(s, r.norm_slots), c.qkv // c.heads
            q, k, v = normed @ r.to_q.weight.T, x @ r.to_k.weight.T, x @ r.to_v.weight.T
            heads = [slice(h * d, (h + 1) * d) for h in range(c.heads)]
            if c.qk_norm:
                q, k = (
                    torch.cat([norm(y[:, h], layer) for h in heads], 1) for y, layer in ((q, r.norm_q), (k, r.norm_k))
                )
            logits = torch.stack([q[:, h] @ k[:, h].T / d**0.5 for h in heads])  # (H, K, N)
            if c.softmax_over == "slots":
                a = logits.exp() / logits.exp().sum(1, keepdim=True)
            elif c.softmax_over == "slots_heads":
                a = logits.exp() / logits.exp().sum((0, 1), keepdim=True)
            else:
                a = logits.exp() / logits.exp().sum(2, keepdim=True)
            attention = a.sum(0) if c.softmax_over == "slots_heads" else a.mean(0)
            if c.renorm == "entry":
                a = (a + c.renorm_eps) / (a + c.renorm_eps).sum(-1, keepdim=True)
            elif c.renorm == "sum":
                a = a / (a.sum(-1, keepdim=True) + c.renorm_eps)
            u = torch.cat([a[i] @ v[:, h] for i, h in enumerate(heads)], dim=-1)
            if c.renorm == "layer":
                u = norm(u, r.norm_update)
            if c.out_proj:
                u = u @ r.out.weight.T
            state = normed if c.gru_on_normed else s
            s = state + u if r.gru is None else gated(u, state, r.gru)
            if c.mlp_width and (c.mlp_last or i < c.iterations - 1):
                first, _, second = r.mlp
                hidden = norm(s, r.norm_mlp) @ first.weight.T + first.bias
                through = (
                    hidden * (1 + torch.erf(hidden / 2**0.5)) / 2 if c.activation == "gelu" else hidden.clamp(min=0)
                )
                s = s + through @ second.weight.T + second.bias
        found.append(s)
        taken.append(attention)
    return torch.stack(found), torch.stack(taken)


@pytest.mark.parametrize(
    "preset", [name for name, row in PRESETS.items() if not {"transport", "binder", "pooled"} & row.keys()]
)
def test_every_preset_equals_its_formula(preset):
    heads = 2 if "heads" in str(PRESETS[preset].get("softmax_over")) else 1
    for knobs in ({"heads": heads}, {"heads": 2, "out_proj": True, "qkv_width": 12}):
        module, features, noise = built(preset=preset, **knobs)
        features.requires_grad_()
        ours, theirs = module(features, noise), plain(module, features, noise)
        for mine, his in zip(ours, theirs, strict=True):
            assert torch.allclose(mine, his, atol=1e-12), preset
        weight = torch.randn_like(ours.slots)
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        inputs = [features, *trained.values()]
        found, expected = (
            torch.autograd.grad((s * weight).sum(), inputs, allow_unused=True) for s in (ours.slots, theirs[0])
        )
        for mine, his, name in zip(found, expected, ["features", *trained], strict=True):
            mine, his = (torch.zeros(()) if g is None else g for g in (mine, his))
            assert torch.allclose(mine.expand_as(his) if his.dim() else mine, his, atol=1e-9), (preset, name)


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(
        sorted(name for name, row in PRESETS.items() if not {"transport", "binder", "pooled", "qk_norm"} & row.keys())
    ),
    st.sampled_from(["entry", "sum", "layer", "none"]),
    st.sampled_from([0.0, 1e-8, 0.3]),
    st.integers(1, 3),
)
def test_folded_equals_plain(preset, renorm, eps, iterations):
    row = {"preset": preset, "heads": 1, "renorm": renorm, "renorm_eps": eps, "iterations": iterations}
    if PRESETS[preset].get("softmax_over") == "keys":
        row |= {"renorm": "none"}
    folded, features, noise = built(**row, kv="folded")
    plainly, _, _ = built(**row, kv="plain")
    plainly.load_state_dict(folded.state_dict())
    for a, b in zip(folded(features, noise), plainly(features, noise), strict=True):
        assert torch.allclose(a, b, atol=1e-9)


@pytest.mark.parametrize("kv", ["folded", "plain"])
def test_a_background_slot_is_that_of_uorf(kv):
    """Compute Yu et al. 2021, Algorithm 1: the first slot has a separate Gaussian, queries, GRU and MLP, and competes with the others."""
    module, features, _ = built(slots=4, ground=True, kv=kv, mlp_width=24, iterations=3)
    r, noise = module.rounds[0], torch.randn(B, 4, D, dtype=torch.float64)
    x = norm(features, module.norm_input)
    keys, values = x @ r.to_k.weight.T, x @ r.to_v.weight.T
    slots = [module.mu[min(i, 1)] + module.log_sigma[min(i, 1)].exp() * noise[:, i] for i in range(4)]
    for _ in range(3):
        own = [("ground" if i == 0 else "others", slot) for i, slot in enumerate(slots)]
        asked = [norm(s, getattr(r.norm_slots, n)) @ getattr(r.to_q, n).weight.T for n, s in own]
        logits = torch.stack([torch.einsum("bd,bnd->bn", q, keys) * D**-0.5 for q in asked], 1)
        shares = logits.softmax(1) + 1e-8
        taken = (shares / shares.sum(-1, keepdim=True)) @ values
        slots = [gated(taken[:, i], s, getattr(r.gru, n)) for i, (n, s) in enumerate(own)]
        slots = [s + getattr(r.mlp, n)(norm(s, getattr(r.norm_mlp, n))) for (n, _), s in zip(own, slots, strict=True)]
    found = module(features, noise)
    torch.testing.assert_close(found.slots, torch.stack(slots, 1), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(found.attention, shares - 1e-8, rtol=1e-6, atol=1e-6)
    # Everything except keys and values exists twice. The order of the other slots does not matter; that of the background slot does.
    plain_one, *_ = built(slots=4, kv=kv, mlp_width=24)
    shared = sum(p.numel() for p in (r.to_k.weight, r.to_v.weight, *module.norm_input.parameters()))
    count = [sum(p.numel() for p in m.parameters()) for m in (module, plain_one)]
    assert count[0] - shared == 2 * (count[1] - shared)
    order = [0, 3, 1, 2]
    torch.testing.assert_close(module(features, noise[:, order]).slots, found.slots[:, order])
    assert not torch.allclose(module(features, noise[:, [1, 0, 2, 3]]).slots, found.slots[:, [1, 0, 2, 3]], atol=1e-2)


def test_slot_attention_is_equivariant_to_the_order_of_slots():
    module, features, noise = built()
    whole = module(features, noise)
    frames = module(features.unflatten(0, (2, 1)).expand(2, 4, N, IN), noise.unflatten(0, (2, 1)).expand(2, 4, K, D))
    assert frames.slots.shape == (2, 4, K, D) and frames.attention.shape == (2, 4, K, N)
    assert torch.allclose(frames.slots[:, 3], whole.slots) and torch.allclose(frames.attention[:, 0], whole.attention)
    order, tokens = torch.tensor([2, 0, 1]), torch.randperm(N)
    turned = module(features[:, tokens], noise[:, order])
    assert torch.allclose(turned.slots, whole.slots[:, order]) and torch.allclose(
        turned.attention, whole.attention[:, order][..., tokens]
    )
    assert torch.allclose(whole.attention.sum(1), torch.ones(B, N).double()) and (whole.attention >= 0).all()
    with pytest.raises(ValueError, match=r"noise: is required .* of shape \(…, 3, 8\)"):
        module(features)


def saved(module, features):
    """Return the number of elements that a forward saves for its backward, and the slots."""
    held = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: held.append(t.numel()) or t, lambda t: t):
        slots = module(features).slots
    return sum(held), slots


def test_gradient_last_learns_from_the_last_iteration_only():
    for straight in (False, True):
        knobs = {"gradient": "last", "slot_init": "learned", "straight_through": straight}
        module, features, _ = built(**knobs)
        held, slots = saved(module, features)
        slots.sum().backward()
        assert (module.initial_slots.grad is not None) == module.initial_slots.requires_grad == straight
        assert (
            saved(built(**knobs, iterations=9)[0], features)[0] == held
        )  # memory does not grow with the number of iterations


@pytest.mark.parametrize("kind", ["torch", "flax", "keras"])
def test_the_gru_equals_torchs_cell_with_the_initialization_of_its_library(kind):
    torch.manual_seed(0)
    gru, cell = Gru(D, kind), nn.GRUCell(D, D)
    for bias in (gru.bias_ih, gru.bias_hh):
        assert (kind == "torch") == bool(bias.any())
    if kind != "torch":
        eye = gru.weight_hh.T @ gru.weight_hh if kind == "keras" else gru.weight_hh[:D] @ gru.weight_hh[:D].T
        assert torch.allclose(eye, torch.eye(D), atol=1e-5)
    nn.init.normal_(gru.bias_hh)
    hidden = F.pad(gru.bias_hh.detach(), (2 * D, 0)) if kind == "flax" else gru.bias_hh.detach()
    state = {
        "weight_ih": gru.weight_ih.data,
        "weight_hh": gru.weight_hh.data,
        "bias_ih": gru.bias_ih.data,
        "bias_hh": hidden,
    }
    cell.load_state_dict(state)
    x, h = torch.randn(5, D), torch.randn(5, D)
    assert torch.allclose(gru(x, h), cell(x, h), atol=1e-9)


BAD = {
    "preset=sa2021: did you mean 'sa2020'?": {"preset": "sa2021"},
    "heads=3 does not divide": {"heads": 3},
    "kv=folded": {"heads": 2, "kv": "folded"},
    "renorm=entry: is not needed with softmax_over=keys": {"preset": "tf", "renorm": "entry"},
    "pooled: does not compute attention": {"preset": "pooled", "slots": 16, "qk_norm": True},
    "set out_proj or a gru": {"preset": "tf_inv", "qkv_width": 4},
    "qk_norm: cannot be combined with transport or kv=folded": {"preset": "tf_inv_osrt", "kv": "folded"},
    "straight_through: applies to gradient=last": {"straight_through": True},
    "ground: needs two or more slots": {"ground": True, "slots": 1},
    "ground=True: must be False with a binder": {"preset": "psb", "ground": True},
    "would not be trained": {"preset": "tf_inv", "gradient": "last"},
}


@pytest.mark.parametrize("told", BAD)
def test_incompatible_options_are_refused(told):
    with pytest.raises(ValueError, match=told.replace("?", r"\?")):
        SlotAttentionConfig.model_validate({"slots": K, "width": D, **BAD[told]})


def framed(**frame):
    torch.manual_seed(0)
    config = SlotAttentionConfig(preset="isa", slots=K, width=D, mlp_width=16)
    module = InvariantSlotAttention(config, FrameConfig(**{"scale_clip": (1e-6, 100), **frame}), IN).double()
    for parameter in module.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    lines = torch.linspace(-1, 1, 4, dtype=torch.float64)
    grid = torch.stack(torch.meshgrid(lines, lines, indexing="ij"), -1).flatten(0, 1)
    return module, torch.randn(B, 16, IN, dtype=torch.float64), grid, torch.randn(B, K, D + 4, dtype=torch.float64)


@pytest.mark.parametrize("scales", [False, True])
@pytest.mark.parametrize("mean", ["code", "paper"])
def test_frames_move_with_their_content(scales, mean):
    module, features, grid, noise = framed(scales=scales, scale_mean=mean)
    slots, positions, sizes = module.init_slots(noise)
    at = module.run_iterations(features, grid, slots, positions, sizes)
    moved = torch.tensor([0.3, -2.0], dtype=torch.float64)
    by = torch.tensor([1.7, 0.4], dtype=torch.float64) if scales else torch.ones(2, dtype=torch.float64)
    then = module.run_iterations(features, grid * by + moved, slots, positions * by + moved, sizes * by)
    assert torch.allclose(then.slots, at.slots, atol=1e-9) and torch.allclose(then.attention, at.attention, atol=1e-6)
    assert torch.allclose(then.positions, at.positions * by + moved, atol=1e-5)
    if scales:
        assert torch.allclose(then.scales, at.scales * by, atol=1e-5)
    else:
        assert torch.equal(at.scales, sizes)


def test_frames_equal_the_algorithm_of_the_paper():
    module, features, grid, noise = framed()
    c, f = module.config, module.frame
    slots, positions, sizes = module.init_slots(noise)
    ours = module.run_iterations(features, grid, slots, positions, sizes)
    x = norm(features, module.norm_input)
    through = module.grid_enc
    for b in range(B):
        s, p, w = slots[b], positions[b], sizes[b]
        for i in range(c.iterations + 1):
            relative = torch.stack([(grid - p[k]) / (w[k] * f.delta) for k in range(K)])
            g = relative @ module.grid_proj.weight.T + module.grid_proj.bias
            q = norm(s, module.norm_slots) @ module.to_q.weight.T
            keys = torch.stack([through(x[b] @ module.to_k.weight.T + g[k]) for k in range(K)])
            values = torch.stack([through(x[b] @ module.to_v.weight.T + g[k]) for k in range(K)])
            logits = torch.stack([keys[k] @ q[k] / D**0.5 for k in range(K)])
            a = logits.exp() / logits.exp().sum(0)
            share = a / (a.sum(-1, keepdim=True) + c.renorm_eps)
            p = share @ grid
            w = torch.stack([((share[k] + f.scale_eps)[:, None] * (grid - p[k]) ** 2).sum(0).sqrt() for k in range(K)])
            if i < c.iterations:
                s = gated(torch.stack([share[k] @ values[k] for k in range(K)]), s, module.gru)
                s = s + module.mlp(module.norm_mlp(s))
        for mine, his in zip((ours.slots, ours.positions, ours.scales, ours.attention), (s, p, w, a), strict=True):
            assert torch.allclose(mine[b].double(), his, atol=1e-9)


def test_a_slot_with_a_single_token_has_a_gradient():
    module, features, grid, noise = framed(scale_clip=(0.001, 2.0))
    features.requires_grad_()
    with torch.no_grad():
        module.to_q.weight.mul_(1e3)  # so sharp that each slot has one token
    found = module(features, grid, noise)
    (found.slots.sum() + found.scales.sum() + found.positions.sum()).backward()
    assert torch.isfinite(features.grad).all()
    assert ((found.scales >= 0.001) & (found.scales <= 2)).all()
    slots, positions, scales = module.init_slots(torch.randn(50, K, D + 4, dtype=torch.float64))
    assert (
        slots.std() == pytest.approx(1, abs=0.1)
        and positions.abs().max() < 1
        and positions.std() == pytest.approx(3**-0.5, abs=0.05)
    )
    assert abs(torch.corrcoef(torch.stack([positions.flatten(), scales.flatten()]))[0, 1]) < 0.2


@pytest.mark.parametrize("preset", ["tf_inv_gru", "tf_inv"])
def test_one_gru_for_all_layers_is_equal_grus(preset):
    shared, features, noise = built(preset="tf_inv_gru", share_gru=True)
    separate, _, _ = built(preset="tf_inv_gru")
    state = shared.state_dict()
    gru = {name.removeprefix("gru."): value for name, value in state.items() if name.startswith("gru.")}
    copies = {f"rounds.{i}.gru.{name}": value for i in range(3) for name, value in gru.items()}
    separate.load_state_dict({**{name: v for name, v in state.items() if not name.startswith("gru.")}, **copies})
    for one, other in zip(shared(features, noise), separate(features, noise), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    if preset == "tf_inv":
        with pytest.raises(ValueError, match=r"share_gru: needs layers=own and a GRU, got layers=own and gru=none"):
            SlotAttentionConfig.model_validate({"preset": preset, "share_gru": True})
        with pytest.raises(ValueError, match=r"share_gru: needs layers=own and a GRU, got layers=shared"):
            SlotAttentionConfig.model_validate({"preset": "sa", "share_gru": True})


@pytest.mark.parametrize(
    "knobs",
    [
        {"preset": "sa"},
        {"preset": "sa", "kv": "plain"},
        {"preset": "isa"},
        {"preset": "slate", "heads": 2},
        {"preset": "tf"},
        {"preset": "tf_inv_gru"},
        {"preset": "tf_inv_osrt"},
    ],
)
def test_masked_tokens_change_nothing(knobs):
    module, features, noise = built(**{"renorm_eps": 0.1} if knobs["preset"] in ("sa", "isa") else {}, **knobs)
    keep = torch.ones(B, N, dtype=torch.bool)
    keep[0, 6:] = keep[1, [0, 4]] = False
    found = module(features, noise, keep=keep)
    for i in range(B):
        alone = module(features[i : i + 1, keep[i]], noise[i : i + 1])
        torch.testing.assert_close(found.slots[i : i + 1], alone.slots, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(found.attention[i : i + 1][..., keep[i]], alone.attention, rtol=1e-10, atol=1e-12)
        assert not found.attention[i][:, ~keep[i]].any()
    everything = module(features, noise, keep=torch.ones(B, N, dtype=torch.bool))
    torch.testing.assert_close(everything.slots, module(features, noise).slots, rtol=1e-12, atol=1e-14)
