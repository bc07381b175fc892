"""Runs `sparo …` in separate processes, forked from one that has imported everything: a start takes no time for imports.

tests/docs starts the same commands as a user does.
"""

from __future__ import annotations

import faulthandler
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from multiprocessing import get_context
from pathlib import Path

import torch

os.environ.setdefault("DS_ACCELERATOR", "cpu")
CONTEXT = get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.preload"])


class Started:
    """A running `sparo …`, with the part of `subprocess.Popen` that tests use."""

    def __init__(
        self, arguments: tuple[str, ...], environment: Mapping[str, str], cwd: Path | None, program: str | None
    ):
        self._folder = tempfile.TemporaryDirectory(prefix="sparo-test-")
        self._out, self._err = (Path(self._folder.name) / name for name in ("out", "err"))
        self._process = CONTEXT.Process(
            target=_run, args=(arguments, dict(environment), cwd, program, self._out, self._err)
        )
        self._process.start()

    @property
    def pid(self) -> int | None:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    def send_signal(self, number: int) -> None:
        if self._process.is_alive() and self._process.pid:
            os.kill(self._process.pid, number)

    def stdout_now(self) -> str:
        """Return what it has written to stdout so far."""
        return self._out.read_text(errors="replace") if self._out.exists() else ""

    def stderr_now(self) -> str:
        """Return what it has written to stderr so far."""
        return self._err.read_text(errors="replace") if self._err.exists() else ""

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Return (stdout, stderr) after its end. Raises subprocess.TimeoutExpired."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("sparo", timeout or 0.0, stderr=self.stderr_now().encode())
        out = self._out.read_text(errors="replace") if self._out.exists() else ""
        return out, self.stderr_now()


def _run(
    arguments: tuple[str, ...], environment: dict[str, str], cwd: Path | None, program: str | None, out: Path, err: Path
) -> None:
    for path, number in ((out, 1), (err, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.environ.clear()
    os.environ.update(environment)
    if cwd is not None:
        os.chdir(cwd)

    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", "2")))
    faulthandler.enable()  # tests send SIGABRT to a process that hangs
    sys.argv = ["sparo", *arguments]
    if program is None:
        from launch.cli.main import main

        main()
    else:
        exec(compile(program, "program", "exec"), {"__name__": "__main__"})


# Threads of each process. Two processes with two threads each would wait for each other on two cores.
THREADS = 1 if "PYTEST_XDIST_WORKER" in os.environ else 2


def start_sparo(*arguments: str, cwd: Path | None = None, program: str | None = None, **environment: str) -> Started:
    """Start `sparo …` (or a program that calls it) in a separate process."""
    env = {**os.environ, "OMP_NUM_THREADS": str(THREADS), **environment}
    return Started(arguments, env, cwd, program)


def sparo(*arguments: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    process = start_sparo(*arguments, cwd=cwd, **environment)
    stdout, stderr = process.communicate(timeout=500)
    return subprocess.CompletedProcess(arguments, process.returncode or 0, stdout, stderr)
