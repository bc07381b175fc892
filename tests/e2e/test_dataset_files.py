"""Test evaluation sets that a YAML file adds: Winoground as published, and a user's own set."""

import json

import numpy as np
import pytest
import yaml
from torch.nn import functional as F

from evals.encoders.loading import load_encoder
from evals.sets.open_set import open_set
from evals.suite import catalogue
from evals.suite.image_text_tasks import PairsTaskConfig, RetrievalTaskConfig
from evals.suite.labelled_tasks import ProbeTaskConfig
from evals.suite.question_tasks import MatchingTaskConfig
from evals.suite.zeroshot_tasks import ZeroshotTaskConfig
from sparo_data.writer import write_shards
from sparo_train.core.errors import ConfigError, DataError
from tests.helpers.processes import sparo
from tests.helpers.recipes import tiny_recipe
from tests.helpers.samples import jpeg, sample

CAPTIONS = ["a red square on a blue circle", "a blue circle on a red square", "one thing", "a thing that is one"]
SET = """
mine:
  group: own
  task: pairs
  files: table.csv and the images
  options:
    layout: table
    columns: {file: table.csv, images: ["{path}"], captions: ["a {good}"], false_captions: ["a {bad}"], kind: "{kind}"}
  n: 3
  chance: 0.5
"""


def winoground(folder, rows=6):
    (folder / "images").mkdir(parents=True)
    lines = []
    for i in range(rows):
        for place in range(2):
            (folder / f"images/ex_{i}_img_{place}.png").write_bytes(jpeg(10 * i + place))
        words = {
            "caption_0": CAPTIONS[i % 4],
            "caption_1": CAPTIONS[(i + 1) % 4],
            "collapsed_tag": ["Object", "Relation"][i % 2],
        }
        lines.append(json.dumps({"id": i, "image_0": f"ex_{i}_img_0", "image_1": f"ex_{i}_img_1", "tag": "x", **words}))
    (folder / "examples.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def own_set(folder):
    folder.mkdir(parents=True)
    for i in range(3):
        (folder / f"{i}.jpg").write_bytes(jpeg(i))
    (folder / "table.csv").write_text(
        "path,good,bad,kind\n" + "".join(f'{i % 3}.jpg,"red, {i}",blue,k{i % 2}\n' for i in range(5))
    )


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    root = tmp_path_factory.mktemp("datasets")
    write_shards(root / "shards", (sample(i) for i in range(48)), 24)
    (root / "recipe.yaml").write_text(yaml.safe_dump(tiny_recipe(root / "shards", root, name="run", steps=4)))
    assert sparo("train", "recipe.yaml", cwd=root).returncode == 0
    winoground(root / "data/winoground")
    own_set(root / "data/mine")
    (root / "configs/datasets").mkdir(parents=True)
    (root / "configs/datasets/mine.yaml").write_text(SET)
    return root


def test_winoground_is_scored_by_name(place):
    done = sparo("eval", "run", "--tasks", "winoground,own", "--features", "none", "--json", "out.json", cwd=place)
    assert done.returncode == 0, done.stderr
    results = json.loads((place / "out.json").read_text())["results"]
    result = results["run/winoground"]
    encoder = load_encoder(str(place / "run"))
    text, image, group = [], [], []
    for line in (place / "data/winoground/examples.jsonl").read_text().splitlines():
        row = json.loads(line)
        pixels = open_set(
            MatchingTaskConfig(task="matching", root=str(place / "data/winoground"), **catalogue_options(place)),
            "questions",
        )
        images = F.normalize(encoder.images([pixels.read(2 * row["id"] + i)[1] for i in range(2)]).flatten(1), dim=-1)
        texts = F.normalize(encoder.text([row["caption_0"], row["caption_1"]]).flatten(1), dim=-1)
        (c0_i0, c1_i0), (c0_i1, c1_i1) = (images @ texts.T).tolist()
        text.append(c0_i0 > c1_i0 and c1_i1 > c0_i1)
        image.append(c0_i0 > c0_i1 and c1_i1 > c1_i0)
        group.append(text[-1] and image[-1])
    expected = {"text": np.mean(text), "image": np.mean(image), "group": np.mean(group)}
    assert {name: result["metrics"][name] for name in expected} == pytest.approx(expected)
    assert {"group/Object", "group/Relation", "text/Object"} <= result["metrics"].keys()
    assert (result["n"], result["headline"], result["chance"]) == (6, "group", pytest.approx(1 / 6))
    assert "6 questions instead of 400" in result["note"]
    own = results["run/mine"]
    assert own["n"] == 5 and set(own["metrics"]) >= {"k0", "k1", "macro"} and not own["note"]


def catalogue_options(place):
    (entry,) = [entry for entry in catalogue.datasets() if entry.name == "winoground"]
    return entry.options


def test_two_runs_are_compared_row_by_row(place):
    for name in ("first", "second"):
        changes = {"name": name, "seed": 1 if name == "first" else 2}
        (place / f"{name}.yaml").write_text(yaml.safe_dump(tiny_recipe(place / "shards", place, steps=4, **changes)))
        assert sparo("train", f"{name}.yaml", cwd=place).returncode == 0
        assert sparo("eval", name, "--tasks", "winoground", "--features", "none", cwd=place).returncode == 0
    done = sparo("eval", "compare", "first", "second", cwd=place)
    assert done.returncode == 0 and "winoground" in done.stdout, done.stdout + done.stderr


def test_sets_are_listed_and_a_limit_keeps_rows_whole(place):
    done = sparo("eval", "--list", cwd=place)
    assert done.returncode == 0 and "winoground  odd" in done.stdout and "mine  intact" in done.stdout, done.stdout
    options = catalogue_options(place)
    some = open_set(
        MatchingTaskConfig(task="matching", root=str(place / "data/winoground"), limit=5, **options), "questions"
    )
    assert [question.key for question in some.questions] == ["0", "1", "2", "3", "4"]
    assert len(some) == 10 and [question.images for question in some.questions] == [
        (2 * i, 2 * i + 1) for i in range(5)
    ]


def test_a_table_holds_labels_captions_or_pairs(tmp_path):
    own_set(tmp_path / "own")
    (tmp_path / "own/rows.json").write_text(
        json.dumps({str(i): {"image": f"{i}.jpg", "label": i, "one": "a", "two": f"b {i}"} for i in range(3)})
    )
    columns = {"file": "rows.json", "label": "{label}", "captions": ["{one}", "{two}"]}
    labels = open_set(
        ZeroshotTaskConfig(task="zeroshot", root=str(tmp_path / "own"), layout="table", columns=columns), "label"
    )
    assert [fact for _, _, fact in labels] == [0, 1, 2]
    with pytest.raises(ConfigError, match=r"columns\.split: missing, but task probe needs the rows of split 'train'"):
        open_set(
            ProbeTaskConfig(task="probe", root=str(tmp_path / "own"), layout="table", columns=columns), "label", "train"
        )
    rows = [{"image": f"{i}.jpg", "label": i, "part": ("train", "test")[i % 2]} for i in range(3)]
    (tmp_path / "own/parts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    parted = {"file": "parts.jsonl", "label": "{label}", "split": "part"}
    probe = ProbeTaskConfig(task="probe", root=str(tmp_path / "own"), layout="table", columns=parted)
    assert [[fact for _, _, fact in open_set(probe, "label", part)] for part in ("train", "test")] == [[0, 2], [1]]
    captions = open_set(
        RetrievalTaskConfig(task="retrieval", root=str(tmp_path / "own"), layout="table", columns=columns), "captions"
    )
    assert [fact for _, _, fact in captions] == [["a", "b 0"], ["a", "b 1"], ["a", "b 2"]]
    own = yaml.safe_load(SET)["mine"]["options"]
    pairs = open_set(PairsTaskConfig(task="pairs", root=str(tmp_path / "own"), **own), "pairs")
    assert [[p.caption for p in fact] for _, _, fact in pairs] == [
        ["a red, 0", "a red, 3"],
        ["a red, 1", "a red, 4"],
        ["a red, 2"],
    ]


@pytest.mark.parametrize(
    ("columns", "table", "error", "message"),
    [
        (None, "", ConfigError, "layout=table: needs the key `columns`"),
        ({"file": "t.csv"}, "path\n0.jpg\n", DataError, r"t\.csv: row 1: no column 'image'"),
        ({"file": "t.csv", "images": ["{path}"]}, "path\n0.jpg\n", ConfigError, "needs captions and false_captions"),
        ({"file": "t.csv", "images": ["{path.x}"]}, "path\n0.jpg\n", ConfigError, "cannot be filled in"),
        (
            {"file": "t.csv", "images": ["../{path}"]},
            "path,a,b\n0.jpg,x,y\n",
            DataError,
            "expected names of images",
        ),
        (
            {"file": "t.csv", "images": ["{path}"]},
            'path,a,b\n0.jpg,"x,y\n',
            DataError,
            r"t\.csv, line 1: unexpected end",
        ),
        ({"file": "t.csv", "images": ["{path}"]}, "path,a,b\n0.jpg,x\n", DataError, "fewer columns than the header"),
        ({"file": "t.csv", "images": ["{path}"]}, "path,a,b\n0.jpg,x,y,z\n", DataError, "more columns than the header"),
        ({"file": "t.txt"}, "", ConfigError, r"columns\.file: expected \.csv"),
        ({"file": "t.jsonl"}, "{\n", DataError, r"t\.jsonl, line 1: not valid JSON"),
        ({"file": "t.json"}, "[3]", DataError, "expected an object or a list per row, got int"),
        ({"file": "t.json"}, "[]", DataError, "contains no images"),
    ],
)
def test_a_bad_table_is_refused_by_name(tmp_path, columns, table, error, message):
    if columns is not None:
        (tmp_path / columns["file"]).write_text(table)
        if ",b" in table:
            columns = {**columns, "captions": ["{a}"], "false_captions": ["{b}"]}
    with pytest.raises(error, match=message):
        open_set(PairsTaskConfig(task="pairs", root=str(tmp_path), layout="table", columns=columns), "pairs")


def test_a_bad_dataset_file_is_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs/datasets").mkdir(parents=True)
    for text, message in (
        (SET.replace("task: pairs", "task: pears"), r"mine\.yaml: mine\.task: 'pears'; did you mean 'pairs'"),
        (SET.replace("n: 3", "n: 0"), r"datasets\.mine\.n"),
        (SET.replace("group: own", "grup: own"), r"datasets\.mine\.grup: unknown key; did you mean 'group'"),
    ):
        (tmp_path / "configs/datasets/mine.yaml").write_text(text)
        with pytest.raises(ConfigError, match=message):
            catalogue.datasets()
    (tmp_path / "configs/datasets/mine.yaml").write_text(SET.replace("false_captions", "wrong_captions"))
    with pytest.raises(ConfigError, match=r"data set mine: options: .*\n.*columns\.wrong_captions: unknown key"):
        catalogue.tasks("mine", tmp_path)
    (entry,) = [entry for entry in catalogue.datasets() if entry.name == "mine"]
    assert catalogue.check_presence(entry, tmp_path).state == "odd"  # the other sets are listed nevertheless
