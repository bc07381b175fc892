"""Picture of a slot model: for each image the true masks, predicted masks, reconstruction, and every slot alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor

from sparo_train.core.files import whole_file

from ..tasks.mask_task import transform_mask
from ..tasks.slot_encoder import Decomposition, MaskingEncoder
from ..tasks.video_encoder import TimedEncoder

_GAP, _HEAD, _SIDE = 4, 14, 90  # pixels between tiles, and for text above columns and after rows
# Grey for the background, then Okabe and Ito's colours, which colour-blind readers can distinguish; then darker ones.
_COLOURS = [
    (110, 110, 110),
    (230, 159, 0),
    (86, 180, 233),
    (0, 158, 115),
    (240, 228, 66),
    (0, 114, 178),
    (213, 94, 0),
    (204, 121, 167),
]


class Panel(NamedTuple):
    """An image, and its true masks (H, W) if known."""

    image: Image.Image
    true: np.ndarray | None


class ClipPanel(NamedTuple):
    """Frames of a video, its true masks (T, H, W) if known, and the task's number of context frames."""

    images: Sequence[Image.Image]
    true: np.ndarray | None
    window: int | None = None


def panels(encoder: MaskingEncoder, samples: Sequence[Panel], tile: int = 96, uncertain: bool = False) -> Image.Image:
    """Draw one row per image: the image, true masks, predicted masks, reconstruction (of pixels only), and each slot's part on white.

    Args:
        encoder, samples: the model and its images.
        tile: pixels per side of each tile.
        uncertain: also draw masks whose colours are mixed by the slots' shares of a pixel.
    """
    pixels = encoder.stack([encoder.transform(s.image) for s in samples])
    true_masks, decomposition = [s.true for s in samples], encoder.decompose(pixels)
    return arrange_sheet(*make_tiles(encoder, pixels, true_masks, decomposition, uncertain=uncertain), tile)


def clip_sheet(encoder: TimedEncoder, clips: Sequence[ClipPanel], tile: int = 64, frames: int = 6) -> Image.Image:
    """Draw the same for videos: one row for each of `frames` evenly spaced frames of a clip, one clip below the other."""
    rows: list[list[Tensor]] = []
    heads: list[str] = []
    for tiles, heads in _tiles_of_clips(encoder, clips):  # noqa: B007  the heads are those of all
        # Include the first and the last frame, which show where slots started and ended.
        times = [round(i * (len(tiles) - 1) / max(frames - 1, 1)) for i in range(min(frames, len(tiles)))]
        rows += [tiles[t] for t in times]
    return arrange_sheet(rows, heads, tile)


def clip_animation(encoder: TimedEncoder, clips: Sequence[ClipPanel], tile: int = 64) -> list[Image.Image]:
    """Return a sheet for every frame, with one row per clip; a clip that has ended stays at its last frame."""
    clip_tiles = list(_tiles_of_clips(encoder, clips))
    longest = max(len(tiles) for tiles, _ in clip_tiles)
    return [
        arrange_sheet([tiles[min(t, len(tiles) - 1)] for tiles, _ in clip_tiles], clip_tiles[0][1], tile)
        for t in range(longest)
    ]


def save_animation(sheets: Sequence[Image.Image], place: str | Path | BinaryIO, fps: int = 12, **how: Any) -> None:
    """Save sheets as an endless animation, WebP or GIF by its name."""
    if isinstance(place, str | Path):
        with whole_file(Path(place)) as temporary, temporary.open("wb") as stream:
            save_animation(sheets, stream, fps, **{"format": Path(place).suffix[1:], **how})
        return
    sheets[0].save(place, save_all=True, append_images=sheets[1:], duration=round(1000 / fps), loop=0, **how)


def save_sheet(sheet: Image.Image, place: Path) -> None:
    """Save one picture atomically."""
    with whole_file(place) as temporary:
        sheet.save(temporary)


def _tiles_of_clips(
    encoder: TimedEncoder, clips: Sequence[ClipPanel]
) -> Iterator[tuple[list[list[Tensor]], list[str]]]:
    has_masks = any(clip.true is not None for clip in clips)
    for clip in clips:
        pixels = encoder.stack([encoder.transform(image) for image in clip.images])
        model_input = pixels
        if encoder.conditional and clip.true is not None:
            # Resized to the model's size as for its score, so that hints match the images.
            plane = torch.from_numpy(transform_mask(encoder, clip.true[0]).astype(np.uint8)).to(pixels.device)
            model_input = torch.cat([pixels, plane.expand(len(pixels), 1, -1, -1)], 1)
        (decomposition,) = encoder.decompose_clips(model_input[None], clip.window)
        true_masks = [None] * len(pixels) if clip.true is None else list(clip.true)
        yield make_tiles(encoder, pixels, true_masks, decomposition, has_masks, one_clip=True)


def make_tiles(
    encoder: MaskingEncoder,
    pixels: Tensor,
    true_masks: Sequence[np.ndarray | None],
    decomposition: Decomposition,
    has_masks: bool | None = None,
    one_clip: bool = False,
    uncertain: bool = False,
) -> tuple[list[list[Tensor]], list[str]]:
    """Return a row of tiles per image, and the titles of the columns.

    Args:
        encoder, pixels, true_masks, decomposition: the model, its images, and their masks.
        has_masks: whether true masks have a column.
        one_clip: the images are frames of a video, so that the same slot is the background of all.
        uncertain: whether masks with mixed colours have a column.
    """
    soft_masks = decomposition.soft_masks.cpu()
    predicted = soft_masks.argmax(1).numpy()
    background = background_label(predicted) if one_clip else None
    reconstruction = None if decomposition.reconstruction is None else decomposition.reconstruction.clamp(0, 1).cpu()
    slot_images = None if decomposition.slot_images is None else decomposition.slot_images.clamp(0, 1).cpu()
    has_masks = any(true is not None for true in true_masks) if has_masks is None else has_masks
    blank = torch.ones(3, *soft_masks.shape[-2:])
    rows = []
    for i, labels in enumerate(true_masks):
        image = pixels[i].float() / 255
        # All rows of a sheet have the same columns, even if one lacks some.
        true = blank if labels is None else colour_labels(transform_mask(encoder, labels))
        own = [image] * len(soft_masks[i]) if slot_images is None else slot_images[i]
        # On white, because slots can be black.
        slot_tiles = [share * picture + (1 - share) for share, picture in zip(soft_masks[i], own, strict=True)]
        ground = background_label(predicted[i]) if background is None else background
        tiles = [
            image,
            true if has_masks else None,
            colour_slots(predicted[i], ground),
            mix_slots(soft_masks[i], ground) if uncertain else None,
            None if reconstruction is None else reconstruction[i],
            *slot_tiles,
        ]
        rows.append([t for t in tiles if t is not None])
    heads = ["image", *(["true"] if has_masks else []), "masks", *(["shares"] if uncertain else [])]
    heads += ["decoded"] if reconstruction is not None else []
    heads += [f"slot {k}" for k in range(soft_masks.shape[1])]
    return rows, heads


def colour_labels(labels: np.ndarray) -> Tensor:
    """Convert a label map to colours (3, h, w): 0 grey, pixels that are not scored (255) white."""
    table = torch.tensor(_COLOURS)
    numbers = torch.from_numpy(labels.astype(np.int64))
    # After the last colour, they repeat in darker tones, and after four tones from the first one.
    lap = torch.div((numbers - 1).clamp(min=0), len(_COLOURS) - 1, rounding_mode="floor") % 4
    index = torch.where(numbers > 0, (numbers - 1) % (len(_COLOURS) - 1) + 1, 0)
    colours = table[index] / 255 * (0.6 ** lap[..., None])
    return torch.where((numbers == 255)[..., None], 1.0, colours).permute(2, 0, 1)


def background_label(labels: np.ndarray) -> int:
    """Return the label that covers most of the border of label maps (…, h, w)."""
    rows, columns = labels[..., [0, -1], :], labels[..., [0, -1]]
    return int(np.bincount(np.concatenate([rows.ravel(), columns.ravel()])).argmax())


def colour_slots(labels: np.ndarray, background: int) -> Tensor:
    """Convert a map of slot numbers to colours (3, h, w), the background's slot grey."""
    return colour_labels(np.where(labels == background, 0, labels + 1))


def mix_slots(soft_masks: Tensor, background: int) -> Tensor:
    """Return the slots' colours (3, h, w), mixed by their shares (K, h, w): pale borders are uncertain (Biza et al. 2023, Fig. 4)."""
    shares = soft_masks.float() / soft_masks.float().sum(0, keepdim=True).clamp(min=1e-12)
    colours = colour_slots(np.arange(len(shares))[None], background)[:, 0]
    return (colours @ shares.flatten(1)).view(3, *shares.shape[1:])


def arrange_sheet(
    rows: Sequence[Sequence[Tensor]], heads: Sequence[str], tile: int, names: Sequence[str] | None = None
) -> Image.Image:
    """Arrange tiles (3, s, s) in 0..1 below their titles; `names` are printed after the rows."""
    width, height = len(heads) * (tile + _GAP) + _GAP, len(rows) * (tile + _GAP) + _GAP + _HEAD
    sheet = Image.new("RGB", (width + (_SIDE if names else 0), height), (238, 238, 238))
    pen = ImageDraw.Draw(sheet)
    for column, head in enumerate(heads):
        pen.text((_GAP + column * (tile + _GAP), 1), head, fill=(0, 0, 0))
    for line, name in enumerate(names or ()):
        pen.text((width, _HEAD + _GAP + line * (tile + _GAP) + tile // 2 - 6), name, fill=(0, 0, 0))
    for line, row in enumerate(rows):
        for column, one in enumerate(row):
            array = (one.cpu().permute(1, 2, 0).numpy() * 255 + 0.5).astype(np.uint8)
            # Without smoothing, which would make masks look finer than they are.
            picture = Image.fromarray(array).resize((tile, tile), Image.Resampling.NEAREST)
            sheet.paste(picture, (_GAP + column * (tile + _GAP), _HEAD + _GAP + line * (tile + _GAP)))
    return sheet
