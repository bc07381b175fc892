"""Which metric of which task stands in which column of the SPARO paper's tables."""

from __future__ import annotations

from typing import NamedTuple


class Column(NamedTuple):
    """`group`: the heading above the label.  metric: None is the task's headline."""

    group: str
    label: str
    task: str
    metric: str | None

    @property
    def heading(self) -> str:
        """Group and label on one line."""
        return f"{self.group} {self.label}".strip()


def _imagenets() -> list[Column]:
    names = {"V1": "imagenet1k", "V2": "imagenetv2", "Sketch": "imagenet_sketch", "A": "imagenet-a", "R": "imagenet-r"}
    return [Column("ImageNet-", label, task, "acc1") for label, task in names.items()]


def _retrievals() -> list[Column]:
    sets = {"COCO": "mscoco_captions", "F8k": "flickr8k", "F30k": "flickr30k"}
    kinds = {"Image R@5": "image_R@5", "Text R@5": "text_R@5"}
    return [Column(group, label, task, metric) for group, metric in kinds.items() for label, task in sets.items()]


def _sugar_crepe() -> list[Column]:
    splits = {
        "Replace": {"Object": "replace_obj", "Attribute": "replace_att", "Relation": "replace_rel"},
        "Swap": {"Object": "swap_obj", "Attribute": "swap_att"},
        "Add": {"Object": "add_obj", "Attribute": "add_att"},
        "": {"Avg": "macro"},
    }
    return [Column(g, label, "sugar_crepe", metric) for g, found in splits.items() for label, metric in found.items()]


LAYOUTS = {
    "1": [
        *_imagenets(),
        Column("", "ObjectNet", "objectnet", "acc1"),
        Column("", "SugarCrepe", "sugar_crepe", "macro"),
    ],
    "2": _retrievals(),
    "3": [
        Column("ImageNet", "CLIP probe", "imagenet1k:probe", "acc1"),
        Column("ImageNet", "20-NN", "knn", "acc1_k20"),
        Column("ImageNet", "DINO linear", "linear", "acc1"),
    ],
    "B.1": _sugar_crepe(),
}
TITLES = {
    "1": "Zero-shot recognition, robustness, compositionality (layout of Table 1)",
    "2": "Zero-shot retrieval, hit rate at 5 (layout of Table 2)",
    "3": "ImageNet linear probes and nearest neighbours (layout of Table 3)",
    "B.1": "SugarCrepe (layout of Table B.1)",
}
