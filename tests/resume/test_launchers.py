"""Ranks started by different programs: their world, the address where they meet, and how they end."""

import json
import os
import re
import signal
import socket
import subprocess
from pathlib import Path

import pytest
import yaml

from sparo_train.core.disk import checkpoint_store as store
from sparo_train.core.errors import ConfigError
from sparo_train.core.rendezvous import find_rendezvous
from sparo_train.core.world import World, find_launcher, find_world
from tests.helpers.processes import start_sparo
from tests.helpers.ranks import free_port
from tests.helpers.runs import assert_bit_equal, finish, start_ranks, wait_for_step, with_a_straight_run

PAGE = Path(__file__).resolve().parents[2] / "docs/guides/launchers.md"
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1"}
ORTED = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0"}  # mpirun starts its daemons by srun
PMI2 = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1", "PMI_RANK": "3", "PMI_SIZE": "8"}
PALS = {"PMI_RANK": "3", "PMI_SIZE": "8", "PALS_LOCAL_RANKID": "1"}
PYTORCHJOB = {"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "cc3m-master-0", "MASTER_PORT": "23456", "PET_NNODES": "8"}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return with_a_straight_run(tmp_path_factory.mktemp("launchers"))


@pytest.mark.parametrize(
    ("environment", "world", "launcher"),
    [
        (OPEN_MPI, World(3, 8, 1), "mpirun"),
        ({**OPEN_MPI, **ORTED}, World(3, 8, 1), "mpirun"),
        (HYDRA, World(3, 8, 1), "mpiexec"),
        ({**HYDRA, **ORTED}, World(3, 8, 1), "mpiexec"),
        (PMI2, World(3, 8, 1), "srun"),
        (PALS, World(3, 8, 1), "mpiexec"),
        (PYTORCHJOB, World(3, 8, 0), "torchrun"),
        ({**OPEN_MPI, **PYTORCHJOB, "LOCAL_RANK": "2"}, World(3, 8, 2), "torchrun"),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}, World(0, 1, 0), None),
        ({"PMI_RANK": "3", "PMI_SIZE": "8"}, World(0, 1, 0), None),  # an unknown program, so the device is unknown, too
    ],
)
def test_ranks_of_every_launcher_are_recognised(environment, world, launcher):
    found = find_launcher(environment)
    assert find_world(environment) == world and (found.name if found else None) == launcher


def test_a_launcher_of_several_machines_needs_an_address(monkeypatch):
    for name, value in {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"MASTER_ADDR: is not set, and mpirun sets no variable .* mpirun -x"):
        find_rendezvous()
    for name, value in {
        "OMPI_COMM_WORLD_LOCAL_SIZE": "8",
        "PMIX_NAMESPACE": "5",
        "MASTER_ADDR": "",
        "MASTER_PORT": "",
    }.items():
        monkeypatch.setenv(name, value)  # so that they are removed after the test
    del os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    find_rendezvous()
    assert os.environ["MASTER_ADDR"] == "127.0.0.1" and 20000 <= int(os.environ["MASTER_PORT"]) < 32000


def _mpi_ranks(place, port, *words, size=2):
    """Start ranks with the variables of mpirun."""
    common = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": str(port)}
    common |= {"OMP_NUM_THREADS": "1", "MASTER_PORT": str(port)}
    return [
        start_sparo(
            "train", str(place / "recipe.yaml"), *words, **common,
            OMPI_COMM_WORLD_RANK=str(rank), OMPI_COMM_WORLD_LOCAL_RANK=str(rank),
        )
        for rank in range(size)
    ]  # fmt: skip


@pytest.mark.long
def test_ranks_of_mpirun_save_on_request_and_stop_with_a_given_code(place):
    with socket.socket() as taken:  # another program uses the chosen port
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        words = ("name=mpi", "checkpoint.every_steps=0", "--exit-code-on-stop", "143")
        processes = _mpi_ranks(place, taken.getsockname()[1], *words)
        wait_for_step(place / "mpi", 2, processes)
        processes[1].send_signal(signal.SIGUSR1)
        wait_for_step(place / "mpi", 7, processes)
        processes[0].send_signal(signal.SIGTERM)
        found = finish(processes)
    if found[0][0] == 0:
        pytest.skip("the run finished before the signal")
    assert [code for code, _ in found] == [143, 143], found
    steps = sorted(store.CheckpointStore(place / "mpi/checkpoints").steps())
    assert len(steps) == 2 and 2 <= steps[0] < steps[1], steps
    found = finish(start_ranks(2, "train", place / "recipe.yaml", "name=mpi", "checkpoint.every_steps=0"))
    assert [code for code, _ in found] == [0, 0], found
    assert_bit_equal(place / "mpi", place / "straight")


def test_ranks_that_do_not_start_are_named(place):
    ((code, stderr),) = finish(_mpi_ranks(place, free_port(), "name=alone", "engine.join_timeout=2", size=1))
    assert code == 3 and "these ranks did not start within 2 s (engine.join_timeout): 1 (" in stderr, stderr
    assert not (place / "alone").exists()


@pytest.fixture
def recorded(tmp_path):
    """Write a torchrun that records its arguments."""
    path = tmp_path / "torchrun"
    path.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {tmp_path}/arguments.txt\n')
    path.chmod(0o755)

    def run(script: str, **environment: str) -> list[str]:
        env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **environment}
        subprocess.run(["bash", "-c", script], env=env, check=True)
        return (tmp_path / "arguments.txt").read_text().splitlines()

    return run


def _block(language: str, word: str) -> str:
    blocks = re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    return next(block for block in blocks if word in block)


def test_the_script_for_aws_batch_gives_torchrun_its_node(recorded):
    script = _block("sh", "AWS_BATCH")
    node = {"AWS_BATCH_JOB_NUM_NODES": "2", "AWS_BATCH_JOB_MAIN_NODE_INDEX": "0"}
    child = recorded(
        script, **node, AWS_BATCH_JOB_NODE_INDEX="1", AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS="10.0.0.7"
    )
    assert {"--nnodes=2", "--node-rank=1", "--master-addr=10.0.0.7", "--nproc-per-node=8"} <= set(child)
    main = recorded(script, **node, AWS_BATCH_JOB_NODE_INDEX="0", GPUS="4")
    address = next(word.partition("=")[2] for word in main if word.startswith("--master-addr"))
    assert re.fullmatch(r"\d+\.\d+\.\d+\.\d+", address) and "--nproc-per-node=4" in main
    rules = json.loads(_block("json", "attempts"))["retryStrategy"]["evaluateOnExit"]
    # Without the last rule, AWS Batch would retry jobs that match no rule.
    assert {"onExitCode": "1", "action": "RETRY"} in rules and rules[-1] == {"onReason": "*", "action": "EXIT"}


def test_the_task_for_skypilot_gives_torchrun_its_node(recorded):
    task = yaml.safe_load(_block("yaml", "SKYPILOT"))
    node = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NUM_GPUS_PER_NODE": "8"}
    arguments = recorded(task["run"], **node, SKYPILOT_NODE_RANK="1")
    assert {"--nnodes=2", "--node-rank=1", "--master-addr=10.0.0.1", "--nproc-per-node=8"} <= set(arguments)
    assert arguments[-4:] == ["train", "cc3m_sparo", "engine.kind=ddp", "out=/runs"]
    assert task["resources"]["job_recovery"] == {"max_restarts_on_errors": 3}  # torchrun exits with 1, never with 75


def test_pods_of_a_pytorchjob_restart_after_the_requested_exit_code():
    job = yaml.safe_load(_block("yaml", "PyTorchJob"))["spec"]["pytorchReplicaSpecs"]
    for replica in job.values():
        (container,) = replica["template"]["spec"]["containers"]
        assert replica["restartPolicy"] == "ExitCode" and 128 <= int(container["command"][-1]) < 256
        assert f"world_size={sum(r['replicas'] for r in job.values())}" in container["command"]
