"""Pictures of edited slots: one sheet with the steps of an edit, and an animation."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from ..tasks.slot_editing import EditableEncoder, SlotEdit, apply_edit, draw_state, slot_state
from .panels import arrange_sheet, background_label, colour_slots

_STEPS = 4  # pictures of a gradual edit, the last one of the whole edit


class EditPictures(NamedTuple):
    """A sheet with the image, its reconstruction, and steps of the edit; frames of an animation, there and back."""

    sheet: Image.Image
    frames: list[Image.Image]


def edit_pictures(
    encoder: EditableEncoder, image: Image.Image, edit: SlotEdit, tile: int = 128, num_frames: int = 24
) -> EditPictures:
    """Draw an edit of an image's slot.

    Args:
        encoder: model that draws.
        image: the image.
        edit: the edit.
        tile: pixels per side of each picture.
        num_frames: frames of the animation in one direction.
    """
    state, side = slot_state(encoder, image), encoder.image_size
    amounts = [(i + 1) / _STEPS for i in range(_STEPS)] if edit.is_gradual else [1.0]
    drawings = [draw_state(encoder, state), *(draw_state(encoder, apply_edit(state, edit, side, a)) for a in amounts)]
    original = torch.from_numpy(np.array(encoder.transform(image))).permute(2, 0, 1).float() / 255
    heads = ["image", "decoded", *(f"{a:.0%}" for a in amounts)] if edit.is_gradual else ["image", "decoded", "edited"]
    rows = [[original, *(drawing.image for drawing in drawings)]]
    if drawings[0].shares is not None:
        deleted = edit.slot if edit.delete else None
        labels = [
            _labels(drawing.shares, side, deleted if i else None)
            for i, drawing in enumerate(drawings)
            if drawing.shares is not None
        ]
        background = background_label(labels[0])
        rows.append([torch.ones_like(original), *(colour_slots(one, background) for one in labels)])
    steps = np.linspace(0, 1, num_frames) if edit.is_gradual else np.repeat([0.0, 1.0], num_frames // 2)
    frames = []
    for amount in steps.tolist():
        changed = state if amount == 0 else apply_edit(state, edit, side, amount)
        frames.append(_picture(draw_state(encoder, changed).image, tile))
    return EditPictures(arrange_sheet(rows, heads, tile), [*frames, *frames[::-1]])


def draw_edit(encoder: EditableEncoder, image: Image.Image, edit: SlotEdit, size: int) -> Image.Image:
    """Return an image as drawn after an edit, with sides of about `size` pixels."""
    state = apply_edit(slot_state(encoder, image), edit, encoder.image_size)
    return _picture(draw_state(encoder, state).image, size)


def _labels(shares: Tensor, side: int, without: int | None) -> np.ndarray:
    """Return the slot (side, side) of each pixel; slots after a deleted one keep their numbers."""
    labels = F.interpolate(shares[None], (side, side), mode="bilinear")[0].argmax(0).numpy()
    return labels if without is None else labels + (labels >= without)


def _picture(image: Tensor, tile: int) -> Image.Image:
    array = (image.permute(1, 2, 0).numpy() * 255 + 0.5).astype(np.uint8)
    return Image.fromarray(array).resize((tile, tile), Image.Resampling.NEAREST)
