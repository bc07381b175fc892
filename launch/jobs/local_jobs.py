"""Jobs on this machine through submitit's local and debug executors, and the environment in which jobs are submitted."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from sparo_train.core.errors import ConfigError

from .clusters import ClusterConfig, minutes
from .job import Element, Job

# Variables of an outer job: resources (sbatch reads SLURM_MEM_PER_CPU and others as options), its step, and its ranks.
_PREFIXES = (
    "SLURM_",
    "SLURMD_",
    "SRUN_",
    "SUBMITIT_",
    "TORCHELASTIC_",
    "PMI_",
    "PMIX_",
    "OMPI_",
    "PALS_",
    "MPI_LOCAL",
    "ROLE_",
)
_NAMES = {
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
}
_DEVICES = {"CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL"}
_KEPT = {"SLURM_CONF", "SLURM_CLUSTERS"}  # variables through which SLURM's commands find their cluster


def is_inherited(name: str, outer: Mapping[str, str]) -> bool:
    """Return whether a variable belongs to an outer job instead of the user."""
    if name in _KEPT:
        return False
    return name.startswith(_PREFIXES) or name in _NAMES or ("SLURM_JOB_ID" in outer and name in _DEVICES)


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables, and remove those of an outer job, for submissions in this context."""
    before = dict(os.environ)
    for name in before:
        if is_inherited(name, before):
            del os.environ[name]
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


_CONTROLLER = "submitit.local._local"


def submit_local(
    submitit: Any,
    cluster: ClusterConfig,
    elements: Sequence[Element],
    jobs: Path,
    code: Path,
    parallel: int,
    job_of: Callable[[ClusterConfig, tuple[Element, ...]], Job],
) -> list[str]:
    """Start elements in `parallel` lanes, each running its elements one after another; return the job of each element."""
    # This machine has no queue, so pending elements wait in a lane.
    lanes = [elements[lane::parallel] for lane in range(min(parallel, len(elements)))]
    job_ids: dict[Element, str] = {}
    debug = cluster.kind == "debug"
    if debug:
        executor: Any = submitit.AutoExecutor(folder=jobs, cluster="debug")
    else:
        executor = _detached_executor(submitit)(folder=jobs, python=cluster.python)
        executor.update_parameters(
            tasks_per_node=1 if cluster.starter == "torchrun" else cluster.ranks_per_node,
            gpus_per_node=cluster.gpus_per_node,
            timeout_min=minutes(cluster.time),
            signal_delay_s=cluster.signal_seconds,
        )
    # The snapshot comes first, because the checkout may change while the job waits for its lane.
    path = f"{code}:{os.environ.get('PYTHONPATH', '')}".rstrip(":")
    for number, lane in enumerate(lanes):
        if not debug:
            executor.devices = _lane_devices(cluster.gpus_per_node, number, len(lanes))
        job = replace(job_of(cluster, tuple(lane)), port=_free_port())
        with environment({**cluster.environment, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}):
            submitted: Any = executor.submit(job)
            job_ids |= dict.fromkeys(lane, str(submitted.job_id))
            if debug:
                submitted.result()  # it is not pending any more
    return [job_ids[element] for element in elements]


def _lane_devices(gpus: int, lane: int, lanes: int) -> str:
    """Return CUDA_VISIBLE_DEVICES for a lane: its share of the devices of this shell.

    Raises:
        ConfigError: the lanes need more devices than CUDA_VISIBLE_DEVICES names.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(number) for number in range(gpus * lanes)] if visible is None else visible.split(",")
    if len(names) < gpus * lanes:
        raise ConfigError(
            f"--gpus-per-node {gpus}: {lanes} run(s) at a time need {gpus * lanes} GPU(s), but CUDA_VISIBLE_DEVICES={visible}. "
            "Lower --parallel, or set the variable to more devices."
        )
    return ",".join(names[gpus * lane : gpus * (lane + 1)])


def _free_port() -> int:
    """Return a free port for the ranks of a lane."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def _detached_executor(submitit: Any) -> Any:
    """Return submitit's local executor with a controller that is detached from the launcher's terminal and pipes."""

    class DetachedExecutor(submitit.LocalExecutor):
        devices = ""

        def _submit_command(self, command: str) -> Any:
            tasks = self.parameters["tasks_per_node"]
            env_vars = {
                "SUBMITIT_LOCAL_NTASKS": str(tasks),
                "SUBMITIT_LOCAL_COMMAND": command,
                "SUBMITIT_LOCAL_TIMEOUT_S": str(int(60 * self.parameters["timeout_min"])),
                "SUBMITIT_LOCAL_SIGNAL_DELAY_S": str(int(self.parameters["signal_delay_s"])),
                "SUBMITIT_LOCAL_NODEID": "0",
                "SUBMITIT_LOCAL_JOB_NUM_NODES": "1",
                "SUBMITIT_STDERR_TO_STDOUT": "",
                "SUBMITIT_EXECUTOR": "local",
                "SUBMITIT_LOCAL_WITH_SHELL": "",
                "CUDA_VISIBLE_DEVICES": self.devices,
            }
            with (Path(self.folder) / "controller.log").open("ab") as log:
                process = subprocess.Popen(
                    [sys.executable, "-m", _CONTROLLER, str(self.folder)],
                    env={**os.environ, **env_vars},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            return submitit.local.local.LocalJob(
                folder=self.folder, job_id=str(process.pid), tasks=list(range(tasks)), process=process
            )

    return DetachedExecutor


def local_alive(job: str, logs: str | None = None) -> bool:
    """Return whether submitit's controller of a local job is running.

    Args:
        job: its process number, which a later process may have, too.
        logs: the folder of its logs, which only this controller has in its command line; None: any.
    """
    try:
        words = Path(f"/proc/{int(job)}/cmdline").read_bytes().split(b"\0")
        return _CONTROLLER.encode() in words and (logs is None or logs.encode() in words)
    except (OSError, ValueError):
        return False


def rank_processes(job: str) -> list[int]:
    """Return the process numbers of a local job's ranks."""
    try:
        return [int(word) for word in Path(f"/proc/{job}/task/{job}/children").read_text().split()]
    except OSError:
        return []


def end_local(job: str, patience: float = 60.0) -> None:
    """Signal a local job to save and end; kill it after `patience` seconds, as SLURM does after KillWait."""
    with suppress(OSError):  # it ended meanwhile
        os.kill(int(job), signal.SIGTERM)
        end = time.monotonic() + patience
        while local_alive(job) and time.monotonic() < end:
            time.sleep(0.1)
        if local_alive(job):
            # Read the children before the kill, because their parent changes afterwards.
            ranks = rank_processes(job)
            # The ranks outlive their controller, and hold the folder's lock.
            for pid in (int(job), *ranks):
                os.kill(pid, signal.SIGKILL)
