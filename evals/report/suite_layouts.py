"""Suites of sets and their tables: DataComp, compositional sets, and the columns that reviewers of papers on compositionality ask for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sparo_train.core.errors import ConfigError, did_you_mean

from .grid import Column

_VTAB = (
    "caltech101 cifar100 clevr_count_all clevr_closest_object_distance diabetic_retinopathy dmlab dsprites_label_orientation "
    "dsprites_label_x_position dtd eurosat flowers kitti_closest_vehicle_distance pcam pets resisc45 smallnorb_label_azimuth "
    "smallnorb_label_elevation svhn"
)
VTAB = (*(f"vtab/{name}" for name in _VTAB.split()), "sun397")
_SUGAR_CREPE = [Column("SugarCrepe", "", "sugar_crepe", "macro")]
_PLUS = [Column("SugarCrepe++", label, "sugar_crepe_pp", metric) for label, metric in (("ITT", "itt"), ("TOT", "tot"))]
_ARO = [Column("ARO", "VG-R", "aro/vg_relation", "acc"), Column("ARO", "VG-A", "aro/vg_attribution", "acc")]
_ORDER = [
    Column("ARO", "COCO order", "aro/coco_order", "acc"),
    Column("ARO", "Flickr order", "aro/flickr30k_order", "acc"),
]
_WINOGROUND = [Column("Winoground", name, "winoground", name) for name in ("text", "image", "group")]
_MATCH = [Column("Winoground", "group match", "winoground", "group_match")]
_MATCHING = [
    *(
        Column(name, label, task, metric)
        for name, task in (("ColorSwap", "colorswap"), ("BiVLC", "bivlc"), ("EqBen", "eqben"))
        for label, metric in (("group", "group"), ("group match", "group_match"))
    ),
    Column("MMVP-VLM", "image", "mmvp_vlm", "image"),
    Column("COLA", "image", "cola", "image"),
]
_NEGATION = [
    Column("NegBench", "COCO", "negbench/coco_mcq", "acc"),
    Column("NegBench", "VOC", "negbench/voc2007_mcq", "acc"),
    Column("NegBench", "T2I R@5", "negbench/coco_retrieval", "image_R@5"),
    Column("NegBench", "negated T2I R@5", "negbench/coco_negated_retrieval", "image_R@5"),
]
_OTHERS = [
    Column("VALSE", "", "valse", "acc"),
    Column("SVO", "", "svo_probes", "acc"),
    *(
        Column("What'sUp", label, f"whatsup/{name}", "acc")
        for label, name in (
            ("A", "a"),
            ("B", "b"),
            ("COCO 1", "coco_one"),
            ("COCO 2", "coco_two"),
            ("VG 1", "vg_one"),
            ("VG 2", "vg_two"),
        )
    ),
    *(
        Column("CREPE", label, f"crepe/{name}", "acc")
        for label, name in (
            ("productivity", "productivity"),
            ("atom", "systematicity_atom"),
            ("compound", "systematicity_comp"),
        )
    ),
]
_RETRIEVAL = [
    Column(group, label, task, metric)
    for group, task in (("COCO", "mscoco_captions"), ("Flickr30k", "flickr30k"))
    for label, metric in (("I2T R@1", "text_R@1"), ("T2I R@1", "image_R@1"))
]
# DataComp's tasks with the metric that its averages use (Gadre et al. 2023, tasklist.yml and aggregate_scores.py).
_SHIFTS = [
    (name, "acc1") for name in ["imagenet_sketch", "imagenetv2", "imagenet-a", "imagenet-o", "imagenet-r", "objectnet"]
]
_DATACOMP_VTAB = [
    *((f"vtab/{name}", "mean_per_class_recall") for name in ("caltech101", "flowers", "pets")),
    *(
        (f"vtab/{name}", "acc1")
        for name in [
            "cifar100",
            "clevr_count_all",
            "clevr_closest_object_distance",
            "dtd",
            "eurosat",
            "kitti_closest_vehicle_distance",
            "pcam",
            "resisc45",
            "svhn",
        ]
    ),
    ("sun397", "acc1"),
]
_DATACOMP_RETRIEVAL = [
    ("flickr30k", "mean_R@1"),
    ("mscoco_captions", "mean_R@1"),
    ("misc/winogavil", "jaccard/10-12"),
]
_DATACOMP_OTHERS = [
    ("fgvc_aircraft", "mean_per_class_recall"),
    *(
        (name, "acc1")
        for name in ["cars", "cifar10", "country211", "food101", "gtsrb", "mnist", "renderedsst2", "stl10", "voc2007"]
    ),
    ("wilds/iwildcam", "f1_macro"),
    ("wilds/camelyon17", "acc1"),
    ("wilds/fmow", "acc1_worst_group"),
    ("fairness/dollar_street", "acc5_worst_group"),
    ("fairness/geode", "acc1_worst_group"),
]
DATACOMP = [("imagenet1k", "acc1"), *_SHIFTS, *_DATACOMP_VTAB, *_DATACOMP_RETRIEVAL, *_DATACOMP_OTHERS]


def _mean(label: str, members: Sequence[tuple[str, str]]) -> Column:
    return Column("DataComp", f"{label} ({len(members)})", f"mean of {label}", None, tuple(members))


SUITE_LAYOUTS = {
    "datacomp": [
        Column("DataComp", "ImageNet", "imagenet1k", "acc1"),
        _mean("shifts", _SHIFTS),
        _mean("VTAB", _DATACOMP_VTAB),
        _mean("retrieval", _DATACOMP_RETRIEVAL),
        _mean("average", DATACOMP),
    ],
    "compositional": [*_SUGAR_CREPE, *_PLUS, *_ARO, *_ORDER, *_WINOGROUND, *_MATCH, *_MATCHING, *_NEGATION, *_OTHERS],
    "reviewer": [
        Column("ImageNet", "zero-shot", "imagenet1k", "acc1"),
        Column("VTAB", f"mean of {len(VTAB)}", "vtab", "acc1", tuple((name, "acc1") for name in VTAB)),
        *_RETRIEVAL,
        *_ARO,
        *_SUGAR_CREPE,
        *_PLUS,
        *_WINOGROUND,
    ],
}
# Tasks that a suite scores, but that no column shows: DataComp's averages have no FairFace and no UTKFace.
_MORE_TASKS = {"datacomp": ("fairness/fairface", "fairness/utkface")}
SUITE_TITLES = {
    "datacomp": "DataComp's 38 tasks",
    "compositional": "Compositional sets, authors' scores",
    "reviewer": "Recognition, retrieval and compositionality",
}


class SuiteTask(NamedTuple):
    """A task of a suite, and the metric that a column of the suite shows; None: several do, or the task's headline."""

    name: str
    metric: str | None


def suite_tasks(suite: str) -> list[SuiteTask]:
    """Return the tasks of a suite, in the order of its columns. Raises `ConfigError` with a suggestion."""
    if suite not in SUITE_LAYOUTS:
        raise ConfigError(f"--suite {suite}: {did_you_mean(suite, SUITE_LAYOUTS)}")
    metrics: dict[str, set[str | None]] = {}
    for column in SUITE_LAYOUTS[suite]:
        for task, metric in column.members or ((column.task, column.metric),):
            metrics.setdefault(task, set()).add(metric)
    tasks = [SuiteTask(name, found.pop() if len(found) == 1 else None) for name, found in metrics.items()]
    return [*tasks, *(SuiteTask(name, None) for name in _MORE_TASKS.get(suite, ()))]
