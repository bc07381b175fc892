"""Results on disk: one JSON line per checkpoint and task, and what was predicted for every sample beside it.

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
from sparo_train.core.files import nearest, read_bytes, read_text, write_whole
from sparo_train.core.recipe.recipe_yaml import parse_yaml

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


def append(
    folder: Path, checkpoint: str, task: str, result: Result, facts: dict[str, Any], predictions: bool = True
) -> Record:
    """Add a line and, where asked for, its predictions; several processes may write into one folder."""
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
            data = b"\n" + data  # a line that a full disk or a kill cut off must not take this one with it
        # One write: appending lines of several processes do not mix. A disk that becomes full takes a part of it.
        if os.write(descriptor, data) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder / "results.jsonl"))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return Record(checkpoint, task, result, facts, predictions_file, folder)


def read_records(places: Iterable[str | Path]) -> list[Record]:
    """The newest line per checkpoint and task of these folders, run folders or .jsonl files, in the order first met.

    What was scored with a `--limit` counts where there is nothing else.

    Raises:
        DataError: nothing there, or a line of another version. Lines that a kill or a full disk cut off are passed over.
    """
    newest: dict[tuple[str, str], Record] = {}
    for place in places:
        path, names = _file_of(Path(place)), _names(Path(place))
        for number, line in enumerate(read_bytes(path, DataError).decode("utf-8", "replace").split("\n"), 1):
            try:
                content = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if not isinstance(content, dict):
                continue
            if content.get("schema") != SCHEMA:
                raise DataError(
                    f"{path}: line {number} is no result of this version (schema {SCHEMA}); remove it, or score again"
                )
            record = _of_place(_record(content, path, number), Path(place), names)
            before = newest.get((record.checkpoint, record.task))
            # A whole set is not replaced by a part of it that was scored later.
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
        ):
            raise TypeError("a field of another kind")
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise DataError(
            f"{path}: line {number} is no result ({type(error).__name__}: {error}); remove it, or score again"
        ) from None
    return Record(checkpoint, task, result, facts, predictions, path.parent)


def records_of(place: str) -> list[Record]:
    """The results of one checkpoint: a run's own, all of a folder that has no other's, or those of a name that a table prints,
    `RUN (slots 0,1)`.

    Raises:
        ConfigError: results of several checkpoints, none of which the place names.
        DataError: as `read_records`.
    """
    path, bracket, _ = place.partition(" (")
    records = read_records([path if bracket and not Path(place).exists() else place])
    names = list(dict.fromkeys(record.checkpoint for record in records))
    if len(names) == 1 and not bracket:
        return records
    # A run that was also scored with some of its slots is still that run.
    own = [record for record in records if record.checkpoint == (place if bracket else str(Path(place)))]
    if not own:
        raise ConfigError(
            f"{place}: holds results of {', '.join(names)}; give one of these runs, or a folder with the results of one"
        )
    return own


def whole_records(run: Path) -> list[Record]:
    """What a run itself was scored with on whole sets: some of its slots, or an earlier step, are other models. Raises `DataError` as
    `read_records`."""
    return [r for r in read_records([run]) if r.checkpoint == str(run) and not r.facts.get("limit")]


def _names(place: Path) -> frozenset[str]:
    """What a run in this folder is called, or was before its folder was renamed; nothing where it is no run."""
    config = place / "config.yaml"
    if not config.is_file():
        return frozenset()
    try:
        tree = parse_yaml(read_text(config), str(config))
    except SparoError:  # its name is its folder's, then
        tree = None
    named = tree.get("name") if isinstance(tree, dict) else None
    return frozenset([place.resolve().name, *([named] if isinstance(named, str) else [])])


def _of_place(record: Record, place: Path, names: frozenset[str]) -> Record:
    """A run's own results under the run's place as it is typed now: two runs of one name in two folders are two, and a run that
    was scored by its whole path and by a part of it is one."""
    scored, slots, rest = record.checkpoint.partition(" (slots ")
    return record._replace(checkpoint=f"{place}{slots}{rest}") if Path(scored).name in names else record


def refuse_unwritable(folder: Path, key: str) -> None:
    """Raise `ConfigError` naming `key` where nothing can be written into a folder, which is made: before an hour of scoring, not behind it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".sparo-"):
            pass
    except OSError as error:
        raise ConfigError(f"{key}: nothing can be written into {folder} ({error}); give another folder") from None


def predictions_of(record: Record) -> dict[str, np.ndarray]:
    """Keys and arrays of a record. Raises `DataError` where they were not kept."""
    path = record.folder / "predictions" / record.predictions
    if not record.predictions and not record.result.keys and not record.result.predictions:
        raise DataError(
            f"{record.task}: {record.checkpoint} was scored by {record.result.task} without predictions that could be paired"
        )
    if not record.predictions or Path(record.predictions).name != record.predictions or not path.is_file():
        raise DataError(f"{path}: predictions of {record.checkpoint} on {record.task} are not there; score it again")
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        # A zip's own sums are of its members, not of their names: without one of them another number would be compared.
        if _digest(arrays["keys"].tolist(), {k: array for k, array in arrays.items() if k != "keys"}) != path.stem:
            raise ValueError("its content is not what its name says")
        return arrays
    except Exception as error:  # zip, zlib and numpy's headers raise anything
        raise DataError(
            f"{path}: damaged ({error}); remove it and score {record.checkpoint} on {record.task} again"
        ) from None


def _file_of(place: Path) -> Path:
    # A file, a results folder, a run folder: whichever is at hand.
    candidates = [place, place / "results.jsonl", place / "evals" / "results.jsonl"]
    for path in candidates:
        if path.is_file():
            return path
    raise DataError(f"{place}: {no_results(place)}")


def no_results(place: Path) -> str:
    """Why a place has no results, and what to do."""
    if not place.exists():
        return f"no such folder; {nearest(place)}"
    return (
        "no results; give a folder with results.jsonl, or a run folder: training scores eval.tasks at its end, "
        f"and `sparo eval {place}` at any time"
    )


def _write_predictions(folder: Path, result: Result) -> str:
    if not result.predictions:
        return ""
    # Named by content: a checkpoint that is scored again with the same answers writes no second file.
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
    """Checkpoint, then task; what was scored with a `--limit` says so in the checkpoint's name."""
    out: dict[str, dict[str, Record]] = {}
    for record in records:
        # Under a name of its own: a tenth of a set beside whole ones would be ranked with them.
        limit = record.facts.get("limit")
        name = record.checkpoint if not limit else f"{record.checkpoint} (limit {limit})"
        out.setdefault(name, {})[record.task] = record
    return out


def write_results(path: Path, facts: dict[str, Any], results: dict[str, Result]) -> None:
    """Results with their intervals and the environment, as one JSON file."""
    content = {**facts, "environment": environment(), "results": {name: r.as_dict() for name, r in results.items()}}
    write_whole(path, json.dumps(content, indent=1))
