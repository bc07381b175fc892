"""`sparo launch status`, `logs`, `cancel`, `save` and `resubmit`: commands for jobs that were launched."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sparo_train.core.errors import ConfigError
from sparo_train.core.files import escape_control_chars

from ..jobs.cluster_files import split_options
from ..views.terminal import console, out

if TYPE_CHECKING:  # commands import their dependencies, so that `sparo --help` imports none of it
    from ..monitor.status import Status

Runs = Annotated[list[Path], typer.Argument(help="Folders of runs, sweeps, evaluations or data jobs.")]
Failed = Annotated[bool, typer.Option("--failed", help="Only runs that failed.")]


def status(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(help="Folders of runs, sweeps, evaluations or data jobs. Default: all below runs/."),
    ] = None,
    failed: Failed = False,
    running: Annotated[bool, typer.Option("--running", help="Only runs that are running.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh the table until no job is left.")] = False,
    interval: Annotated[float, typer.Option(min=1.0, help="With --watch: seconds between two queries.")] = 15.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show state, nodes and progress of jobs, and why a job waits or failed. One line per run."""
    from ..monitor.folders import launched_folders
    from ..monitor.status import statuses
    from ..monitor.table import status_table

    if watch and as_json:
        raise ConfigError("--watch: cannot be combined with --json. Run `sparo launch status --json` repeatedly.")
    if failed and running:
        raise ConfigError("--failed: cannot be combined with --running. Remove one of them.")

    def read() -> tuple[list[Status], list[Status]]:
        found = statuses(runs or launched_folders(Path("runs")))
        return found, [s for s in found if (s.failed or not failed) and (s.running or not running)]

    everything, shown = read()
    if as_json:
        out.print_json(json.dumps([status.as_dict() for status in shown]))
    elif not everything:
        out.print("no launched run in ./runs; name run folders, or change to the folder of the launch")
    elif not watch:
        if not out.is_terminal and "COLUMNS" not in os.environ:
            out.width = 240  # a pipe has no width, so rows are not folded for it
        out.print(status_table(shown, len(everything)))
    else:
        from rich.live import Live

        with Live(status_table(shown, len(everything)), console=out, auto_refresh=False) as live:
            while any(status.active for status in everything):
                time.sleep(interval)
                everything, shown = read()
                live.update(status_table(shown, len(everything)), refresh=True)


def logs(
    runs: Runs,
    rank: Annotated[
        int | None, typer.Option(help="Rank whose log is printed. Default: the rank that failed, otherwise 0.")
    ] = None,
    lines: Annotated[int, typer.Option(min=1, help="Number of lines to print from the end of the log.")] = 30,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing new lines.")] = False,
    failed: Failed = False,
) -> None:
    """Print the last lines of a rank's log; of a sweep, those of every run."""
    from ..monitor.folders import run_folders
    from ..monitor.logs import LogSource, failing_rank, log_files
    from ..monitor.status import current_submissions, statuses

    folders = run_folders(runs)
    if follow and len(folders) > 1:
        raise ConfigError(f"--follow: follows one run, got {len(folders)}. Name one of {', '.join(map(str, folders))}.")
    if failed:
        folders = [Path(status.folder) for status in statuses(folders) if status.failed]
    for folder, record in zip(folders, current_submissions(folders), strict=True):
        source = failing_rank(folder, record) if rank is None else LogSource(None, rank)
        files = log_files(folder, record, source)
        if not files:
            message = f"{folder}: rank {source.rank} has no log yet. See `sparo launch status {folder}`."
            if len(folders) == 1:
                raise ConfigError(message)
            console.print(message, soft_wrap=True)
        for path in files:
            empty = "" if path.stat().st_size else " (empty)"
            console.print(f"{folder}: rank {source.rank}: {path}{empty}", soft_wrap=True)
            _print_tail(path, lines, follow and path == files[-1])


def _print_tail(path: Path, lines: int, follow: bool) -> None:
    with path.open(encoding="utf-8", errors="replace") as stream:
        text = stream.read()
        print(escape_control_chars("\n".join(text.splitlines()[-lines:])), flush=True)
        # Offset in the file that was read, so that later lines are shown next.
        while follow:
            print(escape_control_chars(stream.read()), end="", flush=True)
            time.sleep(0.5)


def cancel(runs: Runs) -> None:
    """Cancel jobs. Training saves a checkpoint first; `resubmit` resumes it."""
    from ..monitor.control import cancel as cancel_folders
    from ..monitor.status import statuses

    cancelled = cancel_folders(runs)
    idle = [folder for folder, jobs in cancelled.items() if not jobs]
    ended = {status.folder: status for status in statuses(idle)} if idle else {}
    for folder, jobs in cancelled.items():
        if jobs:
            out.print(f"{folder}: cancelled {', '.join(jobs)}", soft_wrap=True)
        else:
            before = ended[str(folder)]
            out.print(
                f"{folder}: nothing to cancel; job {before.job} has ended ({before.state})", soft_wrap=True
            )  # fmt: skip


def save(runs: Runs) -> None:
    """Let running trainings write a checkpoint now and continue."""
    from ..monitor.control import save_now

    for folder, jobs in save_now(runs).items():
        state = (
            f"asked job {', '.join(jobs)} for a checkpoint"
            if jobs
            else "no training is running, so there is nothing to save"
        )
        out.print(f"{folder}: {state}", soft_wrap=True)


def resubmit(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN or --OPTION VALUE", help="Run folders, and options of the cluster such as --nodes 2."
        ),
    ],
    force: Annotated[bool, typer.Option("--force", help="Submit finished runs, too.")] = False,
) -> None:
    """Resubmit the jobs of these folders with the same recipe, code and cluster, and changed options."""
    from ..monitor.resubmit import resubmit as resubmit_folders

    runs, options = split_options(words)
    for run in resubmit_folders([Path(run) for run in runs], options, force):
        state = f"job {', '.join(run.jobs)}" if run.jobs else f"not submitted: {run.reason or 'all work is done'}"
        out.print(f"{run.folder}  {state}", soft_wrap=True)
