"""Submission of runs again, with the recipe, code and cluster of their newest submission."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from sparo_train.core.config import resolve
from sparo_train.core.errors import ConfigError

from ..jobs.cluster_files import with_options
from ..jobs.clusters import ClusterConfig
from ..jobs.fanout import FanOut
from ..jobs.job import Element
from ..jobs.launching import LaunchOptions, refuse_busy, submit_and_record
from ..jobs.records import Records, launch_lock
from ..jobs.snapshot import Snapshot
from .folders import run_folders


class Resubmitted(NamedTuple):
    """A run with its new jobs; none if it was not submitted, for a reason."""

    folder: Path
    jobs: list[str]
    reason: str = ""


def resubmit(folders: Sequence[Path], options: Sequence[str], force: bool = False) -> list[Resubmitted]:
    """Repeat the newest submissions of these folders, from their working directory and with their code.

    Runs of a sweep are submitted as one array. Of several runs, those that are finished or in the queue are left out.

    Args:
        folders: of runs, fan-outs or sweeps.
        options: changes of the cluster, `--time 2:00:00`.
        force: submit finished runs, too.

    Raises:
        ConfigError: nothing was submitted there, the only run is finished or in the queue, its code is gone, or the
            number of ranks would change.
    """
    runs = run_folders(folders)
    with launch_lock(runs):
        skipped: dict[Path, str] = {}
        for folder in runs:
            try:
                _refuse(folder, force)
            except ConfigError as error:
                if len(runs) == 1:
                    raise
                skipped[folder] = str(error).removeprefix(f"{folder}: ")
        groups: dict[str, list[Path]] = {}
        for folder in runs:
            if folder not in skipped:
                groups.setdefault(_group(_newest(folder)), []).append(folder)
        jobs: dict[Path, list[str]] = {}
        for members in groups.values():
            jobs |= _submit(members, options)
    return [Resubmitted(folder, jobs.get(folder, []), skipped.get(folder, "")) for folder in runs]


def _refuse(folder: Path, force: bool) -> None:
    refuse_busy(folder)
    if not force and not (folder / "plan.json").exists() and Records(folder).is_finished():
        step = Records(folder).heartbeat().get("step", Records(folder).step())
        raise ConfigError(
            f"{folder}: training finished at step {step}. Pass --force to submit the run again, or continue "
            "in a new run (docs/guides/resume.md)."
        )
    if _newest(folder)["cluster"]["kind"] == "allocation":
        raise ConfigError(
            f"{folder}: was trained in an allocation, so it cannot be resubmitted. Repeat `sparo launch train` in an allocation."
        )
    code = Path(_newest(folder)["code"])
    if not code.is_dir():
        raise ConfigError(
            f"{folder}: {code} does not exist, but the run's job uses this copy of the code. Make a new copy with `sparo launch train`."
        )


def _newest(folder: Path) -> dict[str, Any]:
    record = Records(folder).last_submission()
    assert record is not None  # `run_folders` checks it
    return record


def _group(record: dict[str, Any]) -> str:
    """Return a key that is equal for runs that one array can contain."""
    keys = ("on", "cluster", "parallel", "cwd", "logs", "code", "name")
    return json.dumps([record.get(key) for key in keys], sort_keys=True, default=str)


def _submit(folders: Sequence[Path], options: Sequence[str]) -> dict[Path, list[str]]:
    """Submit runs of one group; return the jobs of each."""
    last = _newest(folders[0])
    where = f"the cluster of {folders[0]}"
    cluster = resolve(ClusterConfig, with_options(last["cluster"], options), where)
    if cluster.ranks != resolve(ClusterConfig, last["cluster"], where).ranks:
        raise ConfigError(
            f"{folders[0]}: these options change the number of ranks to {cluster.ranks}, but a resubmitted run keeps "
            "its recipe, which was made for the previous number of ranks. Use `sparo launch train`."
        )
    elements: list[Element] = []
    owners: list[Path] = []
    for folder in folders:
        record = _newest(folder)
        arguments = [tuple(words) for words in record["arguments"]]
        if (folder / "plan.json").exists():
            fan = FanOut(folder)
            arguments = [fan.arguments(number, record["folder"]) for number in fan.missing_elements()]
        elements += [Element(words, record["folder"]) for words in arguments]
        owners += [folder] * len(arguments)
    if not elements:
        return {}
    with _working_directory(last["cwd"]):
        home = Path(last["folder"]) if len(folders) == 1 else Path(last["logs"]).parent
        code = Snapshot(Path(last["code"]), last["commit"], last["changed"])
        launch_options = LaunchOptions(last["on"], cluster, last["parallel"])
        submitted = submit_and_record(launch_options, elements, home, last["name"], code)
    jobs: dict[Path, list[str]] = {}
    for folder, job in zip(owners, submitted, strict=True):
        jobs.setdefault(folder, []).append(job)
    return jobs


@contextmanager
def _working_directory(folder: str) -> Iterator[None]:
    """Change to a submission's working directory, to which relative paths of the recipe refer."""
    here = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(here)
