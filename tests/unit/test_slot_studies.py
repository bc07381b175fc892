"""Slots after training: shares of scores, selections, masks and similarities, each compared with a plain loop."""

from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from evals.encoders.clip_encoder import ClipEncoder
from evals.feature_store.feature_table import Features
from evals.sets.base import Pair
from evals.slots import selection_methods as choosing
from evals.slots.eval_inputs import Pairs, halves, question_groups
from evals.slots.margins import Margins, class_curves, class_margins, each_unit, interval, pair_margins
from evals.slots.selection_report import gain
from evals.tasks import pairs, zeroshot
from sparo_train.core.errors import DataError
from sparo_train.models.clip_config import ClipConfig
from sparo_train.models.clip_model import Clip

U, V, C, N = 6, 3, 5, 70
SMALL = {"image_size": 32, "patch_size": 8, "width": 32, "head_width": 8, "layers": 3}


def clip(readout):
    torch.manual_seed(1)
    text = {"context_length": 16, "width": 32, "heads": 4, "layers": 2}
    config = {"backbone": "ViT-Tiny-16", "readout": readout, "embed_dim": 24, "vision": SMALL, "text": text}
    return ClipEncoder(Clip(ClipConfig.model_validate(config)), label="a model")


def whole_numbers(seed):
    """Return images (N, U, V), class vectors (C, U, V) and labels whose scores have ties and no rounding."""
    drawn = torch.Generator().manual_seed(seed)
    image, weights = (torch.randint(-2, 3, (n, U, V), generator=drawn).float() for n in (N, C))
    return image, weights, torch.randint(0, C, (N,), generator=drawn)


def by_mask(image, weights, labels, units):
    """Compute the plain form: everything except these units is zero."""
    mask = torch.zeros(U)
    mask[list(units)] = 1
    logits = (image * mask[:, None]).flatten(1) @ weights.flatten(1).T
    return zeroshot.rank_classes(logits, 1)[:, 0] == labels


@pytest.mark.parametrize("seed", range(3))
def test_one_pass_equals_one_masked_pass_per_slot(seed):
    image, weights, labels = whole_numbers(seed)
    found = each_unit(image.split(40), weights, labels)
    for unit in range(U):
        assert torch.equal(found.single_unit[:, unit], by_mask(image, weights, labels, [unit]))
        assert torch.equal(found.without[:, unit], by_mask(image, weights, labels, set(range(U)) - {unit}))
    assert torch.equal(found.whole, by_mask(image, weights, labels, range(U)))
    orders = [choosing.random_order(U, s) for s in range(3)]
    for order, curve in zip(orders, class_curves(image.split(33), weights, labels, orders), strict=True):
        for k in range(U):
            assert torch.equal(curve[:, k], by_mask(image, weights, labels, order[: k + 1]))


@pytest.mark.parametrize("seed", range(3))
def test_shares_of_margins_give_the_decisions_of_logits(seed):
    image, weights, labels = whole_numbers(seed)
    margins = class_margins(image.split(40), weights, labels, [""] * N)
    for order in (list(range(U)), choosing.random_order(U, seed)):
        curve = choosing.curve(margins, order)
        for k in range(U):
            assert torch.equal(curve[:, k], by_mask(image, weights, labels, order[: k + 1]))
    few = class_margins(image.split(40), weights, labels, [""] * N, keep=2)
    assert bool((few.right_answers(few.values.sum(1)) >= margins.right_answers(margins.values.sum(1))).all())


def test_pairs_are_scored_as_the_task_scores_them():
    image, true, false = (F.normalize(torch.randn(N, U * V), dim=-1) for _ in range(3))
    false[:5] = true[:5]  # ties count as wrong
    kinds = ["swap" if i % 3 else "add" for i in range(N)]
    shaped = [t.unflatten(1, (U, V)) for t in (image, true, false)]
    for average in ("macro", "micro"):
        margins = pair_margins(*shaped, kinds, [""] * N, average)
        right = margins.right_answers(margins.values.sum(1))
        whole = pairs.score(image, true, false, kinds, average)
        assert torch.equal(right, torch.from_numpy(whole.predictions["right"]))
        assert float(margins.accuracy(right)) == pytest.approx(whole.metrics[average], abs=1e-12)
        assert interval(right, margins.kinds) == pytest.approx(whole.intervals[average], abs=0.02)


def plain_greedy(margins, forward):
    chosen, left = [], list(range(margins.units))

    def score(units):
        right = (margins.values[:, units].sum(1) + margins.fixed > 0).all(1)
        kinds = margins.kinds.unique().tolist()
        return round(sum(float(right[margins.kinds == k].double().mean()) for k in kinds) / len(kinds), 10)

    while left:
        if forward:
            best = max(left, key=lambda u: (score([*chosen, u]), -u))
            chosen.append(best)
        else:
            best = max(left, key=lambda u: (score([x for x in left if x != u]), u))
            chosen.insert(0, best)
        left.remove(best)
    return chosen


@pytest.mark.parametrize("seed", range(4))
def test_greedy_orders_equal_exhaustive_search(seed):
    torch.manual_seed(seed)
    no = torch.zeros(N, 2, dtype=torch.bool)
    margins = Margins(torch.randn(N, U, 2) + 0.3, torch.randn(N, 2) * 0.1, no, torch.randint(0, 3, (N,)), [""] * N)
    assert choosing.forward(margins) == plain_greedy(margins, True)
    assert choosing.backward(margins) == plain_greedy(margins, False)


def test_set_cover_restarts_when_everything_is_covered():
    answers = torch.tensor([[1, 1, 0, 0], [1, 1, 0, 0], [1, 0, 0, 0], [0, 0, 1, 0], [0, 1, 0, 0], [0, 0, 0, 0]])
    values = (2 * answers - 1).float()[..., None]
    no = torch.zeros(6, 1)
    margins = Margins(values, no, no > 0, torch.zeros(6, dtype=torch.int64), [""] * 6)
    # 0 and 1 answer three questions each, 0 comes first. Then 1 and 2 add one each. 2 adds nothing once all are answered.
    assert choosing.cover(margins) == [0, 1, 2, 3]
    assert choosing.top(margins) == [0, 1, 2, 3] and choosing.bottom(margins) == [3, 2, 1, 0]


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10_000))
def test_every_method_orders_every_unit_once(seed):
    torch.manual_seed(seed)
    units, wrong = 1 + seed % 7, 1 + seed % 3
    values = torch.randint(-2, 3, (20, units, wrong)).float()
    tie = torch.rand(20, wrong) < 0.5
    margins = Margins(values, torch.zeros(20, wrong), tie, torch.randint(0, 2, (20,)), [""] * 20)
    # Means over kinds that are equal except for the order of summation: the lower index comes first.
    assert choosing.best_first(torch.tensor([(0.3 + 0.2) + 0.1, (0.1 + 0.2) + 0.3, 0.7]).double()) == [2, 0, 1]
    for method in choosing.METHODS.values():
        assert sorted(method(margins)) == list(range(units))


def test_a_gain_is_paired():
    first = torch.tensor([1, 1, 1, 0] * 50, dtype=torch.bool)
    second = torch.tensor([1, 1, 0, 0] * 50, dtype=torch.bool)
    kinds = torch.arange(200) % 2
    found = gain(first, second, kinds)
    assert found.value == pytest.approx(0.25) and 0.17 < found.low < 0.25 < found.high < 0.33
    assert gain(first, first, kinds) == (0, 0, 0)


def test_samples_of_a_group_are_in_one_half():
    found = [Pair("x", caption, "not it") for caption in ("a", "a", "b", "c", "c", "d", "e", "f")]
    owner = torch.tensor(
        [0, 1, 1, 2, 3, 4, 5, 6]
    )  # images 0 and 1 share a caption, and 1 has another one; 2 and 3 show the same object
    features = Features(
        [np.eye(7, 2, dtype=np.float32) + np.arange(7, dtype=np.float32)[:, None]], list("0123456"), [[]] * 7
    )
    nothing = torch.zeros(8, 2)
    units = cast(Any, None)
    pairs = Pairs(units, features, nothing, nothing, owner, found, "macro", "")
    groups = question_groups(pairs)
    assert groups == ["a", "a", "a", "c", "c", "d", "e", "f"]
    for seed in range(20):
        half = halves("x", pairs, seed).tolist()
        assert half[0] == half[1] == half[2] and half[3] == half[4] and 0 < sum(half) < 8
    one = Pairs(units, features, nothing, nothing, owner[:3], found[:3], "macro", "")
    with pytest.raises(DataError, match=r"has 1 different image\(s\), too few to be split"):
        halves("x", one, 0)
