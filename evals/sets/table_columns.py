"""Columns of a table of images: a key of tasks, which `table_set` reads."""

from __future__ import annotations

from pydantic import model_validator

from sparo_train.core.config import Frozen, field


class TableColumns(Frozen):
    """Columns of images, captions and labels, as texts in which `{column}` stands for a row's value."""

    file: str = field(
        ..., "the table, below root: .csv, .tsv, .json (a list, or a mapping by key) or .jsonl", examples=["table.csv"]
    )
    images: tuple[str, ...] = field(
        ("{image}",), "a row's images, below root", min_length=1, strict=False, examples=[["images/{image_0}.png"]]
    )
    captions: tuple[str, ...] = field(
        (), "its captions, the first one true of the first image", strict=False, examples=[["{caption}"]]
    )
    false_captions: tuple[str, ...] = field(
        (), "captions that are not true of it, for task pairs", strict=False, examples=[["{wrong}"]]
    )
    label: str | None = field(None, "the number of its class", examples=["{label}"])
    kind: str = field("", "what kind of row it is: scores are also given by kind", examples=["{tag}"])
    split: str | None = field(
        None, "column that names a row's part (train, test); null: all rows are scored", examples=["split"]
    )
    key: str | None = field(None, "column that names a row; null: its number", examples=["id"])

    @model_validator(mode="after")
    def _check_lengths(self) -> TableColumns:
        if self.false_captions and len(self.false_captions) != len(self.captions):
            raise ValueError(
                f"columns.false_captions: one for each of the {len(self.captions)} captions, got {len(self.false_captions)}"
            )
        return self
