"""Jobs in the SLURM allocation of this shell (`salloc`): one srun after another, in the foreground, with restarts in place."""

from __future__ import annotations

import logging
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from sparo_train.core.errors import SparoError

from . import slurm
from .clusters import ClusterConfig
from .job import GPUS, KILLED, PROGRAM, Element
from .records import Records
from .script import lines_before
from .submit import restart_limits

logger = logging.getLogger(__name__)
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SPECIAL_STEPS = 4_294_967_000  # numbers above are steps of a batch script or of salloc's shell


def is_training(records: Records, job: str) -> bool:
    """Return whether the newest start of a run in an allocation has not ended, and its step is running."""
    lines = records.starts(job)
    if not lines or "end" in lines[-1]:
        return False
    return f"{job}.{lines[-1].get('step_id')}" in slurm.running_steps(job)


def run_in_allocation(cluster: ClusterConfig, elements: Sequence[Element], code: Path) -> None:
    """Run elements one after another, each on all ranks; their output goes to the terminal and to the job's log.

    A rank that was killed ends the others, and the element starts again from its last checkpoint, up to `idle_restarts`
    times without a new one.
    """
    job = os.environ["SLURM_JOB_ID"]
    for element in elements:
        jobs = Path(element.folder).resolve() / "jobs"
        records = Records(Path(element.folder))
        (jobs / f".{job}.nodes").unlink(missing_ok=True)
        first = len([line for line in records.starts(job) if "end" not in line])
        restart, again = first, True
        while again and restart <= first + cluster.max_restarts:
            script = "\n".join(
                [*lines_before(cluster, _python(cluster), code, jobs, Path.cwd(), restarts=False), "set -o pipefail",
                 _srun_line(cluster, element, jobs / f"{job}_0_log.out", first)]
            )  # fmt: skip
            exit_code, stopped = _run_shell(script, jobs, restart, cluster.gpus_per_node, records, job)
            mark = jobs / f".{job}-{restart}"
            again = not stopped and (exit_code == KILLED or mark.with_name(f"{mark.name}.lost").exists())
            for path in jobs.glob(f"{mark.name}.*"):
                path.unlink(missing_ok=True)
            restart += 1
            if again:
                logger.warning(f"{element.folder}: a rank was lost. The run restarts from its last checkpoint.")
            if stopped:
                return


def _run_shell(script: str, jobs: Path, restart: int, gpus: int, records: Records, job: str) -> tuple[int, bool]:
    """Run shell lines; return their exit code, and whether a signal stopped them. Ctrl-C lets the ranks save and end."""
    # Under SLURM's name, by which ranks number their starts.
    env = {**os.environ, "SLURM_RESTART_COUNT": str(restart), "SUBMITIT_FOLDER": str(jobs), GPUS: str(gpus)}
    step = os.environ.get("SLURM_STEP_ID", "")
    if step.isdecimal() and int(step) < _SPECIAL_STEPS:  # a shell of srun, whose step has the resources
        env["SLURM_OVERLAP"] = "1"
    # In a separate session, because srun and tee would end at a Ctrl-C before the ranks have saved.
    process = subprocess.Popen(["bash", "-c", script], env=env, start_new_session=True)
    received: list[int] = []

    def forward(number: int, _frame: object) -> None:
        received.append(number)
        lines = records.starts(job)
        try:
            if lines and "end" not in lines[-1] and lines[-1]["restart"] == restart:
                slurm.send_signal([f"{job}.{lines[-1].get('step_id')}"], "TERM")
            else:  # no rank has started
                os.killpg(process.pid, signal.SIGTERM)
        except (SparoError, ProcessLookupError):
            process.kill()

    handlers = {number: signal.signal(number, forward) for number in _SIGNALS}
    try:
        return process.wait(), bool(received)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _python(cluster: ClusterConfig) -> str:
    return cluster.python or shlex.quote(sys.executable)


def _srun_line(cluster: ClusterConfig, element: Element, log: Path, first: int) -> str:
    words = [
        "srun", "--unbuffered", "--kill-on-bad-exit=1", f"--nodes={cluster.nodes}", f"--ntasks={cluster.ranks}",
        f"--ntasks-per-node={cluster.ranks_per_node}",
    ]  # fmt: skip
    words += [f"--cpus-per-task={cluster.cpus_per_task}"] if cluster.cpus_per_task else []
    limits = replace(restart_limits(cluster), first=first)
    program = ["-u", "-m", PROGRAM, element.folder, limits.text(), *element.arguments]
    command = f"{shlex.join([*words, *cluster.srun_args])} {_python(cluster)} {shlex.join(program)}"
    return f"{command} 2>&1 | tee -a {shlex.quote(str(log))}"
