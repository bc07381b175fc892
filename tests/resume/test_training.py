"""Training in separate processes: killed, stopped, refused, with damaged data; and resumed bit-identically."""

import io
import json
import os
import random
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from launch.commands.train import train
from sparo_data.writer import write_shard
from sparo_train.core.config import resolve
from sparo_train.core.disk import checkpoint_store as store
from sparo_train.core.disk import metrics
from sparo_train.core.errors import CheckpointError, ConfigError, DataError, TrainingError
from sparo_train.data.read.loader import Pipeline
from sparo_train.objectives.clip import ClipObjective
from sparo_train.train.run_config import RunConfig
from tests.helpers.processes import sparo, start_sparo
from tests.helpers.recipes import tiny_recipe
from tests.helpers.runs import assert_bit_equal, kill_behind, parts, run
from tests.helpers.samples import sample


@pytest.fixture
def straight(shards, tmp_path):
    """The same recipe without interruption."""
    config = run(tiny_recipe(shards, tmp_path / "straight"))
    assert train(config).reason == "finished"
    return config.folder


def test_kill_minus_nine_at_any_step_loses_nothing(shards, tmp_path, straight, write_recipe):
    recipe = write_recipe(tiny_recipe(shards, tmp_path / "killed"))
    folder = tmp_path / "killed" / "tiny"
    rng = random.Random(int(os.environ.get("SPARO_TEST_SEED", "0")))
    for kill_at in sorted(rng.sample(range(1, 12), 2)):
        process = start_sparo("train", str(recipe))
        kill_behind(process, folder, kill_at)
    done = sparo("train", str(recipe))
    assert done.returncode == 0, done.stderr
    assert_bit_equal(folder, straight)


def test_loader_workers_go_with_a_killed_run(shards, tmp_path, write_recipe):
    recipe = write_recipe(tiny_recipe(shards, tmp_path / "gone", steps=2000))
    process = start_sparo("train", str(recipe))
    while process.poll() is None and not metrics.read(tmp_path / "gone/tiny/metrics.jsonl", "train"):
        time.sleep(0.01)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert children
    process.kill()
    process.communicate()
    end = time.monotonic() + 3  # torch's own check takes five seconds, in which other ranks would wait
    while any(Path(f"/proc/{child}").exists() for child in children):
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_signal_saves_and_the_same_command_continues(shards, tmp_path, straight, write_recipe):
    tree = tiny_recipe(shards, tmp_path / "stopped", checkpoint={"every_steps": 0, "every_minutes": 0.0})
    recipe, folder = write_recipe(tree), tmp_path / "stopped" / "tiny"
    process = start_sparo("train", str(recipe))
    while process.poll() is None and not metrics.read(folder / "metrics.jsonl", "train"):
        time.sleep(0.005)
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=60)
    if process.returncode == 0:
        pytest.skip("the run finished before the signal arrived")
    assert process.returncode == 75, stderr
    assert "SIGTERM at step" in stderr and "run the same command again" in stderr
    assert json.loads((folder / "heartbeat.json").read_text())["phase"] == "SIGTERM"
    stopped = store.CheckpointStore(folder / "checkpoints").latest()
    assert stopped is not None and store.read_meta(stopped)["step"] < 12
    assert sparo("train", str(recipe)).returncode == 0
    assert_bit_equal(folder, straight)


def test_a_stop_after_some_steps_and_a_resume_are_exact(shards, tmp_path, straight):
    tree = tiny_recipe(shards, tmp_path / "trial")
    assert train(run({**tree, "stop_after_steps": 5})).reason == "stop_after_steps"
    assert train(run({**tree, "data": {**tree["data"], "workers": 0}})).step == 12
    assert_bit_equal(tmp_path / "trial" / "tiny", straight)


def test_a_finished_run_stays_finished(straight, shards, tmp_path):
    before = (straight / "metrics.jsonl").read_text()
    assert train(run(tiny_recipe(shards, tmp_path / "straight"))).reason == "finished"
    assert (straight / "metrics.jsonl").read_text() == before


def test_the_run_folder_determines_the_run(straight):
    config = resolve(RunConfig, yaml.safe_load((straight / "config.yaml").read_text()), "x")
    assert config.objective.model.readout.kind == "sparo" and (straight / "command.txt").exists()


def test_another_recipe_in_the_same_folder_is_refused(straight, shards, tmp_path):
    tree = tiny_recipe(shards, tmp_path / "straight")
    with pytest.raises(ConfigError, match=r"optim\.lr: 0\.001 -> 0\.002"):
        train(run({**tree, "optim": {**tree["optim"], "lr": 2e-3}}))
    batch = 2 * tree["batch_size"]  # another plan, so the data are not the reason
    with pytest.raises(ConfigError, match=rf"batch_size: {tree['batch_size']} -> {batch}"):
        train(run({**tree, "batch_size": batch}))


def test_a_changed_data_set_is_refused(shards, tmp_path):
    tree = tiny_recipe(shards, tmp_path / "runs")
    train(run({**tree, "stop_after_steps": 3}))
    write_shard(shards / "00004.tar", (sample(i) for i in range(200, 210)))
    with pytest.raises(DataError, match=r"the data changed since this checkpoint.*\n  a\.shards: 4 -> 5"):
        train(run(tree))


def test_a_damaged_checkpoint_is_named_and_the_one_before_continues(shards, tmp_path, straight):
    tree = tiny_recipe(shards, tmp_path / "hurt")
    train(run({**tree, "stop_after_steps": 7}))
    newest = tmp_path / "hurt" / "tiny" / "checkpoints" / "step-00000007"
    file = newest / "optimizer.safetensors"
    file.write_bytes(file.read_bytes()[:-7])
    with pytest.raises(CheckpointError, match=r"step-00000007/optimizer\.safetensors: .*Remove .*step-00000007"):
        train(run(tree))
    for child in newest.iterdir():
        child.unlink()
    newest.rmdir()
    train(run(tree))
    assert_bit_equal(tmp_path / "hurt" / "tiny", straight)


def test_non_finite_steps_are_skipped_counted_and_stop_the_run(shards, tmp_path, monkeypatch):
    original = ClipObjective.forward
    poisoned = {3, 4, 8, 9, 10, 11}

    def forward(self, batch, progress):
        loss = original(self, batch, progress)
        return loss._replace(total=loss.total * (float("nan") if progress.step in poisoned else 1.0))

    monkeypatch.setattr(ClipObjective, "forward", forward)
    tree = tiny_recipe(shards, tmp_path / "nan")
    with pytest.raises(
        TrainingError, match=r"step 11: 3 non-finite steps in a row \(optim\.max_consecutive_skips=2\).*step-0000000"
    ):
        train(run({**tree, "optim": {**tree["optim"], "max_consecutive_skips": 2}}))
    records = metrics.read(tmp_path / "nan" / "tiny" / "metrics.jsonl", "train")
    assert records[5]["skipped_steps"] == 2 and records[3]["grad_norm"] == "nan"
    weights, _ = parts(tmp_path / "nan" / "tiny", 9)
    assert all(t.isfinite().all() for t in weights["model"].values())


def test_too_many_bad_samples_stop_the_run(tmp_path):
    good = [sample(i) for i in range(1200)]
    write_shard(
        tmp_path / "s" / "0.tar", ((k, {**f, "jpg": b"x"} if i % 20 == 0 else f) for i, (k, f) in enumerate(good))
    )
    tree = tiny_recipe(tmp_path / "s", tmp_path / "runs", batch_size=64, steps=40)
    with pytest.raises(DataError, match=r"(?s)were unusable, more than data\.max_bad_share=0\.01.*0\.tar: bad image"):
        train(run(tree))
    stopped = store.CheckpointStore(tmp_path / "runs" / "tiny" / "checkpoints").latest()
    assert stopped is not None and store.read_meta(stopped)["step"] > 0  # the trained steps are saved
    tree["data"] = {**tree["data"], "max_bad_share": 0.2}  # the advice of the message
    train(run(tree))
    last = metrics.read(tmp_path / "runs" / "tiny" / "metrics.jsonl", "train")[-1]
    assert last["bad_samples"]["bad image"] > 30
    assert last["bad_shards"] == {str(tmp_path / "s" / "0.tar"): {"bad image": last["bad_samples"]["bad image"]}}


def test_a_signal_before_the_first_step_leaves_nothing_that_could_not_be_resumed(shards, tmp_path, monkeypatch):
    tree = tiny_recipe(shards, tmp_path / "early")
    original = Pipeline.start

    def start(self, *arguments):
        os.kill(os.getpid(), signal.SIGTERM)
        return original(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Pipeline, "start", start)
        outcome = train(run(tree))
    assert outcome.reason == "SIGTERM" and outcome.step == 0 and outcome.checkpoint is None
    assert train(run(tree)).reason == "finished"


@pytest.mark.stress
def test_thirty_kills_at_random_moments_lose_nothing(shards, tmp_path, straight, write_recipe):
    recipe = write_recipe(tiny_recipe(shards, tmp_path / "killed", checkpoint={"every_steps": 1}))
    rng = random.Random(int(os.environ.get("SPARO_TEST_SEED", "0")))
    for _ in range(30):
        process = start_sparo("train", str(recipe))
        time.sleep(rng.uniform(1.5, 4.0))
        process.kill()
        process.communicate()
    done = sparo("train", str(recipe))
    assert done.returncode == 0, done.stderr
    assert_bit_equal(tmp_path / "killed" / "tiny", straight)


@pytest.mark.parametrize(
    "extra", [{"grad_checkpointing": True}, {"precision": "bf16"}, {"attention": "fused", "grad_checkpointing": True}]
)
def test_other_engine_settings_train(shards, tmp_path, extra):
    tree = tiny_recipe(shards, tmp_path / "runs", steps=3, optim={"clip_grad_norm": 0.5})
    tree["engine"] = {**tree["engine"], **extra}
    assert train(run(tree)).step == 3


def test_checkpointed_activations_give_the_same_gradients(shards, tmp_path, straight):
    tree = tiny_recipe(shards, tmp_path / "ac")
    train(run({**tree, "engine": {**tree["engine"], "grad_checkpointing": True}}))
    losses = [
        [r["loss"] for r in metrics.read(f / "metrics.jsonl", "train")] for f in (straight, tmp_path / "ac" / "tiny")
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_fused_and_plain_attention_train_to_the_same_losses(shards, tmp_path, straight):
    tree = tiny_recipe(shards, tmp_path / "fused")
    train(run({**tree, "engine": {**tree["engine"], "attention": "fused"}}))
    losses = [
        [r["loss"] for r in metrics.read(f / "metrics.jsonl", "train")] for f in (straight, tmp_path / "fused" / "tiny")
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_time_based_checkpoints_are_written(shards, tmp_path):
    tree = tiny_recipe(
        shards, tmp_path / "timed", checkpoint={"every_steps": 0, "every_minutes": 1e-9, "keep_last": 20}
    )
    train(run({**tree, "steps": 4}))
    assert list(store.CheckpointStore(tmp_path / "timed" / "tiny" / "checkpoints").steps()) == [1, 2, 3, 4]


def test_a_problem_in_a_loader_worker_arrives_as_one_message(tmp_path):
    write_shard(tmp_path / "s" / "0.tar", ((f"{i}", {"jpg": b"x", "txt": b"words"}) for i in range(16)))
    with pytest.raises(
        DataError,
        match=r"^data: a whole pass over stream 0 has no usable sample: .*\(bad image: \d+\)\. Repair the samples",
    ):
        train(run(tiny_recipe(tmp_path / "s", tmp_path / "runs")))
    real = io.BytesIO()
    Image.fromarray(np.full((8, 8), 4000, np.float32)).save(real, format="TIFF")
    write_shard(tmp_path / "f" / "0.tar", ((f"{i}", {"tiff": real.getvalue(), "txt": b"words"}) for i in range(16)))
    with pytest.raises(DataError, match=r"\(pixel range: \d+\)\. Set data\.pixel_range; `sparo data check`"):
        train(run(tiny_recipe(tmp_path / "f", tmp_path / "runs", name="deep")))


@pytest.mark.slow
def test_compiled_blocks_train_to_the_same_losses(shards, tmp_path, straight):
    tree = tiny_recipe(shards, tmp_path / "compiled")
    train(run({**tree, "engine": {**tree["engine"], "compile": True}}))
    losses = [
        [r["loss"] for r in metrics.read(f / "metrics.jsonl", "train")]
        for f in (straight, tmp_path / "compiled" / "tiny")
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_a_missing_gpu_is_refused(shards, tmp_path):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    tree = tiny_recipe(shards, tmp_path / "runs", engine={"device": "cuda"})
    with pytest.raises(ConfigError, match=r"engine\.device=cuda: torch finds no GPU"):
        train(run(tree))
