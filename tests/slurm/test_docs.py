"""Run the commands of docs/guides/clusters.md in their order, on a real SLURM."""

import json
import re
import shlex
from pathlib import Path

import pytest
import yaml

from launch.jobs.sbatch_options import spelling
from launch.monitor.folders import launched_folders
from tests.docs.test_docs import ROOT, SHORT
from tests.slurm.conftest import Lab

pytestmark = pytest.mark.slurm
SMALL = "batch_size=16"  # otherwise these trainings take most of the processor time of the tests on SLURM


def test_the_commands_of_the_clusters_page_run(cluster, tmp_path):
    cluster.idle()
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    lab = Lab(tmp_path, cluster)
    text = (ROOT / "docs/guides/clusters.md").read_text(encoding="utf-8")
    lines = [line for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]
    commands = [line for line in lines if line.startswith("sparo ")]
    assert len(lines) - len(commands) == 2 and len(commands) >= 10  # the fixture executes the other two
    for command in commands:
        words = shlex.split(command)[1:]
        words += [*SHORT, SMALL] if "train" in words else []
        words += ["eval={}"] if "name=sweep" in words else []
        words += ["--force"] if "resubmit" in words else []  # the run of two steps has finished by then
        lab.sparo(*words, *(["--train", "140", "--test", "20"] if words == ["data", "scenes"] else []))
        if words[1] in ("train", "data", "resubmit"):
            lab.wait(120, lambda: not cluster.says("squeue", "-h"), command)
    lab.wait(120, lambda: not cluster.says("squeue", "-h"), "the last one")
    found = lab.status(*(folder.relative_to(tmp_path) for folder in launched_folders(tmp_path / "runs")))
    assert len(found) == 7 and all(s["state"].endswith("COMPLETED") and "," not in s["state"] for s in found), found
    results = list((tmp_path / "runs/evals").glob("*/results.json"))
    assert len(results) == 1 and len(json.loads(results[0].read_text())["results"]) == 2
    assert list((tmp_path / "data/scenes/train").glob("*.idx.npy"))


def test_a_sweep_is_operated_as_in_the_guide(whole, tmp_path, monkeypatch):
    """Kill a node between the commands of docs/guides/operate_cluster.md."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    lab, cluster = Lab(tmp_path, whole.cluster), whole.cluster
    text = (ROOT / "docs/guides/operate_cluster.md").read_text(encoding="utf-8")
    (description,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    place = tmp_path / "sparo/clusters"
    place.mkdir(parents=True)
    slow = {"environment": {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{whole.root}/slow", "SPARO_TEST_SLEEP": "0.4"}}
    (place / "mine.yaml").write_text(description + yaml.safe_dump(slow))
    lab.sparo("data", "scenes", "--train", "140", "--test", "20")
    commands = [line for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]
    answers = []
    for command in commands:
        words = shlex.split(command)[1:]
        words += [*SHORT, SMALL, "steps=30", "eval={}", "log.heartbeat_seconds=0.5"] if "train" in words else []
        words += ["--interval", "1"] if "--watch" in words else []
        answers.append(said := lab.sparo(*words))
        if words[1] == "train" and "--dry-run" not in words:
            lab.wait(60, lambda: _steps(lab)[0] > 2, "the first run's steps")
        elif words[1] == "save":
            asked = [line.partition(":")[0] for line in said.splitlines() if ": asked job" in line]
            assert asked and "no training is running, so there is nothing to save" in said
            saved = (tmp_path / asked[0] / "checkpoints").glob
            lab.wait(30, lambda saved=saved: list(saved("step-*/meta.json")), "a checkpoint")
            assert not any(s["restarts"] for s in lab.status(tmp_path / "runs/lr"))
            cluster.kill_node(next(s["nodes"] for s in lab.status(tmp_path / "runs/lr") if s["state"] == "RUNNING"))
    checked, printed, cancelled, resubmitted = (answers[i] for i in (0, 1, 5, 8))
    assert checked.count(": ok, 1 rank(s), Python") == 2 and "GB/s" in checked, checked
    assert "#SBATCH --array=0-5%2" in printed and "6: runs/lr-lr0.001-seed0, " in printed and "hours" in printed
    assert "runs/lr-lr0.0002-seed1: cancelled" in cancelled
    assert resubmitted.count("not submitted: training finished at step 30") == 5 and resubmitted.count("  job ") == 1
    states = lab.status(tmp_path / "runs/lr")
    names = [f"lr-lr{rate}-seed{seed}" for rate in ("0.001", "0.0005", "0.0002") for seed in (0, 1)]
    assert [Path(s["folder"]).name for s in states] == names
    assert {(s["state"], s["step"]) for s in states} == {("COMPLETED", 30)} and sum(s["restarts"] for s in states) >= 1
    assert answers[-1].rstrip().endswith("6 runs: 6 COMPLETED")
    assert answers[7].count("rank 0: ") == 6 * 2 or "has no log yet" in answers[7]


def _steps(lab: Lab) -> list[int]:
    return [status["step"] for status in lab.status(lab.root / "runs/lr")]


def test_every_option_of_this_sbatch_can_be_written_in_a_cluster_file(cluster):
    names = re.findall(r"^ +(?:-\w, )?--([a-z][a-z-]+)", cluster.says("sbatch", "--help"), re.MULTILINE)
    assert len(names) > 70 and [name for name in names if spelling(name) is None] == []


def test_the_page_explains_every_key():
    from launch.jobs.clusters import ClusterConfig

    text = Path(ROOT / "docs/guides/clusters.md").read_text(encoding="utf-8")
    assert not [name for name in ClusterConfig.model_fields if f"`{name}`" not in text]
