"""Jobs in the SLURM allocation of this shell (`salloc`): one srun after another, in the foreground, with restarts in place."""

from __future__ import annotations

import logging
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from .clusters import ClusterConfig
from .job import GPUS, KILLED, PROGRAM, Element
from .records import Records
from .script import lines_before
from .submit import restart_limits

logger = logging.getLogger(__name__)


def run_in_allocation(cluster: ClusterConfig, elements: Sequence[Element], code: Path) -> None:
    """Run elements one after another, each on all ranks; their output goes to the terminal and to the job's log.

    A rank that was killed ends the others, and the element starts again from its last checkpoint, up to `idle_restarts`
    times without a new one.
    """
    job = os.environ["SLURM_JOB_ID"]
    for element in elements:
        jobs = Path(element.folder).resolve() / "jobs"
        records = Records(Path(element.folder))
        script = "\n".join([*lines_before(cluster, _python(cluster), code, jobs, Path.cwd(), restarts=False),
                            "set -o pipefail", _srun_line(cluster, element, jobs / f"{job}_0_log.out")])  # fmt: skip
        again, first = True, len([line for line in records.starts(job) if "end" not in line])
        restart = first
        while again and restart <= first + cluster.idle_restarts:
            # Under SLURM's name, by which ranks number their starts.
            env = {**os.environ, "SLURM_RESTART_COUNT": str(restart), "SUBMITIT_FOLDER": str(jobs), GPUS: str(cluster.gpus_per_node)}  # fmt: skip
            code_number = subprocess.run(["bash", "-c", script], env=env, check=False).returncode
            mark = jobs / f".{job}-{restart}"
            again = code_number == KILLED or mark.with_name(mark.name + ".lost").exists()
            for path in jobs.glob(f"{mark.name}.*"):
                path.unlink(missing_ok=True)
            restart += 1
            if again:
                logger.warning(f"{element.folder}: a rank was lost; starting again from the last checkpoint")


def _python(cluster: ClusterConfig) -> str:
    return cluster.python or shlex.quote(sys.executable)


def _srun_line(cluster: ClusterConfig, element: Element, log: Path) -> str:
    per_node = cluster.ranks_per_node
    words = [
        "srun", "--unbuffered", "--kill-on-bad-exit=1", f"--nodes={cluster.nodes}", f"--ntasks={cluster.ranks}",
        f"--ntasks-per-node={per_node}",
    ]  # fmt: skip
    words += [f"--cpus-per-task={cluster.cpus_per_task}"] if cluster.cpus_per_task else []
    program = ["-u", "-m", PROGRAM, element.folder, restart_limits(cluster).text(), *element.arguments]
    command = f"{shlex.join([*words, *cluster.srun_args])} {_python(cluster)} {shlex.join(program)}"
    return f"{command} 2>&1 | tee -a {shlex.quote(str(log))}"
