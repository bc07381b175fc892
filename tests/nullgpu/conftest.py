"""Fixtures that run programs on the null GPU, each in a separate process: it must never be loaded into pytest's process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .build import UnavailableError, environment

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def null_gpu(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the environment of a subprocess on the null GPU; skip with the reason if it cannot be built."""
    assert "NULLGPU" not in os.environ, "pytest itself must not run on the null GPU"
    try:
        return environment(
            OMP_NUM_THREADS="1",
            NULLGPU_TRUE="1",
            XDG_CACHE_HOME=str(tmp_path_factory.getbasetemp() / "null_gpu_cache"),
            PYTHONPATH=str(ROOT),
        )
    except UnavailableError as reason:
        pytest.skip(f"no null GPU: {reason}")


@pytest.fixture(scope="session")
def run_program(null_gpu: dict[str, str]) -> Callable[..., Any]:
    """Return a function that runs a function of `programs.py` on the null GPU and returns its result."""

    def run(name: str, *arguments: Any, reads: str = "zero") -> Any:
        command = [sys.executable, "-m", "tests.nullgpu.programs", name, json.dumps(arguments)]
        env = {**null_gpu, "NULLGPU_READS": reads}
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
        return json.loads(done.stdout.splitlines()[-1])

    return run
