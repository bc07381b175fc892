"""Fixtures: a real SLURM for the tests of this folder (tests/slurm/cluster.py). Tests are skipped, with the reason, if it cannot run."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from launch.jobs.records import Records
from sparo_data.writer import write_shards
from sparo_train.core.disk import metrics
from tests.helpers.processes import sparo
from tests.helpers.recipes import tiny_recipe
from tests.helpers.runs import assert_bit_equal, finish, start_ranks
from tests.helpers.samples import eval_sets, sample
from tests.slurm.cluster import Cluster

STEPS = 40
ALONE = "engine={kind: local, device: cpu, precision: fp32}"  # one rank
# In the process of a job, every step takes SPARO_TEST_SLEEP seconds longer, and rank SPARO_TEST_DIES kills itself at its fourth step.
_SLOW = """
import importlib.machinery, os, signal, sys, time

class Finder(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name != "sparo_train.train.step":
            return None
        spec = super().find_spec(name, path, target)
        whole = spec.loader.exec_module
        def exec_module(module):
            whole(module)
            gradients, count = module.gradients, [0]
            def slowly(*arguments):
                time.sleep(float(os.environ.get("SPARO_TEST_SLEEP", "0")))
                count[0] += 1
                if os.environ.get("SPARO_TEST_DIES") == os.environ.get("SLURM_PROCID") and count[0] == 4:
                    os.kill(os.getpid(), signal.SIGKILL)
                return gradients(*arguments)
            module.gradients = slowly
        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Finder)
"""


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a folder with a recipe of 40 steps, its uninterrupted runs on one and on two ranks, and a description of the cluster."""
    root = tmp_path_factory.mktemp("lab")
    write_shards(root / "shards", (sample(i) for i in range(96)), 24)
    tree = tiny_recipe(root / "shards", root, steps=STEPS, eval={"tasks": eval_sets(root / "sets")})
    tree["engine"] = {"kind": "ddp", "device": "cpu", "precision": "fp32", "timeout": 60}
    tree |= {
        "log": {"every_steps": 1, "tensorboard": False, "heartbeat_seconds": 1.0},
        "checkpoint": {"every_steps": 10},
    }
    (root / "recipe.yaml").write_text(yaml.safe_dump(tree))
    codes = [code for code, _ in finish(start_ranks(2, "train", root / "recipe.yaml", "name=two"))]
    assert codes == [0, 0]
    done = sparo("train", str(root / "recipe.yaml"), "name=one", ALONE, OMP_NUM_THREADS="1")  # as in the jobs
    assert done.returncode == 0, done.stderr
    (root / "slow").mkdir()
    (root / "slow/sitecustomize.py").write_text(_SLOW)
    (root / "configs/clusters").mkdir(parents=True)
    block = {"extends": str(Path("configs/clusters/test.yaml").resolve()), "time": 30}
    block["setup"] = [f"export PYTHONPATH={root}/slow"]
    block["environment"] = {"SPARO_TEST_SLEEP": "0.1"}
    (root / "configs/clusters/lab.yaml").write_text(yaml.safe_dump(block))
    return root


class Lab:
    """A cluster, and the folder of `place`."""

    def __init__(self, root: Path, cluster: Cluster):
        self.root, self.cluster = root, cluster

    def sparo(self, *words: str, code: int = 0) -> str:
        """Run `sparo …` in the lab's folder, with SLURM's commands; return its output."""
        env = {name: self.cluster.env[name] for name in ("SLURM_CONF", "PATH")}
        done = sparo(*words, cwd=self.root, COLUMNS="200", **env)
        assert done.returncode == code, f"{words}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr

    def launch(self, name: str, *words: str) -> Path:
        """Train the recipe as a job; return its folder."""
        self.sparo("launch", "train", "recipe.yaml", f"name={name}", "--cluster", "lab", *words)
        return self.root / name

    def status(self, *folders: Path) -> list[dict[str, Any]]:
        return json.loads(self.sparo("launch", "status", *map(str, folders), "--json"))

    def state(self, folder: Path) -> str:
        return self.status(folder)[0]["state"]

    def squeue(self, folder: Path, form: str = "%T") -> str:
        """Return the state of the newest job from squeue."""
        record = Records(folder).last_submission()
        assert record
        return self.cluster.says("squeue", "-h", "-r", "--states=all", "-j", record["jobs"][-1], "-o", form)

    def wait(self, seconds: float, ready: Callable[[], Any], what: str) -> None:
        end = time.monotonic() + seconds
        while not ready():
            assert time.monotonic() < end, f"{what}: not within {seconds} s\n{self._evidence()}"
            time.sleep(0.1)

    def step(self, folder: Path, step: int, seconds: float = 90) -> None:
        """Wait until a run has taken `step` steps."""
        self.wait(
            seconds,
            lambda: any(r["step"] >= step for r in metrics.read(folder / "metrics.jsonl", "train")),
            f"step {step}",
        )

    def end(self, folder: Path, seconds: float = 150, state: str = "COMPLETED") -> None:
        """Wait until its job has ended in the expected state."""
        over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        self.wait(seconds, lambda: set(self.squeue(folder).split()) <= set(over), f"{folder.name}: the end")
        assert set(self.squeue(folder).split()) == {state}, self._evidence()

    def equal(self, folder: Path, straight: str = "two") -> None:
        """Assert that losses, parameters and moments equal those of the uninterrupted run."""
        assert_bit_equal(folder, self.root / straight, STEPS)

    def starts(self, folder: Path) -> list[tuple[int, int, str]]:
        """Return (restart, step, how it ended) for every start of the newest job."""
        records = Records(folder)
        last = records.last_submission()
        assert last
        lines = records.starts(last["jobs"][0])
        ends = {line["restart"]: line["reason"] for line in lines if "end" in line}
        return [(s["restart"], s["step"], ends.get(s["restart"], "")) for s in lines if "end" not in s]

    def _evidence(self) -> str:
        """Return information for the message of a failed test."""
        text = self.cluster.says("squeue", "--states=all") + "\n" + self.cluster.says("sinfo", "-N")
        for path in sorted((self.cluster.root / "log").glob("slurm*.log")):
            text += "\n".join([f"\n{path.name}", *path.read_text(errors="replace").splitlines()[-12:]])
        for path in sorted(self.root.glob("*/jobs/*_log.err"), key=lambda p: p.stat().st_mtime)[-4:]:
            text += f"\n{path}\n" + "\n".join(path.read_text(errors="replace").splitlines()[-15:])
        return text


def _running(accounting: bool) -> Iterator[Cluster]:
    problem = Cluster.missing(accounting)
    if problem:
        pytest.skip(problem)
    root = Path(tempfile.mkdtemp(prefix="sparo-slurm-", dir="/tmp"))
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    cluster = Cluster(root, 16800 + 1000 * worker + 500 * accounting, accounting)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(root, ignore_errors=True)


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    yield from _running(False)


@pytest.fixture(scope="session")
def accounted(place: Path) -> Iterator[Lab]:
    """Start it with slurmdbd, so that sacct works."""
    for cluster in _running(True):
        yield Lab(place, cluster)


@pytest.fixture(scope="session")
def lab(cluster: Cluster, place: Path) -> Lab:
    return Lab(place, cluster)


@pytest.fixture
def whole(lab: Lab) -> Iterator[Lab]:
    """Wait until every node is idle, before and after a test."""
    lab.cluster.idle()
    yield lab
    for node in ("n1", "n2", "n3", "n4"):
        lab.cluster.start_node(node)
        lab.cluster.says("scontrol", "update", f"nodename={node}", "state=resume")
    lab.cluster.idle()
