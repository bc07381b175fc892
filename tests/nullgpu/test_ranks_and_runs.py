"""Rank 0 of many, whole trainings, and memory compared with the estimates of `--dry-run`. Values and times mean nothing here."""

import pytest

pytestmark = pytest.mark.nullgpu
# Workspaces of cuBLAS on an H100 for the threads of forward and backward. No estimate contains them.
WORKSPACES = 2 * 32 * 2**20
FEATURES = 16 * 64 * 64 * 4  # bytes of the encodings of 16 images: 64 slots of 64 values
SMALL = [f"objective.model.{tower}.layers=3" for tower in ("vision", "text")]
GATHER = [*SMALL, "objective.loss.exchange=gather"]


@pytest.mark.parametrize("world_size", [8, 64, 1024])
def test_fsdp2_gathers_each_unit_twice_and_scatters_it_once(run_program, world_size):
    step = run_program("ranks", world_size, {"kind": "fsdp2"}, GATHER)
    groups, number, sizes = (
        step["units"] + 1,
        step["number"],
        step["bytes"],
    )  # units, and parameters outside of units
    # The loss gathers the encodings of images and texts, and scatters their gradients.
    assert number["_reduce_scatter_base_"] == groups + 2
    # Gathered in forward, and again in backward. The parameters of the root stay gathered.
    assert number["_allgather_base_"] == 2 * groups - 1 + 2
    assert "allgather_" not in number
    sent = sizes["_allgather_base_"] + world_size * (sizes["_reduce_scatter_base_"] - 2 * 2 * FEATURES)
    # FSDP2 pads each tensor to as many rows as there are ranks, which this small model notices at 1,024.
    padding = 1.32 if world_size == 1024 else 1
    assert sent * (world_size - 1) / world_size == pytest.approx(padding * step["sent"], rel=0.05)
    assert step["between"] == pytest.approx(step["kept"] + WORKSPACES, rel=0.05)
    assert step["counts"].get("stream_sync", 0) == 0


def test_offloaded_parameters_leave_little_on_the_device(run_program):
    """logit_scale stays on the device, while the gradients of the other parameters are on the host."""
    engine = {"kind": "fsdp2", "cpu_offload": True}
    step = run_program("ranks", 8, engine, [*GATHER, "objective.ema={decay: 0.9}"])
    assert step["between"] == pytest.approx(WORKSPACES, rel=0.01)
    # FSDP2 copies each gradient to the host, and the norms are computed from two copies. Previously, 285 with 12 layers.
    assert step["counts"]["event_sync"] < 75 and step["counts"]["stream_sync"] <= 2
    # DINO clips each gradient by its own norm, and averages the teacher.
    dino = run_program("against_estimate", "dino/imagenet_vits16_sparo.yaml", [], engine, 8, 8, reads="stored")
    assert dino["waits"] <= 3


@pytest.mark.parametrize("world_size", [8, 1024])  # 64 ranks: see test_a_dry_run_estimates_the_peak_of_a_step
@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeed_keeps_what_the_estimate_says(run_program, stage, world_size):
    step = run_program("ranks", world_size, {"kind": "deepspeed", "stage": stage}, GATHER, reads="stored")
    bucket = 200e6 if stage == 3 else 0
    assert step["between"] == pytest.approx(step["kept"] + bucket + WORKSPACES, rel=0.05)
    # DeepSpeed 0.19 waits for the device once per parameter in stage 3.
    assert step["counts"]["stream_sync"] <= (86 if stage == 3 else 5)


@pytest.mark.parametrize("world_size", [8, 64, 1024])
def test_ddp_sends_each_gradient_once(run_program, world_size):
    step = run_program("ranks", world_size, {"kind": "ddp"}, GATHER, reads="stored")
    sent = 2 * (world_size - 1) / world_size * step["bytes"]["allreduce_"]
    assert sent == pytest.approx(step["sent"], rel=0.05)
    # The loss sends each rank only the gradients of its own encodings.
    assert step["bytes"]["_reduce_scatter_base_"] == 2 * FEATURES
    assert step["bytes"]["_allgather_base_"] == 2 * world_size * FEATURES
    assert step["between"] == pytest.approx(
        step["kept"] + step["kept"] / 3 + WORKSPACES, rel=0.1
    )  # gradients stay in buckets
    assert step["counts"].get("stream_sync", 0) == 0


def test_the_loss_of_1024_ranks_takes_few_launches(run_program):
    """The ring launches 44,700 kernels in a step of 128 pairs per rank."""
    alone, many = (run_program("ranks", size, {"kind": "ddp"}, SMALL, 128, reads="stored") for size in (8, 1024))
    assert many["counts"]["launch"] < alone["counts"]["launch"] + 100
    encodings = 128 * 64 * 64 * 4
    assert many["bytes"]["_allgather_base_"] == 2 * 1024 * encodings
    assert many["bytes"]["_reduce_scatter_base_"] == 2 * encodings


@pytest.mark.parametrize(("kind", "world_size"), [("local", 1), ("fsdp2", 64)])
def test_compiled_steps_launch_less_and_other_lengths_compile_once(run_program, kind, world_size):
    """With all layers of B/16, a step of 16 pairs takes 1,062 instead of 1,699 launches (local), 1,134 instead of 1,708 (fsdp2)."""
    eager, compiled = (
        run_program("launches", world_size, {"kind": kind, "compile": compile}, SMALL, reads="stored")
        for compile in (False, "auto")
    )
    assert compiled["launch"] < 0.82 * eager["launch"]
    first, second, all_lengths = compiled["graphs"]
    # Blocks and readouts of both towers. The text tower's are compiled again for variable lengths.
    assert (first, second, all_lengths) == (4, 6, 6) and eager["graphs"] == [0, 0, 0]


def test_the_norms_of_sharded_gradients_take_few_launches(run_program):
    """Previously, each norm was computed separately: three launches for each of 70 parameters."""
    alone, sharded = (run_program("launches", 64, {"kind": kind}, SMALL, reads="stored") for kind in ("ddp", "fsdp2"))
    assert sharded["launch"] - alone["launch"] < 70


def test_hybrid_sharding_keeps_a_copy_per_group(run_program):
    whole = run_program("ranks", 64, {"kind": "fsdp2"}, GATHER)
    hybrid = run_program("ranks", 64, {"kind": "fsdp2", "shard_size": 8}, GATHER)
    assert hybrid["between"] - WORKSPACES == pytest.approx(8 * (whole["between"] - WORKSPACES), rel=0.1)
    # Gradients of shards are averaged over the eight groups.
    assert hybrid["number"]["allreduce_"] == whole["number"]["allreduce_"] + whole["units"] + 1


def test_a_checkpoint_is_copied_without_a_wait_per_tensor(run_program):
    saved = run_program("save_twice")
    assert saved["tensors"] > 100 and saved["counts"]["d2h"] > 100
    waits = sum(saved["counts"].get(kind, 0) for kind in ("stream_sync", "event_sync", "device_sync"))
    assert waits <= 2


@pytest.mark.parametrize(
    ("kind", "engine", "changes"),
    [
        ("clip", {}, {"objective": {"ema": {"decay": 0.9}}}),
        ("clip", {"compile": True}, {}),
        ("clip", {"grad_checkpointing": True}, {"micro_batch_size": 4}),
        ("clip", {}, {"optim": {"kind": "muon", "lr": 1e-3}}),
        ("clip", {}, {"objective": {"image_sizes": [[0, 16], [0.5, 32]], "model": {"vision": {"patch_dropout": 0.0}}}}),
        ("dino", {}, {}),
        ("images", {}, {}),
    ],
    ids=["averaged weights", "compiled blocks", "micro-batches", "muon", "growing images", "dino", "slots"],
)
def test_a_run_stops_resumes_and_finishes(run_program, kind, engine, changes):
    run = run_program("train", kind, engine, changes)
    assert run["ends"] == ["stop_after_steps", "finished"]
    assert run["steps"] == 6 and run["memory"] > 0 and run["device"] == "cuda"


def test_workers_are_forked_before_the_device_starts_and_batches_are_pinned(run_program):
    run = run_program("train_with_workers")
    assert run["end"] == "finished" and run["forked_late"] == [False, False]
    assert run["machine"] == "Null GPU (sm_90)"
    assert run["pinned"] and all(run["pinned"])


def test_segments_that_grow_leave_fewer_gaps(run_program):
    fixed, growing = (run_program("reserved_memory", expandable) for expandable in (False, True))
    assert fixed["expandable"] == [False] and growing["expandable"] == [True]
    # Measured: 13 % above the peak instead of 42 %.
    assert 2 * (growing["reserved"] - growing["peak"]) < fixed["reserved"] - fixed["peak"]


@pytest.mark.parametrize(
    ("recipe", "changes", "engine", "world_size", "samples"),
    [
        ("clip/cc15m_sparo.yaml", [], {"kind": "local"}, 1, 256),
        ("clip/cc15m_sparo.yaml", [], {"kind": "local", "grad_checkpointing": True}, 1, 256),
        ("clip/cc15m_sparo.yaml", ["objective.ema={decay: 0.9}"], {"kind": "fsdp2"}, 64, 64),
        ("clip/cc15m_sparo.yaml", [], {"kind": "ddp"}, 1024, 128),
        ("clip/cc15m_sparo.yaml", [], {"kind": "deepspeed", "stage": 2}, 64, 64),
        ("clip/cc15m_sparo.yaml", [], {"kind": "deepspeed", "stage": 3}, 64, 64),
        ("dino/imagenet_vits16_sparo.yaml", [], {"kind": "local"}, 1, 16),
        ("dino/imagenet_vits16_sparo.yaml", ["objective.model.patch_size=8"], {"kind": "local"}, 1, 8),
        ("dino/imagenet_vits16_sparo.yaml", ["objective.model.arch=vit_base"], {"kind": "local"}, 1, 16),
        ("dino/imagenet_vits16.yaml", [], {"kind": "local"}, 1, 16),
    ],
    ids=[
        "local",
        "checkpointing",
        "fsdp2 with an average",
        "ddp",
        "zero 2",
        "zero 3",
        "dino",
        "dino s/8",
        "dino b/16",
        "dino without slots",
    ],
)
def test_a_dry_run_estimates_the_peak_of_a_step(run_program, recipe, changes, engine, world_size, samples):
    step = run_program("against_estimate", recipe, changes, engine, world_size, samples, reads="stored")
    is_zero = engine["kind"] == "deepspeed"
    # Activations take 8 % more under ZeRO-3 than elsewhere, and DeepSpeed waits for the device.
    assert step["estimate"] == pytest.approx(step["peak"], rel=0.07 if is_zero else 0.05)
    assert is_zero or step["waits"] == 0


def test_a_dry_run_estimates_the_memory_between_steps(run_program):
    small, large = (run_program("local_memory", pairs) for pairs in (32, 64))
    assert small["between"] == pytest.approx(small["kept"] + WORKSPACES, rel=0.02)
    # Only activations grow with the batch.
    assert large["between"] == pytest.approx(small["between"], rel=0.01)
    activations = small["peak"] - small["states"] - small["gathered"] - WORKSPACES
    assert large["peak"] - small["peak"] == pytest.approx(activations, rel=0.15)
    assert large["reserved"] < 1.5 * large["peak"]
