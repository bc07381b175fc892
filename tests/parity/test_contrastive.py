"""The exact losses compared with the published formulas, on one rank and on several."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from sparo_train.core import distributed
from sparo_train.core.distributed import Ring
from sparo_train.core.registries import LOSSES
from sparo_train.objectives import contrastive as module
from sparo_train.objectives.contrastive import SoftmaxLoss, contrastive, uses_gather
from tests.helpers.ranks import run_ranks


def features(b, d, seed=0, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    image, text = (F.normalize(torch.randn(b, d, generator=g, dtype=torch.float64), dim=1) for _ in range(2))
    return image.to(dtype), F.normalize(text + 0.5 * image, dim=1).to(dtype)


def plain(image, text, scale, bias, kind):
    """Compute the published formulas over the whole batch."""
    z = scale * image @ text.T
    if kind == "softmax":
        return ((z.logsumexp(1) - z.diagonal()).mean() + (z.logsumexp(0) - z.diagonal()).mean()) / 2
    sign = 2 * torch.eye(len(z), dtype=z.dtype) - 1
    return -F.logsigmoid(sign * (z + bias)).sum() / len(z)


def leaves(image, text, dtype=torch.float64, scale=20.0, bias=-4.0):
    values = (image, text, torch.tensor(scale, dtype=dtype), torch.tensor(bias, dtype=dtype))
    return [v.clone().requires_grad_() for v in values]


def gradients(tensors):
    return [torch.zeros_like(t) if t.grad is None else t.grad for t in tensors]


def close(found, expected, tolerance):
    return all(
        float((a - b).norm()) <= tolerance * max(float(b.norm()), 1e-1) for a, b in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
@given(b=st.integers(1, 9), d=st.integers(2, 8), tile=st.integers(1, 40), seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_tiles_on_one_rank_equal_the_formula(kind, b, d, tile, seed):
    image, text = features(b, d, seed)
    expected, found = leaves(image, text), leaves(image, text)
    loss = plain(*expected, kind)
    loss.backward()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_TILE", tile)
        got = contrastive(*found, loss=LOSSES.get(kind)(exchange="ring"))
    got.total.backward()
    assert float(got.total.detach()) == pytest.approx(float(loss.detach()), rel=1e-12, abs=1e-12)
    assert close(gradients(found), gradients(expected), 1e-11)
    assert torch.equal(got.correct, (image @ text.T).argmax(1) == torch.arange(b))


@pytest.mark.parametrize("exchange", ["ring", "gather"])
def test_a_collapsed_model_has_accuracy_zero(exchange):
    same = torch.ones(4, 3) / 3**0.5
    assert not contrastive(same, same, torch.tensor(10.0), loss=SoftmaxLoss(exchange=exchange)).correct.any()


def on_rank(ranks, image, text, kind, exchange, dtype):
    b = len(image) // ranks.size
    own = [t[ranks.rank * b : (ranks.rank + 1) * b].to(dtype) for t in (image, text)]
    mine = leaves(*own, dtype)
    got = contrastive(*mine, loss=LOSSES.get(kind)(exchange=exchange))
    got.total.backward()
    return float(got.total.detach()), gradients(mine), got.correct


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
@pytest.mark.parametrize("exchange", ["ring", "gather"])
def test_the_mean_over_ranks_is_the_global_batch(world_size, kind, exchange):
    image, text = features(12, 16)
    whole = leaves(image, text)
    loss = plain(*whole, kind)
    loss.backward()
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
        found = run_ranks(world_size, on_rank, image, text, kind, exchange, dtype)
        totals, parts, correct = zip(*found, strict=True)
        assert sum(totals) / world_size == pytest.approx(float(loss.detach()), rel=10 * tolerance)
        d_image, d_text = (torch.cat([p[i] for p in parts]) / world_size for i in range(2))
        d_scale, d_bias = (sum(p[i] for p in parts) / world_size for i in range(2, 4))
        assert close([d_image, d_text, d_scale, d_bias], gradients(whole), tolerance)
        assert torch.equal(torch.cat(correct), (image @ text.T).argmax(1) == torch.arange(12))


def _second_derivative(_ranks, image, text):
    mine = leaves(image, text)
    total = contrastive(*mine, loss=LOSSES.get("softmax")(exchange="gather")).total
    with pytest.raises(NotImplementedError, match="Gather: expected first derivatives only"):
        torch.autograd.grad(total, mine[:1], create_graph=True)


def test_second_derivatives_of_gathered_encodings_are_refused():
    run_ranks(2, _second_derivative, *features(4, 8))


def on_rank_in_bf16(ranks, image, text, kind, exchange):
    sent = []
    with pytest.MonkeyPatch.context() as patch:
        gather, shift = distributed._all_gather, Ring.shift
        patch.setattr(distributed, "_all_gather", lambda out, t, group: (sent.append(t), gather(out, t, group=group)))
        patch.setattr(Ring, "shift", lambda self, *tensors: (sent.extend(tensors), shift(self, *tensors))[1])
        b = len(image) // ranks.size
        mine = leaves(*(t[ranks.rank * b : (ranks.rank + 1) * b] for t in (image, text)))
        got = contrastive(*mine, loss=LOSSES.get(kind)(exchange=exchange, exchange_dtype="bf16"))
        got.total.backward()
    return float(got.total.detach()), gradients(mine), {t.dtype for t in sent if t.shape == (b, image.shape[1])}


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
@pytest.mark.parametrize("exchange", ["ring", "gather"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_encodings_sent_in_bf16_give_the_loss_of_rounded_encodings(world_size, exchange, kind):
    image, text = features(8, 16)
    whole = leaves(image.bfloat16().double(), text.bfloat16().double())
    loss = plain(*whole, kind)
    loss.backward()
    found = run_ranks(world_size, on_rank_in_bf16, image, text, kind, exchange)
    totals, parts, dtypes = zip(*found, strict=True)
    assert sum(totals) / world_size == pytest.approx(float(loss.detach()), rel=1e-12)
    d_image, d_text = (torch.cat([p[i] for p in parts]) / world_size for i in range(2))
    assert close([d_image, d_text], gradients(whole)[:2], 1e-11)
    # In the ring, the gradients of visiting texts travel, too, in their own dtype.
    if world_size > 1:
        assert set.union(*dtypes) == {torch.bfloat16} | ({torch.float64} if exchange == "ring" else set())


@pytest.mark.parametrize(
    ("own", "ranks", "width", "on_gpu", "gathers"),
    [
        (128, 1024, 4096, True, True),
        (128, 1024, 4096, False, False),
        (512, 64, 4096, True, True),
        (512, 1024, 4096, True, False),
        (2048, 1024, 512, True, False),  # rows of logits are larger than the encodings
        (64, 2, 512, False, True),
    ],
)
def test_auto_gathers_while_the_tables_are_small(own, ranks, width, on_gpu, gathers):
    assert uses_gather(SoftmaxLoss(), own, own * ranks, width, on_gpu) == gathers
    for exchange in ("gather", "ring"):
        chosen = SoftmaxLoss(exchange=exchange)
        assert uses_gather(chosen, own, own * ranks, width, on_gpu) == (exchange == "gather")


def test_low_precision_features_are_multiplied_in_fp32():
    image, text = (t.to(torch.bfloat16) for t in features(8, 32, dtype=torch.float32))
    found = leaves(image, text, torch.float32)
    for exchange in ("ring", "gather"):
        total = contrastive(*found[:3], loss=SoftmaxLoss(exchange=exchange)).total
        assert total.dtype == torch.float32
        assert float(total.detach()) == pytest.approx(
            float(plain(*(t.detach().float() for t in found), "softmax")), rel=1e-6
        )


def test_large_logits_neither_overflow_nor_vanish():
    image, text = features(6, 3, dtype=torch.float32)
    found = leaves(image, text, torch.float32, scale=1000.0)
    expected = leaves(image.double(), text.double(), scale=1000.0)
    contrastive(*found[:3], loss=SoftmaxLoss(exchange="ring")).total.backward()
    plain(*expected, "softmax").backward()
    assert close([g.double() for g in gradients(found)], gradients(expected), 2e-4)


def around(ranks):
    ring, here = Ring(), torch.tensor([float(ranks.rank)])
    seen = [ranks.rank]
    for _ in range(ring.size):
        (here,) = ring.shift(here).wait()
        seen.append(int(here))
    return seen


def test_shifting_around_the_ring_ends_at_the_start():
    assert run_ranks(3, around) == [[0, 2, 1, 0], [1, 0, 2, 1], [2, 1, 0, 2]]
    assert Ring().size == 1 and Ring().shift(torch.ones(2)).wait()[0].tolist() == [1, 1]
