"""Fixtures that run programs on the null GPU, each in its own process: it must never be loaded into pytest's process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
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
def run_program(null_gpu: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """Return a function that runs a function of `programs.py` on the null GPU and returns its result (see `server.py`)."""
    printed = tmp_path_factory.mktemp("programs") / "printed.txt"
    command = [sys.executable, "-m", "tests.nullgpu.server", str(printed)]
    with subprocess.Popen(
        command, cwd=ROOT, env=null_gpu, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as server:
        assert server.stdin is not None and server.stdout is not None
        requests, exit_codes = server.stdin, server.stdout

        def run(name: str, *arguments: Any, reads: str = "zero") -> Any:
            requests.write(json.dumps([name, arguments, reads]) + "\n")
            requests.flush()
            exit_code, text = exit_codes.readline(), printed.read_text()
            assert exit_code == "0\n", f"exit code {exit_code}{text[-8000:]}"
            return json.loads(text.splitlines()[-1])

        yield run
        requests.close()
