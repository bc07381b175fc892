"""`sparo launch …`: submit jobs to a cluster, show their state, cancel and resubmit them."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparo_train.core.errors import ConfigError, did_you_mean

from ..jobs.cluster_files import load_cluster, options_help, split_options
from ..views.terminal import console, out
from . import data as data_cli
from . import job_control
from .given_options import ALLOW_UNKNOWN_OPTIONS, Recipe, refuse_keys_as_options

if TYPE_CHECKING:  # commands import their dependencies, so that `sparo --help` imports none of it
    from ..jobs.fanout import FanOut
    from ..jobs.launching import LaunchOptions
    from ..jobs.plan import LaunchPlan
    from ..jobs.records import Records
    from ..monitor.status import Status

app = typer.Typer(no_args_is_help=True, help="Submit, watch, cancel and resubmit jobs on a cluster.")
_CLUSTER = "Options of the cluster, each a key of its block in configs/clusters:\n\n" + options_help()

ClusterName = Annotated[
    str,
    typer.Option(
        "--cluster",
        help="Where to run: slurm, allocation (the SLURM allocation of this shell), local (this machine), debug (this "
        "process), or the NAME of your own file configs/clusters/NAME.yaml.",
    ),
]
Parallel = Annotated[int | None, typer.Option(min=1, help="Maximum number of jobs of the array that run at a time.")]
After = Annotated[
    list[Path] | None, typer.Option(help="Start only after the job of this earlier run has finished. May be repeated.")
]
DryRun = Annotated[
    bool,
    typer.Option("--dry-run", "--print", help="Print ranks, GPUs, hours, cost and the batch script; submit nothing."),
]


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
    dry_run: DryRun = False,
) -> None:
    """Submit a recipe. `optim.lr=[1e-3,5e-4]` and `--seeds 3` submit an array of runs. Repeat the command to resume."""
    from ..jobs.launching import LaunchOptions, launch_train, plan_train
    from ..jobs.sweep import expand, sweep_folder
    from ..recipes import find_recipe

    recipe = find_recipe(recipe)
    overrides, options = split_options(words or [])
    refuse_keys_as_options(options)
    launch_options = LaunchOptions(on, load_cluster(on, options), parallel, tuple(after or ()))
    name, runs = expand(recipe, overrides, seeds, "gpu" if launch_options.cluster.gpus_per_node else "cpu")
    folder = sweep_folder(runs[0].out, name)
    for choice in runs[0].choices:
        console.print(choice.text, soft_wrap=True)
    if dry_run:
        _print_plan(launch_options, plan_train(runs, launch_options, folder))
        return
    run_jobs = launch_train(runs, launch_options, folder)
    for run, job in run_jobs:
        out.print(f"{run}  job {job}", soft_wrap=True)
    if len(runs) > 1:
        console.print(
            f"{folder}: names all of these runs for sparo launch status, logs, cancel, save and resubmit",
            soft_wrap=True,
        )
    _exit_with_debug_code(launch_options, [folder for folder, _ in run_jobs])


@app.command("eval", context_settings=ALLOW_UNKNOWN_OPTIONS, epilog=_CLUSTER)
def evaluate(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="CHECKPOINT or --OPTION VALUE",
            help="Checkpoints, options of `sparo eval`, and options of the cluster such as --nodes 2.",
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
    model: Annotated[
        str | None, typer.Option(help="Name of the model, if CHECKPOINT is a weight file, as in `sparo eval --model`.")
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(
            help="Name of the job's folder in runs/evals. Default: derived from checkpoints, tasks and options."
        ),
    ] = None,
    parallel: Parallel = None,
    after: After = None,
    dry_run: DryRun = False,
) -> None:
    """Score checkpoints and tasks as an array of jobs. Repeat the command to submit missing jobs and print the table."""
    from ..jobs.arrays import eval_elements
    from ..jobs.fanout import FanOut, plan_name
    from ..jobs.launching import LaunchOptions
    from ..recipes import find_recipe

    checkpoints, options = split_options(words)
    launch_options = LaunchOptions(on, load_cluster(on, options), parallel, tuple(after or ()))
    elements = eval_elements(
        checkpoints, tasks.split(",") if tasks else None, find_recipe(data) if data else None, model, root
    )
    fan = FanOut.make(Path("runs/evals") / (name or plan_name(elements)), "eval", elements, not dry_run)
    _launch(fan, launch_options, dry_run)


@app.command("data", context_settings=ALLOW_UNKNOWN_OPTIONS, epilog=_CLUSTER)
def data(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="COMMAND ARGUMENT or --OPTION VALUE",
            help="`convert` or `index`, with its arguments as for `sparo data`. Cluster options such as --nodes 2 "
            "can be added.",
        ),
    ],
    parts: Annotated[int, typer.Option(min=1, help="Number of jobs that share the work.")],
    on: ClusterName = "slurm",
    name: Annotated[
        str | None,
        typer.Option(
            help="Name of the job's folder in runs/data. Default: derived from the command and its arguments."
        ),
    ] = None,
    parallel: Parallel = None,
    after: After = None,
    dry_run: DryRun = False,
) -> None:
    """Run a `sparo data` command with --part as an array of jobs."""
    from ..jobs.fanout import FanOut, plan_name
    from ..jobs.launching import LaunchOptions

    plain, options = split_options(words, others=True)
    launch_options = LaunchOptions(on, load_cluster(on, options), parallel, tuple(after or ()))
    elements = [{"arguments": ["data", *plain, "--part", f"{number}/{parts}"]} for number in range(parts)]
    _check_arguments(elements[0]["arguments"][1:])
    fan = FanOut.make(Path("runs/data") / (name or plan_name(elements)), "data", elements, not dry_run)
    _launch(fan, launch_options, dry_run)


@app.command(context_settings=ALLOW_UNKNOWN_OPTIONS, epilog=_CLUSTER)
def check(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="--OPTION VALUE", help="Options that replace settings of the cluster, such as --nodes 2."
        ),
    ] = None,
    on: ClusterName = "slurm",
    wait: Annotated[
        float,
        typer.Option(min=1, help="Maximum number of seconds to wait for the job, including its time in the queue."),
    ] = 600,
) -> None:
    """Test a cluster with a one-minute job: interpreter, packages, folder, devices, ports, exchange between ranks.

    Prints one line per node, and ends with code 1 if a node has a problem.
    """
    from ..monitor.check import read_reports, report_lines, submit_check, wait_for_check

    plain, options = split_options(words or [])
    if plain:
        raise ConfigError(f"sparo launch check: takes options only, got {plain[0]}. Did you mean --cluster {plain[0]}?")
    cluster = load_cluster(on, options)
    folder = (
        Path("runs/checks") / f"{Path(on).stem}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    )  # two checks at once
    submit_check(on, cluster, folder)
    last = ""

    def show(status: Status) -> None:
        nonlocal last
        reason = f" ({status.reason})" if status.reason and status.active else ""  # the report says why it failed
        text = f"{folder}: job {status.job} is {status.state}{reason}"
        if text != last:
            console.print(text, soft_wrap=True)
        last = text

    status = wait_for_check(folder, wait, show)
    reports = read_reports(folder, cluster)
    for line in report_lines(reports):
        out.print(line, soft_wrap=True)
    if not reports or any(report.problems for report in reports):
        if not reports:
            raise ConfigError(f"{folder}: no rank started. {status.reason}")
        raise typer.Exit(1)


@app.command("check-rank", hidden=True)
def check_rank(folder: Path) -> None:
    """Run the tests of one rank of `sparo launch check`."""
    from ..commands.rank_check import RankCheck

    RankCheck(folder).run()


@app.command(hidden=True)
def element(context: typer.Context, folder: Path, number: int) -> None:
    """Run one element of a fan-out."""
    from ..jobs.fanout import FanOut

    sparo = context.find_root().command
    FanOut(folder).run(number, lambda arguments: sparo.main(list(arguments), standalone_mode=False))


app.command()(job_control.status)
app.command()(job_control.logs)
app.command()(job_control.cancel)
app.command()(job_control.save)
app.command(context_settings=ALLOW_UNKNOWN_OPTIONS, epilog=_CLUSTER)(job_control.resubmit)


def _print_plan(launch_options: LaunchOptions, plan: LaunchPlan) -> None:
    """Print a launch in words, and the script that SLURM would get."""
    from ..jobs.plan import plan_lines
    from ..jobs.submit import batch_script

    for line in plan_lines(plan, launch_options.parallel):
        console.print(line, soft_wrap=True, highlight=False)
    if plan.cluster.kind == "slurm":
        home, code = plan.home.resolve(), plan.home.resolve() / "code/HASH"
        script = batch_script(plan.cluster, home / "jobs", plan.name, code, launch_options.parallel, len(plan.runs))
        out.print(script, soft_wrap=True, highlight=False)


def _launch(fan: FanOut, launch_options: LaunchOptions, dry_run: bool) -> None:
    from ..jobs.arrays import launch_elements, plan_elements
    from ..views.results_table import results_table

    if dry_run:
        _print_plan(launch_options, plan_elements(fan, launch_options))
        return
    jobs = launch_elements(fan, launch_options)
    if jobs:
        out.print(f"{fan.folder}  {len(jobs)} element(s), job {jobs[0]} …", soft_wrap=True)
        _exit_with_debug_code(launch_options, [fan.folder])
    results = fan.results()
    if results and not fan.missing_elements():
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
        out.print(
            f"{fan.folder}: all {len(fan.elements)} elements are done; another --name runs them again", soft_wrap=True
        )


def _check_arguments(arguments: list[str]) -> None:
    """Raise `ConfigError` before submission if `sparo data` would refuse these arguments."""
    group: Any = typer.main.get_command(data_cli.app)
    if arguments[0] not in group.commands:
        raise ConfigError(f"sparo data {arguments[0]}: {did_you_mean(arguments[0], group.commands)}")
    try:
        parameters = group.commands[arguments[0]].make_context(arguments[0], list(arguments[1:])).params
    except Exception as error:
        if not hasattr(error, "format_message"):  # click's, from wherever typer imports it
            raise
        raise ConfigError(f"sparo data {' '.join(arguments)}: {error.format_message()}") from None  # type: ignore[attr-defined]
    if (to := parameters.get("to", "shards")) != "shards":
        raise ConfigError(
            f"--to {to}: one process writes the whole data set. Run `sparo data convert` without `sparo launch`."
        )


def _exit_with_debug_code(launch_options: LaunchOptions, folders: Sequence[Path]) -> None:
    """Exit with the code of a job that ran in this process, or in the foreground."""
    from ..jobs.records import Records

    if launch_options.cluster.kind in ("debug", "allocation"):
        code = max((_last_code(Records(folder)) for folder in folders), default=0)
        if code:
            raise typer.Exit(code)


def _last_code(records: Records) -> int:
    """Return the exit code of the newest submission of a folder; 1 if it left no record of its end."""
    last = records.last_submission()
    if last is None:
        return 0
    if (records.folder / "plan.json").exists():
        from ..jobs.fanout import FanOut

        return int(bool(FanOut(records.folder).missing_elements()))
    lines = [line for job in last["jobs"] for line in records.starts(job)]
    # In an allocation, the submission is recorded before its starts; in this process, after them.
    recent = last["cluster"]["kind"] == "debug" or (bool(lines) and lines[-1]["time"] >= last["time"])
    return lines[-1].get("end", 1) if lines and recent else 1
