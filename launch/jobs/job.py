"""Program that a job runs on its nodes: `sparo …` as one rank, or torchrun for a node.

This module imports nothing heavy, because a signal before it installs its handlers would end the process immediately.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sparo_train.core.world import end_with_parent

PROGRAM = "launch.cli.node"  # by name, because the program may import jobs, and a job stays light until it runs
STOPPED = 75  # exit code: saved after a signal, or nothing to save yet; may be restarted
KILLED = 137  # exit code of the shell for a rank that ended without a message
GPUS = "SPARO_GPUS_PER_NODE"  # number of GPUs that a job requested, for programs that it starts
LOCAL_AGAIN = 144  # exit code with which submitit's local executor restarts a job
_STOPS = (signal.SIGTERM, signal.SIGUSR2)
_SAVE = signal.SIGUSR1  # write a checkpoint and continue


@dataclass(frozen=True)
class Element:
    """One `sparo ARGUMENTS`, and the folder of its records."""

    arguments: tuple[str, ...]
    folder: str


@dataclass(frozen=True)
class RestartLimits:
    """Limits after which a job is not started again.

    Attributes:
        idle: consecutive starts without a new checkpoint.
        restarts: restarts in total.
        hours: hours of all starts together; None: any.
        start_hours: hours that one start can take, for starts whose end is not known.
        first: number of the first start that counts; in an allocation, earlier launches have lower numbers.
    """

    idle: int = 3
    restarts: int = 200
    hours: float | None = None
    start_hours: float = 24.0
    first: int = 0

    def text(self) -> str:
        """Return the form in which a rank's command line contains them."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def parse(cls, text: str) -> RestartLimits:
        """Return the limits that `text` returned."""
        return cls(**json.loads(text))


@dataclass(frozen=True)
class Job:
    """A picklable callable for submitit: runs the elements one after another, on every rank.

    Attributes:
        cwd: working directory.
        nodes, ranks_per_node: size of the job; with `torchrun`, this is called once per node.
        limits: when the job is not started again.
        port: port at which ranks of one machine meet.
        visible: original CUDA_VISIBLE_DEVICES, "all" for unset, where submitit would hide the GPUs.
        gpus: requested GPUs per node.
    """

    elements: tuple[Element, ...]
    cwd: str
    limits: RestartLimits
    nodes: int = 1
    ranks_per_node: int = 1
    torchrun: bool = False
    port: int = 0
    visible: str | None = None
    gpus: int = 0

    def __call__(self) -> int:
        """Run the job; on a cluster, the process ends here with the exit code that the batch script reads."""
        debug = "SUBMITIT_DEBUG_JOB_ID" in os.environ
        if not debug:
            stop_until_training()
            mark("started")
        # submitit starts elsewhere, but relative paths of a recipe refer to the folder of the launch.
        os.chdir(self.cwd)
        os.environ[GPUS] = str(self.gpus)
        if self.visible == "all":
            os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        elif self.visible is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = self.visible
        if self.torchrun:
            sys.exit(self._run_torchrun(self.elements[0]))
        self._set_rank_environment()
        if len(self.elements) > 1 and not debug:
            sys.exit(self._run_sequentially())
        node = importlib.import_module(PROGRAM)
        code = max(node.perform(e.arguments, e.folder, self.limits) for e in self.elements)
        if not debug:
            node.leave(code)
        return code

    def checkpoint(self) -> Any:
        """Restart unchanged; submitit calls this for a signal before our handlers are installed."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)

    def _node_arguments(self, element: Element) -> list[str]:
        return ["-m", PROGRAM, element.folder, self.limits.text(), *element.arguments]

    def _run_sequentially(self) -> int:
        """Run every element in a separate process, until one of them is stopped."""
        codes = []
        attempt = f"{os.environ['SUBMITIT_LOCAL_JOB_ID']}_{os.environ['SUBMITIT_LOCAL_LOCALID']}_log"
        for element in self.elements:
            # Into the run's own folder, because the files of this job contain all runs of the lane.
            output = Path(element.folder, "jobs", attempt)
            command = [sys.executable, "-u", *self._node_arguments(element)]
            codes.append(_supervise(command, torchrun=False, output=output))
            # A stopped element continues after the restart, before later ones begin.
            if codes[-1] in (STOPPED, LOCAL_AGAIN):
                return codes[-1]
        return max(codes)

    def _run_torchrun(self, element: Element) -> int:
        command = [sys.executable, "-u", "-m", "torch.distributed.run", f"--nnodes={self.nodes}"]
        command += [f"--nproc-per-node={self.ranks_per_node}", f"--node-rank={os.environ.get('SLURM_NODEID', '0')}"]
        command += [f"--master-addr={os.environ.get('MASTER_ADDR', '127.0.0.1')}"]
        command += [f"--master-port={os.environ.get('MASTER_PORT', str(self.port))}"]
        failures, start_time = Path(element.folder, "jobs/failures.jsonl"), time.time()
        code = _supervise([*command, *self._node_arguments(element)], torchrun=True)
        if code == STOPPED and os.environ.get("SLURM_NODEID", "0") != "0":
            return 0  # the first node ends with the code; with this one, srun would end it while it writes its record
        has_failure_record = failures.exists() and failures.stat().st_mtime >= start_time
        # A failure that a rank recorded is the run's own. Without a record, a node was lost, so the job is restarted.
        return code if has_failure_record or code in (0, STOPPED) else KILLED

    def _set_rank_environment(self) -> None:
        """Let ranks of submitit's local executor find each other as under torchrun."""
        size = int(os.environ.get("SUBMITIT_LOCAL_NTASKS", "1"))
        if size > 1:
            rank = os.environ["SUBMITIT_LOCAL_LOCALID"]
            # Under torchrun's names, which training reads.
            os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=str(size))
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(self.port))
            # Otherwise a rank could join another job of this machine that uses the same port.
            os.environ["TORCHELASTIC_RUN_ID"] = f"local job {os.environ['SUBMITIT_LOCAL_JOB_ID']}"


def mark(what: str) -> None:
    """Leave a mark of this start for the batch script, which looks for the file after srun."""
    if "SUBMITIT_FOLDER" in os.environ and "SLURM_JOB_ID" in os.environ:
        name = f".{os.environ['SLURM_JOB_ID']}-{os.environ.get('SLURM_RESTART_COUNT', '0')}.{what}"
        Path(os.environ["SUBMITIT_FOLDER"], name).touch()


def stop_until_training() -> None:
    """Let a signal before training, or after its end, end the process with the exit code for restarts; nothing is there to be saved."""
    for number in _STOPS:
        signal.signal(number, lambda _number, _frame: os._exit(STOPPED))
    signal.signal(_SAVE, signal.SIG_IGN)


def _supervise(command: list[str], torchrun: bool, output: Path | None = None) -> int:
    """Run a child and forward our signals to it or to its ranks; return the exit code.

    With `output`, its output is appended to that path with the suffixes .out and .err.

    torchrun would end its ranks immediately, so it ignores the signals, and its ranks receive them from here.
    """
    received: list[int] = []
    for number in (*_STOPS, _SAVE):
        ignored = torchrun or number == _SAVE
        signal.signal(number, signal.SIG_IGN if ignored else signal.SIG_DFL)  # signal mask that the child starts with
    with ExitStack() as files:
        streams = {}
        if output is not None:
            output.parent.mkdir(parents=True, exist_ok=True)
            for name, suffix in (("stdout", ".out"), ("stderr", ".err")):
                streams[name] = files.enter_context(output.with_name(output.name + suffix).open("ab"))
        child = subprocess.Popen(
            command,
            env={**os.environ, "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGINT"},
            preexec_fn=end_with_parent,
            **streams,
        )  # fmt: skip

    def forward(number: int, _frame: object) -> None:
        if number != _SAVE:
            received.append(number)
        for pid in _child_processes(child.pid) if torchrun else [child.pid]:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue

    for number in (*_STOPS, _SAVE):
        signal.signal(number, forward)
    code = child.wait()
    if received and code not in (0, LOCAL_AGAIN):  # torchrun reports every failed rank as 1
        return STOPPED
    return code if code >= 0 else 128 - code


def _child_processes(pid: int) -> list[int]:
    listings = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(word) for listing in listings for word in listing.read_text().split()]
