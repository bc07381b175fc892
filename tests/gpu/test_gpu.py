"""Tests that only a GPU can decide: `pytest -m gpu`."""

import os
import subprocess
import sys

import pytest
import torch
import yaml

from evals.encoders.clip_encoder import ClipEncoder
from sparo_data.writer import write_shards
from sparo_train.core.config import resolve
from sparo_train.core.disk import metrics
from sparo_train.models.sparo import Sparo
from sparo_train.train.build import build_objective
from sparo_train.train.run_config import RunConfig
from tests.helpers.object_centric import object_centric
from tests.helpers.processes import sparo
from tests.helpers.ranks import free_port
from tests.helpers.recipes import dino_recipe, tiny_recipe
from tests.helpers.runs import finish, losses
from tests.helpers.samples import sample
from tests.unit.test_engines import after_four_steps

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")]
SEVERAL = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    root = tmp_path_factory.mktemp("gpu")
    write_shards(root / "shards", (sample(i) for i in range(96)), 24)
    for name, make in (("clip", tiny_recipe), ("dino", dino_recipe)):
        tree = make(root / "shards", root, name=name)
        tree["engine"] = {"device": "cuda", "precision": "fp32", "compile": False}
        (root / f"{name}.yaml").write_text(yaml.safe_dump(tree))
        done = sparo("train", f"{name}.yaml", cwd=root)
        assert done.returncode == 0, done.stderr
    return root


@pytest.mark.parametrize("name", ["clip", "dino"])
def test_training_equals_the_cpu(place, name):
    done = sparo("train", f"{name}.yaml", f"name={name}-cpu", "engine.device=cpu", cwd=place)
    assert done.returncode == 0, done.stderr
    assert losses(place / name) == pytest.approx(losses(place / f"{name}-cpu"), rel=2e-3)
    assert metrics.read(place / name / "metrics.jsonl", "train")[-1]["memory"] > 0


@pytest.mark.parametrize("kind", ["images", "psb", "savi", "nerf", "nerf_relu", "slot_mixer"])
def test_training_of_slots_equals_the_cpu(tmp_path, write_recipe, kind):
    recipe = write_recipe(object_centric(kind, tmp_path))
    for name, precision, device in (("there", "fp32", "cuda"), ("low", "bf16", "cuda"), ("here", "fp32", "cpu")):
        done = sparo("train", str(recipe), f"name={name}", f"engine={{device: {device}, precision: {precision}}}")
        assert done.returncode == 0, done.stderr
    here = losses(tmp_path / "here")
    assert losses(tmp_path / "there") == pytest.approx(here, rel=2e-3)
    assert losses(tmp_path / "low") == pytest.approx(here, rel=3e-2)


@pytest.mark.parametrize("name", ["clip", "dino"])
def test_a_run_resumes_after_a_stop(place, name):
    for stop in ("stop_after_steps=5", "stop_after_steps=12"):
        done = sparo("train", f"{name}.yaml", f"name={name}-cut", stop, cwd=place)
        assert done.returncode == 0, done.stderr
    assert losses(place / f"{name}-cut") == pytest.approx(losses(place / name), rel=1e-4)


@pytest.mark.parametrize(
    "change", ["engine.precision=bf16", "engine.compile=true", "engine.grad_checkpointing=true", "micro_batch_size=2"]
)
def test_options_keep_the_losses(place, change):
    name = change.partition("=")[0].rpartition(".")[2]
    done = sparo("train", "clip.yaml", f"name=clip-{name}", change, cwd=place)
    assert done.returncode == 0, done.stderr
    assert losses(place / f"clip-{name}") == pytest.approx(losses(place / "clip"), rel=3e-2)


@SEVERAL
@pytest.mark.parametrize(
    "kind", ["ddp", "fsdp2", "fsdp2, cpu_offload: true", "deepspeed, stage: 2", "deepspeed, stage: 3"]
)
def test_two_gpus_train_like_one(place, kind):
    name = "two-" + "".join(c for c in kind if c.isalnum())
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    engine = f"engine={{kind: {kind}, device: cuda, precision: fp32, timeout: 60}}"
    # Not forked from the process of the other tests, which has loaded DeepSpeed for the CPU.
    command = [sys.executable, "-m", "launch.cli", "train", "clip.yaml", f"name={name}", engine]
    ranks = [
        subprocess.Popen(
            command,
            cwd=place,
            env={**os.environ, **common, "RANK": str(r), "LOCAL_RANK": str(r), "DS_ACCELERATOR": "cuda"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for r in range(2)
    ]
    found = finish(ranks)
    assert [code for code, _ in found] == [0, 0], found
    assert losses(place / name) == pytest.approx(losses(place / "clip"), rel=1e-3)


@pytest.mark.parametrize("kind", ["clip", "dino"])
def test_a_non_finite_step_changes_nothing_without_a_host_sync(kind):
    on_host, on_device = after_four_steps(kind, "cpu", True), after_four_steps(kind, "cuda", False)
    assert on_device.keys() == on_host.keys()
    for name, value in on_host.items():
        torch.testing.assert_close(on_device[name].cpu(), value, rtol=2e-3, atol=2e-4, msg=name)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.bfloat16, 5e-2)])
def test_the_readout_equals_its_plain_form(dtype, tolerance):
    torch.manual_seed(0)
    module = Sparo(384, 64, 64, 64).cuda()
    tokens = torch.randn(8, 197, 384, device="cuda", requires_grad=True)
    with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
        fast, plain = module(tokens, need_attention=True), module.plain(tokens)
    torch.testing.assert_close(fast.values.float(), plain.values.float(), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(fast.attention.float(), plain.attention.float(), rtol=tolerance, atol=tolerance)


def test_encodings_equal_the_cpu(place):
    config = resolve(RunConfig, yaml.safe_load((place / "clip.yaml").read_text()), "x")
    model = build_objective(config).model
    pixels = torch.randint(0, 255, (16, 3, 32, 32), dtype=torch.uint8)
    here = ClipEncoder(model).encode(pixels)
    there = ClipEncoder(model.cuda()).encode(pixels)
    torch.testing.assert_close(there.cpu(), here, rtol=1e-3, atol=1e-4)
