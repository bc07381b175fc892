"""Babel-ImageNet: names and prompts of a language for the classes that have a name in it, compared with a restatement."""

import json

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from evals.sets.babel_imagenet import babel_imagenet
from evals.suite import catalogue
from evals.suite.suite import Suite
from evals.suite.zeroshot_tasks import ZeroshotTaskConfig
from sparo_data.writer import write_wds_layout
from sparo_train.core.errors import DataError, SparoError
from tests.helpers.compositional import BagOfWords, vector
from tests.helpers.samples import jpeg

NAMES = {"DE": [[3, 7, 999], ["roter Hai", "Katze", "rote Katze"]], "BR": [[0, 1], ["a", "b"]]}
PROMPTS = {"DE": ["ein Bild von  {} .", "{}"], "FR": ["{}"]}
LABELS = [3, 7, 8, 999, 0, 3, 999, 7]


@pytest.fixture
def root(tmp_path):
    samples = [(f"s{i}", {"jpg": jpeg(i), "cls": str(label).encode()}) for i, label in enumerate(LABELS)]
    folder = tmp_path / "imagenet1k"
    write_wds_layout(folder, samples, classnames=[f"class {i}" for i in range(1000)], templates=["a {c}"])
    (folder / "babel_imagenet.json").write_text(json.dumps(NAMES))
    (folder / "nllb_dist13b_prompts.json").write_text(json.dumps(PROMPTS))
    return tmp_path


def test_only_classes_with_a_name_are_scored(root):
    task = catalogue.tasks("babel_imagenet/de", root)["babel_imagenet/de"]
    assert task.language == "de" and task.root == str(root / "imagenet1k") and task.split == "test"
    encoder = BagOfWords()
    result = Suite({"z": task}).run(encoder)["z"]
    weights = []
    for name in NAMES["DE"][1]:  # two spaces in the prompt are kept
        texts = [
            sum(map(vector, sorted(t.lower().split())), torch.zeros(16)) for t in (f"ein Bild von  {name} .", name)
        ]
        weights.append(F.normalize(sum(F.normalize(t, dim=0) for t in texts), dim=0))
    images = [encoder.transform(image) for _, image, _ in catalogue.open_set(task, "label")]
    kept = [
        (image, NAMES["DE"][0].index(label))
        for image, label in zip(images, LABELS, strict=True)
        if label in NAMES["DE"][0]
    ]
    right = []
    for image, label in kept:
        encoding = encoder.encode(torch.from_numpy(np.array(image)).permute(2, 0, 1)[None])[0]
        right.append(int(torch.stack(weights).mv(encoding).argmax()) == label)
    assert (
        result.n == len(kept) == 6
        and result.value == pytest.approx(np.mean(right))
        and result.chance == pytest.approx(1 / 3)
    )
    assert result.options["language"] == "de" and len(result.keys) == 6
    # The images are those of ImageNet, so all languages share their encodings.
    plain = Suite({"z": task.model_copy(update={"language": None})}).run(encoder)["z"]
    assert plain.data == result.data and plain.n == 8


def test_names_come_from_the_folder_or_from_clip_benchmark(root, tmp_path):
    assert babel_imagenet(root / "imagenet1k", "DE")[2] == ["ein Bild von  {c} .", "{c}"]
    pytest.importorskip("clip_benchmark")
    numbers, names, templates = babel_imagenet(tmp_path / "none", "de")
    assert len(numbers) == len(names) == 738 and names[1] == "Goldfisch" and len(templates) == 80
    listed = [entry for entry in catalogue.datasets() if entry.group == "babel_imagenet"]
    assert len(listed) == 90  # of 93 languages with names, three have no prompts
    for entry in listed:
        babel_imagenet(tmp_path / "none", entry.settings["language"])


@pytest.mark.parametrize(
    ("names", "prompts", "message"),
    [
        (NAMES, PROMPTS, None),
        ({"DE": [[1, 2], ["a"]]}, PROMPTS, "the language DE needs one name per class number"),
        ({"DE": [[1, 1000], ["a", "b"]]}, PROMPTS, "the language DE needs one name per class number"),
        ({"DE": [[1], ["a"]]}, PROMPTS, "the language DE needs one name per class number"),
        ({"DE": 3}, PROMPTS, "DE must have a list of class numbers and a list of names"),
        ({"DE": [["x"], ["a"]]}, PROMPTS, "DE must have a list of class numbers and a list of names"),
        (NAMES, {"DE": ["no place"]}, "each prompt must contain {} .* got .no place"),
        (NAMES, {}, "language=de: is not in Babel-ImageNet"),
    ],
)
def test_damaged_files(root, names, prompts, message):
    (root / "imagenet1k/babel_imagenet.json").write_text(json.dumps(names))
    (root / "imagenet1k/nllb_dist13b_prompts.json").write_text(json.dumps(prompts))
    if message is None:
        assert len(babel_imagenet(root / "imagenet1k", "de")[0]) == 3
        return
    with pytest.raises(DataError, match=message.replace("{}", r"\{\}")):
        babel_imagenet(root / "imagenet1k", "de")


def test_a_language_without_prompts_and_other_sets_are_refused(root):
    with pytest.raises(DataError, match=r"language=br: is not in Babel-ImageNet; .*DE"):
        babel_imagenet(root / "imagenet1k", "br")
    task = ZeroshotTaskConfig(root=str(root / "imagenet1k"), language="de")
    (root / "imagenet1k/classnames.txt").write_text("cat\ndog\n")
    with pytest.raises(
        SparoError, match=r"language=de needs one label per image and ImageNet's 1,000 classes, got 2 classes"
    ):
        Suite({"z": task}).check()
