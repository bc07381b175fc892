"""The permutation-invariant probe: assignments compared with all permutations; it finds what is linear, and nothing that is absent."""

import itertools
import json

import numpy as np
import pytest

from evals.sets.view_set import ClipSet, ObjectClipSet
from evals.tasks.objects.slot_probe import ProbedClip, assign_slots, fit_ridge, match_slots, score
from object_centric.tasks.probe_task import SLOT_PROBE
from sparo_data.synthetic.video_sets import VideoSetConfig, render_videos
from sparo_data.writer import write_wds_layout
from sparo_train.core.errors import DataError

COLORS = ("blue", "green", "red")


def clips(count, slots=5, objects=3, times=4, width=16, noise=0.05, seed=0, told=True):
    """Return slots that encode an object's position, velocity and colour linearly, in a random order per clip; the others are noise."""
    rng = np.random.default_rng(seed)
    says = rng.normal(size=(3 + 3 + 3, width))
    made = []
    for _ in range(count):
        position, velocity = (rng.normal(size=(times, objects, 3)) for _ in range(2))
        words = rng.integers(0, 3, objects)
        facts = np.concatenate([position, velocity, np.broadcast_to(np.eye(3)[words], (times, objects, 3))], -1)
        table = noise * rng.normal(size=(times, slots, width))
        order = rng.permutation(slots)[:objects]
        if told:
            table[:, order] += facts @ says
        made.append(ProbedClip(table, position, {"velocity": velocity}, {"color": [COLORS[w] for w in words]}))
    return made


def test_assignment_equals_exhaustive_search():
    some = clips(6, seed=3)
    weights = np.random.default_rng(1).normal(size=(17, 3))
    slots_of, total = assign_slots(some, weights)
    by_hand = 0.0
    for clip, own in zip(some, slots_of, strict=True):
        said = clip.slots @ weights[:-1] + weights[-1]
        errors = {p: ((said[:, list(p)] - clip.position) ** 2).sum() for p in itertools.permutations(range(5), 3)}
        assert min(errors, key=errors.__getitem__) == tuple(own)
        by_hand += min(errors.values())
    assert total == pytest.approx(by_hand)


def test_a_ridge_with_zero_penalty_is_least_squares():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(50, 4)), rng.normal(size=(50, 2))
    theirs = np.linalg.lstsq(np.concatenate([x, np.ones((50, 1))], 1), y, rcond=None)[0]
    assert np.allclose(fit_ridge(x, y, 0.0), theirs)
    assert np.abs(fit_ridge(x, y, 10.0)[:-1]).sum() < np.abs(theirs[:-1]).sum()


def test_constant_targets_have_no_score():
    still = [c._replace(numbers={"velocity": np.zeros_like(c.numbers["velocity"])}) for c in clips(12)]
    found = score(still[:6], still[6:], restarts=2)
    assert "velocity_r2" not in found.metrics and all(np.isfinite(value) for value in found.metrics.values())


@pytest.mark.parametrize("level", [0.0, 0.1, 1e6 / 3])
def test_a_number_that_is_the_same_everywhere_has_no_score(level):
    rng = np.random.default_rng(0)

    def clips():
        same = {"w": np.full((4, 2, 3), level)}
        return [ProbedClip(rng.normal(size=(4, 5, 8)), rng.normal(size=(4, 2, 3)), same, {}) for _ in range(4)]

    assert "w_r2" not in score(clips(), clips(), 2).metrics


def test_a_slot_probe_finds_encoded_properties_only():
    every = clips(80)
    found = score(every[:40], every[40:], restarts=6)
    assert (
        found.metrics["position_r2"] > 0.95
        and found.metrics["velocity_r2"] > 0.95
        and found.metrics["color_accuracy"] == 1
    )
    low, high = found.intervals["position_r2"]
    assert low <= found.metrics["position_r2"] <= high and high - low < 0.1
    assert len(found.options["errors"]) == 6 and found.options["errors"] == sorted(found.options["errors"])
    nothing = clips(80, told=False)
    empty = score(nothing[:40], nothing[40:], restarts=3)
    assert empty.metrics["velocity_r2"] < 0.1 and empty.metrics["color_accuracy"] < 0.6
    # A start may end badly: the best of six is at least as good as the best of two.
    assert min(match_slots(every, 6).errors) <= min(match_slots(every, 2).errors)


def test_annotations_of_episodes_are_read_and_missing_ones_named(tmp_path):
    render_videos(tmp_path / "v", VideoSetConfig(train=1, test=3, frames=4, size=16, per_shard=12, max_objects=2), 1)
    _, images, fact = ObjectClipSet(tmp_path / "v/clips", 3).read(0)
    counts = {np.asarray(fact["position"]).shape, np.asarray(fact["numbers"]["velocity"]).shape}
    assert len(images) == fact["frames"] == 3 and counts == {(3, len(fact["words"]["shape"]), 3)}
    assert set(fact["words"]) == {"color", "shape", "material", "size"} and json.loads(json.dumps(fact)) == fact
    write_wds_layout(tmp_path / "uneven", [(f"{n}", {f"{t:03d}.png": b"" for t in range(n)}) for n in (2, 3)])
    with pytest.raises(DataError, match=r"has 3 frames, but the first sample has 2. Set frames: 2 or less"):
        ClipSet(tmp_path / "uneven", None).read(1)
    # The stored features of a given length must not hide this error.
    given, default = ClipSet(tmp_path / "uneven", 2), ClipSet(tmp_path / "uneven", None)
    assert given.identity() == default.identity() and given.stamp() != default.stamp()
    few = SLOT_PROBE.config(root=str(tmp_path / "v/clips"))
    with pytest.raises(DataError, match=r"has 3 usable episode\(s\), but probes need at least 4"):
        SLOT_PROBE.check(few)
    assert ObjectClipSet(tmp_path / "v/clips", 3).identity() != ObjectClipSet(tmp_path / "v/clips", 2).identity()
    for broken, told in (
        ({"objects": [{"positions": [1]}]}, "has no positions"),
        ({"objects": [{"positions": [[10**400, 0, 0]] * 4}]}, "has no positions"),
        ({}, "no list `objects`"),
    ):
        source = ObjectClipSet(tmp_path / "v/clips", 3)
        source._episode(0)
        key, where, episode = source._episode(0)
        episode.metadata = broken  # type: ignore[misc]
        source._episode = lambda number, of=(key, where, episode): of  # type: ignore[method-assign]
        with pytest.raises(DataError, match=told):
            source.read(0)
