"""`sparo slots edit`: an image as drawn from its slots, before and after one slot is moved, scaled, deleted or swapped."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from PIL import Image

from evals.encoders.loading import load_encoder
from evals.report.results_file import refuse_unwritable
from evals.sets.pictures import decode_image
from evals.slots.eval_inputs import open_images
from object_centric.pictures.edits import edit_pictures
from object_centric.pictures.panels import save_animation, save_sheet
from object_centric.tasks.slot_editing import EditableEncoder, SlotEdit, check_edit, editable, slot_state
from sparo_train.core.accelerator import available_device
from sparo_train.core.errors import ConfigError
from sparo_train.core.files import read_bytes

from ..slot_work import SlotOptions
from .panel_runs import one_task


class EditOptions(NamedTuple):
    """Options of `sparo slots edit`.

    Attributes:
        image: file, or TASK:NUMBER for an image of a task.
        slot: number of the slot.
        move, scale, delete: the edit.
        swap: number of a slot of this image, or IMAGE:SLOT of another image; None: no swap.
        tile: pixels per side of each picture.
        out: .png file, or .webp or .gif for an animation.
        slot_options: options that find tasks.
    """

    image: str
    slot: int
    move: tuple[float, float]
    scale: float
    delete: bool
    swap: str | None
    tile: int
    out: Path
    slot_options: SlotOptions


def edit_image(checkpoint: str, options: EditOptions) -> Path:
    """Write the picture or animation of an edit; return its path.

    Raises:
        ConfigError: a model that draws no images, or an edit that it does not support.
    """
    if options.out.is_dir() or options.out.resolve() == Path(options.image).resolve():
        raise ConfigError(f"--out {options.out}: is a folder or the image itself. Name another file.")
    refuse_unwritable(options.out.parent, "--out")
    model = editable(load_encoder(checkpoint, None, available_device().type))
    image = _open(checkpoint, model, options.image, options.slot_options)
    edit = SlotEdit(options.slot, options.move, options.scale, options.delete)
    if options.swap is not None:
        edit = _with_swap(checkpoint, model, edit, options)
    check_edit(model, edit)
    pictures = edit_pictures(model, image, edit, options.tile)
    if options.out.suffix.lower() == ".png":
        save_sheet(pictures.sheet, options.out)
    else:
        save_animation(pictures.frames, options.out)
    return options.out


def _with_swap(checkpoint: str, model: EditableEncoder, edit: SlotEdit, options: EditOptions) -> SlotEdit:
    swap = options.swap or ""
    if swap.isdecimal():
        if int(swap) == edit.slot:
            raise ConfigError(f"--swap {swap}: is the slot that is edited. Name another slot.")
        return edit._replace(exchange=int(swap))
    name, _, number = swap.rpartition(":")
    if not name or not number.isdecimal():
        raise ConfigError(
            f"--swap {swap}: expected a slot of this image, or IMAGE:SLOT of another image, as in other.png:2"
        )
    other = slot_state(model, _open(checkpoint, model, name, options.slot_options))
    if int(number) >= len(other.slots):
        raise ConfigError(
            f"--swap {swap}: the slot number is too large, because {model.label} has {len(other.slots)} slots, numbered from 0"
        )
    return edit._replace(replacement=other.slots[int(number)])


def _open(checkpoint: str, model: EditableEncoder, image: str, options: SlotOptions) -> Image.Image:
    """Return the image of a file, or of TASK:NUMBER."""
    name, _, number = image.rpartition(":")
    if Path(image).is_file() or not (name and number.isdecimal()):
        return decode_image(read_bytes(Path(image), ConfigError), image, model.decoding)
    try:
        task = one_task(checkpoint, name, options)
    except ConfigError as error:
        raise ConfigError(
            f"{image}: is neither a file nor an image of a task (TASK:NUMBER); {str(error).removeprefix('--task ')}"
        ) from None
    source = open_images(task)
    if int(number) >= len(source):
        raise ConfigError(f"{image}: the task has {len(source)} images, numbered from 0")
    return source.read(int(number))[1]
