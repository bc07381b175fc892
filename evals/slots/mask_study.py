"""Masks trained on pairs of captions and what they do elsewhere: the protocol of the SPARO paper's Table 5."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..encoders.selection import Selection, SelectionData
from .eval_inputs import Classes, Pairs, halves
from .masks import Factors, MaskTraining, TrainedMask, accuracy, factors, train_mask

Granularity = Literal["unit", "dimension"]


class MaskRow(NamedTuple):
    """A row of Table 5, over several seeds of the training.

    parts: (how many, numbers in each).  shape: of an encoding.  pairs: the standard score without and with each seed's mask;
    `held_out`: on pairs that no mask saw.  tasks: by name, accuracy without and with each seed's mask.
    """

    label: str
    parts: tuple[int, int]
    shape: tuple[int, ...]
    held_out: bool
    pairs: tuple[float, list[float]]
    tasks: dict[str, tuple[float, list[float]]]


def relative_change(pairs: tuple[float, float], task: tuple[float, float]) -> float:
    """A task's relative change over that of the pairs, as Table 5 has it; NaN where the mask changed nothing there."""
    # Over nothing gained it would be any number: the paper's table has no such row, ours says so.
    gained = (pairs[1] - pairs[0]) / pairs[0] if pairs[0] else 0.0
    return float("nan") if gained == 0 or task[0] == 0 else (task[1] - task[0]) / task[0] / gained


def mask_row(
    label: str,
    pairs: Pairs,
    tasks: Mapping[str, Classes],
    per: Granularity,
    how: Sequence[MaskTraining],
    held_out: bool = False,
) -> tuple[MaskRow, list[TrainedMask]]:
    """Train a mask per element of `how`, and score each on tasks, whose classifiers it is folded into."""
    train_factors = eval_factors = mask_factors(pairs, per)
    if held_out:
        # One half for all seeds of the training, whose spread is then of the training alone.
        half = halves(label, pairs, how[0].seed)
        train_factors, eval_factors = train_factors.only(half), train_factors.only(~half)
    trained_masks = [train_mask(train_factors, one) for one in how]
    width = pairs.units.encoder.width
    ones = torch.ones(train_factors.d.shape[1])
    scores = {name: _folded(task, [ones, *(one.mask for one in trained_masks)], width) for name, task in tasks.items()}
    number = len(ones)
    shape = (width,) if pairs.units.kind == "parts" else (pairs.units.number, width // pairs.units.number)
    row = MaskRow(
        label,
        (number, width // number),
        shape,
        held_out,
        (accuracy(eval_factors, ones), [accuracy(eval_factors, one.mask) for one in trained_masks]),
        {name: (values[0], values[1:]) for name, values in scores.items()},
    )
    return row, trained_masks


def mask_factors(pairs: Pairs, per: Granularity) -> Factors:
    """What a mask's training needs of pairs of captions."""
    u = pairs.units
    image = u.images(pairs.features.rows(pairs.owner))
    names = list(dict.fromkeys(pair.kind for pair in pairs.caption_pairs))
    # Micro: one kind, whose mean is the mean over pairs.
    kinds = torch.tensor([names.index(pair.kind) if pairs.average == "macro" else 0 for pair in pairs.caption_pairs])
    return factors(image, u.texts(pairs.true), u.texts(pairs.false), kinds, per)


def _folded(task: Classes, masks: Sequence[Tensor], width: int) -> list[float]:
    """Accuracy behind each mask: argmax_c <m*y, w_c> = argmax_c <y, m*w_c>, so images are not encoded again."""
    weights = task.weights.flatten(1)
    folded = [weights * mask.repeat_interleave(width // len(mask)) for mask in masks]
    right, first = [0] * len(masks), 0
    for rows in task.features.blocks():
        truth = task.labels[first : first + len(rows)]
        first += len(rows)
        for i, each in enumerate(folded):
            right[i] += int(((rows.float() @ each.T).argmax(-1) == truth).sum())
    return [count / max(1, len(task.labels)) for count in right]


def mask_selection(
    name: str, pairs: Pairs, trained: TrainedMask, per: Granularity, how: MaskTraining, held_out: bool
) -> Selection:
    """A mask as a file that `--slots` takes; `selected_units` are the units that it lets through by more than half on average."""
    units = pairs.units
    by_unit = trained.mask.view(units.number, -1).mean(1)
    # A file must choose something; where all are half closed it is the most open one.
    selected_units = (by_unit > 0.5).nonzero().flatten().tolist() or [int(by_unit.argmax())]
    order = by_unit.argsort(descending=True, stable=True).tolist()
    share = "half" if held_out else "all"
    return Selection(
        checkpoint=units.encoder.weights,
        label=units.encoder.label,
        units=units.kind,
        count=units.number,
        method=f"mask per {per}, clamp {how.clamp}, epoch {trained.epoch}",
        chosen=tuple(selected_units),
        order=tuple(order),
        scores=tuple(by_unit.tolist()),
        mask=tuple(trained.mask.tolist()),
        made_on=SelectionData(task=name, data=pairs.data, n=trained.n, share=share, seed=how.seed),
    )
