"""Devices: names, errors, and machines with another accelerator than CUDA."""

import subprocess
import sys

import pytest
import torch

from evals.encoders.encoder import texts_per_batch
from sparo_train.core import accelerator
from sparo_train.core.errors import ConfigError
from sparo_train.engine.device_context import Clock, Device, DeviceConfig
from sparo_train.train.meter import memory, utilisation
from tests.helpers.processes import sparo

NO_GPU = pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")


@pytest.fixture
def apple(monkeypatch):
    """Replace torch's answers by those of a machine with an Apple GPU."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("mps"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)


@NO_GPU
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cuda", r"^--device=cuda: torch finds no GPU\. Use --device=cpu or auto\.$"),
        ("xpu", r"^--device=xpu: torch finds no device of kind xpu\."),
        ("tpu", r"^--device: expected auto, cpu, cuda, xpu, mps, got tpu\.$"),
        ("cuda:x", r"^--device: expected auto"),
        ("auto:1", r"^--device: expected auto"),
    ],
)
def test_devices_that_do_not_exist_are_refused(name, message):
    with pytest.raises(ConfigError, match=message):
        accelerator.find_device(name, "--device")


@NO_GPU
def test_machines_without_an_accelerator_use_the_cpu():
    assert accelerator.find_device("auto", "x") == accelerator.find_device("cpu", "x") == torch.device("cpu")
    assert accelerator.collectives(torch.device("cpu")) == "gloo"
    assert accelerator.device_name(torch.device("cpu")) is None
    assert memory(torch.device("cpu")) > 0 and utilisation(1.0, torch.device("cpu")) is None
    done = sparo("eval", "missing", "--device", "cuda")
    assert done.returncode == 2 and "--device=cuda: torch finds no GPU" in done.stderr


@pytest.mark.parametrize(
    ("variables", "warns"),
    [
        ({}, True),
        ({"CUDA_VISIBLE_DEVICES": "0"}, True),
        ({"CUDA_VISIBLE_DEVICES": ""}, False),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, False),
        ({"SLURM_JOB_ID": "7"}, False),
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_GPUS": "0"}, True),
    ],
)
def test_gpus_that_torch_does_not_see_are_reported(monkeypatch, tmp_path, caplog, variables, warns):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
    for name in ("nvidia0", "nvidia1", "nvidiactl"):
        (tmp_path / name).touch()
    monkeypatch.setattr(accelerator, "_DEVICE_FILES", tmp_path)
    for name in ("CUDA_VISIBLE_DEVICES", "SLURM_JOB_ID", "SLURM_JOB_GPUS", "SLURM_STEP_GPUS", "SLURM_GPUS_ON_NODE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    accelerator._warn_of_unused_gpus.cache_clear()
    assert accelerator.find_device("auto", "x") == torch.device("cpu")
    assert ("sees none of the 2 GPU(s)" in caplog.text) is warns


def test_gpus_use_their_own_collectives_and_the_host_gloo():
    assert accelerator.collectives(torch.device("cuda", 1)) == "cpu:gloo,cuda:nccl"
    assert accelerator.collectives(torch.device("xpu")) == "cpu:gloo,xpu:xccl"


@pytest.mark.parametrize("has_instructions", [False, True])
def test_bf16_on_a_cpu_without_its_instructions_is_reported(monkeypatch, caplog, has_instructions):
    cpu = torch.device("cpu")
    assert isinstance(accelerator.is_bf16_slow(cpu), bool) and not accelerator.is_bf16_slow(torch.device("cuda"))
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: has_instructions)
    for precision in ("bf16", "fp32"):
        Device(DeviceConfig(device="cpu", precision=precision)).prepare_objective(torch.nn.Identity())
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == (not has_instructions)
    assert has_instructions or "A new run is faster with engine.precision=fp32." in warnings[0]


def test_an_apple_gpu_needs_no_streams_and_no_pinned_memory(apple, monkeypatch):
    assert accelerator.find_device("auto", "x") == torch.device("cpu")  # only if it is named explicitly
    device = accelerator.find_device("mps", "x")
    assert device == torch.device("mps") and accelerator.collectives(device) == "gloo"
    assert not accelerator.is_streaming(device) and accelerator.take_peak_memory(device) is None
    assert memory(device) > 0 and utilisation(1.0, device) is None and texts_per_batch(device) == 2048
    clock = Clock(device)
    with clock.running():
        pass
    assert clock.take() > 0
    with pytest.raises(ConfigError, match=r"engine\.precision=bf16: mps has no bfloat16 .* Use engine\.precision=fp32"):
        Device(DeviceConfig(device="mps"))  # this torch has no MPS, so tensors cannot be created
    context = Device(DeviceConfig(device="mps", precision="fp32"))
    batch = {"image": torch.zeros(2)}
    assert context.device == device and context.prefetch_to_device(batch) is batch
    with pytest.raises(ConfigError, match=r"x=mps:1: this machine has 1 device\(s\), counted from 0"):
        accelerator.find_device("mps:1", "x")


@pytest.mark.parametrize("enable", [False, True])
def test_tf32_is_set_by_the_recipe(enable):
    try:
        Device(DeviceConfig(device="cpu", tf32=enable))
        assert torch.backends.cuda.matmul.allow_tf32 == torch.backends.cudnn.allow_tf32 == enable
    finally:
        accelerator.set_tf32(False)


def test_compiling_needs_triton_and_a_compiler(monkeypatch):
    import torch.utils._triton

    gpu = torch.device("cuda")
    monkeypatch.setattr(torch.utils._triton, "has_triton", lambda: True)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(accelerator.shutil, "which", lambda name: None)
    assert accelerator.compile_problem(gpu) == "a C compiler (gcc or clang) is missing"
    monkeypatch.setenv("CC", "/usr/bin/gcc")
    assert accelerator.compile_problem(gpu) is None


_SIGNALLED = """
import os, signal, time
from sparo_train.core.accelerator import start_compile_workers
from torch._inductor import config

os.setsid()
config.compile_threads = 2
received, numbers = [], (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
for number in numbers:
    signal.signal(number, lambda number, frame: received.append(number))
start_compile_workers()
from torch._inductor.async_compile import AsyncCompile

pool = AsyncCompile.process_pool()
assert pool.submit(os.getpid).result(60) != os.getpid()
for number in numbers:
    os.killpg(0, number)
time.sleep(0.5)
assert pool.submit(os.getpid).result(60) != os.getpid() and received == list(numbers)
"""


@pytest.mark.long
def test_signals_to_the_process_group_end_no_compile_worker():
    done = subprocess.run([sys.executable, "-c", _SIGNALLED], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
