"""Which parameters of a tower are trained: open_clip's locks, and the recipe's `freeze`."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from .clip_config import Freeze

_STEM = ("conv1", "class_embedding", "positional_embedding", "token_embedding", "ln_pre")
_BEHIND = ("norm", "fc_norm")  # of timm's trunks, in which everything else that is no block is before the blocks


def freeze(tower: nn.Module, blocks: int, how: Freeze) -> None:
    """Take parameters out of training: of the whole tower, of its blocks and what is before them, or of the first so many blocks."""
    if how is True:
        tower.requires_grad_(False)
    elif how is not False:
        # "blocks" stands for all of them, so that recipes need not count.
        count = blocks if how == "blocks" else int(how)
        for name, p in tower.named_parameters():
            # Only ever taken out: what both towers share may be frozen by the other one.
            if layer_of(name, blocks) <= count:
                p.requires_grad_(False)


def layer_of(name: str, blocks: int) -> int:
    """Of a tower's parameter: 0 before its blocks, n + 1 in block n, one more behind them (norm, read-out, projection)."""
    first, _, rest = name.partition(".")
    if first == "transformer":
        return 1 + int(rest.split(".")[1])
    if first == "trunk":
        part, _, rest = rest.partition(".")
        return 1 + int(rest.split(".")[0]) if part == "blocks" else blocks + 1 if part in _BEHIND else 0
    return 0 if first in _STEM else blocks + 1


def lock(tower: nn.Module, groups: Sequence[Sequence[nn.Module | nn.Parameter]], unlocked: int) -> None:
    """open_clip's: all but the last groups."""
    tower.requires_grad_(False)
    for group in groups[max(0, len(groups) - unlocked) :]:
        for part in group:
            part.requires_grad_(True)
