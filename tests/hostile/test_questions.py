"""Damaged and odd files of compositional sets: one error that names the file, never another kind of exception."""

import json
import shutil

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from evals.suite import catalogue
from evals.suite.question_tasks import ChoiceTaskConfig, MatchingTaskConfig, QuestionsTaskConfig, questions_of
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
        source, _ = questions_of(tasks_of(name, root))
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
        ({"image_path": "/etc/../.."}, r"is not the name of an image in this folder"),
    ],
)
def test_odd_rows_are_named(change, match, root, tmp_path):
    folder = tmp_path / "negbench"
    shutil.copytree(root / "negbench", folder)
    names = ["image_path", "correct_answer", *(f"caption_{k}" for k in range(4)), "correct_answer_template"]
    row = {**dict(zip(names, ["000000000000.jpg", "0", "a", "b", "c", "d", "positive"], strict=True)), **change}
    made.write_csv(folder / "COCO_val_mcq_llama3.1_rephrased.csv", [names, list(row.values())])
    with pytest.raises(DataError, match=match):
        questions_of(tasks_of("negbench/coco_mcq", tmp_path))


def test_regions_outside_the_image_are_refused_when_read(root, tmp_path):
    folder = tmp_path / "aro"
    shutil.copytree(root / "aro", folder)
    rows = json.loads((folder / "visual_genome_relation.json").read_text())
    rows[0]["bbox_x"] = 500
    (folder / "visual_genome_relation.json").write_text(json.dumps(rows))
    source, _ = questions_of(tasks_of("aro/vg_relation", tmp_path))
    with pytest.raises(DataError, match=r"the region 500,2,9,22 is outside the image of 30 x 20 pixels"):
        source.read(0)


def test_lists_in_cells_are_not_executed(root, tmp_path):
    folder = tmp_path / "crepe"
    shutil.copytree(root / "crepe", folder)
    path = folder / FILES["crepe/productivity"]
    path.write_text("image_id,caption,x,y,width,height,hard_negs\n0,a,0,0,5,5,__import__('os').getcwd()\n")
    with pytest.raises(DataError, match=r"\{hard_negs:list\} must be a list"):
        questions_of(tasks_of("crepe/productivity", tmp_path))


def test_tasks_refuse_questions_of_another_form(root):
    columns = tasks_of("winoground", root).columns
    assert columns is not None
    options = {"root": str(root / "winoground"), "layout": "table", "columns": columns}
    with pytest.raises(
        DataError, match=r"task choice needs an image with several texts, .* got 2 image\(s\) and 2 text\(s\)"
    ):
        questions_of(ChoiceTaskConfig(task="choice", **options))
    one = columns.model_copy(update={"captions": ("{caption_0}",)})
    with pytest.raises(DataError, match=r"task matching needs as many texts as images"):
        questions_of(MatchingTaskConfig(task="matching", **{**options, "columns": one}))
    with pytest.raises(DataError, match=r"no question is left"):
        questions_of(MatchingTaskConfig(task="matching", min_per_kind=99, **options))


def test_an_odd_number_of_rows_is_refused(root, tmp_path):
    shutil.copytree(root / "mmvp_vlm", tmp_path / "mmvp_vlm")
    path = tmp_path / "mmvp_vlm/Questions.csv"
    path.write_text("\n".join(path.read_text().splitlines()[:-1]) + "\n")
    with pytest.raises(DataError, match=r"has 11 rows, but a question consists of 2"):
        questions_of(tasks_of("mmvp_vlm", tmp_path))


def test_frames_of_another_form_are_refused(root, tmp_path):
    shutil.copytree(root / "eqben", tmp_path / "eqben")
    np.save(tmp_path / "eqben/eqbenyoucook2/1_0.npy", np.zeros((4, 4), np.float32))
    source, _ = questions_of(tasks_of("eqben", tmp_path))
    number = source._names.index("eqbenyoucook2/1_0.npy")
    with pytest.raises(DataError, match=r"expected \(H, W, 3\) uint8, got \(4, 4\) float32"):
        source.read(number)
