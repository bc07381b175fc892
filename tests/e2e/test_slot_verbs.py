"""Test `sparo slots` on small runs: `sparo eval --slots` scores the same selection, and invalid input loses nothing."""

import json
import re

import pytest
import yaml
from PIL import Image

from sparo_data.writer import write_wds_layout
from tests.helpers.processes import sparo
from tests.helpers.samples import jpeg


def slots(world, *words, code=0, data="tasks.yaml", **named):
    store = () if words[0] == "show" else ("--features", "store")
    done = sparo("slots", *words, "--data", data, *store, cwd=world, COLUMNS="160", **named)
    assert done.returncode == code, done.stderr + done.stdout
    assert "Traceback" not in done.stderr
    return done


def scored(world, *words):
    done = sparo(
        "eval",
        *words,
        "--data",
        "tasks.yaml",
        "--features",
        "store",
        "--no-write-to-run",
        "--json",
        "got.json",
        cwd=world,
    )
    assert done.returncode == 0, done.stderr
    return {name.rpartition("/")[2]: r for name, r in json.loads((world / "got.json").read_text())["results"].items()}


@pytest.fixture(scope="module")
def told_apart(world):
    """Write a task of pairs whose true captions differ, in a YAML file with the zero-shot task."""
    pair = '{"kind": "%s", "caption": "a red square %d", "negative_caption": "a blue square %d"}'
    kinds = ("replace_att", "swap_att")
    rows = [(f"{i:03d}", {"jpg": jpeg(i), "json": (pair % (kinds[i % 2], i, i)).encode()}) for i in range(12)]
    write_wds_layout(world / "told/pairs", rows)
    tasks = {
        "zero": {"task": "zeroshot", "root": str(world / "small/zero")},
        "pairs": {"task": "pairs", "root": str(world / "told/pairs")},
    }
    (world / "told.yaml").write_text(yaml.safe_dump({"tasks": tasks}))
    return world


def test_a_selection_has_the_scores_of_eval(told_apart):
    world = told_apart
    done = slots(world, "select", "runs/s0", "--task", "pairs", "--report-tasks", "zero,pairs", "--method", "forward", "--k", "2", "--out",
                 "chosen.json", "--json", "facts.json", "--plot", "curves.png", "--draws", "5", data="told.yaml")  # fmt: skip
    facts = json.loads((world / "facts.json").read_text())
    zero, pairs = facts["reports"]
    assert (zero["share"], pairs["share"]) == ("other data", "held out") and zero["n"] == 12 > pairs["n"] > 0
    assert len(zero["curve"]) == 4 and zero["curve"][1] == zero["chosen"][0] and zero["curve"][3] == zero["whole"][0]
    assert facts["selection"]["made_on"]["n"] + pairs["n"] == 12 and (world / "curves.png").stat().st_size > 5000
    assert "next: sparo eval runs/s0 --slots chosen.json" in done.stderr
    whole, chosen = (
        scored(world, "runs/s0", "--tasks", "zero"),
        scored(world, "runs/s0", "--tasks", "zero", "--slots", "chosen.json"),
    )
    assert (
        zero["whole"][0] == whole["zero"]["metrics"]["acc1"] and zero["chosen"][0] == chosen["zero"]["metrics"]["acc1"]
    )
    by_number = ",".join(map(str, facts["selection"]["chosen"]))
    assert (
        chosen["zero"]["metrics"]
        == scored(world, "runs/s0", "--tasks", "zero", "--slots", by_number)["zero"]["metrics"]
    )
    again = ("select", "runs/s0", "--task", "zero", "--report-tasks", "zero", "--same-data", "--out", "own.json")
    (world / "own.json").write_text(
        json.dumps({**json.loads((world / "chosen.json").read_text()), "names": {"2": "mine"}, "notes": {"1": "x"}})
    )
    done = slots(world, *again, "--slots", "chosen.json")
    assert "same data" not in done.stdout  # the selection was made on the pairs
    assert "by hand" in slots(world, *again, "--slots", "0,2").stdout  # the origin of such a selection is unknown
    done = slots(world, *again, "--k", "best")
    own = json.loads((world / "own.json").read_text())
    assert (own["names"], own["notes"]) == ({"2": "mine"}, {"1": "x"})  # names of the same units are kept
    assert "same data" in done.stdout and "their gain is too high" in " ".join(done.stderr.split())


def test_every_unit_has_its_scores(world):
    slots(world, "score", "runs/s0", "--json", "units.json")
    table = json.loads((world / "units.json").read_text())["scores"]
    assert set(table) == {"zero alone", "zero without", "pairs alone", "pairs without", "knn alone"}
    for slot in range(4):
        alone = scored(world, "runs/s0", "--tasks", "zero,pairs,knn", "--slots", str(slot))
        rest = scored(world, "runs/s0", "--tasks", "zero", "--slots", ",".join(str(s) for s in range(4) if s != slot))
        for task in ("zero", "pairs", "knn"):
            assert table[f"{task} alone"][slot] == pytest.approx(alone[task]["metrics"][alone[task]["headline"]])
        assert table["zero without"][slot] == rest["zero"]["metrics"]["acc1"]


def test_masks_have_the_scores_of_eval(world):
    slots(
        world,
        "mask",
        "runs/s0",
        "--task",
        "pairs",
        "--report-tasks",
        "zero",
        "--granularity",
        "dimension",
        "--out",
        "mask.json",
        "--json",
        "m.json",
        "--seeds",
        "2",
    )
    (row,) = json.loads((world / "m.json").read_text())["rows"]
    assert row["parts"] == [32, 1] and len(row["pairs"][1]) == len(row["relative_change"]["zero"]) == 2
    found = scored(world, "runs/s0", "--tasks", "zero,pairs", "--slots", "mask.json")
    assert found["zero"]["metrics"]["acc1"] == row["tasks"]["zero"][1][0]
    assert found["pairs"]["metrics"]["macro"] == row["pairs"][1][0] >= row["pairs"][0]


def test_tables_of_the_paper_and_quality(world):
    four = slots(
        world, "table", "4", "runs/s0", "runs/s1", "--task", "zero", "--report-tasks", "pairs", "--json", "4.json"
    )
    assert "layout of Table 4" in four.stdout and "Average" in four.stdout
    columns = json.loads((world / "4.json").read_text())["columns"]
    assert columns[0]["kinds"] == ["replace_att", "swap_att", "Average"] and columns[0]["share"] == "50 %"
    five = slots(
        world, "table", "5", "runs/s0", "--task", "pairs", "--report-tasks", "zero", "--seeds", "1", "--json", "5.json"
    )
    assert "(4, 8)" in five.stdout and "(32, 1)" in five.stdout
    quality = slots(world, "quality", "runs/s0", "--task", "zero", "--reference", "pixels:8", "--json", "q.json")
    assert "in effect" in quality.stdout
    (row,) = json.loads((world / "q.json").read_text())["rows"]
    assert 1 <= row["effective"] <= 4 and 0 <= row["redundancy"] <= 1 and len(row["sharpness_of_units"]) == 4
    assert -1 <= row["meaning"] <= 1 and row["n"] == 12
    slots(world, "quality", "pixels:8", "--task", "zero", "--parts", "4", "--json", "q.json")


def test_slots_of_dino_are_selected_by_knn(others):
    done = slots(
        others, "select", "runs/dino", "--task", "knn", "--k", "best", "--out", "dino.json", "--json", "d.json"
    )
    facts = json.loads((others / "d.json").read_text())
    assert facts["reports"][0]["share"] == "held out" and "knn" in done.stdout
    found = scored(others, "runs/dino", "--tasks", "knn", "--slots", "dino.json")
    assert 0 <= found["knn"]["metrics"]["acc1_k20"] <= 1
    done = slots(
        others,
        "select",
        "runs/dino",
        "--task",
        "probe",
        "--report-tasks",
        "knn,probe",
        "--k",
        "1",
        "--out",
        "l.json",
        "--json",
        "l2.json",
    )
    near, linear = json.loads((others / "l2.json").read_text())["reports"]
    assert (near["share"], linear["share"]) == ("other data", "held out") and linear["draws"] == 5
    assert linear["chosen"][0] == linear["curve"][0] and len(linear["curve"]) == 4
    done = slots(others, "select", "runs/dino", "--task", "probe", "--method", "cover", code=2)
    assert "a linear layer is fitted" in done.stderr
    done = slots(others, "select", "runs/s0", "--task", "pairs", code=2)
    assert "has 1 different image(s), too few to be split" in done.stderr  # all twelve have the same true caption
    done = slots(others, "select", "runs/dino", "--task", "knn", "--method", "forward", code=2)
    assert "a vote is not a sum over units" in done.stderr
    done = slots(others, "select", "runs/dino", "--task", "zero", code=2)
    assert "has no text tower" in done.stderr


def test_heads_and_parts_are_selected_like_slots(others):
    words = ("runs/plain", "--task", "zero", "--report-tasks", "pairs")
    slots(others, "select", *words, "--units", "heads", "--head-layers", "2", "--out", "heads.json", "--json", "h.json")
    facts = json.loads((others / "h.json").read_text())
    assert facts["selection"]["count"] == 4 and len(facts["selection"]["chosen"]) == 2
    found = scored(others, "runs/plain", "--tasks", "pairs", "--slots", "heads.json")
    assert found["pairs"]["metrics"]["macro"] == facts["reports"][0]["chosen"][0]
    slots(others, "select", *words, "--units", "parts", "--parts", "4", "--out", "parts.json", "--json", "p.json")
    found = scored(others, "runs/plain", "--tasks", "pairs", "--slots", "parts.json")
    assert found["pairs"]["metrics"]["macro"] == json.loads((others / "p.json").read_text())["reports"][0]["chosen"][0]


BAD = {
    "a model without slots": (("select", "runs/plain", "--task", "zero"), "has no slots, or only one. Use a model with a readout"),
    "heads of slots": (("select", "runs/s0", "--task", "zero", "--units", "heads"), "Use a CLIP whose image tower is open_clip's ordinary ViT"),
    "units": (("select", "runs/s0", "--task", "zero", "--units", "slot"), "--units slot: did you mean 'slots'?"),
    "parts": (("select", "runs/plain", "--task", "zero", "--units", "parts"), "--parts None"),
    "method": (("select", "runs/s0", "--task", "zero", "--method", "tpo"), "--method tpo: did you mean 'top'?"),
    "k": (("select", "runs/s0", "--task", "zero", "--k", "9"), "--k 9: exceeds the 4 slots"),
    "k 0": (("select", "runs/s0", "--task", "zero", "--k", "0"), "--k 0: expected `half`, `best`, or a number of at least 1"),
    "task": (("select", "runs/s0", "--task", "zeor"), "--task zeor: did you mean 'zero'?"),
    "retrieval": (("select", "runs/s0", "--task", "ret"), "needs a task of kind zeroshot, pairs, choice, matching, paraphrases, knn or probe"),
    "out": (("select", "runs/s0", "--task", "zero", "--out", "x.yaml"), "--out x.yaml: expected a .json file"),
    "plot": (("select", "runs/s0", "--task", "zero", "--plot", "x.xyz"), "--plot x.xyz: expected a .png, .pdf or .svg file"),
    "slots": (("select", "runs/s0", "--task", "zero", "--slots", "7"), "--slots 7"),
    "a file that is not there": (("select", "runs/s0", "--task", "zero", "--slots", "no.json"), "no.json"),
    "mask of classes": (("mask", "runs/s0", "--task", "zero"), "masks of slots are trained on pairs of a right"),
    "mask of heads": (("mask", "runs/plain", "--task", "pairs", "--units", "heads", "--report-tasks", "zero"), "a mask multiplies each value"),
    "per": (("mask", "runs/s0", "--task", "pairs", "--granularity", "slot"), "--granularity slot"),
    "clamp": (("mask", "runs/s0", "--task", "pairs", "--clamp", "mix"), "--clamp mix"),
    "parts of slots": (("score", "runs/s0", "--tasks", "zero", "--parts", "4"), "--parts: applies to --units parts only. Remove it."),
    "blocks of slots": (("select", "runs/s0", "--task", "zero", "--head-layers", "4"), "--head-layers: applies to --units heads only"),
    "a method by hand": (("select", "runs/s0", "--task", "zero", "--slots", "0,1", "--method", "top"), "--method: has no effect with --slots"),
    "seeds of four": (("table", "4", "runs/s0", "--task", "zero", "--seeds", "3"), "--seeds: has no effect in Table 4"),
    "k of five": (("table", "5", "runs/s0", "--task", "pairs", "--k", "half"), "--k: has no effect in Table 5"),
    "table": (("table", "6", "runs/s0"), "sparo slots table 6"),
    "four on pairs": (("table", "4", "runs/s0", "--task", "pairs", "--report-tasks", "pairs"), "requires a selection task of kind `zeroshot`"),
    "judged by itself": (("quality", "runs/s0", "--task", "zero", "--reference", "runs/s0"), "is the evaluated checkpoint itself"),
    "one image": (("quality", "runs/s0", "--task", "zero", "--limit", "1"), "has 1 image(s), but slots are compared over at least two"),
    "sort": (("score", "runs/s0", "--tasks", "zero", "--sort", "pairs"), "--sort pairs: is not among the tasks shown"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_reported_and_writes_nothing(name, others, tmp_path):
    words, message = BAD[name]
    before = sorted(others.glob("*.json"))
    done = slots(others, *words, code=2)
    assert message in " ".join(done.stderr.split()), done.stderr
    assert sorted(others.glob("*.json")) == before


def test_a_selection_of_another_checkpoint_is_refused(others):
    slots(others, "select", "runs/s0", "--task", "zero", "--out", "mine.json", "--report-tasks", "zero")
    done = sparo("eval", "runs/s1", "--data", "tasks.yaml", "--tasks", "zero", "--slots", "mine.json", cwd=others)
    assert done.returncode == 2 and "--slots mine.json: was made for another checkpoint" in done.stderr
    done = slots(others, "select", "runs/s1", "--task", "zero", "--slots", "mine.json", code=2)
    assert "was made for another checkpoint" in done.stderr


def test_pages_escape_foreign_text(world, tmp_path):
    export = world / "runs/s0"
    Image.new("RGB", (50, 30), "red").save(tmp_path / "a.png")
    Image.new("RGB", (30, 50), "blue").save(tmp_path / "b.png")
    hostile = "<script>alert(1)</script> $x^{ \x1b[31m"
    done = sparo("slots", "show", str(export), "--image", "a.png", "--image", "b.png", "--caption", hostile, "--caption", "blue",
                 "--out", "page", "--slots", "0,2", cwd=tmp_path)  # fmt: skip
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "page/report.html").read_text()
    assert "<script" not in page and "&lt;script&gt;" in page and "\x1b" not in page
    assert not re.search(r"(src|href)=\"(?!data:)", page) and page.count("<img") == 2 * 3 + 2 * 4 * 2
    assert {p.name for p in (tmp_path / "page").iterdir()} == {
        "report.html",
        "examples.png",
        "slot-000.png",
        "slot-002.png",
    }
    for words, message in (
        (("--image", "a.png", "--caption", "x", "--caption", "y"), "2 captions for 1 images"),
        ((), "Name a task of the run (--task retrieval) or your own images"),
        (("--image", "no.png"), "no.png"),
        (("--image", "a.png", "--slots", "9"), "--slots 9"),
    ):
        done = sparo("slots", "show", str(export), *words, "--out", "bad", cwd=tmp_path)
        assert done.returncode == 2 and message in " ".join(done.stderr.split()) and not (tmp_path / "bad").exists()


def test_pictures_of_a_task_and_of_a_model_without_texts(others):
    slots(
        others,
        "show",
        "runs/s0",
        "--task",
        "zero",
        "--images",
        "8",
        "--tiles",
        "2",
        "--min-cosine",
        "-1",
        "--min-share",
        "0",
        "--out",
        "pictures",
    )
    page = (others / "pictures/report.html").read_text()
    assert "8 images of zero" in page and page.count("<h3>Slot ") == 4 and "have a cosine above -1" in page
    slots(
        others,
        "show",
        "runs/dino",
        "--task",
        "knn",
        "--images",
        "5",
        "--examples",
        "2",
        "--tiles",
        "2",
        "--out",
        "dino",
    )
    page = (others / "dino/report.html").read_text()
    assert "most sharp" in page and "no text tower" in page
    done = slots(others, "show", "runs/plain", "--task", "zero", "--images", "2", "--out", "plain", code=2)
    assert "has no slots" in done.stderr
