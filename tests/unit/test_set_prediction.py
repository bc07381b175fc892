"""Sets of objects: how scenes are read, and predictions matched and scored, compared with the published rules."""

import contextlib
import itertools
import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from evals.sets.objects import ATTRIBUTES, WIDTH, attribute_columns, object_rows
from evals.tasks.objects import average_precision as ap
from object_centric.objectives.set_prediction import SetPrediction, SetPredictionConfig, cheapest_pairs
from sparo_train.core.contracts import Progress
from sparo_train.core.errors import BadSampleError

COLUMNS = attribute_columns()
SMALL = {
    "image_size": 16,
    "encoder": {"channels": [8, 8], "strides": [2, 2]},
    "features": 8,
    "grouping": {"preset": "sa_me", "slots": 3, "width": 8},
}


ODD_PLACES = ([1, 2], "abc", [1, 2, "x"], None, [1, 2, float("nan")], [1, 2, 1e300], [1, 2, 10**400])


def thing(**changed):
    return {
        "size": "small",
        "material": "metal",
        "shape": "cylinder",
        "color": "cyan",
        "3d_coords": [3, -3, 0.0],
        **changed,
    }


def test_a_scene_is_read_with_clevrs_own_keys_or_ours():
    (row,) = object_rows(json.dumps({"objects": [thing()]}).encode())
    assert row.shape == (WIDTH,) and row[:3].tolist() == [1, 0, 0.5] and row[-1] == 1 and row.sum() == 6.5
    said = {name: ATTRIBUTES[name][int(row[at].argmax())] for name, at in COLUMNS.items()}
    assert said == {"size": "small", "material": "metal", "shape": "cylinder", "color": "cyan"}
    ours = thing(position=[3, -3, 0.0])
    del ours["3d_coords"]
    assert object_rows(json.dumps({"objects": [ours]}).encode())[0].tolist() == row.tolist()
    assert object_rows(b'{"objects": []}').shape == (0, WIDTH)


BAD = {
    "no list `objects`": [b"", b"[1", b"[]", b'{"objects": 3}', b"\xff", b'{"thing": []}'],
    "is not a mapping": [b'{"objects": [1]}'],
    "color='pink' is not one of gray": [json.dumps({"objects": [thing(color="pink")]}).encode()],
    "shape=None is not one of cube": [json.dumps({"objects": [thing(shape=None)]}).encode()],
    "is not x, y, z": [json.dumps({"objects": [thing(**{"3d_coords": at})]}).encode() for at in ODD_PLACES],
}  # fmt: skip


@pytest.mark.parametrize("told", BAD)
def test_an_invalid_scene_is_a_bad_sample(told):
    for text in BAD[told]:
        with pytest.raises(BadSampleError, match=told):
            object_rows(text)


WORDS = st.sampled_from(["objects", "size", "3d_coords", "x"])
TREES = st.recursive(
    st.none() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
)


@settings(max_examples=60, deadline=None)
@given(TREES)
def test_any_json_is_rows_or_a_bad_sample(tree):
    with contextlib.suppress(BadSampleError):
        assert object_rows(json.dumps(tree).encode()).shape[1] == WIDTH


def plain(predicted, true, columns, threshold, dspn=False):
    """Compute average precision object by object, like `average_precision_clevr` of the authors' code."""
    listed = [(row, image) for image, rows in enumerate(predicted) for row in rows]
    # np.argsort(confidence)[::-1] in the authors' code: equal confidences are visited in reverse order.
    listed = [listed[i] for i in np.argsort([row[-1] for row, _ in listed], kind="stable")[::-1]]
    taken, hits = set(), []
    for row, image in listed:
        best, at = 1e9, None
        for number, other in enumerate(true[image]):
            if dspn and (image, number) in taken:
                continue
            if all(row[c].argmax() == other[c].argmax() for c in columns.values()):
                far = np.linalg.norm((row[:3].astype(float) - other[:3]) * 6)
                if far < best:
                    best, at = far, number
        hit = at is not None and best < threshold and (image, at) not in taken
        if hit:
            taken.add((image, at))
        hits.append(hit)
    total = sum(map(len, true))
    right = np.cumsum(hits)
    recall, precision = [0, *(right / total), 1], [0, *(right / np.arange(1, len(hits) + 1)), 0]
    for i in reversed(range(len(precision) - 1)):
        precision[i] = max(precision[i], precision[i + 1])
    return sum((recall[i + 1] - recall[i]) * precision[i + 1] for i in range(len(recall) - 1))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 999), st.sampled_from(ap.THRESHOLDS), st.booleans())
def test_average_precision_is_the_published_one(images, slots, seed, threshold, dspn):
    rng = np.random.default_rng(seed)
    few = {"a": slice(3, 5), "b": slice(5, 7)}  # few attributes, so that many agree

    def rows(n):
        found = np.zeros((n, 8), np.float32)
        found[:, :3] = rng.integers(0, 4, (n, 3)) / 12
        found[np.arange(n), 3 + rng.integers(0, 2, n)] = found[np.arange(n), 5 + rng.integers(0, 2, n)] = 1
        found[:, -1] = rng.integers(0, 4, n) / 4  # many equal confidences
        return found

    predicted, true = [rows(slots) for _ in range(images)], [rows(rng.integers(0, 4)) for _ in range(images)]
    if not sum(map(len, true)):
        return
    result = ap.score(predicted, true, few, 6.0, "dspn" if dspn else "nearest")
    expected = plain(predicted, true, few, threshold, dspn)
    assert result.metrics[f"ap_{threshold:g}"] == pytest.approx(expected, abs=1e-12)
    assert all(low <= high for low, high in result.intervals.values()) and result.counts["objects"] == sum(
        map(len, true)
    )


def test_equal_confidences_are_visited_in_reverse_order_as_in_the_reference():
    true = np.zeros((1, WIDTH), np.float32)
    true[:, 3] = true[:, 5] = true[:, 7] = true[:, 10] = 1
    right, wrong = np.repeat(true, 1, 0), np.repeat(true, 1, 0)
    wrong[0, 3:5] = 0, 1
    right[0, -1] = wrong[0, -1] = 0.5
    predicted = np.concatenate([right, wrong])
    assert ap.score([predicted], [true], COLUMNS, 6.0).metrics["ap_inf"] == pytest.approx(0.5)
    assert ap.score([predicted[::-1]], [true], COLUMNS, 6.0).metrics["ap_inf"] == 1


def test_average_precision_matches_each_object_once_by_confidence():
    true = np.zeros((2, WIDTH), np.float32)
    true[:, 3] = true[:, 5] = true[:, 7] = true[:, 10] = 1
    true[1, 0] = 0.5  # three units away
    twice = true[[0, 0]].copy()
    twice[:, -1] = 0.9, 0.8
    assert ap.score([twice], [true], COLUMNS, 6.0).metrics["ap_inf"] == pytest.approx(0.5)
    assert ap.score([twice], [true], COLUMNS, 6.0, "dspn").metrics["ap_inf"] == 1
    assert ap.score([twice], [true], COLUMNS, 6.0, "dspn").metrics["ap_1"] == pytest.approx(0.5)
    sure = np.concatenate([true, true])
    sure[:2, -1], sure[2:, -1], sure[2:, 3:5] = 0.9, 0.1, (0, 1)
    assert (
        ap.score([sure], [true], COLUMNS, 6.0).metrics["ap_0.0625"] == 1
    )  # predictions without an object cost nothing
    sure[:2, -1], sure[2:, -1] = 0.1, 0.9
    assert ap.score([sure], [true], COLUMNS, 6.0).metrics["ap_inf"] == pytest.approx(0.5)


def test_the_loss_is_that_of_the_cheapest_of_all_matchings():
    torch.manual_seed(0)
    objective = SetPrediction(SetPredictionConfig.model_validate({"model": SMALL, "huber": 0.3}))
    noise = torch.randn(4, *objective.config.model.noise)
    objects = torch.rand(4, 3, WIDTH).round()
    objects[2, 1:] = 0
    images = torch.randint(0, 256, (4, 3, 16, 16), dtype=torch.uint8)
    batch = {"image": images, "noise": noise, "objects": objects}
    loss = objective(batch, Progress(0, 10, 0))
    found = objective.model(objective.pixels(images), noise).objects
    cheapest = [
        min(
            sum(F.huber_loss(rows[i], true[j], reduction="mean", delta=0.3) for i, j in enumerate(order))
            for order in itertools.permutations(range(3))
        )
        for rows, true in zip(found, objects, strict=True)
    ]
    assert loss.total.item() == pytest.approx(torch.stack(cheapest).mean().item(), rel=1e-6)  # type: ignore[arg-type]
    loss.total.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in objective.parameters())
    shuffled = {**batch, "objects": objects[:, [2, 0, 1]]}
    assert objective(shuffled, Progress(0, 10, 0)).total.item() == pytest.approx(loss.total.item(), rel=1e-6)
    with torch.no_grad():
        objective.model.head[2].weight[0, 0] = torch.nan
    assert objective(batch, Progress(0, 10, 0)).total.isnan()  # the training loop skips such a step


def test_matching_accepts_costs_of_nan():
    rows, columns = cheapest_pairs(torch.full((2, 3, 3), torch.nan)).unbind(1)
    assert sorted(rows[0].tolist()) == sorted(columns[1].tolist()) == [0, 1, 2]
