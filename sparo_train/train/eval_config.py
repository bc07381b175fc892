"""What is scored: every task has a config of its own, told apart by `task`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Discriminator, Field

from ..core.config import Frozen


class SetTaskConfig(Frozen):
    """One data set scored by one task. `root` is a folder in clip-benchmark's wds layout (or ours for pairs)."""

    task: Literal["zeroshot", "retrieval", "pairs"]
    root: str


class LabelledTaskConfig(Frozen):
    """Labelled images: shards with `.cls` members (a folder, a glob, a URL) or a folder of class folders.

    `resize`: of the shortest side before the middle is cut out; default: 256 for 224 pixels, and in proportion.
    """

    train: str
    test: str
    resize: int | None = Field(default=None, gt=0)
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


EvalTaskConfig = Annotated[SetTaskConfig | KnnTaskConfig | LinearTaskConfig, Discriminator("task")]
