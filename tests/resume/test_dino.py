"""DINO runs that are killed, stopped and resumed: student, teacher, centre and schedules are bit-identical."""

import os
import random
import time
from collections import Counter

import pytest

from launch.commands.train import train
from sparo_train.core.disk import checkpoint_store as store
from sparo_train.core.disk import metrics
from sparo_train.core.errors import CollapseError, ConfigError
from tests.helpers.processes import sparo, start_sparo
from tests.helpers.recipes import dino_recipe
from tests.helpers.runs import assert_bit_equal, goes_on_across_engines, kill_behind, losses_of, run


def test_kill_minus_nine_loses_nothing(shards, tmp_path, write_recipe):
    straight = run(dino_recipe(shards, tmp_path / "straight"))
    assert train(straight).reason == "finished"
    state = store.read_part(straight.folder / "checkpoints/step-00000012", "model")
    assert {"center", "teacher.head.last_layer.weight_v", "student.backbone.sparo.q_emb"} <= state.keys()
    recipe = write_recipe(dino_recipe(shards, tmp_path / "killed"))
    folder = tmp_path / "killed/dino"
    kill_behind(start_sparo("train", str(recipe)), folder, 5)
    done = sparo("train", str(recipe))
    assert done.returncode == 0, done.stderr
    assert_bit_equal(folder, straight.folder)
    record = metrics.read(folder / "metrics.jsonl", "train")[-1]
    assert {"teacher_entropy", "teacher_kl", "center_norm", "grad_norm_backbone", "grad_norm_head"} <= record.keys()


@pytest.mark.stress
def test_fifty_kills_at_random_moments_lose_nothing(shards, tmp_path, write_recipe):
    changes = {"steps": 600, "checkpoint": {"every_steps": 1}}
    straight = run(dino_recipe(shards, tmp_path / "straight", **changes))
    assert train(straight).reason == "finished"
    recipe = write_recipe(dino_recipe(shards, tmp_path / "killed", **changes))
    folder, rng, codes = tmp_path / "killed/dino", random.Random(int(os.environ.get("SPARO_TEST_SEED", "0"))), Counter()
    for _ in range(50):
        process = start_sparo("train", str(recipe), "stop_after_steps=599")
        before = max(store.CheckpointStore(folder / "checkpoints").steps(), default=0)
        while (
            process.poll() is None and max(store.CheckpointStore(folder / "checkpoints").steps(), default=0) <= before
        ):
            time.sleep(0.005)
        time.sleep(rng.uniform(0, 0.15))  # in a step, in a save, or between them
        process.kill()
        process.communicate()
        codes[process.returncode] += 1
    done = sparo("train", str(recipe))
    assert done.returncode == 0, done.stderr
    assert codes[-9] == 50
    assert_bit_equal(folder, straight.folder, 600)


DINOV3 = {"registers": 2, "layer_scale": 0.1, "positions": "rope", "ffn_layer": "swiglu"}
DINOV2_LOSSES = {"ibot": {}, "koleo": 0.1, "centering": "sinkhorn_knopp", "gram": {"first_step": 2, "update_steps": 4}}


@pytest.mark.long
@pytest.mark.parametrize(("model", "losses"), [({}, {}), (DINOV3, DINOV2_LOSSES)], ids=["dino", "dinov3"])
def test_two_ranks_continue_from_checkpoints_of_each_other(shards, tmp_path, write_recipe, model, losses):
    trees = [dino_recipe(shards, tmp_path / name) for name in ("alone", "two")]
    for tree in trees:
        tree["objective"] |= losses
        tree["objective"]["model"] |= model
    straight = run(trees[0])
    train(straight)
    recipe = write_recipe(trees[1])
    assert goes_on_across_engines(recipe, tmp_path / "two/dino") == pytest.approx(losses_of(straight.folder), rel=1e-4)


def test_a_collapse_is_warned_of_once_and_recorded(shards, tmp_path, capsys):
    tree = dino_recipe(shards, tmp_path / "flat", steps=6)
    tree["objective"] |= {"teacher_temp": 50.0, "warmup_teacher_temp": 50.0}  # uniform targets
    config = run(tree)
    train(config)
    said = capsys.readouterr().err.replace("\n", " ")
    assert said.count("the representation collapses") == 1 and "objective.collapse" in said
    records = metrics.read(config.folder / "metrics.jsonl", "train")
    assert [r.get("alarm") for r in records] == [1.0] * 6
    tree["objective"]["collapse"] = {"action": "stop"}
    tree["name"] = "stopped"
    with pytest.raises(
        CollapseError, match=r"teacher entropy 1\.0000 of log\(out_dim\), outside .*action=warn"
    ) as ended:
        train(run(tree))
    assert ended.value.exit_code == 4
    healthy = run(dino_recipe(shards, tmp_path / "healthy", steps=6))
    train(healthy)
    record = metrics.read(healthy.folder / "metrics.jsonl", "train")[-1]
    assert 1 < record["rankme"] <= 8 and 0 < record["feature_std"] < 1 and 1 <= record["prototypes_used"] <= 64
    assert not any("alarm" in r for r in metrics.read(healthy.folder / "metrics.jsonl", "train"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"micro_batch_size": 4, "objective.head.use_bn": True}, "use_bn couples the samples"),
        ({"data.hflip": 0.5}, "data.hflip: applies to image-text pairs only"),
        ({"objective.model.arch": "vit_smal"}, "vit_small"),
        ({"objective.crops.local_size": 4}, "crops.local_size=4 is below model.patch_size=8"),
        ({"objective.model.readout.kind": "spar"}, "sparo"),
        ({"objective.kind": "dine"}, "dino"),
    ],
)
def test_mistakes_in_a_recipe_are_named(shards, tmp_path, change, message):
    tree = dino_recipe(shards, tmp_path)
    for dotted, value in change.items():
        at = tree
        *outer, last = dotted.split(".")
        for key in outer:
            at = at[key]
        at[last] = value
    with pytest.raises(ConfigError, match=message):
        run(tree)


def test_statistics_that_fail_do_not_end_a_run(shards, tmp_path, monkeypatch, capsys):
    def fail(last):
        raise RuntimeError("cusolver error")

    monkeypatch.setattr("sparo_train.objectives.dino.slow_metrics", fail)
    config = run(dino_recipe(shards, tmp_path, steps=3))
    assert train(config).reason == "finished"
    said = capsys.readouterr().err.replace("\n", " ")
    assert said.count("log_metrics failed (RuntimeError: cusolver error)") == 1
    assert "rankme" not in metrics.read(config.folder / "metrics.jsonl", "train")[-1]
