"""The numbers that a run reports about itself."""

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from launch.commands.train import train
from sparo_train.core.config import resolve
from sparo_train.core.disk import metrics
from sparo_train.core.recipe.layers import override
from sparo_train.train import meter as flops
from sparo_train.train.build import build_objective, build_pipeline
from sparo_train.train.meter import FlopCounter, average_over_ranks, memory, utilisation
from sparo_train.train.run_config import RunConfig
from tests.helpers.recipes import dino_recipe, tiny_recipe


@pytest.mark.parametrize("readout", ["{kind: token}", "{kind: sparo, slots: 4, slot_width: 8, head_width: 8}"])
def test_model_flops_are_three_counted_forwards(shards, tmp_path, readout):
    config = resolve(RunConfig, override(tiny_recipe(shards, tmp_path), [f"objective.model.readout={readout}"]), "x")
    batch = next(build_pipeline(config).start()).batch
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        build_objective(config).embed({key: value[:1] for key, value in batch.items()})
    counter = FlopCounter(lambda: build_objective(config))
    assert counter.per_sample(batch) == 3 * counted.get_total_flops()
    longer = {**batch, "text": torch.cat([batch["text"], batch["text"]], dim=1)}
    assert counter.per_sample(longer) > counter.per_sample(batch)


def test_a_teacher_has_no_backward(shards, tmp_path):
    tree = dino_recipe(shards, tmp_path)
    tree["objective"] |= {"ibot": {}, "gram": {"first_step": 1}}
    config = resolve(RunConfig, tree, "x")
    batch = next(build_pipeline(config).start()).batch
    objective, patches = build_objective(config), 16
    one = {key: value[:1] for key, value in batch.items()}
    crops = [objective.pixels(one[key][0]) for key in ("global_crops", "local_crops")]
    nothing = torch.full((1, objective.config.most_masked), 2 * patches)
    networks = {
        "student": lambda: objective.student(crops, [None, None], None, nothing),
        "teacher": lambda: objective.teacher(crops[:1], [None], None, nothing),
        "earlier": lambda: [block(objective.earlier.embed(crops[0])) for block in objective.earlier.blocks],
    }
    flops = {}
    for name, forward in networks.items():
        with FlopCounterMode(display=False) as counted, torch.no_grad():
            forward()
        flops[name] = counted.get_total_flops()
    found = FlopCounter(lambda: build_objective(config)).per_sample(batch)
    expected = 3 * flops["student"] + flops["teacher"] + flops["earlier"]
    assert found == pytest.approx(expected, rel=0.1)  # masked patches and cosines add a little
    assert abs(3 * sum(flops.values()) - expected) > 0.3 * expected


def test_utilisation_is_known_for_known_devices_only(monkeypatch):
    assert utilisation(1e12, torch.device("cpu")) is None
    monkeypatch.setattr(flops.torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    assert utilisation(98.9e12, torch.device("cuda")) == pytest.approx(0.1)
    monkeypatch.setattr(flops.torch.cuda, "get_device_name", lambda _: "NVIDIA Something")
    assert utilisation(1e12, torch.device("cuda")) is None


def test_memory_is_in_gibibytes():
    before = memory(torch.device("cpu"))
    held = torch.ones(2**26)
    assert memory(torch.device("cpu")) >= before > 0.1 and float(held[0]) == 1


def test_numbers_of_several_ranks_are_one_line():
    found = average_over_ranks([{"loss": 1.0, "forward_seconds": 0.1}, {"loss": 3.0, "forward_seconds": 0.15}])
    assert found == {
        "loss": 2.0,
        "forward_seconds": pytest.approx(0.125),
        "step_spread": pytest.approx(0.5),
        "slowest_rank": 1,
    }


def test_a_run_reports_norms_per_tower_speed_and_memory(shards, tmp_path):
    tree = tiny_recipe(shards, tmp_path, steps=4)
    config = resolve(RunConfig, {**tree, "log": {**tree["log"], "flops": True}}, "x")
    train(config)
    last = metrics.read(config.folder / "metrics.jsonl", "train")[-1]
    parts = math.hypot(last["grad_norm_visual"], last["grad_norm_text"])
    assert 0 < parts <= last["grad_norm"] * (1 + 1e-6)  # the rest belongs to the temperature
    assert {
        "tflops",
        "memory",
        "step_seconds",
        "forward_seconds",
        "samples_per_second",
        "data_wait",
        "logit_scale",
        "lr",
    } <= last.keys()
    assert "mfu" not in last and last["tflops"] > 0
