"""Rendered stand-ins for compositional sets: true to their scenes, readable by the readers of the published sets, reproducible."""

import csv
import hashlib
import json

import numpy as np
import pytest

from evals.suite import catalogue
from evals.suite.question_tasks import load_questions
from evals.suite.suite import Suite
from sparo_data.synthetic.scene_questions import SceneQuestionsConfig, render_questions, shuffle_words
from sparo_train.core.errors import DataError
from tests.helpers.compositional import BagOfWords

NAMES = ["winoground", "colorswap", "aro/vg_relation", "aro/vg_attribution", "aro/coco_order", "negbench/coco_mcq"]
CONFIG = SceneQuestionsConfig(questions=120, size=16, antialias=1)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("scene_questions")
    render_questions(root, CONFIG, processes=1)
    return root


def test_every_set_is_read_and_scored(root):
    tasks = catalogue.tasks("compositional", root)
    assert list(tasks) == NAMES
    results = Suite(tasks).run(BagOfWords())
    assert {name: result.n for name, result in results.items()} == dict.fromkeys(NAMES, 120)
    # Captions with the same words in another order are ties for a bag of words: wrong, except for ARO's orders.
    assert results["winoground"].metrics["text"] == results["colorswap"].value == results["aro/vg_relation"].value == 0
    assert results["aro/coco_order"].value == 1
    assert results["aro/vg_relation"].metrics["blind"] < 0.65 and results["aro/coco_order"].metrics["blind"] > 0.9


def test_captions_of_a_question_have_the_same_words(root):
    for name in NAMES[:5]:
        (task,) = catalogue.tasks(name, root).values()
        _, questions = load_questions(task)
        for question in questions:
            assert len({tuple(sorted(text.split())) for text in question.texts}) == 1, question


def test_negated_captions_are_true_or_false_of_the_scene(root):
    with (root / "negbench/COCO_val_mcq_llama3.1_rephrased.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert {row["correct_answer_template"] for row in rows} == {"positive", "negative", "hybrid"}
    for row in rows:
        right, (hybrid, positive, negative) = row["caption_0"], (row[f"caption_{k}"] for k in (1, 2, 3))
        absent, present = (text.removeprefix("a ") for text in hybrid.split(" but no "))
        assert positive == f"a {present} and a {absent}" and negative.startswith("no ") and absent not in negative
        if "no " in right:
            assert f"no {absent}" in right
        else:
            assert absent not in right and present in right


def test_orders_are_those_of_aro():
    text = "a small red rubber cube to the left of a large blue metal sphere"
    nouns, others, trigrams, order = shuffle_words(text, np.random.default_rng(0))
    where = {word: i for i, word in enumerate(text.split())}
    fixed = ["a", "to", "the", "left", "of"]
    assert [w for w in nouns.split() if w in fixed] == [w for w in text.split() if w in fixed] and nouns != text
    assert all(
        others.split()[where[w]] == w for w in ("small", "red", "rubber", "cube", "large", "blue", "metal", "sphere")
    )
    for i in range(0, 14, 3):
        assert sorted(trigrams.split()[i : i + 3]) == sorted(text.split()[i : i + 3])
    parts = [" ".join(text.split()[i : i + 3]) for i in range(0, 14, 3)]
    assert all(part in order for part in parts) and order != text


def test_equal_options_give_equal_files_and_others_are_refused(root, tmp_path):
    render_questions(tmp_path, CONFIG, processes=1)

    def digest(place):
        files = sorted(path for path in place.rglob("*") if path.is_file())
        return {path.relative_to(place).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}

    assert digest(tmp_path) == digest(root)
    with pytest.raises(DataError, match=r"contains a set with other options \(seed"):
        render_questions(tmp_path, SceneQuestionsConfig(questions=120, size=16, antialias=1, seed=1), processes=1)
    # An interrupted call continues with the sets whose file is missing.
    (tmp_path / "colorswap/test.json").unlink()
    render_questions(tmp_path, CONFIG, processes=1)
    assert digest(tmp_path) == digest(root) and len(json.loads((tmp_path / "colorswap/test.json").read_text())) == 120
