"""Time that `sparo launch` adds on SLURM: until the first training step, and from the signal of a preemption to the requeue.

    eval "$(python tests/slurm/cluster.py start)"
    python benchmarks/jobs.py

The model and batch of the demo are trained on two nodes by `sparo launch train` and on two ranks by torchrun, in turn,
until the first step is in metrics.jsonl. Then the job gets the signal of a preemption. When squeue no longer lists it as
running, it has saved and asked to be requeued. The second column of this row is the time that SLURM allows.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from common import noise_shards, parser, report, row

from launch.jobs.cluster_files import load_cluster
from launch.jobs.records import Records
from sparo_train.core.disk.metrics import read

RECIPE = str(Path(__file__).resolve().parents[1] / "configs/clip/scenes_tiny.yaml")
SAME = [
    "log.every_steps=1",
    "log.tensorboard=false",
    "eval={}",
    "checkpoint.every_steps=0",
    "data.sources.scenes.shards=shards",
]
SPARO = [sys.executable, "-m", "launch.cli"]


def until(ready: Callable[[], object], begin: float) -> float:
    """Return the seconds from `begin` until `ready` returns True. Raises after five minutes."""
    while not ready():
        if time.monotonic() > begin + 300:
            raise SystemExit("not there after five minutes: see `sparo launch status`")
        time.sleep(0.02)
    return time.monotonic() - begin


def state(job: str) -> str:
    return subprocess.run(
        ["squeue", "-h", "-j", job, "-o", "%T"], capture_output=True, text=True, check=False
    ).stdout.strip()


def launched(name: str) -> tuple[float, float]:
    """Return the seconds until the first step of a job on two nodes, and from the signal until it is requeued."""
    folder, begin = Path("runs") / name, time.monotonic()
    if shutil.which("sbatch") is None or "SLURM_CONF" not in os.environ:
        raise SystemExit('no SLURM here: eval "$(python tests/slurm/cluster.py start)" first')
    subprocess.run(
        [*SPARO, "launch", "train", RECIPE, f"name={name}", *SAME, "--cluster", "test", "--nodes", "2"], check=True
    )
    first = until(lambda: read(folder / "metrics.jsonl", "train"), begin)
    record = Records(folder).last_submission()
    assert record is not None
    job = record["jobs"][0]
    sent = time.monotonic()
    subprocess.run(["scancel", "--signal=USR2", job], check=True)
    saved = until(lambda: state(job) not in ("RUNNING", "COMPLETING"), sent)
    subprocess.run(["scancel", job], check=True)
    until(lambda: subprocess.run(["squeue", "-h"], capture_output=True, check=True).stdout == b"", sent)
    return first, saved


def direct(name: str) -> float:
    """Return the seconds until the first step of the same run with torchrun."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        "29477",
        "-m",
        "launch.cli",
    ]
    command += ["train", RECIPE, f"name={name}", *SAME, "engine.kind=ddp", "world_size=2"]
    begin = time.monotonic()
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL)  # torchrun ends with a traceback
    first = until(lambda: read(Path("runs") / name / "metrics.jsonl", "train"), begin)
    process.terminate()  # torchrun passes it on to its ranks
    process.wait()
    return first


def main() -> None:
    options = parser(__doc__).parse_args()
    rounds = 1 if options.quick else 5
    lead = load_cluster("test").signal_seconds
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        noise_shards(Path("shards"), 2048)
        pairs, leads = [], []
        for number in range(rounds):
            first, saved = launched(f"job-{number}")
            pairs.append((first, direct(f"direct-{number}")))
            leads.append((saved, float(lead)))
        os.chdir("..")
    rows = [
        row("first step: sparo launch (ours) / torchrun", pairs, None, "s", False),
        row("signal to requeued (ours) / lead time", leads, 1.0, "s", False),
    ]
    report("launching on two nodes of one machine", rows, options.json)


if __name__ == "__main__":
    main()
