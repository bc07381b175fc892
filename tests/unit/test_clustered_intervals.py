"""Intervals for answers about shared images: restatements, coverage of the truth, and their use in tasks and comparisons."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from evals.report.compare import compare
from evals.slots.margins import interval
from evals.slots.selection_report import gain
from evals.suite import answers
from evals.tasks import pairs, questions
from evals.tasks.clusters import assign_clusters, difference_test, first_copies, mean_error, share_interval
from evals.tasks.questions import Answers
from evals.tasks.result import wilson
from tests.unit.test_compare import two

NAMES = st.lists(st.sets(st.integers(0, 8), min_size=1, max_size=3), min_size=1, max_size=12)


def plain_clusters(names):
    """Join answers with a common name until nothing changes."""
    found = list(range(len(names)))
    for _ in names:
        for i, one in enumerate(names):
            for j, other in enumerate(names):
                if one & other:
                    found[i] = found[j] = min(found[i], found[j])
    return found


@given(NAMES)
@settings(deadline=None)
def test_answers_with_a_common_image_are_one_cluster(names):
    expected, found = plain_clusters(names), assign_clusters(names)
    if len(set(expected)) == len(names):
        assert found is None
        return
    assert found is not None and found.min() == 0 and len(set(found.tolist())) == found.max() + 1
    same = np.equal.outer(expected, expected)
    assert np.array_equal(np.equal.outer(found, found), same)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 2), st.integers(0, 4)), min_size=2, max_size=30))
@settings(deadline=None)
def test_the_standard_error_is_that_of_sums_over_clusters(rows):
    values, strata, clusters = (np.asarray(column) for column in zip(*rows, strict=True))
    kinds = sorted(set(strata.tolist()))
    sums = {}
    for value, kind, cluster in zip(values.astype(float), strata, clusters, strict=True):
        here = values[strata == kind]
        sums[cluster] = sums.get(cluster, 0.0) + (value - here.mean()) / (len(kinds) * len(here))
    found = mean_error(values.astype(float), strata, clusters)
    if len(sums) == 1:
        assert math.isinf(found)
    else:
        assert found == pytest.approx((len(sums) / (len(sums) - 1) * sum(s**2 for s in sums.values())) ** 0.5)


def test_repeated_answers_count_once():
    right = np.array([True] * 30 + [False] * 20)
    clusters = np.arange(50)
    four = np.repeat(right, 4)
    low, high = share_interval(four, np.zeros(200), np.repeat(clusters, 4))
    assert (low, high) == pytest.approx(wilson(0.6, 49))  # 50 clusters, one degree of freedom for the mean
    assert high - low > 1.9 * np.diff(wilson(0.6, 200))[0]
    assert share_interval(np.ones(8, bool), np.zeros(8), np.array([0, 0, 1, 1, 2, 2, 3, 3])) == wilson(1.0, 4)
    # Answers that only differ within clusters give no narrower interval than independent answers.
    assert share_interval(np.array([True, False] * 20), np.zeros(40), np.repeat(np.arange(20), 2)) == wilson(0.5, 40)


def test_intervals_of_clusters_have_their_nominal_coverage():
    rng = np.random.default_rng(0)
    covered, naive = [], []
    clusters = np.repeat(np.arange(80), 5)
    for _ in range(400):
        difficulty = rng.beta(1, 1, 80)  # half of all answers are right, and questions about one image are similar
        right = rng.random(400) < difficulty[clusters]
        low, high = share_interval(right, np.zeros(400), clusters)
        covered.append(low < 0.5 < high)
        naive.append(wilson(right.mean(), 400)[0] < 0.5 < wilson(right.mean(), 400)[1])
    assert 0.92 < np.mean(covered) < 0.98 and np.mean(naive) < 0.85


@pytest.mark.parametrize("average", ["micro", "macro"])
def test_tasks_use_clusters_only_where_images_are_shared(average):
    torch.manual_seed(0)
    right = torch.rand(60) < 0.6
    kinds, keys = ["a", "b", "b"] * 20, [str(i) for i in range(60)]

    def scored(images):
        return questions.score(
            "choice", Answers({"acc": right}, {"acc": torch.full((60,), 0.5)}, kinds, keys, (), images), average
        )

    alone, own, shared = scored(()), scored([(i,) for i in range(60)]), scored([(i // 3,) for i in range(60)])
    assert alone.intervals == own.intervals and "cluster" not in own.predictions
    assert shared.metrics == alone.metrics and shared.counts == {"clusters": 20}
    assert "the 60 questions are grouped into 20 independent clusters" in " ".join(shared.remarks())
    strata = np.asarray(kinds) if average == "macro" else np.zeros(60)
    assert shared.intervals["acc"] == share_interval(right.numpy(), strata, np.arange(60) // 3)
    b = np.asarray(kinds) == "b"
    assert shared.intervals["acc/b"] == share_interval(right.numpy()[b], np.zeros(40), np.repeat(np.arange(20), 2))


def test_pairs_and_slots_have_the_same_intervals():
    torch.manual_seed(0)
    image, true, false = (F.normalize(torch.randn(60, 8), dim=-1) for _ in range(3))
    kinds, owners = ["add", "swap", "swap"] * 20, [i // 3 for i in range(60)]
    plain, found = (pairs.score(image, true, false, kinds, owners=of) for of in ((), owners))
    assert found.metrics == plain.metrics and found.intervals != plain.intervals
    right = torch.from_numpy(found.predictions["right"])
    numbers = torch.tensor([["add", "swap"].index(kind) for kind in kinds])
    clusters = assign_clusters([[owner] for owner in owners])
    assert clusters is not None
    assert interval(right, numbers, clusters) == found.intervals["macro"]
    other = torch.rand(60) < 0.5
    change = right.double().numpy() - other.double().numpy()
    assert gain(right, other, numbers, clusters)[1:] == difference_test(change, np.asarray(kinds), clusters)[0]


def test_comparisons_allow_for_shared_images(tmp_path):
    rng = np.random.default_rng(0)
    margins = [torch.from_numpy(np.repeat(rng.normal(size=40) + shift, 5)) for shift in (0.0, 0.3)]

    def compared(name, every, owners):
        first, second = (
            pairs.score_margins(margin[::every], ["a"] * (200 // every), owners=owners)._replace(
                keys=tuple(map(str, range(0, 200, every))), data="d"
            )
            for margin in margins
        )
        one, other = two(tmp_path / name, first, second)
        return compare(one, other)

    alone, shared = compared("alone", 1, ()), compared("shared", 1, [i // 5 for i in range(200)])
    assert shared.difference == alone.difference
    assert (shared.only_first, shared.only_second) == (alone.only_first, alone.only_second)
    widths = [np.ptp(found.interval) for found in (shared, alone)]
    assert widths[0] == pytest.approx(5**0.5 * widths[1], rel=0.15)
    assert alone.p is not None and shared.p is not None and shared.p > alone.p
    # As if every image had one question.
    assert shared.interval == pytest.approx(compared("images", 5, ()).interval, abs=0.03)


def test_answers_of_plugins_may_share_an_image():
    right = torch.tensor([True, True, False, False, True, True])
    made = answers.Answers({"acc": right, "other": ~right}, {"acc": 0.5, "other": 0.25}, kinds=["x"] * 3 + ["y"] * 3)
    plain, joint = (answers.score_answers(of, "longer") for of in (made, made._replace(images=list("aabbcc"))))
    assert plain.n == joint.n == 6 and plain.keys == () and plain.chance == pytest.approx(0.5)
    assert plain.options["chance_other"] == pytest.approx(0.25)
    assert plain.metrics == joint.metrics and plain.metrics["acc/x"] == pytest.approx(2 / 3)
    assert plain.intervals["acc"] == wilson(2 / 3, 6) and joint.predictions["cluster"].tolist() == [0, 0, 1, 1, 2, 2]
    low, high = joint.intervals["acc"]
    # Three images with two equal answers each.
    assert (low, high) == pytest.approx(share_interval(right.numpy(), np.zeros(6), np.repeat(range(3), 2)))
    assert low < plain.intervals["acc"][0] and high > plain.intervals["acc"][1]
    for name in ("keys", "kinds", "images"):
        with pytest.raises(ValueError, match=rf"Answers\.{name}: has 5 entries for 6 answers"):
            answers.score_answers(made._replace(**{name: list("aabbc")}), "longer")


def test_copies_of_an_image_are_found_by_their_encodings():
    g = torch.Generator().manual_seed(0)
    images = F.normalize(torch.randn(40, 64, generator=g), dim=-1)
    order = torch.randperm(120, generator=g) % 40
    rows = images[order] * (1 + 1e-7 * torch.randn(120, 1, generator=g))  # as computed in another batch
    first = {int(image): order.tolist().index(int(image)) for image in order.unique()}
    assert first_copies(rows.split(50)) == [first[int(image)] for image in order]
    assert first_copies([images]) == list(range(40)) and first_copies([]) == []
    assert first_copies([images[:1]]) == [0]
    # A model that has learned little: images differ in the sixth digit, and copies by rounding only.
    little = images[:1] + 1e-5 * images
    assert first_copies([little.double()[order]]) == [first[int(image)] for image in order]
    assert first_copies([images[:1].expand(5, -1)]) == list(range(5))
