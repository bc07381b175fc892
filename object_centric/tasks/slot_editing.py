"""Edits of slots: move and scale objects through their slots' reference frames (Biza et al. 2023, Fig. 1, 5, 6), delete and swap slots."""

from __future__ import annotations

from typing import NamedTuple

import torch
from PIL import Image
from torch import Tensor

from evals.encoders.encoder import Encoder
from evals.slots.attend import preprocess_image
from sparo_train.core.errors import ConfigError

from .slot_encoder import SlateEncoder, SlotEncoder

_MAX_MOVE, _MAX_SCALE = 10, 100
EditableEncoder = SlotEncoder | SlateEncoder


class SlotState(NamedTuple):
    """Slots (K, D) of one image, and their positions and scales (K, 2) in y, x if they have reference frames."""

    slots: Tensor
    positions: Tensor | None
    scales: Tensor | None


class SlotEdit(NamedTuple):
    """One edit of one slot.

    Attributes:
        slot: its number.
        move: (dx, dy) in shares of the image's width and height, to the right and down.
        scale: factor of its size.
        delete: remove the slot.
        exchange: number of the slot of the same image with which it changes places.
        replacement: slot (D,) that takes its place, of another image.
    """

    slot: int
    move: tuple[float, float] = (0.0, 0.0)
    scale: float = 1.0
    delete: bool = False
    exchange: int | None = None
    replacement: Tensor | None = None

    @property
    def is_gradual(self) -> bool:
        """Return whether the edit has intermediate states."""
        return not self.delete and self.replacement is None


class Drawing(NamedTuple):
    """Reconstruction (3, S, S) in 0..1 of a state, and each slot's share (K, s, s) of its pixels; None if the decoder has no shares."""

    image: Tensor
    shares: Tensor | None


def editable(encoder: Encoder) -> EditableEncoder:
    """Return the encoder. Raises `ConfigError` if it does not draw images from slots."""
    if not isinstance(encoder, SlotEncoder | SlateEncoder) or encoder.draws != "pixels":
        raise ConfigError(
            f"{encoder.label}: is not an image model that decodes slots to an image. Use an image model with "
            "objective.kind=slots and target=pixels, or one with objective.kind=slate."
        )
    return encoder


def supported_edits(encoder: Encoder) -> list[str]:
    """Return the edits that a model supports, of delete, move and scale; empty if it does not draw images from slots."""
    if not isinstance(encoder, SlotEncoder | SlateEncoder) or encoder.draws != "pixels":
        return []
    frame = getattr(encoder.model.config, "frame", None)
    return [
        "delete",
        *(["move"] if frame is not None else []),
        *(["scale"] if frame is not None and frame.scales else []),
    ]


@torch.inference_mode()
def slot_state(encoder: EditableEncoder, image: Image.Image) -> SlotState:
    """Return the slots of an image, and their frames."""
    pixels = encoder.stack([preprocess_image(encoder, image)])
    if isinstance(encoder, SlateEncoder):
        return SlotState(encoder.run_model(pixels).slots[0], None, None)
    with encoder.autocast():
        output = encoder.model.tower(encoder.normalize(pixels), encoder.noise.to(encoder.device)[None])
    positions, scales = (None, None) if output.frames is None else (output.frames[0][0], output.frames[1][0])
    return SlotState(output.slots[0], positions, scales)


def check_edit(encoder: EditableEncoder, edit: SlotEdit) -> None:
    """Raise `ConfigError` if the model cannot do this edit."""
    frame = getattr(encoder.model.config, "frame", None)
    for slot in (edit.slot, *([] if edit.exchange is None else [edit.exchange])):
        if not 0 <= slot < encoder.slots:
            raise ConfigError(
                f"--slot or --swap: {encoder.label} has {encoder.slots} slots, numbered from 0, got {slot}"
            )
    if edit.delete and encoder.slots == 1:
        raise ConfigError(f"--delete: {encoder.label} has only one slot. Use a model with several slots.")
    needs_frame = edit.move != (0.0, 0.0) or edit.scale != 1 or edit.exchange is not None
    if needs_frame and frame is None:
        raise ConfigError(
            f"{encoder.label}: its slots have no positions, so they cannot be moved, scaled or exchanged. Use a model "
            "with objective.model.frame (T-SA, TS-SA), delete the slot, or replace it by a slot of another image."
        )
    if edit.scale != 1 and frame is not None and not frame.scales:
        raise ConfigError(
            f"{encoder.label}: its slots have positions, but no scales (T-SA). Use a model with frame.scales (TS-SA)."
        )
    if not all(abs(part) <= _MAX_MOVE for part in edit.move) or not 1 / _MAX_SCALE <= edit.scale <= _MAX_SCALE:
        raise ConfigError(
            f"slot {edit.slot}: expected a move of at most {_MAX_MOVE} times the size of the image and a scale of "
            f"{1 / _MAX_SCALE:g} to {_MAX_SCALE}, got {edit.move} and {edit.scale}"
        )


def apply_edit(state: SlotState, edit: SlotEdit, side: int, amount: float = 1.0) -> SlotState:
    """Return the state after an edit, or after a part of it.

    Args:
        state: slots of an image.
        edit: an edit that `check_edit` allows.
        side: pixels per side, so that a move by k / side is one of k pixels.
        amount: share of the edit, 0 to 1, for intermediate states.
    """
    slots, positions, scales = state
    if edit.delete:
        keep = [slot for slot in range(len(slots)) if slot != edit.slot]
        return SlotState(*(None if part is None else part[keep] for part in state))  # type: ignore[arg-type]
    if edit.replacement is not None:
        slots = slots.clone()
        slots[edit.slot] = edit.replacement
    if positions is not None and scales is not None:
        target, target_scales = positions.clone(), scales.clone()
        if edit.exchange is not None:
            pair, swapped = [edit.slot, edit.exchange], [edit.exchange, edit.slot]
            target[pair], target_scales[pair] = positions[swapped], scales[swapped]
        # First and last pixels are at -1 and 1, so a pixel is 2 / (side - 1).
        target[edit.slot] += torch.tensor(edit.move[::-1]).to(target) * 2 * side / max(side - 1, 1)
        target_scales[edit.slot] *= edit.scale
        positions = positions + amount * (target - positions)
        scales = scales * (target_scales / scales) ** amount
    return SlotState(slots, positions, scales)


@torch.inference_mode()
def draw_state(encoder: EditableEncoder, state: SlotState) -> Drawing:
    """Draw a state."""
    with encoder.autocast():
        if isinstance(encoder, SlateEncoder):
            return Drawing(encoder.model.generate(state.slots[None]).float()[0].clamp(0, 1).cpu(), None)
        frames = (
            None if state.positions is None or state.scales is None else (state.positions[None], state.scales[None])
        )
        decoded = encoder.model.decode(state.slots[None], frames)
    return Drawing(encoder.denormalize(decoded.image)[0].clamp(0, 1).cpu(), decoded.masks[0].float().cpu())
