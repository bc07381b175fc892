"""Record launches and memory of the steps of test_steps.py after an intended change: `python -m tests.nullgpu.record`."""

import json
import subprocess
import sys
from pathlib import Path

import torch

from .build import environment
from .test_steps import KINDS

COUNTS = ("launch", "h2d", "h2d_bytes", "gemm_16bit", "gemm_fp32", "gemm_flop", "cudnn")


def main() -> None:
    """Write expected_steps.json."""
    env = environment(OMP_NUM_THREADS="1", NULLGPU_TRUE="1", NULLGPU_READS="zero", PYTHONPATH=str(Path.cwd()))
    arguments = json.dumps([KINDS, {}, {}, 10**9])
    command = [sys.executable, "-m", "tests.nullgpu.programs", "steps", arguments]
    done = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
    steps = json.loads(done.stdout.splitlines()[-1])
    rows = {
        kind: {**{name: step["counts"].get(name, 0) for name in COUNTS}, "peak": step["peak"]}
        for kind, step in steps.items()
    }
    content = {"torch": torch.__version__.rpartition(".")[0], "steps": rows}
    Path(__file__).with_name("expected_steps.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
