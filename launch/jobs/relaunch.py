"""Submitting again what a folder says was launched in it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from sparo_train.core.config import resolve
from sparo_train.core.errors import ConfigError

from .clusters import ClusterConfig, with_options
from .fanout import FanOut
from .job import Element
from .launching import LaunchOptions, refuse_busy, submit_and_record
from .records import Records
from .snapshot import Snapshot


def resubmit(folder: Path, options: Sequence[str]) -> list[str]:
    """The newest submission once more, from where it was made, with the code that it had; returns the jobs.

    Raises:
        ConfigError: nothing was launched there, a job is not over, its code is gone, or other ranks are asked for.
    """
    last = Records(folder).last()
    if last is None:
        raise ConfigError(f"{folder}: no job was launched there; use `sparo launch train`")
    refuse_busy(folder)
    name = f"the cluster of {folder}"
    cluster = resolve(ClusterConfig, with_options(last["cluster"], options), name)
    if cluster.ranks != resolve(ClusterConfig, last["cluster"], name).ranks:
        raise ConfigError(f"{folder}: other ranks need a resolved recipe of their own; `sparo launch train` makes it")
    code = Snapshot(Path(last["code"]), last["commit"], last["changed"])
    if not code.path.is_dir():
        raise ConfigError(f"{code.path}: the code that ran there is gone; `sparo launch train` takes a new copy")
    arguments = [tuple(args) for args in last["arguments"]]
    if (folder / "plan.json").exists():
        fan = FanOut(folder)
        arguments = [fan.arguments(number, last["folder"]) for number in fan.missing()]
    here = Path.cwd()
    # Relative paths of the recipe meant that folder.
    os.chdir(last["cwd"])
    try:
        elements = [Element(words, last["folder"]) for words in arguments]
        home = Path(last["folder"])
        return (
            submit_and_record(LaunchOptions(last["on"], cluster, last["parallel"]), elements, home, last["name"], code)
            if elements
            else []
        )
    finally:
        os.chdir(here)
