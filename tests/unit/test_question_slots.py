"""Slots on questions: sums over slots equal the scores of `sparo eval`, for every form of question and on the explorer's page."""

import numpy as np
import pytest
import torch

from evals.feature_store.features import FeatureStore
from evals.slots import selection_methods
from evals.slots.eval_inputs import Pairs, Questions, halves, make_pairs, material, question_groups
from evals.slots.mask_study import MaskTraining, mask_row
from evals.slots.page_arrays import make_arrays
from evals.slots.selection_report import ChoiceOptions, choose, report
from evals.slots.units import make_units
from evals.suite import catalogue
from evals.suite.suite import Suite
from sparo_train.core.errors import ConfigError
from tests.helpers import compositional as made


class WithSlots(made.BagOfWords):
    slots = 4


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    root = tmp_path_factory.mktemp("questions")
    for write in (
        made.winoground,
        made.mmvp,
        made.sugar_crepe_pp,
        made.aro,
        made.negbench,
        made.svo,
        made.crepe,
        made.whatsup,
    ):
        write(root)
    names = ["winoground", "mmvp_vlm", "sugar_crepe_pp", "aro/vg_relation", "negbench/coco_mcq", "svo_probes", "crepe/productivity", "whatsup/a"]  # fmt: skip
    tasks = {name: catalogue.tasks(name, root)[name] for name in names}
    encoder = WithSlots()
    return tasks, make_units(encoder), FeatureStore(), Suite(tasks).run(encoder)


def test_all_slots_together_give_the_tasks_score(world):
    tasks, units, store, results = world
    for name, task in tasks.items():
        each = material(name, task, units, store)
        margins = each.margins()
        total = margins.values.sum(1) + margins.fixed
        # Ties between sums over slots are exact here, because the products of equal vectors are added in the same order.
        assert float(margins.accuracy(margins.right_answers(total))) == pytest.approx(results[name].value), name
        assert isinstance(each, Pairs) == (name == "aro/vg_relation"), name


def test_a_selection_is_made_and_reported_on_questions(world):
    tasks, units, store, _ = world
    for name in ("winoground", "negbench/coco_mcq", "sugar_crepe_pp"):
        each = material(name, tasks[name], units, store)
        assert isinstance(each, Questions) and len(question_groups(each)) == len(each.questions)
        options = ChoiceOptions(k=2, method="forward")
        shown = report(name, each, choose(name, each, options), options)
        assert shown.share == "held out" and 0 < shown.n < len(each.questions) and len(shown.curve) == 4
    margins = material("negbench/coco_mcq", tasks["negbench/coco_mcq"], units, store).margins()
    alone = selection_methods.accuracies(margins)
    expected = [float(margins.accuracy(margins.right_answers(margins.values[:, u]))) for u in range(4)]
    assert alone.tolist() == pytest.approx(expected)


def test_images_and_captions_of_one_question_are_not_split(world):
    tasks, units, store, _ = world
    each = material("sugar_crepe_pp", tasks["sugar_crepe_pp"], units, store)
    half = halves("x", each, 0)
    images = [
        {q.images[0] for q, chosen in zip(each.questions, half.tolist(), strict=True) if chosen is side}
        for side in (True, False)
    ]
    assert not images[0] & images[1]


def test_masks_are_trained_on_right_and_wrong_captions(world):
    tasks, units, store, _ = world
    counts = {"negbench/coco_mcq": 12 * 3, "winoground": 8 * 2, "sugar_crepe_pp": 25 * 2}
    for name, count in counts.items():
        pairs = make_pairs(name, material(name, tasks[name], units, store))
        row, (trained,) = mask_row(name, pairs, {}, "unit", [MaskTraining(epochs=2)])
        assert trained.n == count and trained.mask.shape == (4,) and 0 <= row.pairs[0] <= 1
    with pytest.raises(ConfigError, match=r"svo_probes: masks of slots are trained on pairs of a right"):
        make_pairs("svo_probes", material("svo_probes", tasks["svo_probes"], units, store))


def test_the_page_gets_the_comparisons(world):
    tasks, units, store, results = world
    for name in ("negbench/coco_mcq", "winoground", "crepe/productivity"):
        arrays = make_arrays(name, tasks[name], units, store)
        wide = arrays.facts["comparisons"]
        total = torch.from_numpy(arrays.arrays["left"].sum(0)).view(-1, wide)
        tie = torch.from_numpy(arrays.arrays["tie"]).bool().view(-1, wide)
        right = ((total > 0) | (tie & (total >= 0))).all(1).numpy()
        assert arrays.kind == "questions" and np.mean(right) == pytest.approx(results[name].value)
        assert len(arrays.arrays["kinds"]) == len(right) == arrays.n
