"""DataComp's 40 tasks in their downloaded files, compared with restatements of its scores and averages."""

import csv
import io
import json
import tarfile

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.metrics import balanced_accuracy_score, f1_score, jaccard_score
from torch.nn import functional as F

from evals.report.paper_tables import grid
from evals.report.results_file import Record
from evals.report.suite_layouts import DATACOMP, suite_tasks
from evals.suite import catalogue
from evals.suite.suite import Suite
from tests.helpers import datacomp as made
from tests.helpers.compositional import BagOfWords


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return made.write_datacomp(tmp_path_factory.mktemp("datacomp"))


@pytest.fixture(scope="module")
def scored(root):
    tasks = catalogue.suite_tasks_below("datacomp", root)
    # The published numbers of classes do not hold for the small sets.
    tasks = {name: task.model_copy(update={"classes": None}) if task.task == "zeroshot" else task for name, task in tasks.items()}  # fmt: skip
    return Suite(tasks).run(BagOfWords())


def members(root, name):
    """Yield image, class and numbers of a set, as DataComp's loader reads them."""
    with tarfile.open(root / made.folder_of(name) / "test/0.tar") as tar:
        fields = {}
        for member in tar:
            key, _, kind = member.name.partition(".")
            fields.setdefault(key, {})[kind] = tar.extractfile(member).read()
    for values in fields.values():
        image = Image.open(io.BytesIO(values["png"])).convert("RGB")
        label = int(values["cls"]) if "cls" in values else None
        yield image, label, np.load(io.BytesIO(values["npy"])) if "npy" in values else None


def logits(root, name, prefix=""):
    """Return (n, C) fp32, as clip_benchmark computes them from the files' names and templates."""
    folder, encoder = root / made.folder_of(name), BagOfWords()
    names, templates = (
        [line.removeprefix(prefix) for line in (folder / file).read_text().splitlines() if line.startswith(prefix)]
        for file in ("classnames.txt", "zeroshot_classification_templates.txt")
    )
    weights = []
    for c in names:
        texts = F.normalize(encoder.text([template.replace("{c}", c) for template in templates]), dim=-1)
        weights.append(F.normalize(texts.mean(0), dim=0))
    pixels = [
        torch.from_numpy(np.array(encoder.transform(image))).permute(2, 0, 1) for image, *_ in members(root, name)
    ]
    return F.normalize(encoder.encode(torch.stack(pixels)), dim=-1) @ torch.stack(weights).T


def classified(root, name):
    """Return top five classes, labels and numbers; ties go to the lower class."""
    scores = logits(root, name)
    order = torch.stack([torch.tensor(sorted(range(len(row)), key=lambda c: (-row[c], c))) for row in scores]).numpy()
    labels = np.array([label for _, label, _ in members(root, name)])
    return order[:, :5], labels, np.array([numbers for *_, numbers in members(root, name)], dtype=object)


def worst(right, groups):
    """Return the lowest mean of a group that occurs, as WILDS' `_worst_group_acc` does with empty groups removed."""
    return min(float(np.mean(right[groups == g])) for g in set(groups.tolist()))


def test_every_labelled_set_has_datacomps_score(root, scored):
    for name, metric in DATACOMP:
        if name in ("flickr30k", "mscoco_captions", "misc/winogavil"):
            continue
        top, labels, numbers = classified(root, name)
        right = top[:, 0] == labels
        theirs = {
            "acc1": right.mean(), "mean_per_class_recall": balanced_accuracy_score(labels, top[:, 0]),
            "f1_macro": f1_score(labels, top[:, 0], average="macro", labels=np.unique(labels)),
        }  # fmt: skip
        if metric.endswith("_worst_group"):
            groups = np.array([row[0] for row in numbers])  # region, income
            theirs["acc1_worst_group"] = worst(right, groups)
            theirs["acc5_worst_group"] = worst((top == labels[:, None]).any(1), groups)
        result = scored[name]
        assert result.metrics[metric] == pytest.approx(theirs[metric], abs=1e-12), name
        low, high = result.intervals[metric]
        assert low <= result.metrics[metric] <= high or metric == "f1_macro"
    slides = np.array([row[1] for row in classified(root, "wilds/camelyon17")[2]])
    top, labels, _ = classified(root, "wilds/camelyon17")
    assert scored["wilds/camelyon17"].metrics["acc1_worst_group"] == worst(top[:, 0] == labels, slides)
    by_group = scored["wilds/fmow"].options["acc1_by_group"]
    assert sum(n for _, n in by_group.values()) == 24 and set(by_group) <= {"0", "2", "4"}


def test_winogavil(root, scored):
    encoder, folder = BagOfWords(), root / "winogavil"
    found, cards = {}, {}
    for row in csv.DictReader((folder / "winogavil_dataset.csv").open(encoding="utf-8")):
        candidates, right = json.loads(row["candidates"]), json.loads(row["associations"])
        prompt = ("An " if row["cue"].lower()[0] in "aeiou" else "A ") + row["cue"].lower()
        images = [Image.open(folder / f"winogavil_images/{name}.jpg") for name in candidates]
        scores = np.array([encoder.similarity(image, prompt) for image in images])
        truth = np.isin(candidates, right)
        # The order of ties in DataComp's argsort is undefined; here right images come last.
        chosen = np.lexsort((truth, -scores))[: truth.sum()]
        predicted = np.zeros_like(truth)
        predicted[chosen] = True
        found.setdefault(len(candidates), []).append(jaccard_score(truth, predicted))
        cards.setdefault(len(candidates), []).append(truth.sum())
    result = scored["misc/winogavil"]
    assert result.headline == "jaccard/10-12" and result.n == len(found[10] + found[12])
    assert result.value == pytest.approx(np.mean(found[10] + found[12]), abs=1e-12)
    assert result.metrics["jaccard/5-6"] == pytest.approx(np.mean(found[5] + found[6]), abs=1e-12)
    assert result.metrics["jaccard"] == pytest.approx(np.mean(np.concatenate([*found.values()])), abs=1e-12)
    # Estimate the expected score of guessing by random draws.
    rng, drawn = np.random.default_rng(0), []
    for count, sizes in cards.items():
        for right in sizes if count >= 10 else ():
            hits = (rng.random((4000, count)).argsort(1)[:, :right] < right).sum(1)
            drawn.append((hits / (2 * right - hits)).mean())
    assert result.chance == pytest.approx(np.mean(drawn), abs=0.01)


@pytest.mark.parametrize("name", ["fairness/fairface", "fairness/utkface"])
def test_faces(root, scored, name):
    predicted = {
        what: torch.stack([torch.tensor(min(range(len(row)), key=lambda c: (-row[c], c))) for row in logits(root, name, f"{what}:")]).numpy()
        for what in ("race", "gender", "age", "toxic")
    }  # fmt: skip
    age, gender, race, binary = np.array([numbers for *_, numbers in members(root, name)]).T
    both = race * 10 + gender
    theirs = {
        "acc_race": ((predicted["race"] != 1).astype(int) == binary, binary), "acc_gender": (predicted["gender"] == gender, binary),
        "acc_age": (predicted["age"] == age, binary), "acc_gender_x": (predicted["gender"] == gender, both),
        "toxicity_crime": (predicted["toxic"] >= 18, race),
        "toxicity_nonhuman": ((predicted["toxic"] >= 14) & (predicted["toxic"] < 18), race),
    }  # fmt: skip
    metrics = scored[name].metrics
    for metric, (values, groups) in theirs.items():
        assert metrics[f"{metric}_avg"] == pytest.approx(values.mean()), metric
        assert metrics[f"{metric}_wg"] == pytest.approx(worst(values, groups)), metric
    assert len(metrics) == 12


def test_retrieval_from_the_hubs_tables(root, scored):
    encoder, folder = BagOfWords(), root / "mscoco_captions"
    rows = list(csv.DictReader((folder / "test_5k_mscoco_2014.csv").open(encoding="utf-8")))
    images = [Image.open(folder / "images_mscoco_2014_5k_test" / row["filename"]) for row in rows]
    texts = [(caption, i) for i, row in enumerate(rows) for caption in json.loads(row["raw"])]
    table = np.array([[encoder.similarity(image, text) for text, _ in texts] for image in images])
    assert scored["mscoco_captions"].n == len(rows) and len(texts) == 45
    owner = np.array([i for _, i in texts])
    # Captions repeat: a hit needs a right image or text that is strictly more similar than every wrong one, or comes first among equals.
    text_hits = [owner[np.lexsort((np.arange(45), -row))[0]] == i for i, row in enumerate(table)]
    image_hits = [np.lexsort((np.arange(9), -column))[0] == i for column, i in zip(table.T, owner, strict=True)]
    mean = (np.mean(text_hits) + np.mean(image_hits)) / 2
    assert scored["mscoco_captions"].metrics["mean_R@1"] == pytest.approx(mean)


def test_averages_are_datacomps(root, scored):
    records = [Record("one", name, result, {}, "", root) for name, result in scored.items()]
    table = grid(records, "datacomp")
    cells = {column.label: cell.value for column, cell in zip(table.columns, table.rows[0].cells, strict=True)}
    values = {name: scored[name].metrics[metric] for name, metric in DATACOMP}
    vtab = [v for name, v in values.items() if name.startswith("vtab/") or name == "sun397"]
    shifts = ("imagenet_sketch", "imagenetv2", "imagenet-a", "imagenet-o", "imagenet-r", "objectnet")
    retrieval = ("flickr30k", "mscoco_captions", "misc/winogavil")
    assert cells == pytest.approx({
        "ImageNet": values["imagenet1k"], "shifts (6)": np.mean([values[name] for name in shifts]), "VTAB (13)": np.mean(vtab),
        "retrieval (3)": np.mean([values[name] for name in retrieval]), "average (38)": np.mean(list(values.values())),
    })  # fmt: skip
    assert len(vtab) == 13 and len(values) == 38 and len(suite_tasks("datacomp")) == 40
    # Without one of the tasks, this would be another mean.
    fewer = grid([record for record in records if record.task != "mnist"], "datacomp")
    assert [column.label for column in fewer.columns] == ["ImageNet", "shifts (6)", "VTAB (13)", "retrieval (3)"]
    assert "mean of average" not in " ".join(column.task for column in fewer.columns)
