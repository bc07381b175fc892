"""The commands of docs/guides/clusters.md, in their order, on a real SLURM."""

import json
import re
import shlex
from pathlib import Path

import pytest

from launch.monitor.folders import launched_folders
from tests.docs.test_docs import ROOT, SHORT
from tests.slurm.conftest import Lab

pytestmark = pytest.mark.slurm


def test_the_commands_of_the_clusters_page_run(cluster, tmp_path):
    cluster.idle()
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    lab = Lab(tmp_path, cluster)
    text = (ROOT / "docs/guides/clusters.md").read_text(encoding="utf-8")
    lines = [line for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]
    commands = [line for line in lines if line.startswith("sparo ")]
    assert len(lines) - len(commands) == 2 and len(commands) >= 10  # the two are what the fixture does
    for command in commands:
        words = shlex.split(command)[1:]
        words += SHORT if "train" in words else []
        words += ["eval={}"] if "name=sweep" in words else []
        lab.sparo(*words, *(["--train", "140"] if words == ["data", "scenes"] else []))
        if words[1] in ("train", "data", "resubmit"):
            lab.wait(120, lambda: not cluster.says("squeue", "-h"), command)
    lab.wait(120, lambda: not cluster.says("squeue", "-h"), "the last one")
    found = lab.status(*(folder.relative_to(tmp_path) for folder in launched_folders(tmp_path / "runs")))
    assert len(found) == 7 and all(s["state"].endswith("COMPLETED") and "," not in s["state"] for s in found), found
    results = list((tmp_path / "runs/evals").glob("*/results.json"))
    assert len(results) == 1 and len(json.loads(results[0].read_text())["results"]) == 2
    assert list((tmp_path / "data/scenes/train").glob("*.idx.npy"))


def test_the_page_explains_every_key():
    from launch.jobs.clusters import ClusterConfig

    text = Path(ROOT / "docs/guides/clusters.md").read_text(encoding="utf-8")
    assert not [name for name in ClusterConfig.model_fields if f"`{name}`" not in text]
