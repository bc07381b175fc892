"""`sparo papers ITEM --run`: data, training, measurements, table, figure and verdict of a sweep, one command for all of it."""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from sparo_train.core.errors import ConfigError, DataError, SparoError
from sparo_train.train.run_config import RunConfig

from ..commands.sweep_table import sweep_grid, sweep_rows
from ..jobs.launching import LaunchOptions, launch_train
from ..jobs.records import Records
from ..jobs.sweep import SweepFile, expand, read_sweep, sweep_folder
from ..monitor.status import statuses
from ..monitor.table import summary_line
from ..recipes import recipe
from ..views.results_table import grid_table
from ..views.terminal import console, out
from .figures import draw
from .index import PaperItem, read_index
from .sweep_record import MEASURES, collect, write_record
from .verdict import Verdict, decide

_POLL = 2.0  # seconds between two looks at the jobs


def run_item(item: PaperItem, small: bool, seeds: int | None, launch_options: LaunchOptions) -> list[Verdict]:
    """Run a table or figure; on SLURM, submit it and return, and finish when the command is repeated.

    Raises:
        ConfigError: it has no sweep of this size, a command for its data fails, or jobs are still in the queue.
        DataError: runs ended before they were finished.
    """
    name = item.small if small else item.sweep
    if not name:
        other = "--small" if item.small and not small else ""
        advice = f"Add {other}." if other else "`sparo papers` shows its commands."
        size = "small" if small else "full"
        raise ConfigError(f"{item.paper}, {item.name}: has no {size} sweep. {advice}")
    path = recipe(f"sweeps/{name}.yaml")
    sweep = read_sweep(path)
    for command in sweep.data:
        _sparo(shlex.split(command)[1:])
    machine = "gpu" if launch_options.cluster.gpus_per_node else "cpu"
    stem, runs = expand(path, [], seeds or (5 if small else item.seeds), machine)
    home = sweep_folder(runs[0].out, stem)
    if not _train(runs, launch_options, home):
        return []
    _measure(sweep, stem, [run.folder for run in runs])
    return _report(item, name, path, home)


def _train(runs: Sequence[RunConfig], launch_options: LaunchOptions, home: Path) -> bool:
    """Train runs that are not finished; return False if they wait in SLURM's queue.

    Raises:
        DataError: a run ended before it was finished.
    """
    folders = [run.folder for run in runs]
    waiting = [f for f in folders if not Records(f).is_finished()]
    if not waiting:
        return True
    known = [folder for folder in waiting if folder.exists()]
    if not any(status.active for status in statuses(known)):
        launch_train(runs, launch_options, home)
    if launch_options.cluster.kind == "slurm":
        out.print(summary_line(statuses(folders)), soft_wrap=True)
        out.print(
            f"{home}: when `sparo launch status {home}` shows that all runs have finished, repeat the `sparo papers` command for the results.",
            soft_wrap=True,
        )
        return False
    last = ""
    while (found := statuses(waiting)) and any(status.active for status in found):
        if (text := summary_line(found)) != last:
            console.print(text, soft_wrap=True)
        last = text
        time.sleep(_POLL)
    if failed := [status for status in statuses(waiting) if not Records(Path(status.folder)).is_finished()]:
        raise DataError(
            f"{failed[0].folder}: ended before it was finished, {failed[0].state} {failed[0].reason}. `sparo launch logs "
            f"{failed[0].folder}` shows why. Repeat this `sparo papers` command to continue."
        )
    return True


def _measure(sweep: SweepFile, stem: str, folders: Sequence[Path]) -> None:
    """Run the measurements of finished runs that have none yet."""
    for folder in folders:
        for name, measure in sweep.measures.items():
            row = next(r for r in sorted(sweep.runs, key=len, reverse=True) if folder.name.startswith(f"{stem}-{r}"))
            path = folder / MEASURES / f"{name}.json"
            if path.exists() or (measure.rows and row not in measure.rows):
                continue
            path.parent.mkdir(exist_ok=True)
            temporary = path.with_suffix(".part")
            # Replaced within words, because a folder's name may contain spaces.
            words = [word.format(run=folder, file=temporary) for word in shlex.split(measure.command)[1:]]
            _sparo(words)
            temporary.replace(path)


def _sparo(words: Sequence[str]) -> None:
    """Run a `sparo` command in a process. Raises `ConfigError` if it fails."""
    console.print(f"sparo {shlex.join(words)}", soft_wrap=True)
    done = subprocess.run([sys.executable, "-m", "launch.cli", *words], check=False)
    if done.returncode:
        raise ConfigError(
            f"sparo {shlex.join(words)}: failed with exit code {done.returncode}. Fix the problem reported above, and repeat the command."
        )


def _report(item: PaperItem, name: str, path: Path, home: Path) -> list[Verdict]:
    """Print the table, write the record and the figure, and print the verdicts on the claims of this sweep."""
    rows = sweep_rows(path)
    out.print_wide(grid_table(sweep_grid(f"{item.paper}, {item.name}", rows, mean=True), False))
    record = collect(path)
    home.mkdir(parents=True, exist_ok=True)
    write_record(record, home / "record.json")
    out.print(f"{home / 'record.json'}: scores of {sum(len(row.runs) for row in record.rows)} runs", soft_wrap=True)
    try:
        draw(record, home / "figure.png")
        out.print(str(home / "figure.png"), soft_wrap=True)
    except SparoError as error:  # a table without a score that can be drawn is still printed
        console.print(f"the figure could not be drawn: {error}", soft_wrap=True)
    verdicts = [decide(claim, record) for claim in read_index().claims if claim.sweep == name]
    print_verdicts(verdicts)
    return verdicts


def print_verdicts(verdicts: Sequence[Verdict]) -> None:
    """Print each claim with its verdict and the results of its tests."""
    for verdict in verdicts:
        reason = f": {verdict.reason}" if verdict.reason else ""
        out.print_line((f"claim {verdict.claim.number}: ", ""), (f"{verdict.outcome}{reason}", "bold"))
        out.print(f"  {verdict.claim.claim}", soft_wrap=True)
        for finding in verdict.findings:
            out.print(f"  {finding.text}", soft_wrap=True)
