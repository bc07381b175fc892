"""`objective.independence`: the penalties compared with plain loops, over micro-batches and on two ranks."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch.nn import functional as F

from sparo_train.core.contracts import Progress
from sparo_train.objectives.clip import ClipObjective
from sparo_train.objectives.clip_config import ClipObjectiveConfig
from sparo_train.objectives.slot_independence import attention_overlap, slot_dependence
from tests.helpers.ranks import run_ranks
from tests.parity.test_clip import READOUTS, TINY, tokens

KINDS = ["attention", "covariance", "hsic"]


def plain_dependence(values, kind):
    """Loop over pairs of slots (b, L, V) of unit norm."""
    centered = values - values.mean(0)
    found = []
    for one, other in itertools.permutations(range(values.shape[1]), 2):
        cross, left, right = (
            float((centered[:, a].T @ centered[:, b] / len(values)).norm())
            for a, b in ((one, other), (one, one), (other, other))
        )
        found.append(values.shape[2] * cross**2 if kind == "covariance" else cross**2 / (left * right))
    return sum(found) / len(found)


def encodings(b, slots, width, seed=0):
    g = torch.Generator().manual_seed(seed)
    values = torch.randn(b, slots, width, generator=g, dtype=torch.float64)
    values[:, 1] += values[:, 0]  # two dependent slots
    return F.normalize(values, dim=-1)


@pytest.mark.parametrize("kind", ["covariance", "hsic"])
@given(b=st.integers(2, 9), slots=st.integers(2, 5), width=st.integers(1, 4), seed=st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_hsic_equals_the_loop_over_pairs(kind, b, slots, width, seed):
    values = encodings(b, slots, width, seed)
    # With two values of equal sign, a slot has no variance, and the quotient of rounding errors is meaningless.
    if (values.std(0).norm(dim=-1) < 1e-3).any():
        return
    found = slot_dependence(values.flatten(1) / slots**0.5, slots, kind)
    assert float(found) == pytest.approx(plain_dependence(values, kind), rel=1e-9)


def test_hsic_of_copies_is_one_and_of_independent_slots_is_small():
    value = encodings(4000, 2, 8)[:, :1]
    assert float(slot_dependence(torch.cat([value, value], 1).flatten(1), 2, "hsic")) == pytest.approx(1)
    independent = torch.cat([value, encodings(4000, 2, 8, seed=5)[:, :1]], 1)
    assert float(slot_dependence(independent.flatten(1), 2, "hsic")) < 0.01


def test_overlap_is_the_mean_cosine_of_attention_maps():
    attention = torch.rand(3, 5, 7, dtype=torch.float64)
    expected = [
        torch.stack([F.cosine_similarity(a[i], a[j], dim=0) for i, j in itertools.permutations(range(5), 2)]).mean()
        for a in attention
    ]
    torch.testing.assert_close(attention_overlap(attention), torch.stack(expected))


def objective(kind, readout="sparo"):
    torch.manual_seed(0)
    model = {**TINY, "readout": READOUTS[readout]}
    return ClipObjective(
        ClipObjectiveConfig.model_validate({"model": model, "independence": {"kind": kind, "weight": 3.0}})
    ).double()


def batch(rows=slice(None)):
    g = torch.Generator().manual_seed(1)
    image = torch.randint(0, 255, (4, 3, 32, 32), dtype=torch.uint8, generator=g)
    return {"image": image[rows], "text": tokens(4, 9, 6, 3)[rows]}


def loss_and_gradients(kind, rows=slice(None)):
    model = objective(kind)
    loss = model(batch(rows), Progress(0, 10, 0))
    loss.total.backward()
    return loss, [p.grad for p in model.parameters() if p.grad is not None]


def of_rank(ranks, kind):
    loss, gradients = loss_and_gradients(kind, slice(2 * ranks.rank, 2 * ranks.rank + 2))
    return float(loss.total.detach()), float(loss.metrics["independence_loss"]), [g.numpy() for g in gradients]


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_have_the_loss_and_gradients_of_one(kind):
    whole, gradients = loss_and_gradients(kind)
    parts = run_ranks(2, of_rank, kind)
    assert sum(part[0] for part in parts) / 2 == pytest.approx(float(whole.total.detach()), rel=1e-6)
    assert sum(part[1] for part in parts) / 2 == pytest.approx(float(whole.metrics["independence_loss"]), rel=1e-6)
    for one, *others in zip(gradients, *(part[2] for part in parts), strict=True):
        torch.testing.assert_close(sum(map(torch.from_numpy, others)) / 2, one, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("readout", ["sparo", "slot_attention", "ep"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_penalty_is_added_with_its_weight_and_falls_under_training(kind, readout):
    model = objective(kind, readout).float()
    plain = ClipObjective(ClipObjectiveConfig.model_validate({"model": {**TINY, "readout": READOUTS[readout]}}))
    plain.load_state_dict(model.state_dict())
    loss, without = model(batch(), Progress(0, 10, 0)), plain(batch(), Progress(0, 10, 0))
    penalty = loss.metrics["independence_loss"]
    torch.testing.assert_close(loss.total, without.total + 3 * penalty)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(20):
        optimizer.zero_grad()
        loss = model(batch(), Progress(0, 10, 0))
        loss.total.backward()
        optimizer.step()
    # The attention of a new readout is nearly uniform, so its overlap decreases slowly.
    assert float(loss.metrics["independence_loss"]) < float(penalty) - 1e-5


@pytest.mark.parametrize("readout", ["gap-patches", "coca", "flair", "fdt"])
def test_a_readout_without_separate_slots_is_refused(readout):
    with pytest.raises(ValidationError, match="independence"):
        ClipObjectiveConfig.model_validate(
            {
                "model": {**TINY, "readout": READOUTS[readout], "init_logit_bias": -10},
                "loss": {"kind": "sigmoid"},
                "independence": {},
            }
        )
