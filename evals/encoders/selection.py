"""`selection.json`: the selected units of an encoding and how they were selected, and the encoder that keeps only those."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from pydantic import ValidationError, model_validator
from torch import Tensor

from sparo_train.core.config import Frozen, field
from sparo_train.core.errors import ConfigError, DataError
from sparo_train.core.files import parse_json, read_text, write_whole
from sparo_train.models.weight_files.weights import weights_sha256

from .encoder import Encoder, Precision, TextEncoder
from .heads import SelectedHeads, make_heads


class MaskedEncoder(Encoder):
    """Encoder whose image encodings are multiplied by a mask (Section 5.2 of the SPARO paper); texts are unchanged.

    A cosine with a text is then that of the masked image encoding and the whole text, up to a factor per image. Only
    the features of `inner` are stored; `of` applies to them what `encode` applies to images.

    Args:
        inner: the encoder.
        mask: (D,), or (L,) with one value per slot; zeros and ones make a selection of slots (Section 5.1).
        label: name for messages.
    """

    # Copies are made without arguments.
    def __new__(cls, inner: Encoder | None = None, *_args: Any, **_options: Any) -> MaskedEncoder:
        """Return an encoder with texts if `inner` has any."""
        with_text = cls is MaskedEncoder and isinstance(inner, TextEncoder)
        return object.__new__(MaskedTextEncoder if with_text else cls)

    def __init__(self, inner: Encoder, mask: Tensor, label: str = ""):
        width, slots = inner.width, inner.slots
        if mask.shape not in ((width,), (slots,)):
            raise ConfigError(
                f"{inner.label}: expected a mask of shape ({width},) or ({slots},), got {tuple(mask.shape)}"
            )
        super().__init__(inner.model, inner.mean.flatten().tolist(), inner.std.flatten().tolist(), label or inner.label)
        self.inner, self.transform, self.image_size, self.slots = inner, inner.transform, inner.image_size, slots
        self.decoding = inner.decoding
        # The value of a slot applies to all values of the slot.
        self.mask = mask.float().repeat_interleave(width // slots) if mask.shape == (slots,) else mask.float()

    @classmethod
    def keep_slots(cls, inner: Encoder, slots: Iterable[int]) -> MaskedEncoder:
        """Keep these slots only. Raises `ConfigError` for a number that is not a slot, or occurs twice."""
        chosen = tuple(slots.tolist() if isinstance(slots, Tensor | np.ndarray) else slots)
        select_slots(inner, chosen, option="slots")
        mask = torch.zeros(inner.slots)
        mask[list(chosen)] = 1
        return cls(inner, mask, f"{inner.label} slots {','.join(map(str, chosen))}")

    @property
    def precision(self) -> Precision:  # pyright: ignore
        return self.inner.precision

    @precision.setter
    def precision(self, precision: Precision) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        self.inner.precision = precision

    @property
    def width(self) -> int:
        return self.inner.width

    @property
    def architecture(self) -> str:
        return f"{self.inner.architecture} mask {weights_sha256({'mask': self.mask})}"

    def apply(self, encodings: Tensor) -> Tensor:
        """Apply the mask to encodings (n, D) of the inner encoder."""
        return encodings * self.mask.to(encodings.device)

    def to_store(self) -> tuple[Encoder, Callable[[Tensor], Tensor] | None]:
        return self.inner, self.apply

    def encode(self, pixels: Tensor) -> Tensor:
        return self.apply(self.inner.encode(pixels))


class MaskedTextEncoder(MaskedEncoder, TextEncoder):  # pyright: ignore[reportIncompatibleVariableOverride]
    """The same around an encoder with a text tower."""

    @property
    def text_weights(self) -> str:
        return self._texts.text_weights

    def text(self, captions: Sequence[str]) -> Tensor:
        return self._texts.text(captions)

    @property
    def _texts(self) -> TextEncoder:
        assert isinstance(self.inner, TextEncoder)
        return self.inner


SCHEMA = 1
_MAX_BYTES = 16 << 20


class SelectionData(Frozen):
    """Data on which a selection was made."""

    task: str = field("", "Name of the task.")
    data: str = field("", "SHA-256 that identifies the task's data.")
    n: int = field(0, "Number of questions that were used.", ge=0)
    share: Literal["all", "half"] = field(
        "all", "Share of the data that was used: all, or half. With half, the other half was held out for the report."
    )
    seed: int = field(0, "With share=half: random seed of the division into halves.")


class Selection(Frozen):
    """A selection or a mask for one checkpoint.

    Raises:
        ValueError: inconsistent values.
    """

    schema_: Literal[1] = field(SCHEMA, "Schema version of this file.", alias="schema")
    sparo: Literal["selection"] = field("selection", "Marks the file as a selection of units.")
    checkpoint: str = field(..., "SHA-256 of the weights.")
    label: str = field("", "Path of the checkpoint.")
    units: Literal["slots", "parts", "heads"] = field("slots", "Kind of units that are selected.")
    count: int = field(..., "Total number of units.", ge=1, le=1_000_000)
    head_layers: int = field(4, "For units=heads: number of last blocks whose heads are the units.", ge=1)
    method: str = field("hand", "Method of the selection.")
    classifier_slots: Literal["slice", "renorm"] = field(
        "slice", "How the slots of each class vector are scaled: not at all (slice), or all to the same norm (renorm)."
    )
    chosen: tuple[int, ...] = field(..., "Selected units, best first if an order is known.", min_length=1)
    order: tuple[int, ...] = field((), "All units, best first.")
    scores: tuple[float, ...] = field(
        (), "Score of each unit when it is used alone, on the data of `made_on`, in the order of unit numbers."
    )
    mask: tuple[float, ...] = field(
        (),
        "Factors by which encodings are multiplied, instead of 1 for selected units and 0 for the others: one per unit, or one per dimension of an encoding.",
    )
    made_on: SelectionData = field(SelectionData(), "Data on which the selection was made.")
    looked_at: tuple[str, ...] = field(
        (), "For a selection made by hand: identities of the data whose scores the person saw while selecting."
    )
    names: dict[int, str] = field({}, "Names of units, by number.")
    notes: dict[int, str] = field({}, "Notes on units, by number.")

    @model_validator(mode="after")
    def _validate_unit_ids(self) -> Self:
        for key in ("chosen", "order"):
            numbers = getattr(self, key)
            wrong = [number for number in numbers if not 0 <= number < self.count]
            if wrong:
                raise ValueError(f"{key}: {wrong[0]} is not a unit; units are numbered from 0 to {self.count - 1}")
            if len(set(numbers)) < len(numbers):
                raise ValueError(f"{key}: names a unit twice")
        for key in ("names", "notes"):
            wrong = [number for number in getattr(self, key) if not 0 <= number < self.count]
            if wrong:
                raise ValueError(f"{key}: {wrong[0]} is not a unit; units are numbered from 0 to {self.count - 1}")
        # With an incomplete order, `the best half` would be half of something else.
        if self.order and len(self.order) != self.count:
            raise ValueError(f"order: must list all {self.count} units, got {len(self.order)}")
        if self.scores and len(self.scores) != self.count:
            raise ValueError(f"scores: needs one score for each of {self.count} units, got {len(self.scores)}")
        return self


def read_selection(path: Path) -> Selection:
    """Read a file that `write_selection` or the explorer wrote. Raises `ConfigError` naming the file and the problem."""
    try:
        # Selections are shared between users, so the size of the file is limited.
        text = read_text(path, DataError, _MAX_BYTES)
        content = parse_json(text, str(path), dict, DataError)
    except DataError as error:
        raise ConfigError(f"--slots {error}") from None
    if content.get("sparo") != "selection":
        raise ConfigError(f"--slots {path}: is not a selection. `sparo slots select` writes one.")
    try:
        return Selection.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigError(
            f"--slots {path}: {where + ': ' if where else ''}{first['msg']}. Write the file again with `sparo slots select`."
        ) from None


def write_selection(path: Path, selection: Selection) -> None:
    """Write a selection atomically."""
    write_whole(path, selection.model_dump_json(by_alias=True, indent=1) + "\n")


def keep_units(encoder: Encoder, selection: Selection, where: str = "--slots") -> Encoder:
    """Return the encoder with these units only, or with this mask.

    Raises:
        ConfigError: the selection was made for other weights, or does not match them.
    """
    # Compare hashes of weights instead of paths, because slots of another training mean something else.
    if selection.checkpoint not in (encoder.weights, encoder.exported_from or encoder.weights):
        raise ConfigError(
            f"{where}: was made for another checkpoint ({selection.label or selection.checkpoint[:12]}), but {encoder.label} has "
            "different weights, in which slots have other meanings. Select again, or give numbers (--slots 0,3,8-15)."
        )
    if selection.units == "heads":
        heads = make_heads(encoder, selection.head_layers)
        if heads.slots - 1 != selection.count:
            raise ConfigError(f"{where}: has {selection.count} heads, but {encoder.label} has {heads.slots - 1}")
        # In numerical order, so that the parts of an encoding keep their order.
        return SelectedHeads(heads, sorted(selection.chosen))
    whole = selection.units == "slots" and encoder.slots != selection.count
    # Units must divide an encoding evenly; otherwise values would belong to two units.
    if whole or encoder.width % selection.count:
        raise ConfigError(
            f"{where}: has {selection.count} {selection.units}, but {encoder.label} has {encoder.slots} slots"
        )
    return MaskedEncoder(
        encoder, mask_factors(selection, encoder.width), f"{encoder.label} {describe_selection(selection)}"
    )


def mask_factors(selection: Selection, width: int) -> torch.Tensor:
    """Return the factors (width,) fp32 of encodings. Raises `ConfigError` if a mask has another length."""
    if selection.mask:
        mask = torch.tensor(selection.mask)
        if len(mask) not in (selection.count, width) or not bool(mask.isfinite().all()):
            raise ConfigError(f"--slots: expected a mask of {selection.count} or {width} values, got {len(mask)}")
    else:
        mask = torch.zeros(selection.count)
        mask[list(selection.chosen)] = 1
    # The value of a unit applies to all values of the unit.
    return mask.repeat_interleave(width // len(mask))


def describe_selection(selection: Selection) -> str:
    """Describe a selection in a few words, for tables and errors."""
    if selection.mask:
        return f"{selection.method} of {len(selection.mask)} values"
    return f"{selection.method}: {len(selection.chosen)} of {selection.count} {selection.units}"


def select_slots(encoder: Encoder, slots: tuple[int, ...], option: str = "--slots", **facts: Any) -> Selection:
    """Keep slots chosen by the user, by an `option` for errors. Raises `ConfigError` if the encoder has no such slot, or a slot occurs twice."""
    if encoder.slots < 2:
        raise ConfigError(
            f"{option}: {encoder.label} has no slots, or only one. Use a model with a readout of several slots (readout.kind=sparo)."
        )
    wrong = [
        slot
        for slot in slots
        if isinstance(slot, bool) or not isinstance(slot, int | np.integer) or not 0 <= slot < encoder.slots
    ]
    if len(set(slots)) < len(slots):
        raise ConfigError(f"{option}: names a slot twice, got {', '.join(map(str, slots))}. Give each slot once.")
    if wrong or not slots:
        raise ConfigError(
            f"{option} {wrong[0] if wrong else ''}: {encoder.label} has {encoder.slots} slots, numbered from 0"
        )
    return Selection(checkpoint=encoder.weights, label=encoder.label, count=encoder.slots, chosen=slots, **facts)
