"""Results on disk: one JSON line per checkpoint and task, and the predictions for every sample.

DIR/results.jsonl   DIR/predictions/HASH.npz (keys, and arrays with one row per sample)
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import tempfile
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sparo_train.core.disk.rundir import environment
from sparo_train.core.errors import ConfigError, DataError, SparoError
from sparo_train.core.files import read_bytes, read_text, suggest_path, write_whole
from sparo_train.core.recipe.recipe_yaml import parse_yaml

from ..tasks.result import Result

SCHEMA = 1


class Record(NamedTuple):
    """One line: a checkpoint on a task, the result, and everything that it depends on.

    Attributes:
        checkpoint: as the user typed it.
        facts: sha256, architecture, preprocessing, precision, environment, seconds, …
        predictions: file name in DIR/predictions; empty if they were not stored.
    """

    checkpoint: str
    task: str
    result: Result
    facts: dict[str, Any]
    predictions: str
    folder: Path

    @property
    def dataset(self) -> str:
        """Return the set's identity, which is equal for results on the same samples."""
        return self.result.data


def append(
    folder: Path, checkpoint: str, task: str, result: Result, facts: dict[str, Any], predictions: bool = True
) -> Record:
    """Append a line and, if requested, its predictions; several processes may write to one folder."""
    predictions_file = _write_predictions(folder / "predictions", result) if predictions else ""
    line = {
        "schema": SCHEMA,
        "checkpoint": checkpoint,
        "name": task,
        **result.as_dict(),
        "facts": facts,
        "predictions": predictions_file,
    }
    folder.mkdir(parents=True, exist_ok=True)
    data = (json.dumps(line) + "\n").encode()
    descriptor = os.open(folder / "results.jsonl", os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            data = b"\n" + data  # start a new line after one that a full disk or a kill truncated
        # One write, so that lines of several processes do not mix; a full disk may truncate it.
        if os.write(descriptor, data) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder / "results.jsonl"))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return Record(checkpoint, task, result, facts, predictions_file, folder)


def read_records(places: str | Path | Iterable[str | Path]) -> list[Record]:
    """Return the newest line per checkpoint and task of a folder, run folder or .jsonl file, or several, in the order of first occurrence.

    Scores with `--limit` only count if a task has no others.

    Raises:
        DataError: no results, or a line of another version. Lines that a kill or a full disk truncated are skipped.
    """
    newest: dict[tuple[str, str], Record] = {}
    for place in [places] if isinstance(places, str | Path) else places:
        path, names = _find_file(Path(place)), _names(Path(place))
        for number, line in enumerate(read_bytes(path, DataError).decode("utf-8", "replace").split("\n"), 1):
            try:
                content = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if not isinstance(content, dict):
                continue
            if content.get("schema") != SCHEMA:
                raise DataError(
                    f"{path}: line {number} is not a result of this version (schema {SCHEMA}). Remove this line, or score again."
                )
            record = _rename_for_place(_record(content, path, number), Path(place), names)
            before = newest.get((record.checkpoint, record.task))
            # A later score on part of a set does not replace one on the whole set.
            if before is None or before.facts.get("limit") or not record.facts.get("limit"):
                newest[record.checkpoint, record.task] = record
    return list(newest.values())


def _record(content: dict[str, Any], path: Path, number: int) -> Record:
    try:
        checkpoint, task, facts, predictions = (content[k] for k in ("checkpoint", "name", "facts", "predictions"))
        result = Result.from_dict(content)
        if not (
            isinstance(checkpoint, str)
            and isinstance(task, str)
            and isinstance(facts, dict)
            and isinstance(predictions, str)
            and isinstance(facts.get("checkpoint", {}), dict)
            and isinstance(facts.get("environment", {}), dict)
        ):
            raise TypeError("a field has the wrong type")
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise DataError(
            f"{path}: line {number} is not a result ({type(error).__name__}: {error}). Remove this line, or score again."
        ) from None
    return Record(checkpoint, task, result, facts, predictions, path.parent)


def find_records(place: str) -> list[Record]:
    """Return the results of one checkpoint: a run's own, those of a folder with a single one, or those of a name as printed in tables, `RUN (slots 0,1)`.

    Raises:
        ConfigError: results of several checkpoints, and none is named.
        DataError: like `read_records`.
    """
    path, bracket, _ = place.rpartition(" (slots ")
    path = path or place
    records = read_records([path if bracket and not Path(place).exists() else place])
    names = list(dict.fromkeys(record.checkpoint for record in records))
    if len(names) == 1 and not bracket:
        return records
    # A run whose slots were also scored separately is still that run.
    own = [record for record in records if record.checkpoint == (place if bracket else str(Path(place)))]
    if not own:
        raise ConfigError(
            f"{place}: contains results of {', '.join(names)}. Give one of these runs, or a folder with the results of a single run."
        )
    return own


def whole_records(run: Path) -> list[Record]:
    """Return a run's own scores on whole sets, without those of some slots or of earlier steps. Raises `DataError` like `read_records`."""
    return [r for r in read_records([run]) if r.checkpoint == str(run) and not r.facts.get("limit")]


def _names(place: Path) -> frozenset[str]:
    """Return the names of a run in this folder, also from before the folder was renamed; empty if it is not a run."""
    config = place / "config.yaml"
    if not config.is_file():
        return frozenset()
    try:
        tree = parse_yaml(read_text(config), str(config))
    except SparoError:  # its name was that of its folder
        tree = None
    named = tree.get("name") if isinstance(tree, dict) else None
    return frozenset([place.resolve().name, *([named] if isinstance(named, str) else [])])


def _rename_for_place(record: Record, place: Path, names: frozenset[str]) -> Record:
    """Return a run's own results under the path as typed now, so that two runs with one name in two folders stay separate."""
    scored, slots, rest = record.checkpoint.partition(" (slots ")
    return record._replace(checkpoint=f"{place}{slots}{rest}") if Path(scored).name in names else record


def refuse_unwritable(folder: Path, key: str) -> None:
    """Raise `ConfigError` naming `key` if a folder, which is created, is not writable: before an hour of scoring, not after it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".sparo-"):
            pass
    except OSError as error:
        raise ConfigError(f"{key}: {folder} is not writable ({error}). Give another folder.") from None


def load_predictions(record: Record) -> dict[str, np.ndarray]:
    """Return keys and arrays of a record. Raises `DataError` if they were not stored."""
    path = record.folder / "predictions" / record.predictions
    if not record.predictions and not record.result.keys and not record.result.predictions:
        raise DataError(
            f"{record.task}: {record.checkpoint} was scored by {record.result.task}, a task that stores no predictions for a paired comparison"
        )
    if not record.predictions or Path(record.predictions).name != record.predictions or not path.is_file():
        raise DataError(f"{path}: has no predictions of {record.checkpoint} on {record.task}. Score it again.")
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        # A zip's checksums cover the content of its members, not their names.
        if _digest(arrays["keys"].tolist(), {k: array for k, array in arrays.items() if k != "keys"}) != path.stem:
            raise ValueError("the content does not match the checksum in the file name")
        return arrays
    except Exception as error:  # zip, zlib and numpy's header parser may raise anything
        raise DataError(
            f"{path}: is damaged ({error}). Remove it and score {record.checkpoint} on {record.task} again."
        ) from None


def _find_file(place: Path) -> Path:
    # Accept a file, a results folder, or a run folder.
    candidates = [place, place / "results.jsonl", place / "evals" / "results.jsonl"]
    for path in candidates:
        if path.is_file():
            return path
    raise DataError(f"{place}: {no_results(place)}")


def no_results(place: Path) -> str:
    """Return why a path has no results, and what to do."""
    if not place.exists():
        return f"no such folder; {suggest_path(place)}"
    if place.name.startswith("step-") or not (place / "config.yaml").is_file():
        return f"no results. Give a folder with results.jsonl, as `sparo eval {place} --results FOLDER` writes it"
    return (
        f"no results. Give a folder with results.jsonl, or the folder of a run that was scored. Training "
        f"scores eval.tasks when it ends; `sparo eval {place}` at any time"
    )


def _write_predictions(folder: Path, result: Result) -> str:
    if not result.predictions:
        return ""
    # Named by content, so that scoring a checkpoint again with the same answers writes no second file.
    name = f"{_digest(result.keys, result.predictions)}.npz"
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


def _digest(keys: Sequence[str], arrays: Mapping[str, np.ndarray]) -> str:
    digest = hashlib.sha256("\n".join(keys).encode())
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype} {array.shape}\n".encode() + np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()[:24]


def by_checkpoint(records: Sequence[Record]) -> dict[str, dict[str, Record]]:
    """Group by checkpoint, then task; scores with `--limit` have it in the checkpoint's name."""
    out: dict[str, dict[str, Record]] = {}
    for record in records:
        # Under a separate name, so that part of a set is not ranked with whole ones.
        limit = record.facts.get("limit")
        name = record.checkpoint if not limit else f"{record.checkpoint} (limit {limit})"
        out.setdefault(name, {})[record.task] = record
    return out


def write_results(path: Path, facts: dict[str, Any], results: dict[str, Result]) -> None:
    """Write results with their intervals and the environment, as one JSON file."""
    content = {**facts, "environment": environment(), "results": {name: r.as_dict() for name, r in results.items()}}
    write_whole(path, json.dumps(content, indent=1))
