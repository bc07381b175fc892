"""What shapes do not tell: weights that fit a model and mean another function in it are refused by name."""

from __future__ import annotations

from typing import Any, NamedTuple, Self

import torch
from torch import nn

from sparo_train.core.errors import CheckpointError

_ROUNDED = 1e-3  # published values are rounded to three digits and more


class Normalisation(NamedTuple):
    """What pixels in 0..1 are normalised with."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def of(cls, holder: Any) -> Self | None:
        """Of an objective, an encoder (both have tensors) or a recipe's block (numbers); None where it has not one for all."""
        if not (hasattr(holder, "mean") and hasattr(holder, "std")):
            return None
        # As tensors either way: a buffer (3, 1, 1) and a recipe's three numbers are the same thing.
        return cls(*(tuple(torch.as_tensor(value).flatten().tolist()) for value in (holder.mean, holder.std)))


def refuse_other_pixels(origin: str, theirs: Normalisation | None, own: Normalisation | None) -> None:
    """Raise `CheckpointError` where weights were trained on pixels of another normalisation: they would see other colours."""
    if theirs is None or own is None:
        return
    pairs = zip(theirs.mean + theirs.std, own.mean + own.std, strict=True)
    if max(abs(one - other) for one, other in pairs) > _ROUNDED:
        # As they are typed in a recipe: fp32's tail would look like another number.
        mean, std = ([round(v, 6) for v in values] for values in theirs)
        raise CheckpointError(
            f"{origin}: its pixels are normalised otherwise than the run's; set objective.mean={mean} and objective.std={std}"
        )


def refuse_unlike(origin: str, theirs: nn.Module, own: nn.Module) -> None:
    """Raise `CheckpointError` for other heads, or another activation."""
    their_heads, own_heads = _heads(theirs), _heads(own)
    # By name where both have one (both towers of a CLIP); else by the first there is.
    pairs = [(their_heads[n], own_heads[n]) for n in their_heads if n in own_heads] or list(
        zip(their_heads.values(), own_heads.values(), strict=False)
    )[:1]
    if unlike := [pair for pair in pairs if pair[0] != pair[1]]:
        raise CheckpointError(
            f"{origin}: its attention has {unlike[0][0]} heads and the run's {unlike[0][1]}, which shapes do not tell; make them equal"
        )
    # By the class's name: open_clip, transformers and this project each have a class of their own for it.
    quick = [any(type(part).__name__.lower().startswith("quickgelu") for part in m.modules()) for m in (theirs, own)]
    if quick[0] != quick[1]:
        raise CheckpointError(
            f"{origin}: was trained {'with' if quick[0] else 'without'} OpenAI's approximation of GELU; set objective.model.quick_gelu={str(quick[0]).lower()}"
        )


def _heads(model: nn.Module) -> dict[str, int]:
    """Of every attention, by its name in the model."""
    attention_heads = (
        (name.removeprefix("model."), getattr(part, "num_heads", None)) for name, part in model.named_modules()
    )
    return {name: heads for name, heads in attention_heads if isinstance(heads, int)}
