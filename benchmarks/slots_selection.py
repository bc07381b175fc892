"""Scores and selection of slots: zero-shot score of each slot, compared with a masked pass per slot, greedy selection, and masks.

    python benchmarks/slots_selection.py [--quick] [--json FILE]

64 slots of 64 numbers, 1,000 classes, 2,000 images and 7,511 caption pairs; encodings are random, with a weak signal of the
truth. Both ways to score slots are compared before times are reported. Rows with a time in the second column compare with
the time that we aimed at.
"""

from __future__ import annotations

from typing import Any

import torch
from common import interleave, parser, report, row, seconds
from torch import Tensor
from torch.nn import functional as F

from evals.slots import selection_methods as choosing
from evals.slots.margins import class_margins, each_unit, pair_margins
from evals.slots.mask_study import factors, train_mask

SLOTS, WIDTH, CLASSES, IMAGES, PAIRS = 64, 64, 1000, 2000, 7511


def unit(count: int) -> Tensor:
    """Return (count, L, V) slots of one norm."""
    return F.normalize(torch.randn(count, SLOTS, WIDTH), dim=-1) * SLOTS**-0.5


def zero_shot_rows(rounds: int) -> list[dict[str, Any]]:
    weights, labels = unit(CLASSES), torch.randint(0, CLASSES, (IMAGES,))
    image = F.normalize(unit(IMAGES) + 0.4 * weights[labels], dim=-1) * SLOTS**-0.5
    flat, columns = image.flatten(1), weights.flatten(1).T.contiguous()
    found: dict[str, Tensor] = {}

    def ours() -> None:
        found["ours"] = each_unit(image.split(1024), weights, labels).single_unit

    def theirs() -> None:
        answers = []
        for slot in range(SLOTS):
            mask = torch.zeros(SLOTS, 1)
            mask[slot] = 1
            answers.append(((flat.unflatten(1, (SLOTS, WIDTH)) * mask).flatten(1) @ columns).argmax(1) == labels)
        found["theirs"] = torch.stack(answers, dim=1)

    pairs = interleave(lambda: seconds(ours), lambda: seconds(theirs), rounds)
    assert torch.equal(found["ours"], found["theirs"])
    name = f"zero-shot of each of {SLOTS} slots, {IMAGES:,} images, {CLASSES:,} classes"
    margins = class_margins(image.split(1024), weights, labels, [""] * IMAGES)
    greedy = f"greedy over {SLOTS} slots, zero-shot, 50 wrong classes kept"
    return [
        row(name, pairs, 10, "s", False),
        against(greedy, lambda: choosing.forward(margins), 5, rounds),
    ]


def pair_rows(rounds: int) -> list[dict[str, Any]]:
    image, true, false = (unit(PAIRS) for _ in range(3))
    kinds = [str(i % 7) for i in range(PAIRS)]
    margins = pair_margins(image, true, false, kinds, [""] * PAIRS, "macro")
    known = factors(image, true, false, margins.kinds, "unit")
    return [
        against(f"greedy forward over {SLOTS} slots, {PAIRS:,} pairs", lambda: choosing.forward(margins), 5, rounds),
        against(f"greedy backward over {SLOTS} slots, {PAIRS:,} pairs", lambda: choosing.backward(margins), 5, rounds),
        against(f"mask per slot, 100 epochs of {PAIRS:,} pairs", lambda: train_mask(known), 10, rounds),
    ]


def against(name: str, call: Any, bar: float, rounds: int) -> dict[str, Any]:
    """Return a row that compares with an aim in seconds."""
    call()
    return row(f"{name} (bar: {bar:g} s)", [(seconds(call), bar) for _ in range(rounds)], 1, "s", False)


def main() -> None:
    options = parser(__doc__).parse_args()
    torch.manual_seed(0)
    rounds = 2 if options.quick else 7
    report("slots after training", zero_shot_rows(rounds) + pair_rows(rounds), options.json)


if __name__ == "__main__":
    main()
