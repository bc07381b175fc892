"""`sparo launch …`: submit jobs to a cluster, show their state, cancel and resubmit them."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.table import Table

from sparo_train.core.errors import ConfigError, did_you_mean
from sparo_train.core.files import escape_control_chars

from ..jobs.clusters import load_cluster, options_help, split_options
from ..views.terminal import console, out
from . import data as data_cli
from .given_options import ALLOW_UNKNOWN_OPTIONS, Recipe, refuse_keys_as_options

if TYPE_CHECKING:  # commands import their dependencies, so that `sparo --help` imports none of it
    from ..jobs.fanout import FanOut
    from ..jobs.launching import LaunchOptions
    from ..jobs.status import Status

app = typer.Typer(no_args_is_help=True, help="Submit, watch, cancel and resubmit jobs on a cluster.")
_CLUSTER = "Options of the cluster, each a key of its block in configs/clusters:\n\n" + options_help()

ClusterName = Annotated[
    str,
    typer.Option(
        "--cluster", help="NAME of configs/clusters/NAME.yaml, or local (this machine), or debug (this process)."
    ),
]
Parallel = Annotated[int | None, typer.Option(min=1, help="Maximum number of array elements that run at a time.")]
After = Annotated[
    list[Path] | None, typer.Option(help="Start after the job of this run has finished. May be repeated.")
]
Runs = Annotated[list[Path], typer.Argument(help="Folders of launched jobs.")]


@app.command(context_settings=ALLOW_UNKNOWN_OPTIONS, epilog=_CLUSTER)
def train(
    recipe: Recipe,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE or --OPTION VALUE", help="Overrides of the recipe, and options of the cluster."
        ),
    ] = None,
    on: ClusterName = "slurm",
    seeds: Annotated[int | None, typer.Option(min=1, help="Number of runs, with consecutive seeds.")] = None,
    parallel: Parallel = None,
    after: After = None,
) -> None:
    """Submit a recipe. `optim.lr=[1e-3,5e-4]` and `--seeds 3` submit an array of runs. Repeat the command to resume."""
    from ..commands.recipes import find_recipe
    from ..jobs.launching import LaunchOptions, launch_train
    from ..jobs.sweep import expand

    recipe = find_recipe(recipe)
    overrides, options = split_options(words or [])
    refuse_keys_as_options(options)
    launch_options = LaunchOptions(on, load_cluster(on, options), parallel, tuple(after or ()))
    name, runs = expand(recipe, overrides, seeds)
    run_jobs = launch_train(runs, launch_options, Path(runs[0].out) / name)
    for folder, job in run_jobs:
        out.print(f"{folder}  job {job}", soft_wrap=True)
    _exit_with_debug_code(launch_options, [folder for folder, _ in run_jobs])


@app.command("eval", context_settings=ALLOW_UNKNOWN_OPTIONS, epilog=_CLUSTER)
def evaluate(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="CHECKPOINT or --OPTION VALUE", help="Checkpoints, options of `sparo eval`, and of the cluster."
        ),
    ],
    on: ClusterName = "slurm",
    tasks: Annotated[
        str | None, typer.Option(help="Comma-separated tasks. Default: all tasks of each run's recipe.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="YAML file with a key `tasks`, or a recipe. Default: eval.tasks of the run.")
    ] = None,
    root: Annotated[
        Path, typer.Option(help="Folder that contains the data sets listed by `sparo eval --list`.")
    ] = Path("data"),
    model: Annotated[str | None, typer.Option(help="For weight files: model name.")] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the folder in runs/evals. Default: derived from the plan.")
    ] = None,
    parallel: Parallel = None,
    after: After = None,
) -> None:
    """Score checkpoints and tasks as an array of jobs. Repeat the command to submit missing jobs and print the table."""
    from ..commands.recipes import find_recipe
    from ..jobs.arrays import eval_elements
    from ..jobs.fanout import FanOut, plan_name
    from ..jobs.launching import LaunchOptions

    checkpoints, options = split_options(words)
    launch_options = LaunchOptions(on, load_cluster(on, options), parallel, tuple(after or ()))
    elements = eval_elements(
        checkpoints, tasks.split(",") if tasks else None, find_recipe(data) if data else None, model, root
    )
    fan = FanOut.make(Path("runs/evals") / (name or plan_name(elements)), "eval", elements)
    _launch(fan, launch_options)


@app.command("data", context_settings=ALLOW_UNKNOWN_OPTIONS, epilog=_CLUSTER)
def data(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="COMMAND ARGUMENT or --OPTION VALUE",
            help="convert or index with its arguments, and options of the cluster.",
        ),
    ],
    parts: Annotated[int, typer.Option(min=1, help="Number of jobs that share the work.")],
    on: ClusterName = "slurm",
    name: Annotated[
        str | None, typer.Option(help="Name of the folder in runs/data. Default: derived from the plan.")
    ] = None,
    parallel: Parallel = None,
    after: After = None,
) -> None:
    """Run a `sparo data` command with --part as an array of jobs."""
    from ..jobs.fanout import FanOut, plan_name
    from ..jobs.launching import LaunchOptions

    plain, options = split_options(words, others=True)
    launch_options = LaunchOptions(on, load_cluster(on, options), parallel, tuple(after or ()))
    elements = [{"arguments": ["data", *plain, "--part", f"{number}/{parts}"]} for number in range(parts)]
    _check_arguments(elements[0]["arguments"][1:])
    fan = FanOut.make(Path("runs/data") / (name or plan_name(elements)), "data", elements)
    _launch(fan, launch_options)


@app.command(hidden=True)
def element(context: typer.Context, folder: Path, number: int) -> None:
    """Run one element of a fan-out."""
    from ..jobs.fanout import FanOut

    sparo = context.find_root().command
    FanOut(folder).run(number, lambda arguments: sparo.main(list(arguments), standalone_mode=False))


@app.command()
def status(
    runs: Annotated[list[Path] | None, typer.Argument(help="Folders. Default: all below runs/.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show state, nodes and progress of jobs, and why a job waits or failed."""
    from ..jobs.status import launched_folders, statuses

    run_statuses = statuses(runs or launched_folders(Path("runs")))
    if as_json:
        out.print_json(json.dumps([status.as_dict() for status in run_statuses]))
    elif run_statuses:
        out.print(_status_table(run_statuses))
    else:
        out.print("no job was launched from this folder")


@app.command()
def logs(
    run: Annotated[Path, typer.Argument(help="Folder of a launched job.")],
    rank: Annotated[int | None, typer.Option(help="Rank. Default: the rank that failed, or 0.")] = None,
    lines: Annotated[int, typer.Option(min=1, help="Number of last lines to print.")] = 30,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing new lines.")] = False,
) -> None:
    """Print the last lines of a rank's log."""
    from ..jobs.status import failing_rank, log_files

    log_rank = failing_rank(run) if rank is None else rank
    files = log_files(run, log_rank)
    if not files:
        raise ConfigError(f"{run}: rank {log_rank} has no log yet. See `sparo launch status {run}`.")
    for path in files:
        empty = "" if path.stat().st_size else " (empty)"
        console.print(f"rank {log_rank}: {path}{empty}", soft_wrap=True)
        with path.open(encoding="utf-8", errors="replace") as stream:
            text = stream.read()
            print(escape_control_chars("\n".join(text.splitlines()[-lines:])), flush=True)
            # Offset in the file that was read, so that later lines are shown next.
            while follow and path == files[-1]:
                print(escape_control_chars(stream.read()), end="", flush=True)
                time.sleep(0.5)


@app.command()
def cancel(runs: Runs) -> None:
    """Cancel jobs. Training saves a checkpoint first; `resubmit` resumes it."""
    from ..jobs.status import cancel as cancel_folder

    for run in runs:
        cancelled_jobs = cancel_folder(run)
        out.print(
            f"{run}: cancelled {', '.join(cancelled_jobs)}"
            if cancelled_jobs
            else f"{run}: nothing to cancel, its job has ended"
        )


@app.command(context_settings=ALLOW_UNKNOWN_OPTIONS, epilog=_CLUSTER)
def resubmit(
    words: Annotated[
        list[str], typer.Argument(metavar="RUN or --OPTION VALUE", help="Run folders, and options of the cluster.")
    ],
) -> None:
    """Resubmit the jobs of these folders with the same recipe, code and cluster, and changed options."""
    from ..jobs.arrays import resubmit as resubmit_folder

    runs, options = split_options(words)
    for run in runs:
        jobs = resubmit_folder(Path(run), options)
        out.print(f"{run}  job {', '.join(jobs) or '-: nothing is missing'}", soft_wrap=True)


def _launch(fan: FanOut, launch_options: LaunchOptions) -> None:
    from ..jobs.arrays import launch_elements
    from ..views.results_table import results_table

    jobs = launch_elements(fan, launch_options)
    if jobs:
        out.print(f"{fan.folder}  {len(jobs)} element(s), job {jobs[0]} …", soft_wrap=True)
        _exit_with_debug_code(launch_options, [fan.folder])
    results = fan.results()
    if results and not fan.missing():
        if not (fan.folder / "results.json").exists():
            fan.merge()
        # Short, because columns are narrow.
        short = [Path(checkpoint).name for checkpoint in results]
        # Two checkpoints with one name by their full paths, or one would replace the other.
        results_by_label = dict(zip(short if len(set(short)) == len(short) else results, results.values(), strict=True))
        out.print(results_table(results_by_label, "per cent, 95 % intervals"))
        for line in fan.outdated():
            out.print(line, soft_wrap=True)
    elif not jobs:
        out.print(f"{fan.folder}: all {len(fan.elements)} elements are done", soft_wrap=True)


def _check_arguments(arguments: list[str]) -> None:
    """Raise `ConfigError` before submission if `sparo data` would refuse these arguments."""
    group: Any = typer.main.get_command(data_cli.app)
    if arguments[0] not in group.commands:
        raise ConfigError(f"sparo data {arguments[0]}: {did_you_mean(arguments[0], group.commands)}")
    try:
        group.commands[arguments[0]].make_context(arguments[0], list(arguments[1:]))
    except Exception as error:
        if not hasattr(error, "format_message"):  # click's, from wherever typer imports it
            raise
        raise ConfigError(f"sparo data {' '.join(arguments)}: {error.format_message()}") from None  # type: ignore[attr-defined]


def _exit_with_debug_code(launch_options: LaunchOptions, folders: Sequence[Path]) -> None:
    """Exit with the code of a job that ran in this process."""
    from ..jobs.records import Records

    if launch_options.cluster.kind == "debug":
        run_records = [Records(folder) for folder in folders]
        jobs = [(records, (records.last() or {"jobs": []})["jobs"]) for records in run_records]
        code = max(s.get("end", 0) for records, own in jobs for job in own for s in records.starts(job))
        if code:
            raise typer.Exit(code)


def _status_table(run_statuses: list[Status]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("run", "job", "state", "progress"):
        table.add_column(column, overflow="fold")
    for status in run_statuses:
        facts = [f"{status.step}/{status.total or '?'}"]
        facts += [f"{status.rate:.0f} samples/s"] if status.rate is not None else []
        facts += [f"{timedelta(seconds=round(status.eta))} left"] if status.eta is not None else []
        facts += [f"saved at {status.checkpoint}"] if status.checkpoint is not None else []
        facts += [f"{status.restarts} restart(s)"] if status.restarts else []
        where = f" on {status.nodes}" if status.nodes else ""
        progress = ", ".join(facts) + (f"\n{status.reason}" if status.reason else "")
        table.add_row(status.folder, f"{status.job} ({status.on})", f"{status.state}{where}", progress)
    return table
