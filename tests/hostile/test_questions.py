"""Damaged and unusual files of compositional sets: an error that names the file, never another exception."""

import json
import shutil

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from evals.suite import catalogue
from evals.suite.question_tasks import ChoiceTaskConfig, MatchingTaskConfig, QuestionsTaskConfig, load_questions
from evals.suite.suite import Suite
from sparo_train.core.errors import DataError, SparoError
from tests.helpers import compositional as made

pytestmark = pytest.mark.hostile


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("questions")
    for write in made.WRITERS:
        write(root)
    return root


def tasks_of(name, root) -> QuestionsTaskConfig:
    (task,) = catalogue.tasks(name, root).values()
    return task


FILES = {
    "winoground": "examples.jsonl", "mmvp_vlm": "Questions.csv", "colorswap": "test.json", "eqben": "eqben_subset_10percent_final.json",
    "cola": "data/COLA_multiobjects_matching_benchmark.json", "sugar_crepe_pp": "data/swap_att.json", "bivlc": "data/test-00000-of-00001.parquet",
    "aro/vg_relation": "visual_genome_relation.json", "negbench/coco_mcq": "COCO_val_mcq_llama3.1_rephrased.csv", "valse": "data/existence.json",
    "svo_probes": "svo_probes.csv", "whatsup/a": "controlled_images_dataset.json",
    "crepe/productivity": "prod_hard_negatives/atom/prod_vg_hard_negs_atom_complexity_4.csv",
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_file_gives_one_error(name, data, root):
    path = root / name.partition("/")[0] / FILES[name]
    original = path.read_bytes()
    damaged = bytearray(original)
    kind = data.draw(st.sampled_from(["cut", "flip", "insert", "word"]))
    place = data.draw(st.integers(0, len(original) - 1))
    if kind == "cut":
        del damaged[place:]
    elif kind == "flip":
        damaged[place] ^= data.draw(st.integers(1, 255))
    elif kind == "insert":
        damaged[place:place] = data.draw(st.binary(min_size=1, max_size=8))
    else:
        old = data.draw(st.sampled_from([b'"', b",", b"{", b":", b"caption", b"image", b"["]))
        damaged = bytearray(original.replace(old, data.draw(st.sampled_from([b"", b"null", b"../", b"9" * 30])), 3))
    path.write_bytes(damaged)
    try:
        source, _ = load_questions(tasks_of(name, root))
        source.check()
        for number in range(min(4, len(source))):
            source.read(number)
    except SparoError as error:
        assert str(error).strip() and "Traceback" not in str(error)
    finally:
        path.write_bytes(original)


def test_missing_images_are_counted_by_name(root, tmp_path):
    shutil.copytree(root / "winoground", tmp_path / "winoground")
    for number in (1, 2, 3):
        (tmp_path / f"winoground/images/ex_{number}_img_0.png").unlink()
    with pytest.raises(DataError, match=r"ex_1_img_0\.png: missing; in all, 3 of 16 files are missing"):
        Suite({"w": tasks_of("winoground", tmp_path)}).check()


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"correct_answer": "7"}, r"question 0: the answer must be from 0 to 3, got 7"),
        ({"correct_answer": "one"}, r"\{correct_answer\} must be a finite number, got 'one'"),
        ({"image_path": "/etc/../.."}, r"expected names of images below this folder"),
    ],
)
def test_odd_rows_are_named(change, match, root, tmp_path):
    folder = tmp_path / "negbench"
    shutil.copytree(root / "negbench", folder)
    names = ["image_path", "correct_answer", *(f"caption_{k}" for k in range(4)), "correct_answer_template"]
    row = {**dict(zip(names, ["000000000000.jpg", "0", "a", "b", "c", "d", "positive"], strict=True)), **change}
    made.write_csv(folder / "COCO_val_mcq_llama3.1_rephrased.csv", [names, list(row.values())])
    with pytest.raises(DataError, match=match):
        load_questions(tasks_of("negbench/coco_mcq", tmp_path))


def test_regions_outside_the_image_are_refused_when_read(root, tmp_path):
    folder = tmp_path / "aro"
    shutil.copytree(root / "aro", folder)
    rows = json.loads((folder / "visual_genome_relation.json").read_text())
    rows[0]["bbox_x"] = 500
    (folder / "visual_genome_relation.json").write_text(json.dumps(rows))
    source, _ = load_questions(tasks_of("aro/vg_relation", tmp_path))
    with pytest.raises(DataError, match=r"the region 500,2,9,22 is outside the image of 30 x 20 pixels"):
        source.read(0)


def test_lists_in_cells_are_not_executed(root, tmp_path):
    folder = tmp_path / "crepe"
    shutil.copytree(root / "crepe", folder)
    path = folder / FILES["crepe/productivity"]
    path.write_text("image_id,caption,x,y,width,height,hard_negs\n0,a,0,0,5,5,__import__('os').getcwd()\n")
    with pytest.raises(DataError, match=r"\{hard_negs:list\} must contain a list"):
        load_questions(tasks_of("crepe/productivity", tmp_path))


def test_tasks_refuse_questions_of_another_form(root):
    columns = tasks_of("winoground", root).columns
    assert columns is not None
    options = {"root": str(root / "winoground"), "layout": "table", "columns": columns}
    with pytest.raises(
        DataError, match=r"task choice needs an image with several texts, .* got 2 image\(s\) and 2 text\(s\)"
    ):
        load_questions(ChoiceTaskConfig(task="choice", **options))
    one = columns.model_copy(update={"captions": ("{caption_0}",)})
    with pytest.raises(DataError, match=r"task matching needs as many texts as images"):
        load_questions(MatchingTaskConfig(task="matching", **{**options, "columns": one}))
    with pytest.raises(DataError, match=r"no question is left"):
        load_questions(MatchingTaskConfig(task="matching", min_per_kind=99, **options))


def test_an_odd_number_of_rows_is_refused(root, tmp_path):
    shutil.copytree(root / "mmvp_vlm", tmp_path / "mmvp_vlm")
    path = tmp_path / "mmvp_vlm/Questions.csv"
    path.write_text("\n".join(path.read_text().splitlines()[:-1]) + "\n")
    with pytest.raises(DataError, match=r"must be a multiple of columns\.rows=2, got 11"):
        load_questions(tasks_of("mmvp_vlm", tmp_path))


def test_frames_of_another_form_are_refused(root, tmp_path):
    shutil.copytree(root / "eqben", tmp_path / "eqben")
    np.save(tmp_path / "eqben/eqbenyoucook2/1_0.npy", np.zeros((4, 4), np.float32))
    source, _ = load_questions(tasks_of("eqben", tmp_path))
    number = source._names.index("eqbenyoucook2/1_0.npy")
    with pytest.raises(DataError, match=r"expected \(H, W, 3\) uint8, got \(4, 4\) float32"):
        source.read(number)


def own(folder, rows, columns, **task):
    """Return a task with three images whose rows are in a JSON table."""
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(3):
        made.picture(folder / f"{i}.png", i)
    (folder / "rows.json").write_text(json.dumps(rows))
    options = {"root": str(folder), "layout": "table", "columns": {"file": "rows.json", **columns}}
    return ChoiceTaskConfig(**{"task": "choice", **options, **task})


CHOICE = {"images": ["{i}"], "captions": ["{o}"]}


@pytest.mark.parametrize(
    ("rows", "columns", "match"),
    [
        ([{"i": [], "o": ["a", "b"]}], {}, r"question 0: must have an image and no empty caption, got 0 image"),
        ([{"i": "0.png", "o": ["a", ""]}], {}, r"question 0: must have an image and no empty caption"),
        ([{"i": "0.png", "o": ["a", "b"], "r": 1.5}], {"answer": "{r}"}, r"\{r\} must be a whole number, got 1\.5"),
        ([{"i": "0.png", "o": ["a", "b"], "b": [0, 0, float("nan"), 2]}], {"box": "{b}"}, r"expected left, top, width and height in pixels"),
        ([{"i": "0.png", "o": ["a", "b"], "b": "1e9,0,2,2"}], {"box": "{b}"}, r"expected left, top, width and height in pixels"),
        ([{"i": "0.png", "o": ["a", "b"], "s": "val"}], {"split": "s"}, r"column 's' has no row with 'test', got val\. Set the task's key `split`"),
    ],
)  # fmt: skip
def test_odd_questions_are_refused_before_anything_is_encoded(rows, columns, match, tmp_path):
    with pytest.raises(DataError, match=match):
        load_questions(own(tmp_path / "own", rows, {**CHOICE, **columns}))


def test_a_template_is_applied_to_every_entry_of_a_list(tmp_path):
    rows = [{"i": "0.png", "o": ["x y", "z"], "b": [1, 2, 5, 6]}]
    source, (question,) = load_questions(
        own(tmp_path / "own", rows, {"images": ["{i}"], "captions": ["a photo of {o}"], "box": "{b}"})
    )
    assert question.texts == ("a photo of x y", "a photo of z") and source.read(0)[1].size == (5, 6)


def test_line_separators_and_long_cells_belong_to_the_text(tmp_path):
    folder = tmp_path / "own"
    task = own(folder, [], {**CHOICE, "file": "rows.csv", "captions": ["{o:list}"]})
    long = [f"caption {i} \u2028 of many" for i in range(9000)]
    made.write_csv(folder / "rows.csv", [["i", "o"], ["0.png", repr(long)], ["1.png", "['a\x85b', 'c']"]])
    _, questions = load_questions(task)
    assert [len(question.texts) for question in questions] == [9000, 2] and questions[1].texts[0] == "a\x85b"


def test_questions_of_both_forms_and_many_choices_are_scored(tmp_path):
    rows = [
        {"i": ["0.png"], "o": [f"{k} words" for k in range(900)]},
        {"i": ["0.png", "1.png", "2.png"], "o": ["one"]},
        {"i": ["1.png"], "o": ["a", "b"]},
    ]
    for order in (rows, rows[::-1]):
        (result,) = Suite({"own": own(tmp_path / "own", order, CHOICE)}).run(made.BagOfWords()).values()
        assert (
            result.n == 3
            and "blind" not in result.metrics
            and result.chance == pytest.approx((1 / 900 + 1 / 3 + 1 / 2) / 3)
        )


def test_many_images_are_matched_without_all_assignments(tmp_path):
    rows = [{"i": ["0.png", "1.png", "2.png"] * 3, "o": [f"text {k}" for k in range(9)]}]
    task = own(tmp_path / "own", rows, CHOICE)
    matched = MatchingTaskConfig(**{**task.model_dump(exclude={"task", "ties"}), "task": "matching"})
    (result,) = Suite({"own": matched}).run(made.BagOfWords()).values()
    assert set(result.metrics) == {"group", "text", "image"}
    pair = {"i": ["0.png", "1.png"], "o": ["a", "b"]}
    own(tmp_path / "own", [pair, *rows, pair], CHOICE)
    (result,) = Suite({"own": matched}).run(made.BagOfWords()).values()
    assert set(result.metrics) == {"group", "text", "image"} and result.n == 3
    with pytest.raises(DataError, match=r"columns\.answer applies to task `choice` only"):
        answered = own(
            tmp_path / "own", [{"i": ["0.png", "1.png"], "o": ["a", "b"], "r": 1}], {**CHOICE, "answer": "{r}"}
        )
        load_questions(MatchingTaskConfig(**{**answered.model_dump(exclude={"task", "ties"}), "task": "matching"}))


def test_rows_without_a_kind_form_a_separate_kind(tmp_path):
    rows = [{"i": f"{k % 3}.png", "o": [f"a {k}", f"b {k}"], "k": "x" if k < 9 else ""} for k in range(30)]
    task = own(tmp_path / "own", rows, {**CHOICE, "kind": "{k}"}, average="macro")
    (result,) = Suite({"own": task}).run(made.BagOfWords()).values()
    assert result.value == pytest.approx((result.metrics["acc/x"] + result.metrics["acc/unnamed"]) / 2)


def test_a_limit_keeps_groups_whole(root):
    task = tasks_of("whatsup/a", root).model_copy(update={"limit": 5})
    _, questions = load_questions(task)
    assert len(questions) == 4 and len({question.groups for question in questions}) == 2


def test_a_region_of_an_embedded_image_is_another_image(tmp_path):
    folder = tmp_path / "own"
    task = own(folder, [], {**CHOICE, "file": "rows.parquet", "box": "{b}"})
    made.parquet(folder / "rows.parquet", [{"i": made.embedded(folder, 1), "o": ["a", "b"], "b": "0,0,4,4"}])
    whole = task.model_copy(update={"columns": task.columns.model_copy(update={"box": None})})
    sets = [load_questions(each)[0] for each in (task, whole)]
    assert sets[0].identity() != sets[1].identity() and sets[0].digest(0) != sets[1].digest(0)
    assert sets[0].read(0)[1].size == (4, 4)


def test_copies_of_an_embedded_image_are_one_cluster(tmp_path):
    folder = tmp_path / "own"
    task = own(folder, [], {**CHOICE, "file": "rows.parquet"})
    rows = [{"i": made.embedded(folder, k % 4), "o": [f"a {k}", f"b {k}"]} for k in range(12)]
    made.parquet(folder / "rows.parquet", rows)
    (result,) = Suite({"own": task}).run(made.BagOfWords()).values()
    assert result.n == 12 and result.counts["clusters"] == 4


def test_parquet_cells_with_one_image_of_a_list_or_a_path_are_read(tmp_path):
    folder = tmp_path / "own"
    task = own(folder, [], {**CHOICE, "file": "rows.parquet"})
    one = made.embedded(folder, 1)
    made.parquet(folder / "rows.parquet", [{"i": [one], "o": ["a", "b"]}, {"i": [one, one], "o": ["c", "d"]}])
    source, _ = load_questions(task)
    assert source.read(0)[1].size == (12, 10)
    with pytest.raises(
        DataError,
        match=r"row 2: column i must contain one image per row, got 2 images\. Store each image of a row in a separate column",
    ):
        source.read(1)
    made.parquet(folder / "rows.parquet", [{"i": {"bytes": None, "path": "2.png"}, "o": ["a", "b"]}])
    assert load_questions(task)[0].read(0)[1].size == (12, 10)


def test_a_reader_that_fails_does_not_end_the_list(root, monkeypatch):
    (entry,) = [entry for entry in catalogue.datasets() if entry.name == "valse"]
    monkeypatch.setattr("evals.sets.question_files.open_valse", lambda root: 1 / 0)
    presence = catalogue.check_presence(entry, root)
    assert presence.state == "odd" and "cannot be opened" in presence.note


def test_ties_are_reported(tmp_path):
    rows = [{"i": f"{k % 3}.png", "o": ["a b", "b a"]} for k in range(20)]
    for ties, value in (("lose", 0.0), ("first", 1.0)):
        (result,) = Suite({"own": own(tmp_path / "own", rows, CHOICE, ties=ties)}).run(made.BagOfWords()).values()
        assert result.value == value and result.counts["ties"] == 20
        assert any("20 of 20 questions are decided by a tie" in remark for remark in result.remarks())
