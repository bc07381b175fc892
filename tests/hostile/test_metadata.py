"""Images with further numbers besides their class: unusual and damaged `.npy` members, groups in tables, and wrong configurations."""

import io

import numpy as np
import pytest

from evals.sets.wds import WdsSet
from evals.suite.suite import Suite
from evals.suite.zeroshot_tasks import AttributesTaskConfig, ZeroshotTaskConfig
from evals.tasks import zeroshot
from evals.tasks.associations import jaccard
from sparo_data.writer import write_wds_layout
from sparo_train.core.errors import ConfigError, DataError, SparoError
from tests.helpers import datacomp
from tests.helpers.compositional import BagOfWords, picture
from tests.helpers.samples import jpeg


def write(root, arrays, label=b"0"):
    samples = [(f"s{i}", {"jpg": jpeg(i), "cls": label, "npy": data}) for i, data in enumerate(arrays)]
    write_wds_layout(root, samples, classnames=["cat", "dog"], templates=["a {c}"])
    return ZeroshotTaskConfig(root=str(root), metadata=("region", "year"), group_by="year")


def archive():
    buffer = io.BytesIO()
    np.savez(buffer, np.arange(3))
    return buffer.getvalue()


def saved(array):
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=True)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (saved(np.array([1.5, 2.0])), r"must hold one row of whole numbers, got shape \(2,\) and dtype float64"),
        (saved(np.array([[1, 2]])), r"must hold one row of whole numbers, got shape \(1, 2\) and dtype int64"),
        (saved(np.array(3)), r"got shape \(\) and dtype int64"),
        (saved(np.array([1])), r"s0 has only 1 numbers, but `metadata` lists 2 names \(region, year\)"),
        (saved(np.array([{}, 1], object)), "cannot be read as an array of numbers"),
        (archive(), "cannot be read as an array of numbers"),
        (b"", "cannot be read as an array of numbers"),
        (saved(np.array([1, 2]))[:-3], "cannot be read as an array of numbers"),
    ],
)
def test_damaged_numbers_are_reported_before_anything_is_encoded(tmp_path, data, message):
    encoder = BagOfWords()
    with pytest.raises(DataError, match=message):
        Suite({"z": write(tmp_path, [data] * 2)}).check()
    assert encoder.num_images == 0


def test_one_short_row_is_named(tmp_path):
    task = write(tmp_path, [datacomp.npy([1, 2]), datacomp.npy([1])])
    with pytest.raises(SparoError, match="s1 has only 1 numbers, but `metadata` lists 2 names"):
        Suite({"z": task}).run(BagOfWords())


def test_more_numbers_than_names_and_negative_groups(tmp_path):
    task = write(tmp_path, [datacomp.npy([i, -1 if i else 7, 3, 4]) for i in range(4)])
    result = Suite({"z": task}).run(BagOfWords())["z"]
    assert {group: n for group, (_, n) in result.options["acc1_by_group"].items()} == {"-1": 3, "7": 1}
    with pytest.raises(DataError, match="has label 5, but there are 2 classes"):
        Suite({"z": write(tmp_path / "b", [datacomp.npy([1, 2])] * 2, b"5")}).run(BagOfWords())


def test_a_set_with_numbers_is_not_a_multilabel_set(tmp_path):
    write(tmp_path, [datacomp.npy([1, 2])] * 2)
    assert WdsSet(tmp_path, "label").read(0)[2] == 0  # the class is read for any such numbers
    assert WdsSet(tmp_path, "metadata").read(0)[2] == [0, 1, 2]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"headline": "acc1_worst_group"}, "headline=acc1_worst_group: needs group_by"),
        ({"group_by": "region"}, r"group_by: expected an entry of metadata, got region\. Name the numbers"),
        ({"group_by": "area", "metadata": ["region"]}, r"expected an entry of metadata, got area\. Use region"),
    ],
)
def test_configurations_that_do_not_fit(tmp_path, keys, message):
    with pytest.raises(ValueError, match=message):
        ZeroshotTaskConfig(root=str(tmp_path), **keys)


def test_worst_groups_of_five_need_five_classes(tmp_path):
    task = write(tmp_path, [datacomp.npy([1, 2])] * 2).model_copy(update={"headline": "acc5_worst_group"})
    with pytest.raises(ConfigError, match="headline=acc5_worst_group: needs at least five classes, got 2"):
        Suite({"z": task}).run(BagOfWords())


def test_class_numbers_that_pandas_wrote_as_floats_are_numbers(tmp_path):
    names = [f"thing {i}" for i in range(12)]
    (tmp_path / "classnames.txt").write_text("\n".join(names))
    for i in range(24):
        picture(tmp_path / f"{i}.png", i)
    metrics = []
    for form in ("{}", "{}.0", "+{}"):
        (tmp_path / "table.csv").write_text(
            "\n".join(["image,label,group", *(f"{i}.png,{form.format(i % 12)},{i % 2}" for i in range(24))])
        )
        columns = {"file": "table.csv", "images": ["{image}"], "label": "{label}"}
        task = ZeroshotTaskConfig(
            root=str(tmp_path), layout="table", columns=columns, group_by="group", headline="acc5_worst_group"
        )
        result = Suite({"z": task}).run(BagOfWords())["z"]
        metrics.append((result.metrics, result.predictions["label"].tolist()))
    assert metrics[0] == metrics[1] == metrics[2] and metrics[0][1] == [i % 12 for i in range(24)]
    assert result.chance == pytest.approx(5 / 12)  # five guesses


def test_groups_of_a_table(tmp_path):
    rows = ["image,label,hospital"]
    for i in range(8):
        picture(tmp_path / f"{i}.png", i)
        rows.append(f"{i}.png,{i % 2},{('north', 'Süd, 2')[i // 5]}".replace("Süd, 2", '"Süd, 2"'))
    (tmp_path / "table.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    (tmp_path / "classnames.txt").write_text("cat\ndog\n")
    columns = {"file": "table.csv", "label": "{label}"}
    task = ZeroshotTaskConfig(root=str(tmp_path), layout="table", columns=columns, group_by="hospital")
    result = Suite({"z": task}).run(BagOfWords())["z"]
    groups = result.options["acc1_by_group"]
    assert {name: n for name, (_, n) in groups.items()} == {"north": 5, "Süd, 2": 3}
    assert result.metrics["acc1_worst_group"] == pytest.approx(min(share for share, _ in groups.values()), abs=1e-6)
    # The catalogue's entry of Camelyon17 names the numbers of its shards, which a table does not have.
    with_names = task.model_copy(update={"metadata": ("hospital", "slide", "y")})
    assert Suite({"z": with_names}).run(BagOfWords())["z"].metrics == result.metrics
    named = task.model_copy(update={"group_by": "clinic"})
    with pytest.raises(DataError, match="row 1: no column 'clinic'"):
        Suite({"z": named}).check()


def test_faces_need_names_of_every_attribute(tmp_path):
    datacomp.write_faces(tmp_path, "fairness/fairface", 1, 6)
    root = tmp_path / datacomp.folder_of("fairness/fairface")
    names = [line for line in (root / "classnames.txt").read_text().splitlines() if not line.startswith("age:")]
    (root / "classnames.txt").write_text("\n".join(names))
    task = AttributesTaskConfig(root=str(root))
    with pytest.raises(
        DataError,
        match=r"its class names or templates lack lines for age, got lines for race, gender",
    ):
        Suite({"a": task}).check()
    with pytest.raises(ConfigError, match=r"metadata: lacks race_binary, got age, gender, race\. List the names"):
        Suite({"a": task.model_copy(update={"metadata": ("age", "gender", "race")})}).check()


def test_scores_of_one_class_and_of_one_image():
    import torch

    result = zeroshot.result_from_ranking(torch.tensor([[1, 0], [1, 0]]), torch.tensor([1, 1]), 2, "zeroshot")
    result = zeroshot.with_macro_f1(zeroshot.with_groups(result, ["a", "a"]))
    assert result.metrics["f1_macro"] == 1.0 and result.intervals["f1_macro"] == (1.0, 1.0)
    assert result.metrics["acc1_worst_group"] == 1.0 and "acc5_worst_group" not in result.metrics
    # A tie counts as wrong at every position. Without a right image, the index is 0.
    assert jaccard(torch.ones(1, 6), 2).tolist() == [0.0] and jaccard(torch.ones(1, 6), 0).tolist() == [0.0]
    assert jaccard(torch.tensor([[2.0, 1.0, 1.0]]), 2).tolist() == [1 / 3]
    assert jaccard(torch.tensor([[2.0, 1.0, 0.5]]), 2).tolist() == [1.0]
