"""The data sets of the SPARO paper by name: where their files must lie, and what they must hold.

Names and sizes are clip-benchmark's, DataComp's and VTAB's; nothing is downloaded here. Every set may also lie in the `wds/` layout
(`clip_benchmark_export_wds`, or the Hub's clip-benchmark/wds_* copies), in ROOT/NAME or ROOT/wds_NAME with `-` for `/`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from sparo_train.core.errors import SparoError
from sparo_train.core.registries import TASKS

from ..sets.base import EvalSet
from ..sets.captions import SPLITS, SugarCrepeSet
from ..sets.open_set import open_set
from ..sets.task_config import SetTaskConfig, TaskConfig


class DatasetEntry(NamedTuple):
    """A data set: `files` is what must lie below ROOT/NAME where it is not in the wds layout; `n` images."""

    name: str
    group: str
    task: str
    files: str
    options: dict[str, Any]
    n: int
    classes: int | None
    chance: float | None
    licence: str


_WDS = "test/nshards.txt, test/0.tar …, classnames.txt"
_CLEVR = "CLEVR_v1.0/{images/val,scenes/CLEVR_val_scenes.json}"
_CAPTIONS = "the images, and {0}_test_karpathy.{1} (or Karpathy's dataset_{2}.json)"


def _imagenet(name: str, files: str, layout: str, n: int, classes: int, chance: float, licence: str) -> DatasetEntry:
    expected = {"layout": layout, "classes": classes}
    return DatasetEntry(name, "imagenet", "zeroshot", files, expected, n, classes, chance, licence)


def _vtab(
    name: str, n: int, classes: int, chance: float | None, licence: str, files: str | None = None
) -> DatasetEntry:
    """`files`: where its authors' own files are read too; torchvision's layout."""
    options = {"layout": "torchvision"} if files else {}
    return DatasetEntry(name, "vtab", "zeroshot", files or _WDS, options, n, classes, chance, licence)


def _retrieval(name: str, files: str, n: int, licence: str) -> DatasetEntry:
    return DatasetEntry(name, "retrieval", "retrieval", files, {"layout": "karpathy"}, n, None, None, licence)


_NO_LICENCE = "none stated"
DATASETS = [
    _imagenet("imagenet1k", "val/WNID/*.JPEG", "imagenet", 50000, 1000, 0.001, "ImageNet's terms: research, not commercial"),
    _imagenet("imagenetv2", "0 … 999/*.jpeg (matched frequency)", "imagenetv2", 10000, 1000, 0.001, "MIT"),
    _imagenet("imagenet_sketch", "WNID/*.JPEG", "imagenet", 50889, 1000, 0.001, "MIT"),
    _imagenet("imagenet-a", "WNID/*.jpg", "imagenet", 7500, 200, 0.008, "MIT"),
    _imagenet("imagenet-r", "WNID/*.jpg", "imagenet", 30000, 200, 0.006, "MIT"),
    _imagenet(
        "objectnet", "objectnet-1.0/images/*/*.png and mappings/", "objectnet", 18574, 113, 0.009,
        "CC BY 4.0, and never to be trained on",
    ),
    _vtab("vtab/caltech101", 6085, 102, 0.010, "CC BY 4.0"),
    _vtab("vtab/cifar100", 10000, 100, 0.010, _NO_LICENCE, "cifar-100-python/{train,test,meta}"),
    _vtab("vtab/clevr_count_all", 15000, 8, 0.125, "CC BY 4.0", _CLEVR),
    _vtab("vtab/clevr_closest_object_distance", 15000, 6, 0.191, "CC BY 4.0", _CLEVR),
    _vtab("vtab/diabetic_retinopathy", 42670, 5, None, "Kaggle's competition rules"),
    _vtab("vtab/dmlab", 22735, 6, None, _NO_LICENCE),
    _vtab("vtab/dsprites_label_orientation", 73728, 16, 0.062, "zlib"),
    _vtab("vtab/dsprites_label_x_position", 73728, 16, 0.062, "zlib"),
    _vtab("vtab/dtd", 1880, 47, 0.021, "research only", "dtd/dtd/{images,labels}"),
    _vtab("vtab/eurosat", 5400, 10, 0.101, "MIT"),
    _vtab("vtab/flowers", 6149, 102, 0.010, _NO_LICENCE, "flowers-102/{jpg,imagelabels.mat,setid.mat}"),
    _vtab("vtab/kitti_closest_vehicle_distance", 711, 4, 0.295, "CC BY-NC-SA 3.0"),
    _vtab("vtab/pcam", 32768, 2, 0.500, "CC0", "pcam/camelyonpatch_level_2_split_test_{x,y}.h5 (needs h5py)"),
    _vtab("vtab/pets", 3669, 37, 0.027, "CC BY-SA 4.0", "oxford-iiit-pet/{images,annotations}"),
    _vtab("vtab/resisc45", 6300, 45, 0.022, _NO_LICENCE),
    _vtab("vtab/smallnorb_label_azimuth", 12150, 18, 0.056, "research only"),
    _vtab("vtab/smallnorb_label_elevation", 12150, 9, 0.111, "research only"),
    _vtab("vtab/svhn", 26032, 10, 0.118, "not commercial", "test_32x32.mat"),
    _vtab("sun397", 108754, 397, 0.005, "research only", "SUN397/ClassName.txt, SUN397/a/abbey/*.jpg …"),
    _retrieval("mscoco_captions", _CAPTIONS.format("coco", "json", "coco"), 5000, "captions CC BY 4.0; images Flickr's terms"),
    _retrieval("flickr8k", _CAPTIONS.format("flickr8k", "txt", "flickr8k"), 1000, "research, not commercial"),
    _retrieval("flickr30k", _CAPTIONS.format("flickr30k", "txt", "flickr30k"), 1000, "research, not commercial"),
    DatasetEntry(
        "sugar_crepe", "sugar_crepe", "pairs", f"{{{','.join(SPLITS)}}}.json and COCO's val2017/*.jpg",
        {"layout": "sugar_crepe"}, 1560, None, 0.5, "MIT; images as COCO's",
    ),
]  # fmt: skip
_KINDS = {"zeroshot": "label", "retrieval": "captions", "pairs": "pairs"}
_BY_NAME = {listed.name: listed for listed in DATASETS}


def names() -> list[str]:
    """What `tasks` takes: sets, `SET:probe`, and the groups."""
    return [*_BY_NAME, *dict.fromkeys(listed.group for listed in DATASETS)]


def tasks(name: str, root: Path) -> dict[str, TaskConfig]:
    """The tasks that a name stands for, their files below `root`; none where it is no name of ours."""
    base, _, other = name.partition(":")
    entries = [listed for listed in DATASETS if base in (listed.name, listed.group)]
    if other not in ("", "probe"):
        return {}
    if other:
        entries = [listed for listed in entries if listed.task == "zeroshot"]
    return {
        listed.name + (":probe" if other else ""): task_of(listed, root, other or listed.task) for listed in entries
    }


def task_of(listed: DatasetEntry, root: Path, task: str) -> TaskConfig:
    """The config of a set's task, in the layout that is there."""
    # The Hub's copies are called wds_…, and are as good under that name.
    places = [root / listed.name, root / f"wds_{listed.name.replace('/', '-')}"]
    as_wds = next((p for p in places if (p / "test" / "nshards.txt").is_file()), None)
    options: dict[str, Any] = {"task": task, "root": str(as_wds or places[0]), "benchmark_name": listed.name}
    if as_wds is None:
        options |= listed.options
        if listed.options.get("layout") == "karpathy":
            options |= _karpathy(places[0], listed.name)
    if task == "zeroshot":
        options["classes"] = listed.classes
    if task == "probe":
        options.pop("classes", None)
    # Its authors call the scored part val; the copies in shards call it test.
    if listed.name == "imagenet1k" and as_wds is None:
        options["split"] = "val"
    return TASKS.get(task).config.model_validate(options)


def _karpathy(place: Path, name: str) -> dict[str, str]:
    short = {"mscoco_captions": "coco"}.get(name, name)
    # clip-benchmark's own files first: they are what its published numbers were made of.
    candidates = [f"{short}_test_karpathy.json", f"{short}_test_karpathy.txt", f"dataset_{short}.json"]
    annotations_file = next((place / c for c in candidates if (place / c).is_file()), place / candidates[0])
    images = next((place / f for f in ("val2014", "images", "Images") if (place / f).is_dir()), place)
    return {"annotations": str(annotations_file), "root": str(images)}


class Presence(NamedTuple):
    """`state`: absent, intact, odd (there, with what is odd about it)."""

    state: str
    note: str


def check_presence(listed: DatasetEntry, root: Path) -> Presence:
    """Is it there, and whole? Files are counted and their sizes read, images are not decoded."""
    config = task_of(listed, root, listed.task)
    assert isinstance(config, SetTaskConfig)
    if not Path(config.root).exists():
        return Presence("absent", listed.files)
    try:
        source = open_set(config, _KINDS[listed.task])
        source.check()
        return _presence_of(listed, source)
    except SparoError as error:
        return Presence("odd", str(error))


def oddity(name: str, task: TaskConfig) -> str:
    """What tells a task's data from the listed set whose name it has (`benchmark_name`, else its own); empty where nothing does."""
    if not isinstance(task, SetTaskConfig):
        return ""
    listed = _BY_NAME.get(task.benchmark_name or name.partition(":")[0])
    if listed is None or task.task not in (listed.task, "probe"):
        return ""
    # Of the whole set: `limit` is said with the score already, and is no other data.
    presence = _presence_of(listed, open_set(task.model_copy(update={"limit": None}), _KINDS[listed.task]))
    return presence.note if presence.state == "odd" else ""


def _presence_of(listed: DatasetEntry, source: EvalSet) -> Presence:
    notes = []
    if isinstance(source, SugarCrepeSet):
        notes.append(source.version)
        # The data that the paper was scored on, before its authors took one pair back (commit 546eb51).
        if source.version == "7,512 pairs" and len(source) == 1561:
            return Presence("intact", notes[0])
        if source.version == "not published data":
            return Presence("odd", "the JSON files are not the published ones (SHA-256)")
    if len(source) != listed.n:
        return Presence("odd", f"{len(source):,} images, {listed.n:,} expected")
    if listed.task == "zeroshot":
        num_names = len(source.classnames())
        if listed.classes is not None and num_names != listed.classes:
            return Presence("odd", f"{num_names} class names, {listed.classes} expected")
    return Presence("intact", ", ".join([*notes, f"{len(source):,} images"]))
