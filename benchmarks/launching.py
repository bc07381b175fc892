"""CPU time and memory of `sparo launch` on a login node: the status of a sweep, and a launch that is not submitted.

    python benchmarks/launching.py [--runs 30] [--repeat 5]

Each command runs in a process of its own; CPU time includes the start of Python. The runs of the sweep have 20,000
lines of metrics each (7 MB). SLURM does not have to be installed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_MEASURE = """
import resource, subprocess, sys
code = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode
usage = resource.getrusage(resource.RUSAGE_CHILDREN)
print(usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024, code)
"""


def make_sweep(root: Path, runs: int) -> None:
    """Write the folder of a sweep of local jobs that have ended."""
    cluster = {"kind": "local", "nodes": 1}
    for number in range(runs):
        folder = root / f"runs/sweep-{number}"
        (folder / "jobs").mkdir(parents=True)
        record = {"jobs": ["1"], "on": "local", "cluster": cluster, "folder": str(folder), "arguments": [], "time": 1.0}
        start = {"time": 1.0, "job": "1", "restart": 0, "step": 0}
        (folder / "jobs/submitted.jsonl").write_text(json.dumps(record) + "\n")
        (folder / "jobs/starts.jsonl").write_text(json.dumps(start) + "\n")
        beat = {"step": 20_000, "total": 50_000, "phase": "training", "time": time.time()}
        (folder / "heartbeat.json").write_text(json.dumps(beat))
        facts = {"kind": "train", "loss": 1.0, "samples": 8, "samples_per_second": 100.0, "note": "x" * 240}
        lines = (json.dumps({**facts, "step": step}) for step in range(20_000))
        (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (root / "runs/sweep").mkdir()
    names = [f"sweep-{number}" for number in range(runs)]
    (root / "runs/sweep/sweep.json").write_text(json.dumps({"runs": names}))


def measure(words: list[str], cwd: Path) -> tuple[float, float]:
    """Return the CPU seconds and the peak memory in MB of one command."""
    command = [sys.executable, "-c", _MEASURE, sys.executable, "-m", "launch.cli", *words]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=True)
    seconds, megabytes, code = done.stdout.split()
    if code != "0":
        raise SystemExit(f"sparo {' '.join(words)}: ended with {code}")
    return float(seconds), float(megabytes)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        make_sweep(root, options.runs)
        commands = {
            f"status of {options.runs} runs": ["launch", "status", "runs/sweep"],
            "launch train --dry-run": ["launch", "train", "clip/scenes_tiny", "--cluster", "test", "--dry-run"],
        }
        print("| command | CPU seconds (median, range) | peak memory, MB | n |\n|---|---|---|---|")
        for name, words in commands.items():
            found = [measure(words, root) for _ in range(options.repeat)]
            seconds, memory = [s for s, _ in found], max(m for _, m in found)
            print(
                f"| {name} | {statistics.median(seconds):.2f} ({min(seconds):.2f} to {max(seconds):.2f}) | {memory:.0f} | {len(found)} |"
            )


if __name__ == "__main__":
    main()
