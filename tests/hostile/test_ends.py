"""Test that a run saves and ends at once after errors in evaluations, killed workers, signals, closed terminals and full disks."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
import torch
import yaml
from packaging.requirements import Requirement
from safetensors.torch import load_file, save_file

from launch.commands.train import train
from sparo_data.writer import write_wds_layout
from sparo_train.core.config import resolve
from sparo_train.core.disk import checkpoint_store as store
from sparo_train.core.disk import metrics
from sparo_train.core.errors import TrainingError
from sparo_train.objectives.clip import ClipObjective
from sparo_train.train.run_config import RunConfig
from tests.helpers.processes import start_sparo
from tests.helpers.recipes import tiny_recipe
from tests.helpers.samples import jpeg
from tests.hostile.conftest import assert_ends


def run(tree):
    return resolve(RunConfig, tree, "test")


def saved_step(folder):
    return max(store.CheckpointStore(folder / "checkpoints").steps())


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """Write a set of 480 images, enough for several workers."""
    root = tmp_path_factory.mktemp("many")
    images = [jpeg(i) for i in range(16)]
    samples = [(f"{i:04d}", {"jpg": images[i % 16], "cls": str(i % 3).encode()}) for i in range(480)]
    write_wds_layout(root / "zero", samples, classnames=["red", "blue", "plain"], templates=["a {c}"])
    (root / "t.yaml").write_text(yaml.safe_dump({"tasks": {"zero": {"task": "zeroshot", "root": str(root / "zero")}}}))
    return root


def children(pid):
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def until(ready, seconds=60):
    end = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < end, "not there in time"
        time.sleep(0.02)


def test_an_evaluation_that_fails_ends_with_its_workers(many, home, tmp_path):
    assert_ends(["train", str(home / "good.yaml"), f"out={tmp_path}"], 0, [])
    assert_ends(["export", str(tmp_path / "tiny")], 0, [])
    weights = tmp_path / "tiny/export/open_clip_model.safetensors"
    save_file(
        {name: t * 1e30 for name, t in load_file(weights).items()}, weights
    )  # finite weights whose encodings are not finite
    for features in ("none", str(tmp_path / "store")):
        words = ["eval", str(weights.parent), "--data", str(many / "t.yaml"), "--features", features]
        assert_ends(words, 2, ["is not finite"], seconds=60)


def test_an_overflow_in_the_text_tower_gives_no_score(many, home, tmp_path):
    assert_ends(["train", str(home / "good.yaml"), f"out={tmp_path}"], 0, [])
    assert_ends(["export", str(tmp_path / "tiny")], 0, [])
    weights = tmp_path / "tiny/export/open_clip_model.safetensors"
    save_file({n: t * (1e30 if n.startswith("text.") else 1) for n, t in load_file(weights).items()}, weights)
    for features in ("none", str(tmp_path / "store")):
        assert_ends(
            ["eval", str(weights.parent), "--data", str(many / "t.yaml"), "--features", features],
            2,
            ["the text tower", "is not finite"],
        )


def test_a_failed_evaluation_ends_training_with_its_step_saved(many, shards, tmp_path):
    root = tmp_path / "zero"
    shutil.copytree(many / "zero", root)
    images = [jpeg(0)] * 300
    bad = [(f"{i:04d}", {"jpg": b"none" if i == 290 else data, "cls": b"0"}) for i, data in enumerate(images)]
    write_wds_layout(root, bad, classnames=["red"], templates=["a {c}"])
    tasks = {name: {"task": "zeroshot", "root": str(at)} for name, at in (("fine", many / "zero"), ("zero", root))}
    tree = tiny_recipe(shards, tmp_path, steps=5, eval={"every_steps": 4, "tasks": tasks})
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(tree))
    assert_ends(["train", str(tmp_path / "r.yaml")], 2, ["step 4: fine acc1", "sample 0290", "bad image"])
    assert saved_step(tmp_path / "tiny") == 4


def test_a_killed_loader_worker_ends_a_run_saved(shards, tmp_path):
    tree = tiny_recipe(
        shards, tmp_path, steps=100_000, checkpoint={"every_steps": 0, "every_minutes": 0}, optim={"lr": 1e-4}
    )
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(tree))
    process = start_sparo("train", str(tmp_path / "r.yaml"))
    until(lambda: len(metrics.read(tmp_path / "tiny/metrics.jsonl", "train")) > 3)
    os.kill(children(process.pid)[0], signal.SIGKILL)
    _, stderr = process.communicate(timeout=60)
    words = " ".join(stderr.split())
    assert process.returncode == 3 and "was killed by SIGKILL" in words and "Traceback" not in words, stderr[-2000:]
    assert saved_step(tmp_path / "tiny") >= 4
    assert_ends(
        ["train", str(tmp_path / "r.yaml"), f"stop_after_steps={saved_step(tmp_path / 'tiny') + 2}"],
        0,
        ["resuming from"],
    )


_DIES_WITH_THE_LOCK = """
import multiprocessing.synchronize as shared, os, signal
asked, home, times = shared.Event.is_set, os.getpid(), []

def is_set(self):
    times.append(1)
    if os.getpid() != home and len(times) > 40:
        self._cond.acquire()
        os.kill(os.getpid(), signal.SIGKILL)
    return asked(self)

shared.Event.is_set = is_set
from launch.cli.main import main
main()
"""


@pytest.mark.long
def test_a_worker_that_dies_with_a_lock_is_not_waited_for(shards, tmp_path):
    tree = tiny_recipe(shards, tmp_path, steps=100_000, optim={"lr": 1e-4})
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(tree))
    process = start_sparo("train", str(tmp_path / "r.yaml"), program=_DIES_WITH_THE_LOCK)
    _, stderr = process.communicate(timeout=90)
    assert process.returncode == 3 and "was killed by SIGKILL" in " ".join(stderr.split()), stderr[-2000:]
    assert saved_step(tmp_path / "tiny") >= 4


def test_a_closed_terminal_ends_a_run_saved(shards, tmp_path):
    tree = tiny_recipe(
        shards, tmp_path, steps=100_000, checkpoint={"every_steps": 0, "every_minutes": 0}, optim={"lr": 1e-4}
    )
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(tree))
    listening = "import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL); from launch.cli.main import main; main()"
    process = start_sparo("train", str(tmp_path / "r.yaml"), program=listening)  # the tests may run under nohup, too
    until(lambda: len(metrics.read(tmp_path / "tiny/metrics.jsonl", "train")) > 3)
    process.send_signal(signal.SIGHUP)
    process.communicate(timeout=60)
    assert process.returncode == 75 and saved_step(tmp_path / "tiny") >= 4


_SLOW = """
import sys, time
from evals.sets.wds import SourceSet
read = SourceSet.read
SourceSet.read = lambda self, number: (time.sleep(0.05), read(self, number))[1]
from launch.cli.main import main
main()
"""


@pytest.mark.long
def test_a_signal_during_evaluation_acts_at_once_and_the_evaluation_repeats(many, shards, tmp_path):
    tasks = {"zero": {"task": "zeroshot", "root": str(many / "zero"), "workers": 1}}
    tree = tiny_recipe(shards, tmp_path, steps=6, eval={"every_steps": 4, "tasks": tasks})
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(tree))
    process = start_sparo("train", str(tmp_path / "r.yaml"), program=_SLOW)
    beat = tmp_path / "tiny/heartbeat.json"
    until(lambda: beat.exists() and json.loads(beat.read_text())["phase"] == "evaluating")
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 75 and saved_step(tmp_path / "tiny") == 4, stderr
    assert_ends(["train", str(tmp_path / "r.yaml")], 0, ["finished at step 6"])
    assert [r["step"] for r in metrics.read(tmp_path / "tiny/metrics.jsonl", "eval")] == [4, 6]


@pytest.mark.long
@pytest.mark.parametrize("stream", ["full", "closed"])
def test_a_run_continues_if_stderr_cannot_be_written(stream, home, tmp_path):
    command = [sys.executable, "-m", "launch.cli", "train", str(home / "good.yaml"), f"out={tmp_path}"]
    if stream == "full":
        with Path("/dev/full").open("w") as full:
            done = subprocess.run(command, stderr=full, stdout=full, timeout=120, check=False)
    else:
        done = subprocess.run(["sh", "-c", 'exec "$@" 2>&- >&-', "sh", *command], timeout=120, check=False)
    assert done.returncode == 0 and saved_step(tmp_path / "tiny") == 3


def test_ascii_terminals_and_markup_in_paths_do_not_end_a_run(many, home, tmp_path):
    place = tmp_path / "x[/b]é"
    env = {"PYTHONIOENCODING": "ascii", "LC_ALL": "C"}
    assert_ends(["train", str(home / "good.yaml"), f"out={place}"], 0, ["x[/b]"], **env)
    assert_ends(
        ["eval", str(place / "tiny"), "--data", str(many / "t.yaml"), "--features", str(place / "store")],
        0,
        ["zero"],
        **env,
    )


def test_a_diverged_run_keeps_its_last_good_checkpoint_and_names_it(shards, tmp_path, monkeypatch):
    original = ClipObjective.forward
    monkeypatch.setattr(
        ClipObjective,
        "forward",
        lambda self, batch, progress: (loss := original(self, batch, progress))._replace(
            total=loss.total * (float("nan") if progress.step >= 5 else 1.0)
        ),
    )
    tree = tiny_recipe(shards, tmp_path, checkpoint={"every_steps": 1, "keep_last": 1}, steps=30)
    tree["optim"] = {**tree["optim"], "max_consecutive_skips": 4}
    with pytest.raises(TrainingError, match=r"the last good checkpoint is .*step-00000005; remove later ones"):
        train(run(tree))
    kept = store.CheckpointStore(tmp_path / "tiny/checkpoints").steps()
    assert {step: store.is_suspect(path) for step, path in kept.items()} == {5: False, 10: True}


def test_checkpoints_with_unusable_weights_are_marked(shards, tmp_path):
    tree = tiny_recipe(shards, tmp_path, checkpoint={"every_steps": 1, "keep_last": 3}, steps=30)
    tree["optim"] = {"lr": 1e30, "max_consecutive_skips": 3, "warmup_steps": 0}
    with pytest.raises(TrainingError, match="no earlier checkpoint exists"):
        train(run(tree))
    assert all(store.is_suspect(path) for path in store.CheckpointStore(tmp_path / "tiny/checkpoints").steps().values())


def test_a_run_that_skipped_most_of_its_steps_does_not_end_as_finished(shards, tmp_path):
    tree = tiny_recipe(shards, tmp_path, checkpoint={"every_steps": 1, "keep_last": 3}, steps=6)
    tree["optim"] = {"lr": 1e30, "warmup_steps": 0}
    for _ in range(2):  # repeating the command repeats the message
        with pytest.raises(
            TrainingError,
            match=r"step 6 of 6 is done, but .*5 of 6 steps were skipped as non-finite.*no earlier checkpoint exists",
        ):
            train(run(tree))
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({**tree, "name": "line"}))
    assert_ends(["train", str(tmp_path / "recipe.yaml")], 3, ["skipped as non-finite"])


@pytest.mark.parametrize(
    ("nan_from", "steps", "cause"),
    [(10, 12, ""), (9, 12, "3 of 12 steps were skipped as non-finite, the last 3 among them"), (1, 2, "1 of 2 steps")],
)
def test_a_run_that_skipped_its_last_steps_or_half_of_them_fails(nan_from, steps, cause, shards, tmp_path, monkeypatch):
    original = ClipObjective.forward
    monkeypatch.setattr(
        ClipObjective,
        "forward",
        lambda self, batch, progress: (loss := original(self, batch, progress))._replace(
            total=loss.total * (float("nan") if progress.step >= nan_from else 1.0)
        ),
    )
    tree = tiny_recipe(shards, tmp_path, steps=steps)
    tree["optim"] = {**tree["optim"], "warmup_steps": 0}
    if not cause:
        assert train(run(tree)).reason == "finished"
        return
    with pytest.raises(TrainingError, match=f"is done, but {cause}"):
        train(run(tree))


@pytest.mark.parametrize("end", [{"steps": 1}, {"steps": 6, "stop_after_steps": 1}])
def test_weights_that_only_grew_end_a_run_as_an_error(end, shards, tmp_path):
    tree = tiny_recipe(shards, tmp_path, **end)
    tree["optim"] = {"lr": 1e12, "warmup_steps": 0}
    with pytest.raises(TrainingError, match=r"its weights are not finite or above 1e9\. Try a lower optim.lr"):
        train(run(tree))


def test_one_skipped_step_in_many_ends_as_finished(shards, tmp_path, monkeypatch):
    original = ClipObjective.forward
    monkeypatch.setattr(
        ClipObjective,
        "forward",
        lambda self, batch, progress: (loss := original(self, batch, progress))._replace(
            total=loss.total * (float("nan") if progress.step == 2 else 1.0)
        ),
    )
    assert train(run(tiny_recipe(shards, tmp_path, steps=12))).reason == "finished"


def test_a_damaged_newest_checkpoint_is_refused_unless_fall_back_is_set(shards, tmp_path):
    tree = tiny_recipe(shards, tmp_path)
    straight = train(run({**tree, "name": "straight"})).checkpoint
    train(run({**tree, "stop_after_steps": 7}))
    newest = tmp_path / "tiny/checkpoints/step-00000007"
    (newest / "model.safetensors").write_bytes(b"x" * (newest / "model.safetensors").stat().st_size)
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(tree))
    assert_ends(["train", str(tmp_path / "r.yaml")], 2, ["model.safetensors: damaged"])
    done = assert_ends(
        ["train", str(tmp_path / "r.yaml"), "checkpoint.fall_back=true"], 0, ["resumes from", "step-00000006"]
    )
    assert (
        "damaged-step-00000007" in " ".join(done.stderr.split()) and (newest.parent / "damaged-step-00000007").is_dir()
    )
    ours = load_file(tmp_path / "tiny/checkpoints/step-00000012/model.safetensors")
    assert all(torch.equal(t, ours[name]) for name, t in load_file(straight / "model.safetensors").items())


def test_required_versions_are_above_known_vulnerabilities():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    asked = {r.name: r.specifier for r in map(Requirement, project["dependencies"])}
    assert "2.9.1" not in asked["torch"], "CVE-2026-24747 is open below 2.10"
    assert "1.0.27" not in asked["timm"] and "1.0.28" in asked["timm"], "GHSA-pqww-w348-m542 is open below 1.0.28"


def test_messages_are_not_parsed_as_markup():
    """Text from outside reaches a terminal only through `console` and `out`, which print strings unchanged."""
    root = Path(__file__).parents[2]
    files = [p for top in ("launch", "evals", "sparo_data", "sparo_train") for p in (root / top).rglob("*.py")]
    wrong = [str(p) for p in files if re.search(r"from_markup|rich\.print|markup=True|Console\(", p.read_text())]
    assert wrong == []
    prints = [str(p) for p in files if re.search(r"^\s+print\(", p.read_text(), re.M)]
    assert {Path(p).name for p in prints} <= {"node.py", "job_control.py", "openclip.py"}, prints


def test_data_workers_end_with_their_parent(tmp_path):
    words = ("data", "scenes3d", "set", "--size", "32", "--frames", "9", "--train", "60", "--test", "4")
    started = start_sparo(*words, cwd=tmp_path)
    makers: list[int] = []

    def at_work():
        makers[:] = [p for p in children(started.pid) if "spawn_main" in Path(f"/proc/{p}/cmdline").read_text()]
        return len(makers) == 2

    until(at_work)
    started.kill()
    started.communicate(timeout=20)
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in makers), 20)


def test_ctrl_c_at_a_terminal_is_handled_once(tmp_path):
    """A terminal sends SIGINT to all processes of a command; its child processes print nothing."""
    words = [sys.executable, "-m", "launch.cli", "data", "movi-like", "set", "--size", "32", "--train", "400"]
    process = subprocess.Popen(
        words, cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, start_new_session=True
    )
    until(lambda: len(children(process.pid)) >= 3)  # two workers, and the process that tracks shared memory
    os.killpg(process.pid, signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in stderr, stderr[-2000:]
