"""Ranks are bound to the cores near their GPUs, or to all cores if some would be idle otherwise."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from sparo_train.engine import numa
from sparo_train.engine.ranked import record_collectives

GPU = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Simulate two cores on two sockets, and a GPU on the second one."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        pytest.skip("needs two cores")
    for socket, core in enumerate(cores):
        topology = tmp_path / f"devices/system/cpu/cpu{core}/topology"
        topology.mkdir(parents=True)
        (topology / "physical_package_id").write_text(f"{socket}\n")
        node = tmp_path / f"devices/system/node/node{socket}"
        node.mkdir(parents=True)
        (node / "cpulist").write_text(f"{core}\n")
    gpu = tmp_path / "bus/pci/devices/0000:3b:00.0"
    gpu.mkdir(parents=True)
    (gpu / "numa_node").write_text("1\n")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: GPU)
    bound = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(cores))
    monkeypatch.setattr(os, "sched_setaffinity", lambda task, chosen: bound.append((task, set(chosen))))
    return SimpleNamespace(root=tmp_path, cores=cores, gpu=gpu, bound=bound)


def ranks_with(*everyone):
    return SimpleNamespace(gather=lambda own: [own, *((own[0], socket) for socket in everyone)])


def test_a_rank_is_bound_to_the_socket_of_its_gpu(machine):
    line = numa.bind_to_socket(torch.device("cuda", 0), ranks_with(0), machine.root)
    assert line == "engine.bind_cores: socket 1, 1 of 2 cores"
    assert os.getpid() in {task for task, _ in machine.bound}
    assert all(cores == {machine.cores[1]} for _, cores in machine.bound)


@pytest.mark.parametrize("others", [(), (1,), (None,)])
def test_nothing_is_bound_if_a_socket_has_no_rank(machine, others):
    assert numa.bind_to_socket(torch.device("cuda", 0), ranks_with(*others), machine.root) is None
    assert machine.bound == []


@pytest.mark.parametrize("text", ["-1\n", "", None])
def test_nothing_is_bound_if_the_socket_is_unknown(machine, text):
    if text is None:
        (machine.gpu / "numa_node").unlink()
    else:
        (machine.gpu / "numa_node").write_text(text)
    assert numa.bind_to_socket(torch.device("cuda", 0), ranks_with(0), machine.root) is None
    assert numa.gpu_socket(torch.device("cpu"), machine.root) is None


def test_a_run_continues_if_binding_is_not_permitted(machine, monkeypatch):
    def refuse(*_):
        raise PermissionError("not here")

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    line = numa.bind_to_socket(torch.device("cuda", 0), ranks_with(0), machine.root)
    assert (
        line == "engine.bind_cores: cannot bind to socket 1, 1 of 2 cores (not here); training continues on all cores"
    )


def test_collectives_before_a_timeout_are_written_to_the_run_folder(tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith(("TORCH_FR_", "TORCH_NCCL_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(os, "environ", dict(os.environ, TORCH_FR_BUFFER_SIZE="7"))
    record_collectives(2000, tmp_path)
    assert os.environ["TORCH_FR_DUMP_TEMP_FILE"] == str(tmp_path / "flight_recorder/rank-")
    assert os.environ["TORCH_FR_BUFFER_SIZE"] == "7" and os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"


@pytest.mark.long
def test_a_setting_of_the_allocator_by_the_user_is_kept():
    program = (
        "import os, torch; from sparo_train.core.accelerator import grow_segments; "
        "grow_segments(torch.device('cuda')); print(os.environ.get('PYTORCH_ALLOC_CONF'))"
    )
    for own, expected in ({}, "expandable_segments:True"), ({"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, "None"):
        env = {k: v for k, v in os.environ.items() if not k.endswith("ALLOC_CONF")} | own
        done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == expected
