"""Configuration keys that tasks share: the images that a task is scored on, and the columns of a table of images."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, model_validator

from sparo_train.core.config import Frozen, field
from sparo_train.core.errors import did_you_mean
from sparo_train.core.registries import LAYOUTS
from sparo_train.data.servers.remote import refuse_credentials


class TableColumns(Frozen):
    """Columns of images, captions and labels, as texts in which `{column}` stands for a row's value."""

    file: str = field(
        ...,
        "Path of the table, relative to the key `root`. Formats: .csv, .tsv, .json (a list or a mapping) and .jsonl. "
        "Questions may also be in .parquet with embedded images, or in files that a glob matches. If there are "
        "several files, the extra column file_stem contains the name of each row's file, without its extension.",
        examples=["table.csv"],
    )
    images: tuple[str, ...] = field(
        ("{image}",),
        "Paths of a row's images below `root`. {url:name} stands for the last part of the path or URL in column `url`.",
        min_length=1,
        strict=False,
        examples=[["images/{image_0}.png"]],
    )
    captions: tuple[str, ...] = field(
        (),
        "Captions of a row. The first caption is true of the first image. If a cell contains a list, each entry of the list is a caption.",
        strict=False,
        examples=[["{caption}"]],
    )
    false_captions: tuple[str, ...] = field(
        (), "Captions that are not true of the image, for the task `pairs`.", strict=False, examples=[["{wrong}"]]
    )
    label: str | None = field(
        None, "Column, in braces, with the class, given as a number from 0 or as a name.", examples=["{label}"]
    )
    labels: str | None = field(
        None,
        "For task probe: column, in braces, with the names of all classes of an image, separated by `;` or `|`. An empty "
        "cell: none of the classes.",
        examples=["{findings}"],
    )
    target: str | None = field(None, "Column, in braces, with a number, for the task `regression`.", examples=["{age}"])
    mask: str | None = field(
        None,
        "For task linear_segmentation: path (below root) of each row's label image, a PNG with the class number of each pixel.",
        examples=["{mask}"],
    )
    answer: str | None = field(
        None,
        "For `task: choice`: column, in braces, with the index (from 0) of the correct caption. In rows with a single caption, "
        "it is the index of the correct image. Default: the first is correct.",
        examples=["{correct_answer}"],
    )
    box: str | None = field(
        None,
        "For questions: region of the image that is encoded, as left, top, width and height in pixels.",
        examples=["{x},{y},{width},{height}"],
    )
    folders: tuple[str, ...] = field(
        (),
        "Folders below root in which images are looked for, in this order.",
        strict=False,
        examples=[["VG_100K", "VG_100K_2"]],
    )
    skip_missing: bool = field(
        False, "For questions: skip questions whose images do not exist, and report their number. Default: an error."
    )
    rows: int = field(1, "For questions: number of consecutive rows whose images and captions form one question.", gt=0)
    kind: str = field(
        "",
        "Text that gives the kind of a row, such as {relation} for the value in the column `relation`. Scores are also reported for each kind.",
        examples=["{tag}"],
    )
    split: str | None = field(
        None,
        "Column, without braces, with the split of a row (train, test). Default: all rows are scored.",
        examples=["split"],
    )
    test_share: float | None = field(
        None,
        "If columns.split is not set: fraction of the groups that forms the `test` split; all other groups form the "
        "`train` split. If columns.group is not set, each image is a group.",
        gt=0,
        lt=1,
        examples=[0.2],
    )
    group: str | None = field(
        None,
        "Column, without braces, with the group of a row, such as the patient or the slide. In knn, images of a group do not vote for each other. For "
        "questions: the metric all_of_group counts a group as right only if all its questions are right.",
        examples=["patient"],
    )
    key: str | None = field(
        None, "Column, without braces, with a name for each row. Default: the row's number.", examples=["id"]
    )

    @model_validator(mode="after")
    def _check_lengths(self) -> TableColumns:
        if self.false_captions and len(self.false_captions) != len(self.captions):
            raise ValueError(
                f"columns.false_captions: expected one false caption per caption ({len(self.captions)}), got {len(self.false_captions)}"
            )
        if self.split is not None and self.test_share is not None:
            raise ValueError("columns.test_share: cannot be combined with columns.split. Remove one of them.")
        return self

    @model_validator(mode="after")
    def _check_braces(self) -> TableColumns:
        """Refuse a text that would be the same in all rows, so that all images had one class, and a column's name with braces."""
        texts = {name: getattr(self, name) for name in ("label", "labels", "target", "mask", "answer", "box")}
        if self.captions and self.answer is None:  # with an answer, captions may be fixed prompts
            texts |= {"captions": "".join(self.captions), "false_captions": "".join(self.false_captions)}
        for name, text in texts.items():
            if text and "{" not in text:
                raise ValueError(
                    f"columns.{name}: expected a text with the name of a column in braces, got {text!r}. For the column `{text}`, write {{{text}}}."
                )
        for name in ("split", "group", "key"):
            text = (getattr(self, name) or "").strip()
            if text[:1] == "{" and text[-1:] == "}":
                raise ValueError(
                    f"columns.{name}: expected the name of a column without braces, got {text!r}. Write {text[1:-1]}."
                )
        return self


class TaskConfig(Frozen):
    """Keys of every entry of `eval.tasks`, which names the entry of `sparo.tasks` that scores it."""

    task: Any = field(..., "Kind of the task: an entry of sparo.tasks.")  # each entry has a Literal with one name

    @model_validator(mode="after")
    def _refuse_credentials(self) -> TaskConfig:
        refuse_credentials(*vars(self).values())
        return self


def _validate_layout(layout: str | None) -> str | None:
    if layout is not None and layout not in LAYOUTS.names():
        raise ValueError(did_you_mean(layout, LAYOUTS.names()))
    return layout


class SetTaskConfig(TaskConfig):
    """One data set scored by one task.

    `root` is a folder in clip-benchmark's wds layout, or in the published layout that `layout` names: `folder` (one
    folder per class, with its name), `imagenet` (one folder per WordNet id; A and R are scored over the classes that
    have one), `imagenetv2` (numbered folders), `objectnet`, `karpathy` (images, with `annotations`), `sugar_crepe`,
    `torchvision` (the folder that it calls `root`, of the set named by `benchmark_name`), `table` (any images, with a
    table that `columns` describes).
    """

    root: str = field(..., "Folder of the data set.", examples=["data/emoji/vendor"])
    layout: Annotated[str, AfterValidator(_validate_layout)] = field(
        "wds", "How the set is stored: an entry of sparo.layouts."
    )
    columns: TableColumns | None = field(None, "For layout=table: the file and its columns.")
    split: str = field("test", "Split that is scored.")
    benchmark_name: str | None = field(
        None,
        "Name of the set in clip-benchmark. If the folder lacks class names or templates, they are taken from that set.",
        examples=["cars"],
    )
    published: bool | None = field(
        None,
        "How images are decoded. true: as open_clip and DINO's code do (EXIF orientation is ignored, and transparent pixels "
        "keep their colours), for scores that are comparable with published ones. false: as in training. Default: false for "
        "folders, tables and shards of your own, and true for the data sets of `sparo eval --list` and sets with benchmark_name.",
        examples=[True],
    )
    limit: int | None = field(None, "Use only this many samples, evenly spaced.", gt=0, examples=[1000])
    workers: int = field(2, "Processes that decode images.", ge=0, le=256)


class MetadataTaskConfig(SetTaskConfig):
    """A data set whose images have numbers besides their class, such as the region or the hospital."""

    metadata: tuple[str, ...] = field(
        (),
        "Names of the values in each image's `.npy` member, in order. Without names, the values are the "
        "labels of a multilabel set.",
        strict=False,
        examples=[["region", "year", "y"]],
    )


class LabelledTaskConfig(TaskConfig):
    """Labelled images: shards with `.cls` members (a folder, a glob, a URL) or a folder of class folders; or sets of a `layout`."""

    # True if the task itself keeps images of a group from each other.
    groups_may_overlap: ClassVar[bool] = False

    train: str = field(..., "Images to learn labels from.", examples=["data/fashion_mnist/train"])
    test: str = field(..., "Images that are scored.", examples=["data/fashion_mnist/test"])
    layout: Annotated[str | None, AfterValidator(_validate_layout)] = field(
        None,
        "Layout of the train and test sets, an entry of sparo.layouts. Training images come from the path of the "
        "key `train` (its split train), test images from the path of the key `test` (its split test).",
        examples=["wds"],
    )
    columns: TableColumns | None = field(None, "For layout=table: the file and its columns.")
    published: bool | None = field(
        None,
        "How images are decoded. true: as open_clip and DINO's code do (EXIF orientation is ignored, and transparent pixels "
        "keep their colours), for scores that are comparable with published ones. false: as in training. Default: false for "
        "folders, tables and shards of your own, and true for the data sets of `sparo eval --list` and sets with benchmark_name.",
        examples=[True],
    )
    resize: int | None = field(
        None,
        "Length of an image's shorter side before the center crop, in pixels. Default: the encoder's value.",
        gt=0,
        examples=[256],
    )
    limit: int | None = field(
        None,
        "Use only this many samples, evenly spaced. If the task has several data sets: this many of each.",
        gt=0,
        examples=[1000],
    )
    workers: int = field(2, "Processes that decode images.", ge=0, le=256)
