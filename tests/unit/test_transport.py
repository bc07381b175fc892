"""Transport instead of a softmax: compared with POT and with autograd through every step; and the effect of plans with less entropy."""

import ot
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment
from torch import nn

from object_centric.grouping import transport
from object_centric.grouping.slot_attention import SlotAttention
from object_centric.grouping.slot_config import PRESETS, SlotAttentionConfig
from object_centric.grouping.sparse_transport import l2_plan, sliced_plan
from object_centric.grouping.transport import exact_plan, log_marginal, minimize_entropy, sinkhorn, sinkhorn_unrolled
from sparo_train.core.errors import ConfigError

B, N, IN, K, D = 2, 9, 6, 3, 8
# With gradient=last, other tests compare the gradient.
MOVED = [name for name, row in PRESETS.items() if "transport" in row and "gradient" not in row]


def problem(b=B, k=K, n=N, seed=0):
    drawn = torch.Generator().manual_seed(seed)
    cost, a, s = (torch.randn(shape, generator=drawn, dtype=torch.float64) for shape in ((b, k, n), (b, n), (b, k)))
    return [x.requires_grad_() for x in (cost.square(), log_marginal(a, k), log_marginal(s, k))]


def test_many_steps_equal_pots_plan():
    cost, log_a, log_b = problem()
    found = sinkhorn(cost, log_a, log_b, 2000).plan
    for mine, c, a, b in zip(found.detach(), cost.detach(), log_a.detach().exp(), log_b.detach().exp(), strict=True):
        expected = ot.bregman.sinkhorn_log(b.numpy(), a.numpy(), c.numpy(), 1.0, numItermax=20_000, stopThr=1e-14)
        assert torch.allclose(mine, torch.from_numpy(expected), atol=1e-10)
    few = sinkhorn(cost, log_a, log_b, 1).plan
    assert torch.allclose(few.sum(2), log_b.exp()) and not torch.allclose(few.sum(1), log_a.exp(), atol=1e-3)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 7), st.integers(1, 6), st.integers(0, 99), st.booleans())
def test_the_gradient_equals_autograd(b, k, n, steps, seed, warm):
    inputs = problem(b, k, n, seed)
    v = torch.randn(b, k, 1, dtype=torch.float64, requires_grad=True) if warm else None
    weight, weight_v = torch.randn(b, k, n, dtype=torch.float64), torch.randn(b, k, 1, dtype=torch.float64)
    ours, theirs = (of(*inputs, steps, v) for of in (sinkhorn, sinkhorn_unrolled))
    assert torch.allclose(ours.plan, theirs.plan, atol=1e-12) and torch.allclose(ours.v, theirs.v, atol=1e-12)
    inputs += [v] if warm else []
    scalars = ((plan.plan * weight).sum() + (plan.v * weight_v).sum() for plan in (ours, theirs))
    for mine, his in zip(*(torch.autograd.grad(scalar, inputs) for scalar in scalars), strict=True):
        assert torch.allclose(mine, his, atol=1e-10)


@pytest.mark.parametrize("learn_rate", [False, True])
def test_the_warm_start_keeps_its_graph_as_in_mesh(learn_rate):
    inputs = problem(k=6, n=30)
    rate = torch.tensor(8.0, dtype=torch.float64, requires_grad=learn_rate)
    weight = torch.randn(B, 6, 30, dtype=torch.float64)

    def mesh(cost, log_a, log_b):
        v = None
        for _ in range(4):
            plan, v = sinkhorn_unrolled(cost, log_a, log_b, 5, v)
            entropy = torch.special.entr(plan.clamp(1e-20, 1)).mean((1, 2)).sum()
            (slope,) = torch.autograd.grad(entropy, cost, retain_graph=True)
            cost = cost - rate * nn.functional.normalize(slope.flatten(1), dim=1).view_as(slope)
        return sinkhorn_unrolled(cost, log_a, log_b, 5, v).plan

    cost, v = minimize_entropy(*inputs, 5, 4, rate)
    leaves = [*inputs, rate] if learn_rate else inputs
    plans = (sinkhorn(cost, *inputs[1:], 5, v).plan, mesh(*inputs))
    torch.testing.assert_close(*plans, rtol=1e-9, atol=1e-12)
    for mine, his in zip(*(torch.autograd.grad((p * weight).sum(), leaves) for p in plans), strict=True):
        torch.testing.assert_close(mine, his, rtol=1e-6, atol=1e-9)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 99), st.booleans())
def test_the_gradient_of_the_entropy_equals_autograd(steps, rounds, seed, regularised):
    cost, log_a, log_b = problem(seed=seed)
    similar = None
    if regularised:
        likeness = torch.randn(B, K, K, dtype=torch.float64).softmax(1)
        similar = transport.SimilarityRegularizer(0.3, likeness, sinkhorn(cost, log_a, log_b, steps).plan.detach())
    ours, v = minimize_entropy(cost, log_a, log_b, steps, rounds, 0.7, similar)
    theirs, w = minimize_entropy(cost, log_a, log_b, steps, rounds, 0.7, similar, unrolled=True)
    assert torch.allclose(ours, theirs, atol=1e-10) and torch.allclose(v, w, atol=1e-10)
    # Written out again for one sample at a time.
    for i in range(B):
        c, start = cost[i].detach().clone(), torch.zeros(K, 1, dtype=torch.float64)
        for _ in range(rounds):
            c.requires_grad_()
            p, begun = -c, start
            for _ in range(steps):
                u = log_a[i].detach() - torch.log((p + begun).exp().sum(0))
                begun = log_b[i].detach()[:, None] - torch.log((p + u).exp().sum(1, keepdim=True))
            moved = (p + u + begun).exp()
            held = moved.clamp(1e-20, 1)
            height = -(held * held.log()).mean()
            if similar is not None:
                height = height + 0.3 * (similar.slots[i].T @ moved - similar.first[i]).square().sum()
            (slope,) = torch.autograd.grad(height, c)
            c, start = (c - 0.7 * slope / slope.norm()).detach(), begun.detach()
        assert torch.allclose(ours[i], c, atol=1e-9)


def test_the_exact_plan_is_the_assignment():
    cost = torch.rand(4, 5, 5, dtype=torch.float64)
    even = torch.zeros(4, 5, dtype=torch.float64)
    for plan, c in zip(exact_plan(cost, even, even), cost, strict=True):
        rows, columns = linear_sum_assignment(c.numpy())
        expected = torch.zeros(5, 5, dtype=torch.float64)
        expected[rows, columns] = 1
        assert torch.allclose(plan, expected)
    cost, log_a, log_b = problem(n=20)
    plan = exact_plan(
        cost.detach(), log_a.detach().float(), log_b.detach().float()
    )  # sums that differ in their last bits
    assert torch.allclose(plan.sum(2), log_b.exp(), atol=1e-5) and torch.allclose(plan.sum(1), log_a.exp(), atol=1e-5)


def built(preset, **knobs):
    torch.manual_seed(0)
    config = SlotAttentionConfig.model_validate({"preset": preset, "slots": K, "width": D, **knobs})
    module = SlotAttention(config, IN).double()
    for parameter in module.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    noise = torch.randn(B, K, config.noise_width(N), dtype=torch.float64)
    return module, torch.randn(B, N, IN, dtype=torch.float64), noise


def plain(module, features, noise):
    """Compute the papers' algorithms with torch's operations: whole distances, autograd for the gradient of the entropy, no folding."""
    c, step = module.config, module.rounds[0]
    t, x = c.transport, module.norm_input(features)
    slots = module.mu + module.log_sigma.exp() * noise[..., :D]
    log_a = (K * step.transport.input_marginal(x)[..., 0].softmax(-1)).log()
    k, v = x @ step.to_k.weight.T, x @ step.to_v.weight.T
    for _ in range(c.iterations):
        normed = step.norm_slots(slots)
        q = normed @ step.to_q.weight.T
        apart = (q[:, :, None] - k[:, None]).square().sum(-1)
        cost = {"sqeuclidean": apart, "cdist": apart.sqrt()}.get(
            t.cost, -nn.functional.cosine_similarity(q[:, :, None], k[:, None], dim=-1)
        )
        cost = cost * t.cost_scale
        log_b = torch.zeros(B, K, dtype=torch.float64)
        if t.slot_marginal == "learned":
            log_b = (K * step.transport.slot_marginal(normed)[..., 0].softmax(-1)).log()
        start = None
        if t.entropy_steps:
            cost = cost + t.noise * noise[..., D:]
        for _ in range(t.entropy_steps):
            # As in davzha/MESH, the step size is a constant, and the warm start stays in the graph.
            found, start = sinkhorn_unrolled(cost, log_a, log_b, t.steps, start)
            held = found.clamp(1e-20, 1)
            (slope,) = torch.autograd.grad(-(held * held.log()).mean((1, 2)).sum(), cost, retain_graph=True)
            cost = cost - t.entropy_rate * slope / slope.flatten(1).norm(dim=1)[:, None, None]
        moved = sinkhorn_unrolled(cost, log_a, log_b, t.steps, start).plan
        if t.regularization == "l2":
            moved = l2_plan(cost, log_a.exp(), log_b.exp(), t.l2_weight, t.steps)
        elif t.exact == "sliced":
            moved = moved + sliced_plan(q, k, log_a.exp(), log_b.exp())
        elif t.exact != "none":
            best = exact_plan(cost.detach(), log_a.detach(), log_b.detach())
            moved = moved + best if t.exact == "sum" else best + moved - moved.detach()
        slots = step.gru((moved @ v).flatten(0, 1), slots.flatten(0, 1)).view(slots.shape)
        slots = slots + step.mlp(step.norm_mlp(slots))
    return slots, moved / moved.sum(1, keepdim=True)


@pytest.mark.parametrize("preset", MOVED)
@pytest.mark.parametrize(
    "inner",
    [{}, {"cost": "cosine", "cost_scale": 6.0, "slot_marginal": "learned"}, {"cost": "cdist", "steps": 2}],
    ids=["", "cosine", "cdist"],
)
def test_every_preset_equals_its_formula(preset, inner):
    module, features, noise = built(preset, transport=inner)
    features.requires_grad_()
    ours, theirs = module(features, noise), plain(module, features, noise)
    for mine, his in zip(ours, theirs, strict=True):
        assert torch.allclose(mine, his, atol=1e-9)
    weight = torch.randn_like(ours.slots)
    inputs = [features, *module.parameters()]
    for mine, his in zip(
        *(torch.autograd.grad((s * weight).sum(), inputs) for s in (ours.slots, theirs[0])), strict=True
    ):
        assert torch.allclose(mine, his, atol=1e-7)


def test_exact_plans_can_replace_sinkhorns():
    module, features, noise = built("sa_emd", transport={"exact": "straight_through"})
    ours, theirs = module(features, noise), plain(module, features, noise)
    assert torch.allclose(ours.slots, theirs[0], atol=1e-9)
    assert (
        (ours.attention < 1e-9) | (ours.attention > 1e-3)
    ).all()  # vertices of a transport polytope split few tokens


def test_equal_slots_differ_only_by_noise():
    tokens = torch.randn(1, 40, IN, dtype=torch.float64)
    module, _, _ = built("sa_me", slot_init="same", transport={"entropy_rate": 30.0})
    first, second = (torch.randn(1, K, D + 40, dtype=torch.float64) for _ in range(2))
    with torch.inference_mode():
        found = module(tokens, first)
        assert torch.equal(module(tokens, first).slots, found.slots)
        assert not torch.equal(module(tokens, second).slots, found.slots)
        assert torch.pdist(found.slots[0]).min() > 1e-3
        tied, _, _ = built("sa_sinkhorn")
        still = tied(tokens, initial_slots=torch.randn(1, 1, D, dtype=torch.float64).expand(1, K, D)).slots[0]
    assert torch.pdist(still).max() < 1e-9


def test_gradients_through_the_steps_reach_costs_and_step_sizes():
    module, features, noise = built(
        "sa_me", transport={"regulariser": 0.1, "second_order": True, "learn_rate": True, "noise": 1.0}
    )
    module(features, noise).slots.square().sum().backward()
    learned = dict(module.named_parameters())
    for name in ("rounds.0.transport.rate", "rounds.0.transport.likeness.0.weight"):
        assert learned[name].grad.abs().max() > 0
    with torch.inference_mode():
        again = module(features, noise).slots
    assert torch.allclose(again, module(features, noise).slots, atol=1e-9)


@pytest.mark.parametrize("preset", MOVED)
def test_transport_runs_with_weights_in_bf16(preset):
    module, features, noise = built(preset, transport={"slot_marginal": "learned"})
    with torch.autocast("cpu", torch.bfloat16):  # in the precision of FSDP2
        found = module.bfloat16()(features.bfloat16(), noise.bfloat16())
    assert found.slots.isfinite().all()


def test_transport_plans_of_nan_are_nan():
    cost, log_a, log_b = (x.detach() for x in problem())
    log_a[0, 0] = torch.nan
    assert exact_plan(cost, log_a, log_b).isnan().all()


def test_memory_is_a_quarter_of_autograd():
    kept = []
    cost, log_a, log_b = problem(n=200)
    for unrolled in (False, True):
        total = {}
        hook = torch.autograd.graph.saved_tensors_hooks(
            lambda x, seen=total: (seen.update({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes()}), x)[1],
            lambda x: x,
        )
        with hook:
            found, v = minimize_entropy(cost, log_a, log_b, 5, 4, 8.0, unrolled=unrolled)
            of = sinkhorn_unrolled if unrolled else sinkhorn
            moved = of(found, log_a, log_b, 5, v).plan
        kept.append(sum(total.values()))
        moved.sum().backward()
    assert kept[0] < kept[1] / 4


BAD = {
    "exact=sum": {"entropy_steps": 4, "exact": "sum"},
    "second_order: has no effect, because entropy_steps is 0": {"second_order": True},
    "Set second_order": {"entropy_steps": 4, "regulariser": 1.0},
}  # fmt: skip


@pytest.mark.parametrize("told", BAD)
def test_incompatible_options_are_refused(told):
    with pytest.raises(ValueError, match=told):
        SlotAttentionConfig.model_validate({"preset": "sa_sinkhorn", "transport": BAD[told]})


def test_without_pot_exact_plans_are_refused_at_the_start(monkeypatch):
    monkeypatch.setattr("object_centric.grouping.transport.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"exact=sum: needs POT. Run `pip install -e '\.\[transport\]'"):
        built("sa_emd")


def test_equal_slots_need_a_plan_that_breaks_ties():
    with pytest.raises(ValueError, match="slots that start equal stay equal"):
        SlotAttentionConfig(slot_init="same")
    with pytest.raises(ValueError, match="has one head and no softmax"):
        SlotAttentionConfig.model_validate({"preset": "mesh", "heads": 2})
    module, features, noise = built("mesh")
    with pytest.raises(ValueError, match=r"noise: expected \(…, 3, 17\), got \(2, 3, 8\)"):
        module(features, noise[..., :D])
    with pytest.raises(ValueError, match="noise: is required to break ties"):
        module(features, initial_slots=torch.zeros(B, K, D, dtype=torch.float64))
