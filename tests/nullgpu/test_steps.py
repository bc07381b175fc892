"""CUDA code without a GPU: whether a step runs, where it waits, and how many kernels it launches. Values and times mean nothing here."""

import json
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.nullgpu
KINDS = [
    "clip", "sigmoid", "flair", "dino", "dino_batch_norm", "dinov3", "distill", "images", "psb", "savi", "slot_contrast", "slate", "nerf",
    "nerf_relu", "slot_mixer",
]  # fmt: skip
# Accepted waits, by file and number per step.
WAITS = {
    # Colours are computed only at points with a density, whose number is known on the device only.
    "nerf_relu": {"object_centric/scenes3d/radiance_field.py": 2},
}
BREAKS = {
    "nerf_relu": ["Dynamic shape operator"],  # for the same reason
    "distill": ["Skip calling `torch.compiler.disable()`d function"],  # the teacher, which may be any model
}
EXPECTED = json.loads(Path(__file__).with_name("expected_steps.json").read_text())
TOLERANCE = 0.05


def by_file(waits):
    files = {}
    for line, number in waits.items():
        path = line.rpartition(":")[0]
        files[path] = files.get(path, 0) + number
    return files


@pytest.fixture(scope="module")
def steps(run_program):
    return run_program("steps", KINDS, {}, {}, 10**9)


def test_the_device_identifies_itself_as_a_null_gpu(run_program):
    assert run_program("device") == {"own": True, "name": "Null GPU (sm_90)", "count": 1}


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_never_waits_for_the_device(steps, kind):
    step = steps[kind]
    assert "error" not in step, step
    expected = WAITS.get(kind, {})
    assert by_file(step["waits"]) == expected, step["waits"]
    counts = step["counts"]
    # torch's debug mode overlooks copies from pageable memory and waits of libraries; the counters do not.
    assert counts.get("stream_sync", 0) == sum(expected.values())
    assert counts.get("h2d_pageable", 0) == counts.get("device_sync", 0) == counts.get("event_sync", 0) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_launches_and_holds_as_much_as_recorded(steps, kind):
    version = torch.__version__.rpartition(".")[0]
    if version != EXPECTED["torch"]:
        pytest.skip(f"numbers were recorded with torch {EXPECTED['torch']}, this is {version}")
    recorded, step = EXPECTED["steps"][kind], steps[kind]
    measured = {**step["counts"], "peak": step["peak"]}
    assert {key: measured.get(key, 0) for key in recorded} == pytest.approx(recorded, rel=TOLERANCE, abs=2), (
        "after an intended change: python -m tests.nullgpu.record"
    )


@pytest.mark.parametrize(
    ("engine", "micro_batch_size"),
    [({"grad_checkpointing": True}, 10**9), ({}, 4), ({"attention": "plain"}, 10**9)],
    ids=["gradient checkpointing", "micro-batches", "plain attention"],
)
def test_options_of_a_step_add_no_wait(run_program, engine, micro_batch_size):
    for kind, step in run_program("steps", ["clip", "dino"], engine, {}, micro_batch_size).items():
        assert "error" not in step and step["waits"] == {}, (kind, step)


def test_muon_waits_only_for_its_decision(run_program):
    steps = run_program("steps", ["clip"], {}, {"kind": "muon", "lr": 1e-3}, 10**9)
    assert list(by_file(steps["clip"]["waits"])) == ["sparo_train/engine/local.py"], steps


def test_neighbours_are_searched_in_blocks_that_suit_a_gpu(run_program):
    """Expect 2 blocks of queries times 4 of the bank; with the CPU's blocks it would be 32 times 32."""
    assert run_program("nearest", 4096, 262144)["launch"] < 8 * 60


@pytest.mark.parametrize("kind", ["clip", "flair"])
def test_images_and_texts_are_encoded_to_one_device(run_program, kind):
    devices = run_program("encode", kind)
    assert devices == dict.fromkeys(("fp32", "tf32", "bf16"), ["cuda:0"] * 3)


def test_gradients_have_their_inputs_dtype_inside_and_outside_autocast(run_program):
    results = run_program("autograd_functions")
    assert len(results) >= 36 and {name: r for name, r in results.items() if r is not True} == {}


# Only CLIP and DINO are compiled by default.
@pytest.mark.parametrize(
    ("kinds", "backend"), [(KINDS[:6], "aot_eager"), (KINDS[6:], "eager")], ids=["images", "videos and scenes"]
)
def test_an_objective_compiles_to_one_graph(run_program, kinds, backend):
    for kind, reasons in run_program("graph_breaks", kinds, backend).items():
        assert set(reasons) == set(BREAKS.get(kind, [])), kind
