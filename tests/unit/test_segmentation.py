"""Scores of masks compared with scikit-learn and with their definitions pixel by pixel."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment
from sklearn.metrics import adjusted_rand_score

from evals.tasks.objects.clip_segmentation import MaskedClip
from evals.tasks.objects.clip_segmentation import score as clip_score
from evals.tasks.objects.segmentation import Masked, adjusted_rand, count_pixels, image_scores, score
from evals.tasks.zeroshot import result_from_ranking

labels = st.integers(1, 60).flatmap(
    lambda n: st.tuples(*[st.lists(st.integers(0, 5), min_size=n, max_size=n) for _ in range(2)])
)


@settings(max_examples=200, deadline=None)
@given(labels)
def test_ari_equals_scikit_learn(pair):
    true, predicted = (np.array(x) for x in pair)
    found = image_scores(true, predicted)
    assert found["ari"] == pytest.approx(adjusted_rand_score(true, predicted), abs=1e-12)
    inside = true != 0
    if inside.any():
        assert (
            found["fg_ari"]
            == found["fg_ari_savi"]
            == pytest.approx(adjusted_rand_score(true[inside], predicted[inside]), abs=1e-12)
        )
    else:
        assert np.isnan(found["fg_ari"]) and found["fg_ari_savi"] == 1


@settings(max_examples=100, deadline=None)
@given(labels)
def test_overlaps_are_the_best_of_all_matchings(pair):
    true, predicted = (np.array(x) for x in pair)
    objects, masks = sorted(set(true) - {0}), sorted(set(predicted))
    iou = {
        (o, m): ((true == o) & (predicted == m)).sum() / ((true == o) | (predicted == m)).sum()
        for o in objects
        for m in masks
    }
    found = image_scores(true, predicted)
    if not objects:
        assert np.isnan(found["miou"]) and np.isnan(found["mbo_i"])
        return
    slots = [*masks, *[None] * len(objects)]
    every = itertools.permutations(slots, len(objects)) if len(slots) < 9 else []
    best = max((sum(iou.get((o, m), 0) for o, m in zip(objects, some, strict=True)) for some in every), default=None)
    assert best is None or found["miou"] == pytest.approx(best / len(objects), abs=1e-12)
    assert found["mbo_i"] == pytest.approx(np.mean([max(iou[o, m] for m in masks) for o in objects]), abs=1e-12)
    assert found["miou"] <= found["mbo_i"] + 1e-12 and found["slots_used"] == len(masks)


def test_counts_of_whole_clips_do_not_overflow():
    rng = np.random.default_rng(0)
    true = np.repeat(rng.integers(0, 3, (24, 128, 1)), 128, axis=2)
    predicted = np.where(rng.random(true.shape) < 0.05, 0, true)
    assert image_scores(true, predicted)["ari"] == pytest.approx(
        adjusted_rand_score(true.ravel(), predicted.ravel()), abs=1e-9
    )
    assert adjusted_rand(np.array([[2**40, 0], [0, 2**41]])) == 1  # beyond int64 when squared
    one = np.zeros((256, 256), int)
    assert image_scores(one + 1, np.arange(256 * 256).reshape(256, 256) % 2)["fg_ari"] == 0


@settings(max_examples=60, deadline=None)
@given(labels)
def test_ignored_pixels_count_nowhere_and_instances_of_a_class_are_merged(pair):
    true, predicted = (np.array(x) for x in pair)
    kept = true != 5
    found, expected = image_scores(true, predicted, ignore=5), image_scores(true[kept], predicted[kept])
    assert all(found[name] == pytest.approx(value, abs=1e-12, nan_ok=True) for name, value in expected.items())
    classes = np.array([0, 1, 1, 2, 2, 3])[true]
    found = image_scores(true, predicted, classes=classes)
    assert found["mbo_c"] == pytest.approx(image_scores(classes, predicted)["mbo_i"], abs=1e-12, nan_ok=True)
    assert np.isnan(image_scores(true, predicted)["mbo_c"])
    found = image_scores(true, predicted, ignore=5, classes=classes)["mbo_c"]  # by the mask's label, whatever its class
    assert found == pytest.approx(image_scores(classes[kept], predicted[kept])["mbo_i"], abs=1e-12, nan_ok=True)


def test_a_set_reports_excluded_images():
    full = np.array([[0, 1], [2, 2]])
    empty = np.zeros((2, 2), int)
    found = score([Masked(full, full), Masked(empty, full), Masked(full, empty)])
    assert found.n == 2 and found.counts == {"images": 3, "empty": 1}
    assert found.metrics["fg_ari"] == pytest.approx(np.mean([1, 0])) and found.metrics["fg_ari_savi"] == pytest.approx(
        2 / 3
    )
    assert found.predictions["fg_ari"].shape == (3,) and found.options["background"] == 0
    nothing = score([Masked(empty, empty)])  # a missing score is not a score of zero
    assert (
        nothing.n == 0
        and set(nothing.metrics) == {"ari", "fg_ari_savi", "fg_ari_videosaur"}
        and score([]).metrics == {}
    )
    with pytest.raises(ValueError, match=r"masks of \(1, 2\) and \(2, 2\) differ in size"):
        count_pixels(full, full[:1])
    assert count_pixels(full + 10_000_000, full).table.shape == (3, 3)  # labels may be any numbers


def as_videosaur_has_it(true, predicted, ignored):
    """Return FG-ARI, Hungarian IoU and best overlap from one-hot masks, or None if an image is omitted."""
    there = (true != ignored).astype(np.float64)
    one_hot = np.stack([(true == k) * there for k in range(6)], -1).reshape(-1, 6)
    own = np.stack([predicted == k for k in range(6)], -1).reshape(-1, 6).astype(np.float64)
    objects = one_hot[:, 1:]
    n = objects.T @ own
    a, b, points = n.sum(1), n.sum(0), n.sum()
    pairs, rows, columns = ((x * (x - 1)).sum() for x in (n, a, b))
    expected, most = rows * columns / max(points * (points - 1), 1), (rows + columns) / 2
    ari = (pairs - expected) / (most - expected) if most != expected else 1.0
    own = own * there.reshape(-1, 1)
    both = objects.T @ own
    union = objects.sum(0)[:, None] + own.sum(0)[None] - both
    iou = np.divide(both, union, out=np.zeros_like(both), where=union > 0)
    many = (objects.sum(0) > 0).sum()
    matched = iou[linear_sum_assignment(-iou)].sum()
    return ari if one_hot.sum() else None, matched / many if many else None, iou.max(1).sum() / many if many else None


@settings(max_examples=60, deadline=None)
@given(labels)
def test_scores_equal_videosaurs(pair):
    true, predicted = (np.array(x) for x in pair)
    found = image_scores(true, predicted, ignore=5)
    for name, expected in zip(
        ("fg_ari_videosaur", "miou", "mbo_i"), as_videosaur_has_it(true, predicted, 5), strict=True
    ):
        assert np.isnan(found[name]) if expected is None else found[name] == pytest.approx(expected, abs=1e-6), name


def test_the_share_of_each_slot_is_reported():
    true = np.array([[1, 1], [0, 2]])
    found = score([Masked(true, np.array([[0, 0], [2, 2]])), Masked(true, np.array([[0, 1], [0, 0]]))], slots=4)
    assert found.predictions["coverage"].tolist() == [[0.5, 0, 0.5, 0], [0.75, 0.25, 0, 0]]
    assert [found.counts[f"images_of_slot_{k}"] for k in range(4)] == [2, 1, 1, 0]


def test_n_belongs_to_the_headline_and_feature_errors_have_no_psnr():
    there, none = np.array([[1, 0]]), np.zeros((1, 2), int)
    masks = [Masked(there, there)] + [Masked(none, none)] * 5
    found = score(masks)
    assert (found.n, found.with_headline("fg_ari").n, found.with_headline("fg_ari_savi").n) == (1, 1, 6)
    clip = MaskedClip(there[None], there[None], np.array([0.01]))
    assert clip_score([clip]).metrics["psnr"] == pytest.approx(20, abs=1e-4)
    of_features = clip_score([clip], pixels=False)
    assert "psnr" not in of_features.metrics and of_features.metrics["mse"] == pytest.approx(0.01)


def test_a_mean_over_classes_has_its_interval():
    labels = torch.tensor([0] * 990 + [1] * 10)
    found = torch.zeros(1000, 1, dtype=torch.long)
    found[-5:] = 1  # five of ten of the rare class are right
    result = result_from_ranking(found, labels, 2, "zeroshot")._replace(headline="mean_per_class_recall")
    low, high = result.interval
    assert (
        result.value == 0.75 and low < 0.62 and high > 0.88
    )  # half depends on the class of five right answers, whose interval is 0.2 to 0.8
