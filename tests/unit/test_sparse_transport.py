"""L2-regularized and sliced plans compared with POT, their marginals, and how each handles ties."""

import ot
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from object_centric.grouping.slot_attention import SlotAttention
from object_centric.grouping.slot_config import SlotAttentionConfig
from object_centric.grouping.sparse_transport import l2_plan, sliced_plan
from object_centric.grouping.transport import log_marginal


def problem(b=2, k=3, n=9, seed=0):
    drawn = torch.Generator().manual_seed(seed)
    cost, a, s = (torch.randn(shape, generator=drawn, dtype=torch.float64) for shape in ((b, k, n), (b, n), (b, k)))
    return cost.square(), log_marginal(a, k).exp(), log_marginal(s, k).exp()


@pytest.mark.parametrize("weight", [0.1, 1.0, 10.0])
def test_many_l2_steps_equal_pots_plan(weight):
    cost, a, b = problem()
    found = l2_plan(cost, a, b, weight, 5000)
    for mine, c, tokens, slots in zip(found, cost, a, b, strict=True):
        expected = ot.smooth.smooth_ot_dual(
            slots.numpy(), tokens.numpy(), c.numpy(), weight, reg_type="l2", stopThr=1e-14, numItermax=50_000
        )
        assert torch.allclose(mine, torch.from_numpy(expected), atol=1e-4)
        assert (mine == 0).any() or weight == 10.0
    assert torch.allclose(found.sum(2), b, atol=1e-9) and torch.allclose(found.sum(1), a, atol=1e-4)


@given(k=st.integers(1, 5), n=st.integers(1, 8), steps=st.integers(1, 6), seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_the_sums_of_the_last_half_step_are_exact(k, n, steps, seed):
    cost, a, b = problem(2, k, n, seed)
    found = l2_plan(cost, a, b, 0.7, steps)
    assert (found >= 0).all() and torch.allclose(found.sum(2), b, atol=1e-10)


def test_l2_gradients_are_those_of_differences():
    cost, a, b = (x.requires_grad_() for x in problem(1, 2, 4))
    assert torch.autograd.gradcheck(lambda *x: l2_plan(*x, 0.7, 3), (cost, a, b))


@given(k=st.integers(1, 5), n=st.integers(1, 8), d=st.integers(1, 4), seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_a_sliced_plan_is_the_mean_of_pots_plans_on_a_line(k, n, d, seed):
    _, a, b = problem(1, k, n, seed)
    drawn = torch.Generator().manual_seed(seed)
    queries, keys = (torch.randn(1, size, d, generator=drawn, dtype=torch.float64) for size in (k, n))
    found = sliced_plan(queries, keys, a, b)[0]
    plans = [
        ot.emd_1d(queries[0, :, i].numpy(), keys[0, :, i].numpy(), b[0].numpy(), (a[0] * b.sum() / a.sum()).numpy())
        for i in range(d)
    ]
    assert torch.allclose(found, torch.from_numpy(sum(plans) / d), atol=1e-9)


def test_sorting_breaks_ties_and_the_l2_plan_does_not():
    """Two equal slots and two tokens: one-dimensional plans give each slot a token, and the convex problem gives each half of both."""
    queries, keys = torch.zeros(1, 2, 1), torch.tensor([[[0.0], [1.0]]])
    ones = torch.ones(1, 2)
    assert torch.equal(sliced_plan(queries, keys, ones, ones)[0], torch.eye(2))
    cost = (queries - keys.transpose(1, 2)).square()
    assert torch.allclose(l2_plan(cost, ones, ones, 0.1, 50)[0], torch.full((2, 2), 0.5))


@pytest.mark.parametrize("preset", ["sa_l2", "sa_swd", "sa_sinkhorn_id", "sa_me_id"])
def test_presets_train(preset):
    torch.manual_seed(0)
    config = SlotAttentionConfig.model_validate({"preset": preset, "slots": 3, "width": 8})
    module = SlotAttention(config, 6)
    features, noise = torch.randn(2, 9, 6, requires_grad=True), torch.randn(2, 3, config.noise_width(9))
    module(features, noise).slots.square().mean().backward()
    assert features.grad is not None and features.grad.abs().sum() > 0 and features.grad.isfinite().all()


def test_l2_with_other_plans_is_refused():
    for inner in ({"entropy_steps": 4}, {"exact": "sliced"}):
        with pytest.raises(ValueError, match="regularization=l2: requires entropy_steps=0"):
            SlotAttentionConfig.model_validate({"preset": "sa_l2", "transport": inner})
