"""Arrays of small jobs on a real SLURM: evaluations and conversions."""

import json
import sys
from pathlib import Path

import pytest
import yaml

from launch.jobs.records import Records
from tests.helpers.samples import jpeg
from tests.slurm.conftest import ALONE, STEPS

pytestmark = pytest.mark.slurm


def test_checkpoints_times_tasks_fan_out_and_merge(lab):
    words = ("launch", "eval", "one", "two", "--tasks", "zero,pairs", "--cluster", "lab", "--name", "both")
    lab.sparo(*words, "--parallel", "2")
    folder = lab.root / "runs/evals/both"
    lab.wait(120, lambda: (folder / "results.json").exists(), "the merged results")
    lab.wait(20, lambda: lab.state(folder) == "4 COMPLETED", "the end")
    assert (lab.status(folder)[0]["step"], lab.status(folder)[0]["total"]) == (4, 4)
    merged = json.loads((folder / "results.json").read_text())["results"]
    assert set(merged) == {"one/zero", "one/pairs", "two/zero", "two/pairs"}
    alone = lab.sparo("eval", "one", "--tasks", "zero,pairs", "--json", "alone.json")
    own = json.loads((lab.root / "alone.json").read_text())["results"]
    assert all(merged[name]["metrics"] == own[name]["metrics"] for name in own) and "zero" in alone
    assert set(json.loads((lab.root / "two/evals/latest.json").read_text())["results"]) == {"zero", "pairs"}
    (folder / "parts/00002.json").unlink()  # as after a failed element: the same command submits what is missing
    assert "1 element(s)" in lab.sparo(*words)
    lab.wait(60, lambda: (folder / "parts/00002.json").exists() and lab.state(folder) == "COMPLETED", "the missing one")
    again = lab.sparo(*words)
    assert "micro" in again and "job" not in again and len(Records(folder).submissions()) == 2
    other = lab.sparo("launch", "eval", "one", "--tasks", "zer", "--cluster", "lab", code=2)
    assert "--tasks zer: did you mean 'zero'?" in other


def test_shares_of_an_array_score_what_one_process_would(lab):
    words = "eval one --tasks zero,pairs --features shares --no-write-to-run --results shared --part slurm"
    script = lab.root / "shares.sh"
    script.write_text(f"#!/bin/bash\n{Path(sys.executable).with_name('sparo')} {words}\n")
    lab.cluster.says("sbatch", "--array=3-5", "--chdir", str(lab.root), "--output=share-%a.log", str(script))
    lines = lab.root / "shared/results.jsonl"
    lab.wait(90, lambda: lines.exists() and set(_scores(lines)) == {"zero", "pairs"}, "the scores")
    lab.sparo("eval", "one", "--tasks", "zero,pairs", "--features", "none", "--no-write-to-run", "--json", "whole.json")
    whole = json.loads((lab.root / "whole.json").read_text())["results"]
    assert _scores(lines) == {
        name.rpartition("/")[2]: pytest.approx(result["metrics"]) for name, result in whole.items()
    }
    lab.wait(30, lambda: not lab.cluster.says("squeue", "-h", "--name=shares.sh"), "the end")
    waited = sum("need the other parts" in (lab.root / f"share-{i}.log").read_text() for i in (3, 4, 5))
    assert waited < 3


def _scores(lines: Path) -> dict[str, dict[str, float]]:
    """Return the jobs by task; the last two elements may both see that everything is done, and both score."""
    return {line["name"]: line["metrics"] for line in map(json.loads, lines.read_text().splitlines())}


def test_training_submits_long_tasks_as_a_job(lab):
    tasks = yaml.safe_load((lab.root / "recipe.yaml").read_text())["eval"]["tasks"]
    side = yaml.safe_dump(
        {"cluster": "lab", "tasks": {"zero": tasks["zero"]}}, default_flow_style=True, width=1000
    ).strip()
    said = lab.sparo("train", "recipe.yaml", "name=aside", ALONE, f"eval.job={side}")
    assert "submitted the evaluation (eval.job) to lab" in said
    path = lab.root / f"aside/evals/side-{STEPS:08d}/results.json"
    lab.wait(60, path.exists, "the side job's results")
    ((name, result),) = json.loads(path.read_text())["results"].items()
    lab.sparo("eval", "aside", "--tasks", "zero", "--no-write-to-run", "--json", "aside.json")
    (own,) = json.loads((lab.root / "aside.json").read_text())["results"].values()
    assert name.endswith("/zero") and result["metrics"] == pytest.approx(own["metrics"])


def test_a_conversion_in_parts_equals_a_whole_one(lab):
    source = lab.root / "images"
    for i in range(30):
        path = source / ("cat" if i % 2 else "dog") / f"{i:02d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(jpeg(i))
    lab.sparo("data", "convert", "images", "whole", "--per-shard", "4")
    words = ("launch", "data", "convert", "images", "parted", "--per-shard", "4", "--parts", "3", "--cluster", "lab")
    lab.sparo(*words, "--name", "converted")
    folder = lab.root / "runs/data/converted"
    lab.wait(90, lambda: lab.state(folder) == "3 COMPLETED", "the end")
    whole, parted = ({p.name: p.read_bytes() for p in (lab.root / name).glob("*.tar")} for name in ("whole", "parted"))
    assert whole == parted and len(whole) == 8
    assert "all 3 elements are done" in lab.sparo(*words, "--name", "converted")
    assert "no such option" in lab.sparo(*words, "--per-shrad", "3", code=2).lower()
