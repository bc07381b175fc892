"""Masks of slots and similarities of slots, each compared with its formula."""

import pytest
import torch
from torch.nn import functional as F

from evals.slots.mask_study import Factors, MaskTraining, compute_mask, factors, loss, train_mask
from evals.slots.quality_measures import effective_number, monosemanticity, redundancy, sharpness, similarity
from tests.unit.test_slot_studies import N, U, V


def test_the_factored_loss_is_the_papers():
    torch.manual_seed(0)
    image, true, false = (
        F.normalize(torch.randn(N, U * V, dtype=torch.float64), dim=-1).unflatten(1, (U, V)) for _ in range(3)
    )
    kinds = torch.zeros(N, dtype=torch.int64)
    for per, size in (("unit", U), ("dimension", U * V)):
        for clamp in ("max", "min"):
            theta = (0.05 * torch.randn(size, dtype=torch.float64)).requires_grad_()
            alpha = torch.tensor(4.7, dtype=torch.float64, requires_grad=True)
            f = factors(image, true, false, kinds, per)
            ours = loss(f.d, f.q, theta, alpha, clamp)
            ours.backward()
            grads, theta.grad, alpha.grad = (theta.grad, alpha.grad), None, None
            scale = torch.maximum(torch.tensor(100.0), alpha.exp()) if clamp == "max" else torch.minimum(torch.tensor(100.0), alpha.exp())  # fmt: skip
            m = torch.sigmoid(scale / 4 * theta).repeat_interleave(U * V // size)
            y = image.flatten(1) * m
            logits = scale * torch.stack([F.cosine_similarity(y, t.flatten(1)) for t in (true, false)], dim=1)
            F.cross_entropy(logits, kinds).backward()
            assert torch.allclose(ours.detach(), F.cross_entropy(logits, kinds).detach(), atol=1e-12)
            assert torch.allclose(grads[0], theta.grad, atol=1e-10) and torch.allclose(grads[1], alpha.grad, atol=1e-12)


def test_a_mask_weights_informative_slots_and_is_reproducible():
    torch.manual_seed(0)
    d = 0.02 * torch.randn(400, U)
    d[:, :2] += 0.03
    known = Factors(d, torch.full((400, U), 1 / U), torch.randint(0, 2, (400,)))
    found = train_mask(known, MaskTraining(epochs=15))
    again = train_mask(known, MaskTraining(epochs=15))
    assert torch.equal(found.mask, again.mask) and found.curve == again.curve and len(found.losses) == 15
    assert found.losses[-1] < found.losses[0] and max(found.curve) == found.curve[found.epoch] > found.curve[0] + 0.02
    assert found.mask[:2].min() > 0.9 > 0.6 > found.mask[2:].max()
    assert torch.equal(compute_mask(torch.zeros(3), torch.tensor(0.0), "max"), torch.full((3,), 0.5))


def test_similarity_redundancy_and_effective_number():
    torch.manual_seed(0)
    x = torch.randn(500, 4)
    turned = x @ torch.linalg.qr(torch.randn(4, 4)).Q
    same = similarity(torch.stack([x, turned], dim=1))
    assert torch.allclose(same, torch.ones(2, 2, dtype=torch.float64), atol=1e-6)
    assert redundancy(same) == pytest.approx(1) and effective_number(same) == pytest.approx(1, abs=1e-4)
    other = similarity(torch.randn(4000, 8, 4))
    assert redundancy(other) < 0.01 and effective_number(other) > 7.9
    few = torch.randn(6, 3, 10)  # with fewer images than dimensions, another computation is used
    a = (few - few.mean(0)).double()
    plain = [[float((a[:, i].T @ a[:, j]).square().sum()) for j in range(3)] for i in range(3)]
    table = torch.tensor(plain, dtype=torch.float64)
    root = table.diagonal().sqrt()
    assert torch.allclose(similarity(few), table / root[:, None] / root)


def test_monosemanticity_is_the_mean_over_pairs_of_images():
    torch.manual_seed(0)
    activations, embeddings = torch.randn(30, 4), torch.randn(30, 7)
    a = (activations - activations.min(0).values) / (activations.max(0).values - activations.min(0).values)
    cosine = F.normalize(embeddings, dim=1) @ F.normalize(embeddings, dim=1).T
    for k, found in enumerate(monosemanticity(activations, embeddings)):
        weight = (a[:, k, None] * a[None, :, k]).fill_diagonal_(0)
        assert float(found) == pytest.approx(float((weight * cosine).sum() / weight.sum()), abs=1e-5)
    one = torch.zeros(30, 1)
    one[:10] = 1
    embeddings[:10] = embeddings[0]
    assert float(monosemanticity(one, embeddings)) == pytest.approx(1)


def test_sharpness_is_one_for_a_point_and_zero_for_uniform_attention():
    point, even = torch.eye(8)[:1], torch.full((1, 8), 1 / 8)
    found = sharpness(torch.stack([point, even], dim=1))
    assert torch.allclose(found, torch.tensor([[1.0, 0.0]]), atol=1e-6)
    half = torch.tensor([[[0.25] * 4 + [0.0] * 4]])
    assert torch.allclose(sharpness(half, torch.arange(8)[None] < 4), torch.zeros(1, 1), atol=1e-6)
