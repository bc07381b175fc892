"""`sparo train`: recipe to finished run."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from evals.encoders import from_objective, load_encoder, read_run, run_weights
from evals.results import Result
from evals.suite import Suite
from sparo_train.core.config import dump
from sparo_train.core.contracts import Objective
from sparo_train.core.distributed import Ranks, find_world, started
from sparo_train.core.errors import CheckpointError, SparoError, StoppedError, SupersededError
from sparo_train.core.rundir import RunDir, environment
from sparo_train.models.describe import CONFIG_KEY
from sparo_train.models.weights import to_sparo_clip
from sparo_train.train.build import build_engine, build_objective, build_pipeline, build_ranks
from sparo_train.train.flops import FlopCounter
from sparo_train.train.run import RunConfig
from sparo_train.train.state import Outcome
from sparo_train.train.trainer import Trainer

from .view import ProgressView


def train(config: RunConfig) -> Outcome:
    """Train a recipe into its run folder, from where it stands, together with the other ranks where there are any."""
    ranks = build_ranks(config, find_world())
    try:
        return _train(config, ranks)
    finally:
        ranks.close()


def _train(config: RunConfig, ranks: Ranks) -> Outcome:
    pipeline = build_pipeline(config, ranks.world)
    total = config.total_steps(pipeline.plan.epoch_size)
    engine, objective = build_engine(config, ranks), build_objective(config)
    rundir = RunDir(config.folder)
    try:
        with ProgressView(config.name, rundir.path / "log.txt", silent=ranks.rank > 0) as view:
            patience = 2 * config.log.heartbeat_seconds
            rundir.join(ranks.first(lambda: rundir.open_for_training(dump(config), patience)))
            if not any(rundir.checkpoints.glob("step-*")):
                among = f" on {ranks.size} ranks" if ranks.size > 1 else ""
                view.say(f"{total} steps of {config.batch_size} samples{among} -> {rundir.path}")
            try:
                evaluate = make_evaluate(config, rundir, view.say)
                flops = FlopCounter(lambda: build_objective(config))
                trainer = Trainer(config, rundir, ranks, engine, objective, pipeline, total, view, evaluate, flops)
                outcome = trainer.fit()
            except SupersededError:  # not even into its log
                raise
            except SparoError as error:
                view.note(f"error: {error}")
                raise
            view.say(f"{outcome.reason} at step {outcome.step}; checkpoint {outcome.checkpoint}")
            return outcome
    finally:
        rundir.close()


def exit_if_stopped(outcome: Outcome) -> None:
    """After a signal: raise StoppedError; everything is saved and the same line continues."""
    if outcome.reason.startswith("SIG"):
        stopped = StoppedError(outcome.reason)
        world = started()
        stopped.repeated = world is not None and world.rank > 0
        raise stopped


def make_evaluate(
    config: RunConfig, rundir: RunDir, say: Callable[[str], None]
) -> Callable[[Objective, int], dict[str, Any]] | None:
    """The trainer's evaluation: all of `eval.tasks`, written to RUN/evals and returned for the metrics."""
    if not config.eval.tasks:
        return None
    suite = Suite(config.eval.tasks)
    suite.check()  # now, rather than in the middle of training

    def evaluate(objective: Objective, step: int) -> dict[str, Any]:
        results = suite.run(from_objective(objective))
        rundir.claim.check()
        write_results(rundir.path / "evals" / f"step-{step:08d}.json", {"step": step}, results)
        say(f"step {step}: " + "  ".join(f"{name} {r.headline} {100 * r.value:.1f}" for name, r in results.items()))
        return {name: r.metrics for name, r in results.items()}

    return evaluate


def evaluate_checkpoint(
    checkpoint: str,
    tasks: list[str] | None,
    known: dict[str, Any],
    model: str | None,
    report: Callable[[str], None],
    say: Callable[[str], None],
    latest: bool = True,
) -> dict[str, Result]:
    """Score one checkpoint on the `known` tasks (none: those of its own recipe), or on those of them named in `tasks`.

    `latest`: also write a run folder's evals/latest.json.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    encoder = load_encoder(checkpoint, model, device)
    if encoder.assumed:
        say(encoder.assumed)
    results = Suite(known or recipe_tasks(Path(checkpoint)) or {}).run(encoder, tasks, report)
    if latest and (Path(checkpoint) / "config.yaml").is_file():
        write_results(Path(checkpoint) / "evals" / "latest.json", {"checkpoint": encoder.label}, results)
    return results


def recipe_tasks(checkpoint: Path) -> dict[str, Any] | None:
    """`eval.tasks` of the run that a run or checkpoint folder belongs to; None where there are none."""
    try:
        return dict(read_run(checkpoint)[0].eval.tasks) or None
    except CheckpointError:
        return None


def write_results(path: Path, facts: dict[str, Any], results: dict[str, Result]) -> None:
    """Results with their intervals and the environment, as one JSON file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        **facts,
        "environment": environment(),
        "results": {name: r.as_dict() for name, r in results.items()},
    }
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")  # two processes may write the same results
    temporary.write_text(json.dumps(content, indent=1), encoding="utf-8")
    temporary.replace(path)


def export_run(run: Path, folder: Path | None, layout: str) -> Path:
    """Write a run's newest weights as an open_clip folder, or as a sparo-clip checkpoint file; returns the path."""
    config, step = read_run(run)
    weights = run_weights(step)
    home = run.parent.parent if (run / "meta.json").is_file() else run
    if layout == "sparo-clip":
        path = folder or home / "export" / "sparo_clip.pt"
        path.parent.mkdir(parents=True, exist_ok=True)
        model = config.objective.model.model_dump(
            mode="json"
        )  # what shapes do not tell; sparo-clip's loader ignores it
        torch.save({"epoch": 0, "name": config.name, "state_dict": to_sparo_clip(weights), CONFIG_KEY: model}, path)
        return path
    from sparo_train import openclip  # wraps open_clip's builders

    return openclip.export(
        config.objective.model,
        weights,
        folder or home / "export",
        config.objective.mean,
        config.objective.std,
    )
