"""What is scored: every task has a config of its own, told apart by `task`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Discriminator, Field

from ..core.config import Frozen

Layout = Literal["wds", "folder", "imagenet", "imagenetv2", "objectnet", "karpathy", "sugar_crepe", "torchvision"]


class SetTaskConfig(Frozen):
    """One data set scored by one task.

    `root`: a folder in clip-benchmark's wds layout, or in the published layout that `layout` names:
    `folder` (one folder per class, named like it), `imagenet` (one folder per WordNet id; A and R are scored over the classes
    that have one), `imagenetv2` (numbered folders), `objectnet`, `karpathy` (images, with `annotations`), `sugar_crepe`,
    `torchvision` (the folder that it calls `root`, of a set that `known_as` names).
    `known_as`: clip-benchmark's name of the set, whose class names and templates are used where the folder has none.
    `limit`: so many samples, evenly spaced.  `workers`: processes that decode images.
    """

    root: str
    layout: Layout = "wds"
    split: str = "test"
    known_as: str | None = None
    limit: int | None = Field(default=None, gt=0)
    workers: int = Field(default=2, ge=0)


class ZeroshotTaskConfig(SetTaskConfig):
    """Classification by prompts; multilabel sets (`.npy` members) get mean average precision.

    `classes`: how many there must be.  `border_crop`: of ObjectNet, its red border of two pixels (wise-ft crops it,
    clip-benchmark does not).  `headline`: DataComp has mean_per_class_recall for some sets, the SPARO paper says accuracy.
    """

    task: Literal["zeroshot"]
    classes: int | None = Field(default=None, gt=1)
    border_crop: bool = True
    headline: Literal["acc1", "mean_per_class_recall"] = "acc1"


class RetrievalTaskConfig(SetTaskConfig):
    """Images to captions and back.  `annotations`: for layout karpathy, the file that says which captions an image has."""

    task: Literal["retrieval"]
    annotations: str | None = None
    k: tuple[int, ...] = Field(default=(1, 5, 10), min_length=1)


class PairsTaskConfig(SetTaskConfig):
    """True against false captions; ties lose.  `average`: the headline over kinds (Table B.1 has macro, SugarCrepe's authors micro)."""

    task: Literal["pairs"]
    average: Literal["macro", "micro"] = "macro"


class ProbeTaskConfig(SetTaskConfig):
    """clip-benchmark's linear probe on the whole encoding: AdamW, a cosine per step, the weight decay searched on held-out data.

    `train_split`: beside `split`.  `val_split` or `val_proportion` (drawn by `seed`): what the weight decay is searched on; neither:
    `weight_decay` is used. The SPARO paper gives lr and epochs, and neither batch size nor held-out share.
    `fewshot_k`: images per class, -1: all.
    """

    task: Literal["probe"]
    train_split: str = "train"
    val_split: str | None = None
    val_proportion: float = Field(default=0.2, ge=0, lt=1)
    weight_decay: float = Field(default=0.0, ge=0)
    fewshot_k: int = Field(default=-1, ge=-1)
    lr: float = Field(default=0.1, gt=0)
    epochs: int = Field(default=10, ge=1)
    batch_size: int = Field(default=64, gt=0)
    normalize: bool = True
    seed: int = 0


class LabelledTaskConfig(Frozen):
    """Labelled images: shards with `.cls` members (a folder, a glob, a URL) or a folder of class folders.

    `resize`: of the shortest side before the middle is cut out; default: the encoder's own (DINO's: 256 for 224 pixels).
    """

    train: str
    test: str
    resize: int | None = Field(default=None, gt=0)
    limit: int | None = Field(default=None, gt=0)
    workers: int = Field(default=2, ge=0)


class KnnTaskConfig(LabelledTaskConfig):
    """DINO's weighted k-NN; the headline is k = 20 where it is among them. Encodings as they are, normalised as a whole."""

    task: Literal["knn"]
    k: tuple[int, ...] = Field(default=(10, 20, 100, 200), min_length=1)
    temperature: float = Field(default=0.07, gt=0)


class LinearTaskConfig(LabelledTaskConfig):
    """DINO's linear probe on CLS of the last blocks (with SPARO: its encoding for the last one's).

    `batch_size`: of all ranks; the rate is `lr * batch_size / 256`. `augment`: false trains on features computed once,
    which is another protocol. `avgpool`: also the mean patch of the last block (official for ViT-B, with n_last_blocks=1).
    """

    task: Literal["linear"]
    n_last_blocks: int = Field(default=4, ge=1)
    avgpool: bool = False
    epochs: int = Field(default=100, ge=1)
    lr: float = Field(default=0.001, gt=0)
    batch_size: int = Field(default=1024, gt=0)
    augment: bool = True
    classes: int | None = Field(default=None, gt=1)
    seed: int = 0


EvalTaskConfig = Annotated[
    ZeroshotTaskConfig | RetrievalTaskConfig | PairsTaskConfig | ProbeTaskConfig | KnnTaskConfig | LinearTaskConfig,
    Discriminator("task"),
]
