"""Cells of users' tables that would silently score something else."""

import pytest

from evals.report.compare import _refuse_other_kind
from evals.sets.open_set import open_set
from evals.sets.table_rows import TableRow
from evals.suite.eval_options import EvalOptions
from evals.suite.labelled_tasks import ProbeTaskConfig, _parts
from evals.suite.scoring import training_details
from sparo_train.core.errors import ConfigError, DataError
from tests.helpers.samples import jpeg


def table(folder, rows, header="image,cls,split"):
    """Write images 0.jpg, 1.jpg … and a table; a row's cells follow the name of its image."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [header]
    for number, (name, *cells) in enumerate(rows):
        path = folder / name
        if not path.exists():
            path.write_bytes(jpeg(number))
        lines.append(",".join([name, *cells]))
    (folder / "t.csv").write_text("\n".join(lines) + "\n")
    return folder


def probe(folder, **columns):
    return ProbeTaskConfig.model_validate(
        {
            "root": str(folder),
            "layout": "table",
            "columns": {"file": "t.csv", "images": ["{image}"], "label": "{cls}", "split": "split", **columns},
        }
    )


def test_a_column_without_a_name_does_not_replace_templates():
    row = TableRow({"": "7", "cls": "dog", "kind": "pet"}, "t.csv: row 1")
    assert row.fill("{cls}/{kind}") == "dog/pet" and row.texts("a {cls}") == ["a dog"]
    assert row.names("{cls};{kind}") == ["dog", "pet"] and row.fill("{cls}") == "dog"


@pytest.mark.parametrize(
    "cell", ['["red", "bright"]', "['red', 'bright']", "red;bright", "red | bright", ["red", "bright "]]
)
def test_names_of_a_cell_may_be_a_list(cell):
    assert TableRow({"f": cell}, "x").names("{f}") == ["red", "bright"]


@pytest.mark.parametrize("cell", [[1, 105], "10_533", "nan"])
def test_numbers_are_plain(cell):
    with pytest.raises(DataError, match="must be a finite number"):
        TableRow({"y": cell}, "x").number("{y}")


@pytest.mark.parametrize(
    ("classes", "message"),
    [
        (("red", "RED"), "'RED' and 'red' are different classes"),
        (("1", "1.0"), "'1' and '1.0' are different classes"),
        (("a", "a"), ""),
    ],
)
def test_classes_of_two_spellings_are_reported(tmp_path, caplog, classes, message):
    rows = [("0.jpg", classes[0], "train"), ("1.jpg", classes[1], "train"), ("2.jpg", classes[0], "test")]
    for _ in range(2):  # a set is opened several times, and reports its names once
        open_set(probe(table(tmp_path, rows)), "label", "train")
    assert len(caplog.records) == bool(message)
    assert message in caplog.text and bool(message) == bool(caplog.text)


def test_labels_separated_by_commas_are_reported(tmp_path, caplog):
    rows = [
        ("0.jpg", '"red, bright"', "test"),
        ("1.jpg", '"blue, bright"', "test"),
        ("2.jpg", "red", "test"),
        ("3.jpg", "blue", "test"),
    ]
    open_set(probe(table(tmp_path, rows), label=None, labels="{cls}"), "label", "test")
    assert "look like lists. Separate the names of a cell by semicolons" in caplog.text


def test_a_row_without_a_group_is_refused(tmp_path):
    rows = [("0.jpg", "a", "train", "p1"), ("1.jpg", "b", "train", ""), ("2.jpg", "a", "test", "p3")]
    folder = table(tmp_path, rows, "image,cls,split,patient")
    with pytest.raises(DataError, match=r"t.csv: row 2: column 'patient' has no group\. Fill in the cell"):
        _parts(probe(folder, group="patient"))


def test_copies_of_training_images_are_reported(tmp_path):
    rows = [(f"{i}.jpg", "ab"[i % 2], "train" if i < 4 else "test") for i in range(8)]
    folder = table(tmp_path, rows)
    train, test = _parts(probe(folder)).values()
    assert test.copies_in(train) == (0, 4) and "copies_of_training_images" not in training_details(train, test)
    (folder / "5.jpg").write_bytes((folder / "1.jpg").read_bytes())
    train, test = _parts(probe(folder)).values()
    assert training_details(train, test)["copies_of_training_images"] == "1 of 4"


def test_scores_of_other_protocols_are_not_compared():
    class Record:
        def __init__(self, **options):
            self.task, self.checkpoint = "k", "a"
            self.result = type("R", (), {"options": options, "headline": "acc1"})

    _refuse_other_kind(Record(lr=1e-3), Record(lr=1e-3))
    for one, other in (({"balanced": True}, {}), ({"epochs": 1}, {"epochs": 10}), ({"left_out_neighbours": "x"}, {})):
        with pytest.raises(DataError):
            _refuse_other_kind(Record(**one), Record(**other))


@pytest.mark.parametrize(
    ("options", "message"), [({"limit": 0}, "limit: must be at least 1"), ({"precision": "float16"}, "precision: ")]
)
def test_options_of_programs_are_checked(options, message):
    with pytest.raises(ConfigError, match=message):
        EvalOptions(**options)


def test_places_may_be_texts_and_runs_are_not_written_by_default():
    options = EvalOptions(results="res", features="feat")
    assert options.results.name == "res" and options.features.name == "feat" and not options.write_to_run
