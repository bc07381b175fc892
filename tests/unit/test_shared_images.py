"""Images that several sets contain are encoded once per checkpoint, and every set gets the encodings that it would compute itself."""

import json
import shutil

import numpy as np
import pytest
import torch

from evals.feature_store.features import FeatureStore
from evals.suite import catalogue
from evals.suite.suite import Suite
from tests.helpers import compositional as made


@pytest.fixture
def root(tmp_path):
    for write in (made.sugar_crepe_pp, made.negbench, made.aro, made.bivlc, made.whatsup, made.winoground):
        write(tmp_path / "data")
    return tmp_path / "data"


def suite(root, *names, store=None):
    return Suite({name: catalogue.tasks(name, root)[name] for name in names}, store)


NAMES = (
    "sugar_crepe_pp",
    "negbench/coco_mcq",
    "negbench/coco_retrieval",
    "aro/vg_relation",
    "aro/vg_attribution",
    "bivlc",
    "whatsup/a",
)


def test_results_are_those_of_separate_scoring(root, tmp_path):
    together, apart = made.BagOfWords(), made.BagOfWords()
    found = suite(root, *NAMES, store=FeatureStore(tmp_path / "store")).run(together)
    expected = suite(root, *NAMES, store=FeatureStore()).run(apart)
    for name in NAMES:
        assert found[name].metrics == expected[name].metrics and found[name].keys == expected[name].keys, name
        for key, values in expected[name].predictions.items():
            assert np.array_equal(found[name].predictions[key], values), (name, key)
    # SugarCrepe++ has the images of seeds 0 to 10, both sets of NegBench five and What'sUp eleven of them. Both sets of
    # ARO have the same regions.
    assert apart.num_images - together.num_images == 5 + 5 + 11 + len(regions(root))


def regions(root):
    rows = json.loads((root / "aro/visual_genome_relation.json").read_text())
    return {(row["image_path"], row["bbox_x"], row["bbox_w"]) for row in rows}


def test_a_changed_image_is_encoded_again(root, tmp_path):
    store = FeatureStore(tmp_path / "store")
    suite(root, "sugar_crepe_pp", store=store).run(made.BagOfWords())
    changed = root / "negbench/val2017/000000000003.jpg"
    made.picture(changed, 999)
    encoder = made.BagOfWords()
    found = suite(root, "negbench/coco_mcq", store=store).run(encoder)
    assert encoder.num_images == 1
    expected = suite(root, "negbench/coco_mcq", store=FeatureStore()).run(made.BagOfWords())
    assert found["negbench/coco_mcq"].metrics == expected["negbench/coco_mcq"].metrics


def test_another_model_shares_nothing(root, tmp_path):
    store = FeatureStore(tmp_path / "store")
    suite(root, "sugar_crepe_pp", store=store).run(made.BagOfWords())
    other = made.BagOfWords()
    torch.nn.init.constant_(other.model.weight, 3.0)
    suite(root, "negbench/coco_mcq", store=store).run(other)
    assert other.num_images == 5


def test_damaged_digests_or_parts_are_not_used(root, tmp_path):
    suite(root, "sugar_crepe_pp", store=FeatureStore(tmp_path / "store")).run(made.BagOfWords())
    (part,) = (tmp_path / "store/images").glob("*/part-00000.digests.npy")
    part.write_bytes(part.read_bytes()[:-1] + b"x")
    encoder = made.BagOfWords()
    suite(root, "negbench/coco_mcq", store=FeatureStore(tmp_path / "store")).run(encoder)
    assert encoder.num_images == 5


def test_a_set_is_complete_although_all_its_images_are_known(root, tmp_path):
    store = FeatureStore(tmp_path / "store")
    suite(root, "negbench/coco_mcq", store=store).run(made.BagOfWords())
    shutil.copytree(root / "negbench", root / "copy/negbench")
    encoder = made.BagOfWords()
    found = suite(root / "copy", "negbench/coco_mcq", store=store).run(encoder)
    assert encoder.num_images == 0 and found["negbench/coco_mcq"].n == 12
