"""Results on disk: one JSON line per checkpoint and task, and what was predicted for every sample beside it.

DIR/results.jsonl   DIR/predictions/HASH.npz (keys, and arrays with one row per sample)
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sparo_train.core.disk.rundir import environment
from sparo_train.core.errors import DataError
from sparo_train.core.files import write_whole

from ..tasks.result import Result

SCHEMA = 1


class Record(NamedTuple):
    """A line: which checkpoint on which task, the result, and all that it depends on.

    checkpoint: what the user typed.  facts: sha256, architecture, preprocessing, precision, environment, seconds, …
    predictions: the file's name below DIR/predictions, empty where none were kept.
    """

    checkpoint: str
    task: str
    result: Result
    facts: dict[str, Any]
    predictions: str
    folder: Path

    @property
    def dataset(self) -> str:
        """The set's identity, by which two results are told to be of the same samples."""
        return self.result.data


def append(folder: Path, checkpoint: str, task: str, result: Result, facts: dict[str, Any]) -> Record:
    """Add a line and its predictions; several processes may write into one folder."""
    kept = _keep(folder / "predictions", result)
    line = {
        "schema": SCHEMA,
        "checkpoint": checkpoint,
        "name": task,
        **result.as_dict(),
        "facts": facts,
        "predictions": kept,
    }
    folder.mkdir(parents=True, exist_ok=True)
    data = (json.dumps(line) + "\n").encode()
    descriptor = os.open(folder / "results.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        os.write(descriptor, data)  # one write: appending lines of several processes do not mix
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return Record(checkpoint, task, result, facts, kept, folder)


def read_records(places: Iterable[str | Path]) -> list[Record]:
    """The newest line per checkpoint and task of these folders, run folders or .jsonl files, in the order first met.

    What was scored with a `--limit` counts where there is nothing else.

    Raises:
        DataError: nothing there, or a line that is none of ours. A last line that was cut by a kill is passed over.
    """
    found: dict[tuple[str, str], Record] = {}
    for place in places:
        path = _file_of(Path(place))
        lines = path.read_text(encoding="utf-8").split("\n")
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                content = json.loads(line)
            except ValueError:
                if number == len(lines):
                    continue
                raise DataError(f"{path}: line {number} is no JSON") from None
            if not isinstance(content, dict) or content.get("schema") != SCHEMA:
                raise DataError(f"{path}: line {number} is no result of this version (schema {SCHEMA})")
            record = Record(
                content["checkpoint"], content["name"], Result.from_dict(content), content["facts"], content["predictions"], path.parent
            )  # fmt: skip
            before = found.get((record.checkpoint, record.task))
            if before is None or before.facts.get("limit") or not record.facts.get("limit"):
                found[record.checkpoint, record.task] = record
    return list(found.values())


def predictions_of(record: Record) -> dict[str, np.ndarray]:
    """Keys and arrays of a record. Raises `DataError` where they were not kept."""
    path = record.folder / "predictions" / record.predictions
    if not record.predictions or not path.is_file():
        raise DataError(f"{path}: predictions of {record.checkpoint} on {record.task} are not there; score it again")
    with np.load(path, allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


def _file_of(place: Path) -> Path:
    candidates = [place, place / "results.jsonl", place / "evals" / "results.jsonl"]
    for path in candidates:
        if path.is_file():
            return path
    raise DataError(
        f"{place}: no results; give a folder with results.jsonl, or a run folder that `sparo eval` has scored"
    )


def _keep(folder: Path, result: Result) -> str:
    if not result.predictions:
        return ""
    digest = hashlib.sha256("\n".join(result.keys).encode())
    for name, array in sorted(result.predictions.items()):
        digest.update(f"{name} {array.dtype} {array.shape}\n".encode() + np.ascontiguousarray(array).tobytes())
    name = f"{digest.hexdigest()[:24]}.npz"
    if not (folder / name).is_file():
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / f".{name}.{uuid.uuid4().hex[:8]}.tmp.npz"
        try:
            arrays: dict[str, Any] = {"keys": np.asarray(result.keys), **result.predictions}
            np.savez_compressed(temporary, **arrays)
            temporary.replace(folder / name)
        finally:
            temporary.unlink(missing_ok=True)
    return name


def by_checkpoint(records: Sequence[Record]) -> dict[str, dict[str, Record]]:
    """Checkpoint, then task; what was scored with a `--limit` says so in the checkpoint's name."""
    out: dict[str, dict[str, Record]] = {}
    for record in records:
        limit = record.facts.get("limit")
        name = record.checkpoint if not limit else f"{record.checkpoint} (limit {limit})"
        out.setdefault(name, {})[record.task] = record
    return out


def write_results(path: Path, facts: dict[str, Any], results: dict[str, Result]) -> None:
    """Results with their intervals and the environment, as one JSON file."""
    content = {**facts, "environment": environment(), "results": {name: r.as_dict() for name, r in results.items()}}
    write_whole(path, json.dumps(content, indent=1))
