"""PSB: blocks compared with the released form written out query by query, causality, still images, and refused settings."""

import math

import pytest
import torch
from torch.nn import functional as F

from object_centric.grouping import frame_attention
from object_centric.grouping.binder_stream import BinderStream
from object_centric.grouping.parallel_binder import ParallelBinder
from object_centric.grouping.slot_config import SlotAttentionConfig
from object_centric.objectives.slot_autoencoder import SlotModelConfig

B, T, N, K, D, IN = 2, 3, 5, 4, 8, 6


def built(seed=0, **knobs):
    torch.manual_seed(seed)
    given = {"preset": "psb", "slots": K, "width": D, "iterations": 2, **knobs}
    module = ParallelBinder(SlotAttentionConfig.model_validate(given), IN).double()
    for name, parameter in module.named_parameters():  # norms and biases that change the result
        parameter.data += (0.3 if "norm" in name or "bias" in name else 0.1) * torch.randn_like(parameter)
    return module, torch.randn(B, T, N, IN, dtype=torch.float64)


def ln(layer, x):
    return F.layer_norm(x, x.shape[-1:], layer.weight, layer.bias, layer.eps)


def distances(block, apart):
    b = block.binder
    angles = [apart * 2**i * 2 * math.pi / (2 * b.max_time_distance - 1) for i in range(b.fourier_bands)]
    table = torch.tensor([math.sin(a) for a in angles] + [math.cos(a) for a in angles], dtype=torch.float64) * 2**0.5
    first, _, second = block.distance
    hidden = first.weight @ table + first.bias
    return second.weight @ (hidden * (1 + torch.erf(hidden / 2**0.5)) / 2) + second.bias


def heads_of(layer, x, heads):
    return (x @ layer.weight.T).view(*x.shape[:-1], heads, -1)


def seen(b, s, t):
    return not b.causal or (s <= t and (b.context_frames is None or t - s < b.context_frames))


def plain(module, features):
    """Compute one time, slot, head and token at a time."""
    c, slots = module.config, ln(module.norm, module.initial_slots).expand(B, T, -1, -1)
    own = None
    for block in module.blocks:
        b = block.binder
        x, y = ln(block.norm_slots, slots), ln(block.norm_input, features)
        q, k, v = heads_of(block.to_q, x, c.heads), heads_of(block.to_k, y, c.heads), heads_of(block.to_v, y, c.heads)
        d = q.shape[-1]
        update, own = (
            torch.zeros(B, T, K, c.heads, d, dtype=torch.float64),
            torch.zeros(B, T, K, N, dtype=torch.float64),
        )
        for batch in range(B):
            shares = torch.zeros(T, c.heads, K, T, N, dtype=torch.float64)
            for s in range(T):
                for n in range(N):
                    logit = torch.full((T, c.heads, K), -math.inf, dtype=torch.float64)
                    for t in range(T):
                        if seen(b, s, t):
                            bias = distances(block, s - t)[: c.heads]
                            logit[t] = (q[batch, t] * k[batch, s, n]).sum(-1).T * d**-0.5 + bias[:, None]
                    if not b.inverted:
                        shares[:, :, :, s, n] = logit  # before the mask: a slot competes for all tokens
                    elif b.softmax_scope == "clip":
                        shares[:, :, :, s, n] = logit.flatten().softmax(0).view(T, c.heads, K)
                    else:
                        for t in range(T):
                            if seen(b, s, t):
                                shares[t, :, :, s, n] = logit[t].flatten().softmax(0).view(c.heads, K)
            counted = shares.clone()
            if b.temporal_decay:
                for t in range(T):
                    for s in range(T):
                        counted[t, :, :, s] *= distances(block, s - t)[-c.heads :].exp()[:, None, None]
            weights = counted / (counted.sum((-2, -1), keepdim=True) + c.renorm_eps)
            if not b.inverted:
                weights = shares.flatten(-2).softmax(-1).view(shares.shape)
                shares = torch.stack([shares[t, :, :, t].softmax(-1) for t in range(T)])[:, :, :, None].expand(
                    -1, -1, -1, T, -1
                )
                shares = shares / shares.sum((1, 2), keepdim=True)
            for t in range(T):
                own[batch, t] = shares[t, :, :, t].sum(0)
                for h in range(c.heads):
                    update[batch, t, :, h] = torch.einsum("ksn,snd->kd", weights[t, h], v[batch, :, :, h])
        slots = slots + update.flatten(-2) @ block.out.weight.T
        both = slice(c.heads, c.heads + b.heads)
        biases = torch.stack([torch.stack([distances(block, s - t)[both] for s in range(T)]) for t in range(T)])
        biases = biases.permute(2, 0, 1)
        hidden = torch.tensor([[not seen(b, s, t) for s in range(T)] for t in range(T)])
        biases = biases.masked_fill(hidden, -math.inf)
        if b.interaction == "joint":
            every = torch.stack(
                [torch.stack([biases[:, i // K, j // K] for j in range(T * K)], -1) for i in range(T * K)], -2
            )
            slots = slots + self_attention(block.across_time, ln(block.norm_time, slots).flatten(1, 2), every).view(
                B, T, K, D
            )
        else:
            normed = ln(block.norm_time, slots).transpose(1, 2)
            slots = slots + self_attention(block.across_time, normed, biases).transpose(1, 2)
            slots = slots + self_attention(block.self_attention, ln(block.norm_self_attention, slots), 0)
        hidden = ln(block.norm_mlp, slots) @ block.mlp[0].weight.T + block.mlp[0].bias
        slots = slots + F.gelu(hidden) @ block.mlp[2].weight.T + block.mlp[2].bias
    return slots, own


def self_attention(layer, x, bias):
    q, k, v = (heads_of(part, x, layer.heads).transpose(-2, -3) for part in (layer.to_q, layer.to_k, layer.to_v))
    weights = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 + bias).softmax(-1)
    return (weights @ v).transpose(-2, -3).flatten(-2) @ layer.out.weight.T


KNOBS = [
    {},
    {"heads": 2, "binder": {"heads": 2}},
    {"heads": 2, "binder": {"causal": False}},
    {"binder": {"softmax_scope": "clip"}},
    {"heads": 2, "binder": {"softmax_scope": "clip", "causal": False}},
    {"binder": {"context_frames": 2}},
    {"heads": 2, "binder": {"context_frames": 2}},
    {"binder": {"causal": False}},
    {"binder": {"temporal_decay": True}},
    {"heads": 2, "binder": {"temporal_decay": True, "context_frames": 2}},
    {"binder": {"inverted": False, "context_frames": 2}},
    {"heads": 2, "binder": {"inverted": False, "causal": False}},
    {"binder": {"interaction": "joint"}},
    {"heads": 2, "binder": {"interaction": "joint", "causal": False, "temporal_decay": True}},
]


@pytest.mark.parametrize("frames_at_once", [1, 2, T])
@pytest.mark.parametrize("knobs", KNOBS, ids=str)
def test_blocks_equal_the_released_form(knobs, frames_at_once, monkeypatch):
    monkeypatch.setattr(frame_attention, "_frames_at_once", lambda *_: frames_at_once)
    module, features = built(**knobs)
    found, (slots, own) = module(features), plain(module, features)
    assert torch.allclose(found.slots, slots, atol=1e-10) and torch.allclose(found.attention, own, atol=1e-10)
    inputs = [*module.parameters(), features.requires_grad_()]
    ours, theirs = (
        torch.autograd.grad(s.square().sum(), inputs, allow_unused=True, materialize_grads=True)
        for s in (module(features).slots, plain(module, features)[0])
    )
    assert all(torch.allclose(a, b, atol=1e-9) for a, b in zip(ours, theirs, strict=True))


def test_blocks_are_causal_and_a_still_image_is_a_clip_of_one_frame():
    module, features = built(heads=2)
    later = features.clone()
    later[:, 2] = torch.randn(B, N, IN)
    assert torch.equal(module(later).slots[:, :2], module(features).slots[:, :2])
    assert not torch.allclose(module(later).slots[:, 2], module(features).slots[:, 2])
    still, clip = module(features[:, 0]), module(features[:, :1])
    assert still.slots.shape == (B, K, D) and torch.equal(still.slots, clip.slots[:, 0])
    assert torch.allclose(still.attention.sum(1), torch.ones(B, N, dtype=torch.float64))
    drawn, _ = built(slot_init="gaussian")
    noise = torch.randn(B, K, D, dtype=torch.float64)
    assert torch.allclose(drawn.init_slots(noise, B), drawn.mu + drawn.log_sigma.exp() * noise)
    with pytest.raises(ValueError, match="slots are initialized at random"):
        drawn(features)


def test_parameter_count_equals_the_released_model():
    """Count the parameters of NVlabs/PSB with width 192 and three blocks, without the causal masks that it stores as parameters."""
    given = {"preset": "psb", "slots": 11, "width": 192, "iterations": 3}
    module = ParallelBinder(SlotAttentionConfig.model_validate(given), 192)
    wide = 192
    attention, norm = 4 * wide * wide, 2 * wide
    block = 3 * attention + 5 * norm + 8 * wide * wide + 5 * wide + (16 * 128 + 128) + (128 * 5 + 5)
    assert sum(p.numel() for p in module.parameters()) == 3 * block + norm + 11 * wide == 2_229_327 + 11 * wide


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize(("window", "fades"), [(None, False), (1, False), (3, False), (3, True)])
def test_a_stream_equals_all_frames_at_once(heads, window, fades):
    module, _ = built(heads=heads, slot_init="gaussian", binder={"context_frames": window, "temporal_decay": fades})
    features, noise = torch.randn(B, 6, N, IN, dtype=torch.float64), torch.randn(B, K, D, dtype=torch.float64)
    whole, stream = module(features, noise).slots, BinderStream(module)
    found = torch.stack([stream.push(frame, noise) for frame in features.unbind(1)], 1)
    assert torch.allclose(found, whole, atol=1e-10)
    unbounded, _ = built(heads=heads, slot_init="gaussian", binder={"temporal_decay": fades})
    stream = BinderStream(unbounded, window)
    assert torch.allclose(torch.stack([stream.push(f, noise) for f in features.unbind(1)], 1), whole, atol=1e-10)
    for wrong in ({"causal": False}, {"softmax_scope": "clip"}, {"inverted": False}, {"interaction": "joint"}):
        with pytest.raises(ValueError, match="would depend on later frames"):
            BinderStream(built(binder=wrong)[0])


def test_mixed_precision_sums_in_fp32():
    module, features = built()
    module, features = module.float(), features.float()
    exact = module(features).slots
    with torch.autocast("cpu", torch.bfloat16):
        low, lower = (module(given).slots for given in (features, features.bfloat16()))
    assert (lower - exact).abs().max() < 0.1  # inputs in half precision are standardised in fp32
    low.float().square().sum().backward()
    assert 1e-4 < (low - exact).abs().max() < 0.1 and all(
        p.grad is None or p.grad.isfinite().all() for p in module.parameters()
    )


@pytest.mark.parametrize(
    ("knobs", "told"),
    [
        ({"gru": "torch"}, "gru=torch: must be none with a binder"),
        ({"binder": {"heads": 3}}, "binder.heads=3: must divide width=8"),
        ({"transport": {}}, "transport"),
        ({"slot_init": "same"}, "slot_init=same"),
        ({"binder": {"context_frames": 2, "causal": False}}, "binder.context_frames=2: limits how many earlier frames"),
    ],
)
def test_settings_of_recurrent_slots_are_refused(knobs, told):
    with pytest.raises(ValueError, match=told):
        SlotAttentionConfig.model_validate({"preset": "psb", "slots": K, "width": D, **knobs})


def test_frames_need_recurrent_slots():
    with pytest.raises(ValueError, match="slots with reference frames"):
        SlotModelConfig.model_validate({"grouping": {"preset": "psb"}, "frame": {}})
