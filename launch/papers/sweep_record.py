"""Scores of a sweep's runs in one small JSON file, from which tables, figures and verdicts are made again without the runs."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from evals.report.results_file import whole_records
from evals.report.seed_average import split_seed
from evals.tasks.result import axis_scale
from sparo_train.core.disk import metrics
from sparo_train.core.errors import DataError
from sparo_train.core.files import read_json, write_whole

from ..commands.sweep_table import sweep_rows
from ..jobs.sweep import SweepFigure, read_sweep

MEASURES = "measures"  # folder in a run folder with the files of measurements
_DIGITS = 6
# Scores that are neither fractions nor metrics with a unit.
_PLAIN = frozenset({"grad_norm_peak", "effective_number"})


def score_axis(score: str) -> tuple[float, str]:
    """Return the display factor of TASK/METRIC, and its unit."""
    metric = score.rpartition("/")[2]
    return (1.0, "") if metric in _PLAIN else axis_scale(metric)


class _Stored(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class RunScores(_Stored):
    """One run: its seed, steps, seconds of training, and scores by TASK/METRIC."""

    seed: int
    steps: int
    seconds: float
    scores: dict[str, float]


class RecordRow(_Stored):
    """One row of a sweep file with its runs."""

    name: str
    series: str
    x: float | str | None
    parameters: int
    runs: tuple[RunScores, ...]

    def values(self, score: str) -> dict[int, float]:
        """Return a score by seed, for runs that have it."""
        return {run.seed: run.scores[score] for run in self.runs if score in run.scores}


class SweepRecord(_Stored):
    """Scores of a sweep: its name, the machines that scored its runs, the figure that its file describes, and its rows."""

    schema_version: int = 1
    sweep: str
    machines: tuple[str, ...]
    figure: SweepFigure | None
    rows: tuple[RecordRow, ...]

    def row(self, name: str) -> RecordRow | None:
        """Return a row by its name; None if the sweep has no such row."""
        return next((row for row in self.rows if row.name == name), None)


def collect(sweep: Path, folder: Path | None = None) -> SweepRecord:
    """Return the scores of all finished runs of a sweep file.

    Raises:
        ConfigError: not a sweep file, or runs that do not belong to it.
        DataError: a file of a measurement lacks a score.
    """
    file, rows, machines = read_sweep(sweep), [], dict[str, None]()
    for row in sweep_rows(sweep, folder):
        for record in itertools.chain(*row.results.values()):
            machines[str(record.facts.get("environment", {}).get("machine", "unknown"))] = None
        run = file.runs[row.name]
        scored = [_run_scores(place, file.measures, row.name) for place in row.folders]
        rows.append(
            RecordRow(
                name=row.name, series=run.series or row.name, x=run.x, parameters=row.parameters, runs=tuple(scored)
            )
        )
    return SweepRecord(sweep=sweep.stem, machines=tuple(machines), figure=file.figure, rows=tuple(rows))


def _run_scores(folder: Path, measures: Mapping[str, Any], row: str) -> RunScores:
    scores = {
        f"{record.task}/{name}": round(value, _DIGITS)
        for record in whole_records(folder)
        for name, value in record.result.metrics.items()
    }
    for name, measure in measures.items():
        path = folder / MEASURES / f"{name}.json"
        if path.exists() and (not measure.rows or row in measure.rows):
            tree = read_json(path, dict)
            for score, where in measure.scores.items():
                scores[f"{name}/{score}"] = round(_look_up(tree, where, path), _DIGITS)
    trained = [line for line in metrics.read(folder / "metrics.jsonl") if line.get("kind") == "train"]
    scores |= _training_scores(trained)
    # A logged line has the mean time of the steps since the line before.
    steps = [0, *(line["step"] for line in trained)]
    # Of a diverged run, so that the record stays valid JSON; the seed then counts as missing.
    scores = {name: value for name, value in scores.items() if math.isfinite(value)}
    seconds = sum(
        line.get("step_seconds", 0) * (line["step"] - before) for line, before in zip(trained, steps, strict=False)
    )
    return RunScores(
        seed=split_seed(str(folder))[1],
        steps=int(trained[-1]["step"]) if trained else 0,
        seconds=round(seconds, 1),
        scores=scores,
    )


def _training_scores(lines: list[dict[str, Any]]) -> dict[str, float]:
    """Return the last loss, and the largest gradient norm of the second half over the median norm, for the stability of a training."""
    losses = [line["loss"] for line in lines if "loss" in line]
    norms = [line["grad_norm"] for line in lines if "grad_norm" in line]
    found = {"train/loss": round(losses[-1], _DIGITS)} if losses else {}
    if norms and (middle := statistics.median(norms)) > 0:
        found["train/grad_norm_peak"] = round(max(norms[len(norms) // 2 :]) / middle, _DIGITS)
    return found


def _look_up(tree: Any, where: str, path: Path) -> float:
    """Return the number at a path of keys, element numbers, and values of an element's `task`."""
    found = tree
    for part in where.split("."):
        if isinstance(found, list):
            by_task = {str(item.get("task")): item for item in found if isinstance(item, dict)}
            found = by_task.get(part, found[int(part)] if part.isdecimal() and int(part) < len(found) else None)
        else:
            found = found.get(part) if isinstance(found, dict) else None
    if isinstance(found, bool) or not isinstance(found, int | float):
        raise DataError(f"{path}: has no number at {where}. Delete the file, and measure again.")
    return float(found)


def write_record(record: SweepRecord, path: Path) -> None:
    """Write a record as JSON."""
    write_whole(
        path, json.dumps(record.model_dump(mode="json"), separators=(",", ":")).replace('{"seed"', '\n{"seed"') + "\n"
    )


def read_record(path: Path) -> SweepRecord:
    """Read a record.

    Raises:
        DataError: another file, or one of another version.
    """
    try:
        record = SweepRecord.model_validate(read_json(path, dict, DataError))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise DataError(
            f"{path}: is not a record of a sweep: {where}: {first['msg']}. Name a file that --record wrote."
        ) from None
    if record.schema_version != 1:
        raise DataError(
            f"{path}: the record has format version {record.schema_version}, which this sparo cannot read. Update "
            "sparo."
        )
    return record
