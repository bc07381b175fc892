"""Which metric of which task stands in which column of the SPARO paper's tables."""

from __future__ import annotations

from typing import NamedTuple

from sparo_train.train.run_config import RunConfig


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
    return [
        Column(g, label, "sugar_crepe", metric) for g, columns in splits.items() for label, metric in columns.items()
    ]


_RECOGNITION = [
    *_imagenets(),
    Column("", "ObjectNet", "objectnet", "acc1"),
    Column("", "SugarCrepe", "sugar_crepe", "macro"),
]
LAYOUTS = {
    "1": _RECOGNITION,
    "2": _retrievals(),
    "3": [
        Column("ImageNet", "CLIP probe", "imagenet1k:probe", "acc1"),
        Column("ImageNet", "20-NN", "knn", "acc1_k20"),
        Column("ImageNet", "DINO linear", "linear", "acc1"),
    ],
    "6": [Column("ImageNet", "zero-shot", "imagenet1k", "acc1")],
    "B.1": _sugar_crepe(),
    "B.2": _RECOGNITION,
}
TITLES = {
    "1": "Zero-shot recognition, robustness, compositionality (layout of Table 1)",
    "2": "Zero-shot retrieval, hit rate at 5 (layout of Table 2)",
    "3": "ImageNet linear probes and nearest neighbours (layout of Table 3)",
    "6": "Bottleneck and alignment of heads (layout of Table 6)",
    "B.1": "SugarCrepe (layout of Table B.1)",
    "B.2": "Other bottlenecks (layout of Table B.2)",
}
# Table 6's columns of words, before the score.
HEADS = ("Replace last block", "Cross-attention", "Slot-wise LayerNorm", "Slot-wise projection", "Params")
UNKNOWN_READOUT = ("–",) * len(HEADS)  # of a checkpoint whose recipe is not at hand
_NONE = "N/A"


def readout_cells(config: RunConfig, parameters: int) -> tuple[str, ...]:
    """What stands below `HEADS` for a recipe that trains so many parameters; N/A where it has no read-out, or one without such a key."""
    # Any method may stand in a table, also one whose model has no read-out.
    readout = getattr(getattr(config.objective, "model", None), "readout", None)
    placement = getattr(readout, "placement", None)
    attention = getattr(readout, "cross_attention", None)
    return (
        _NONE if placement is None or attention is None else _answer(placement.replaced > 0),
        _NONE if attention is None else attention.replace("_", "-").capitalize(),
        *(_answer(getattr(readout, key, None)) for key in ("slot_layer_norm", "slot_projection")),
        f"{parameters / 1e6:.1f}M",
    )


def _answer(value: bool | None) -> str:
    return _NONE if value is None else "Yes" if value else "No"
