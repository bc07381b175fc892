"""Catalogue of data sets: where their files must be, and their content. A set is an entry of a YAML file (`dataset_folders`).

Names and sizes of the shipped ones, the sets of the SPARO paper and compositional sets, are those of clip-benchmark,
DataComp, VTAB and the authors. Nothing is downloaded. Every set may also be in the `wds/` layout (`clip_benchmark_export_wds`, or the hub's
clip-benchmark/wds_* copies, and DataComp's), in ROOT/NAME, ROOT/wds_NAME or ROOT/wds_NAME_test with `-` for `/`.
"""

from __future__ import annotations

import logging
import os
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from sparo_train.core.config import Frozen, field, resolve
from sparo_train.core.errors import ConfigError, SparoError, UnexpectedError, did_you_mean
from sparo_train.core.recipe.layers import load_recipe
from sparo_train.core.registries import TASKS

from ..report.suite_layouts import suite_tasks
from ..sets.base import EvalSet
from ..sets.captions import SugarCrepeSet
from ..sets.open_set import open_set
from ..sets.questions import QuestionSet
from ..sets.task_config import SetTaskConfig, TaskConfig

logger = logging.getLogger(__name__)


class DatasetEntry(Frozen):
    """A data set of the catalogue: an entry of a YAML file in `dataset_folders`, under its name."""

    group: str = field(..., "Group of the set: a name that selects all related sets, as in --tasks vtab.")
    task: str = field(..., "Task by which models are scored on the set: an entry of sparo.tasks.")
    folder: str = field(
        "",
        "Name of the folder in ROOT with the files of the set, if several sets share a folder. Default: the name of the set.",
    )
    files: str = field(
        "test/nshards.txt, test/0.tar …, classnames.txt", "Files that `sparo eval --list` expects in ROOT/NAME."
    )
    source: str = field("", "Where to get the files.")
    options: dict[str, Any] = field({}, "Task keys that apply if the files are not in the wds layout.")
    or_options: dict[str, Any] = field(
        {},
        "Keys of the task, used instead of `options` if the columns.file given here exists and the columns.file in `options` does not.",
    )
    settings: dict[str, Any] = field({}, "Keys of the task that are used in every layout.")
    languages: tuple[str, ...] = field(
        (), "Languages of the set. Each becomes a separate set, NAME/LANGUAGE.", strict=False
    )
    language_key: str = field("split", "Task key that is set to the language of each separate set.")
    n: int | None = field(None, "Expected number of images. Default: not checked.", gt=0)
    questions: int | None = field(None, "Number of questions of the whole set. Default: not checked.", gt=0)
    classes: int | None = field(None, "Number of classes of a zeroshot set.")
    chance: float | None = field(None, "Score that random guessing would get.")
    licence: str = field("none stated", "License of the images.")
    name: str = field("", "Name of the set, filled in from the key of the entry in its YAML file.")
    shipped: bool = field(
        False, "Filled in by sparo: true if sparo ships the entry. Images of shipped sets are decoded as in open_clip."
    )


_RENDERED = "scene_questions.json"  # manifest of stand-ins, in the folder above the sets


class _Datasets(Frozen):
    datasets: dict[str, DatasetEntry] = field({}, "Data sets by name.")


def dataset_folders() -> list[Path]:
    """Return the folders whose YAML files list data sets: ./configs/datasets, the user's own, and the package's. Earlier folders take precedence."""
    own = Path(os.environ.get("XDG_CONFIG_HOME", Path.home() / ".config")) / "sparo/datasets"
    return [Path("configs/datasets"), own, Path(__file__).parent / "datasets"]


def datasets() -> list[DatasetEntry]:
    """Return all data sets of the catalogue. Raises `ConfigError` for a file that is not one of data sets."""
    entries: dict[str, DatasetEntry] = {}
    for path in (path for folder in dataset_folders() for path in sorted(folder.glob("*.yaml"))):
        for entry in _read_entries(path.absolute(), path.stat().st_mtime_ns):
            for each in _by_language(entry):
                entries.setdefault(each.name, each)
    return list(entries.values())


def _by_language(entry: DatasetEntry) -> list[DatasetEntry]:
    """Return an entry per language; the entry itself if it has none."""
    if not entry.languages:
        return [entry]
    # The wds layout has no splits by language.
    keys = "options" if entry.language_key == "split" else "settings"
    return [
        entry.model_copy(
            update={
                "name": f"{entry.name}/{language}",
                "folder": entry.folder or entry.name,
                keys: {**getattr(entry, keys), entry.language_key: language},
            }
        )
        for language in entry.languages
    ]


@lru_cache
def _read_entries(path: Path, _modified: int) -> tuple[DatasetEntry, ...]:
    """Return the entries of a file, parsed once per modification time, because every task of an evaluation asks for them."""
    known, entries = TASKS.names(), []
    for name, entry in resolve(_Datasets, {"datasets": load_recipe(path)}, str(path)).datasets.items():
        if entry.task not in known:
            raise ConfigError(f"{path}: {name}.task: {entry.task!r}; {did_you_mean(entry.task, known)}")
        entries.append(
            entry.model_copy(update={"name": name, "shipped": path.parent == dataset_folders()[-1].absolute()})
        )
    return tuple(entries)


def names() -> list[str]:
    """Return the names that `tasks` accepts: sets, `SET:probe`, and groups."""
    return list(dict.fromkeys(name for listed in datasets() for name in _selecting_names(listed)))


def _selecting_names(listed: DatasetEntry) -> tuple[str, ...]:
    """Return the names that select a set: its own, its group, and the part before the slash (`aro` for `aro/vg_relation`)."""
    prefix, slash, _ = listed.name.partition("/")
    return (listed.name, listed.group, *([prefix] if slash else []))


def tasks(name: str, root: Path) -> dict[str, TaskConfig]:
    """Return the tasks that a name stands for, with files below `root`; empty for an unknown name.

    Of a group, sets that do not exist are skipped with a warning, unless none exists.
    """
    base, _, other = name.partition(":")
    entries = [listed for listed in datasets() if base in _selecting_names(listed)]
    if all(listed.name != base for listed in entries):
        absent = [listed.name for listed in entries if _is_absent(make_task(listed, root, listed.task))]
        if absent and len(absent) < len(entries):
            _warn_once(f"--tasks {name}: {len(absent)} set(s) are not in {root}: {', '.join(absent)}")
            entries = [listed for listed in entries if listed.name not in absent]
    if other not in ("", "probe"):
        return {}
    if other:
        entries = [listed for listed in entries if listed.task == "zeroshot"]
    return {
        listed.name + (":probe" if other else ""): make_task(listed, root, other or listed.task) for listed in entries
    }


def suite_tasks_below(suite: str, root: Path) -> dict[str, TaskConfig]:
    """Return the tasks of a suite whose sets are below `root`; the others are named in a warning.

    Raises:
        ConfigError: no such suite, or none of its sets exists.
    """
    entries = {listed.name: listed for listed in datasets()}
    found = {}
    for name, metric in suite_tasks(suite):
        config = make_task(entries[name], root, entries[name].task)
        # A score by another metric would be mistaken for the suite's.
        named = metric is not None and "headline" in type(config).model_fields
        found[name] = config.model_copy(update={"headline": metric}) if named else config
    absent = [name for name, config in found.items() if _is_absent(config)]
    if len(absent) == len(found):
        raise ConfigError(
            f"--suite {suite}: none of the suite's {len(found)} data sets is in {root}. Give their folder with --root; `sparo eval --list` shows "
            "the files of each set."
        )
    if absent:
        _warn_once(f"--suite {suite}: {len(absent)} of {len(found)} sets are not in {root}: {', '.join(absent)}")
    return {name: config for name, config in found.items() if name not in absent}


@lru_cache
def _warn_once(text: str) -> None:
    """Warn once, although every checkpoint of a command asks for the same tasks."""
    logger.warning(text)


def make_task(listed: DatasetEntry, root: Path, task: str) -> TaskConfig:
    """Return the config of a set's task, in the layout that exists on disk."""
    place = root / (listed.folder or listed.name)
    as_wds = next((p for p in _wds_places(listed, root) if (p / "test" / "nshards.txt").is_file()), None)
    options: dict[str, Any] = {"task": task, "root": str(as_wds or place), "benchmark_name": listed.name}
    if "published" in TASKS.get(task).config.model_fields:
        options["published"] = listed.shipped
    options |= listed.settings if task == listed.task else {}
    if as_wds is None:
        existing = _existing(listed, place)
        options |= existing
        if existing.get("layout") == "karpathy":
            options |= _karpathy(place, listed.name)
    if task == "zeroshot":
        options["classes"] = listed.classes
    if task == "probe":
        options.pop("classes", None)
    return resolve(TASKS.get(task).config, options, f"data set {listed.name}: options")


def _existing(listed: DatasetEntry, place: Path) -> dict[str, Any]:
    """Return `options`, or `or_options` if only their table exists."""
    instead = _has_table(listed.or_options, place) and not _has_table(listed.options, place)
    return listed.or_options if instead else listed.options


def _has_table(options: dict[str, Any], place: Path) -> bool:
    """Return whether the options name a table that exists."""
    pattern = options.get("columns", {}).get("file")
    return pattern is not None and any(place.glob(str(pattern)))


def _wds_places(listed: DatasetEntry, root: Path) -> list[Path]:
    """Return the folders in which a set in the wds layout may be; the hub's copies are called wds_…, and those of DataComp wds_…_test."""
    names = dict.fromkeys((listed.name, listed.folder or listed.name))
    flat = [name.replace("/", "-") for name in names]
    return [root / name for name in [*names, *(f"wds_{name}" for name in flat), *(f"wds_{name}_test" for name in flat)]]


def _karpathy(place: Path, name: str) -> dict[str, str]:
    short = {"mscoco_captions": "coco"}.get(name, name)
    # clip-benchmark's own files first, because its published scores are based on them.
    candidates = [f"{short}_test_karpathy.json", f"{short}_test_karpathy.txt", f"dataset_{short}.json"]
    annotations_file = next((place / c for c in candidates if (place / c).is_file()), place / candidates[0])
    images = next((place / f for f in ("val2014", "images", "Images") if (place / f).is_dir()), place)
    return {"annotations": str(annotations_file), "root": str(images)}


class Presence(NamedTuple):
    """State of a set: absent, intact, or odd (present, with a description of the difference)."""

    state: str
    note: str


def _is_absent(config: TaskConfig) -> bool:
    """Return whether the folder or the table of a set does not exist; nothing is read."""
    assert isinstance(config, SetTaskConfig)
    place, columns = Path(config.root), config.columns
    return not place.exists() or (columns is not None and not any(place.glob(columns.file)))


def check_presence(listed: DatasetEntry, root: Path) -> Presence:
    """Check whether a set is present and complete. Files are counted and their sizes read; images are not decoded."""
    try:
        config = make_task(listed, root, listed.task)
        assert isinstance(config, SetTaskConfig)
        if _is_absent(config):
            return Presence("absent", listed.files)
        TASKS.get(listed.task).check(config)
        return _describe_presence(listed, open_set(config, TASKS.get(listed.task).facts))
    except SparoError as error:
        return Presence("odd", str(error))
    except Exception as error:  # a plug-in's reader may fail in any way, and other sets are still listed
        return Presence("odd", f"cannot be opened ({UnexpectedError.from_error(error)})")


def oddity(name: str, task: TaskConfig) -> str:
    """Describe how a task's data differ from the catalogue's set with that name (`benchmark_name`, otherwise its own); empty if they do not."""
    if not isinstance(task, SetTaskConfig):
        return ""
    base = task.benchmark_name or name.partition(":")[0]
    listed = next((entry for entry in datasets() if entry.name == base), None)
    if listed is None or task.task not in (listed.task, "probe"):
        return ""
    # Check the whole set, because `limit` is reported with the score.
    presence = _describe_presence(
        listed, open_set(task.model_copy(update={"limit": None}), TASKS.get(listed.task).facts)
    )
    return presence.note if presence.state == "odd" else ""


def _describe_presence(listed: DatasetEntry, source: EvalSet) -> Presence:
    notes, root = [], Path(source.root)
    if any((folder / _RENDERED).is_file() for folder in (root, *root.parents[:2])):
        return Presence("odd", "rendered scenes (sparo data scene-questions) in the form of the set")
    if isinstance(source, SugarCrepeSet):
        notes.append(source.version)
        # The data on which the paper was scored, before its authors withdrew one pair (commit 546eb51).
        if source.version == "7,512 pairs" and len(source) == 1561:
            return Presence("intact", notes[0])
        if source.version == "not published data":
            return Presence("odd", "the JSON files are not the published ones (SHA-256)")
    if isinstance(source, QuestionSet) and source.incomplete:
        return Presence("odd", source.incomplete)
    if isinstance(source, QuestionSet) and listed.questions not in (None, len(source.questions)):
        return Presence("odd", f"{len(source.questions):,} questions instead of {listed.questions:,}")
    if listed.n not in (None, len(source)):
        return Presence("odd", f"{len(source):,} images instead of {listed.n:,}")
    if listed.task == "zeroshot":
        num_names = len(source.classnames())
        if listed.classes is not None and num_names != listed.classes:
            return Presence("odd", f"{num_names} class names instead of {listed.classes}")
    if isinstance(source, QuestionSet):
        notes.append(f"{len(source.questions):,} questions")
    return Presence("intact", ", ".join([*notes, f"{len(source):,} images"]))
