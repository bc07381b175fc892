"""From a task's config to the set that it is scored on."""

from __future__ import annotations

from pathlib import Path

from sparo_train.core.errors import ConfigError, DataError
from sparo_train.train.eval_config import LabelledTaskConfig, RetrievalTaskConfig, SetTaskConfig, ZeroshotTaskConfig

from .base import EvalSet, FactKind, Limited
from .captions import KarpathySet, SugarCrepeSet
from .files import FolderSet, ImageNetSet, ObjectNetSet
from .library import open_library
from .shards import SourceSet, WdsSet

_KINDS: dict[str, FactKind] = {"zeroshot": "label", "probe": "label", "retrieval": "captions", "pairs": "pairs"}
_FACTS_OF: dict[str, FactKind] = {
    "folder": "label",
    "imagenet": "label",
    "imagenetv2": "label",
    "objectnet": "label",
    "karpathy": "captions",
    "sugar_crepe": "pairs",
    "torchvision": "label",
}


def open_set(config: SetTaskConfig, task: str, split: str | None = None) -> EvalSet:
    """The images of a task, `limit` of them where it says so.

    Args:
        split: default: the config's own.

    Raises:
        DataError: a file that is missing or no such file.
        ConfigError: a layout whose facts are not what the task needs.
    """
    kind, layout = _KINDS[task], config.layout
    if layout != "wds" and _FACTS_OF[layout] != kind:
        raise ConfigError(f"layout={layout}: has {_FACTS_OF[layout]}, and task {task} needs {kind}")
    whole = _open(config, layout, kind, split or config.split)
    whole.home, whole.known_as = Path(config.root), config.known_as
    return whole if config.limit is None else Limited(whole, config.limit)


def open_labelled(config: LabelledTaskConfig) -> tuple[EvalSet, EvalSet]:
    """The training and the test images, each with its label."""
    train, test = (SourceSet(getattr(config, key), "label", key) for key in ("train", "test"))
    return (train, test) if config.limit is None else (Limited(train, config.limit), Limited(test, config.limit))


def _open(config: SetTaskConfig, layout: str, kind: FactKind, split: str) -> EvalSet:
    if layout == "wds":
        return WdsSet(config.root, kind, split)
    if layout == "sugar_crepe":
        return SugarCrepeSet(config.root)
    if layout == "karpathy":
        assert isinstance(config, RetrievalTaskConfig)
        if config.annotations is None:
            raise ConfigError("layout=karpathy: needs annotations, the file with the captions")
        return KarpathySet(config.root, config.annotations, split)
    if layout == "torchvision":
        return open_library(config.root, config.known_as, split)
    if layout == "objectnet":
        return ObjectNetSet(config.root, getattr(config, "border_crop", True))
    expected = config.classes if isinstance(config, ZeroshotTaskConfig) else None
    folder = Path(config.root) / split
    if not folder.is_dir():
        if split != config.split:
            raise DataError(f"{folder}: missing; layout {layout} has a folder per split")
        folder = Path(config.root)
    if layout == "folder":
        return FolderSet(folder)
    return ImageNetSet(folder, expected, numbered=layout == "imagenetv2")
