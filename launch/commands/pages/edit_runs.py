"""`sparo slots edit`: an image as drawn from its slots, before and after one slot is moved, scaled, deleted or swapped."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from PIL import Image

from evals.encoders.encoder import Encoder
from evals.encoders.loading import load_encoder
from evals.report.results_file import refuse_unwritable
from evals.sets.base import decode_image
from object_centric.pictures.edits import edit_pictures
from object_centric.pictures.panels import save_animation, save_sheet
from object_centric.tasks.slot_editing import EditableEncoder, SlotEdit, check_edit, editable, slot_state
from sparo_train.core.accelerator import available_device
from sparo_train.core.errors import ConfigError
from sparo_train.core.files import read_bytes


class EditOptions(NamedTuple):
    """Options of `sparo slots edit`.

    Attributes:
        image: the image.
        slot: number of the slot.
        move, scale, delete: the edit.
        swap: number of a slot of this image, or FILE:SLOT of another image; None: no swap.
        tile: pixels per side of each picture.
        out: .png file, or .webp or .gif for an animation.
    """

    image: Path
    slot: int
    move: tuple[float, float]
    scale: float
    delete: bool
    swap: str | None
    tile: int
    out: Path


def edit_image(checkpoint: str, options: EditOptions) -> Path:
    """Write the picture or animation of an edit; return its path.

    Raises:
        ConfigError: a model that draws no images, or an edit that it does not support.
    """
    refuse_unwritable(options.out.parent, "--out")
    data = read_bytes(options.image, ConfigError)
    encoder = load_encoder(checkpoint, None, available_device().type)
    model = editable(encoder)
    image = _decode(encoder, data, options.image)
    edit = SlotEdit(options.slot, options.move, options.scale, options.delete)
    edit = edit if options.swap is None else _with_swap(model, edit, options.swap)
    check_edit(model, edit)
    pictures = edit_pictures(model, image, edit, options.tile)
    if options.out.suffix.lower() == ".png":
        save_sheet(pictures.sheet, options.out)
    else:
        save_animation(pictures.frames, options.out)
    return options.out


def _with_swap(model: EditableEncoder, edit: SlotEdit, swap: str) -> SlotEdit:
    if swap.isdecimal():
        if int(swap) == edit.slot:
            raise ConfigError(f"--swap {swap}: is the same slot. Name another.")
        return edit._replace(exchange=int(swap))
    name, _, number = swap.rpartition(":")
    if not name or not number.isdecimal():
        raise ConfigError(
            f"--swap {swap}: expected a slot of this image, or FILE:SLOT of another image, as in other.png:2"
        )
    other = slot_state(model, _decode(model, read_bytes(Path(name), ConfigError), Path(name)))
    if int(number) >= len(other.slots):
        raise ConfigError(f"--swap {swap}: {model.label} has {len(other.slots)} slots, numbered from 0")
    return edit._replace(replacement=other.slots[int(number)])


def _decode(encoder: Encoder, data: bytes, path: Path) -> Image.Image:
    return decode_image(data, path, encoder.decoding)
