"""A picture of a slot model at work: per image the true masks, its own, what it draws, and every slot alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor

from ..tasks.mask_task import seen_by
from ..tasks.slot_encoder import MaskingEncoder

_GAP, _HEAD = 4, 14  # pixels between tiles, and for the words above them
# Okabe and Ito's colours, which colour-blind people tell apart; then darker ones.
_COLOURS = [
    (0, 0, 0),
    (230, 159, 0),
    (86, 180, 233),
    (0, 158, 115),
    (240, 228, 66),
    (0, 114, 178),
    (213, 94, 0),
    (204, 121, 167),
]


class Panel(NamedTuple):
    """An image, and its true masks (H, W) where they are known."""

    image: Image.Image
    true: np.ndarray | None


def panels(encoder: MaskingEncoder, samples: Sequence[Panel], tile: int = 96) -> Image.Image:
    """One row per image: it, its true masks, the model's, what it draws (where it draws pixels), each slot's part on white.

    Args:
        tile: pixels per side of each.
    """
    pixels = encoder.stacked([encoder.transform(s.image) for s in samples])
    found = encoder.parts(pixels)
    shares = found.shares.cpu()
    drawn = None if found.drawn is None else found.drawn.clamp(0, 1).cpu()
    own_of = None if found.own is None else found.own.clamp(0, 1).cpu()
    known, blank = any(s.true is not None for s in samples), torch.ones(3, *shares.shape[-2:])
    rows = []
    for i, sample in enumerate(samples):
        image = pixels[i].float() / 255
        true = blank if sample.true is None else _coloured(seen_by(encoder, sample.true))
        own = [image] * len(shares[i]) if own_of is None else own_of[i]
        parts = [share * picture + (1 - share) for share, picture in zip(shares[i], own, strict=True)]
        tiles = [
            image,
            true if known else None,
            _coloured(shares[i].argmax(0).numpy() + 1),
            None if drawn is None else drawn[i],
            *parts,
        ]
        rows.append([t for t in tiles if t is not None])
    heads = ["image", *(["true"] if known else []), "masks", *(["drawn"] if drawn is not None else [])]
    heads += [f"slot {k}" for k in range(shares.shape[1])]
    return _sheet(rows, heads, tile)


def _coloured(labels: np.ndarray) -> Tensor:
    table = torch.tensor(_COLOURS)
    numbers = torch.from_numpy(labels.astype(np.int64))
    lap = torch.div((numbers - 1).clamp(min=0), len(_COLOURS) - 1, rounding_mode="floor")
    index = torch.where(numbers > 0, (numbers - 1) % (len(_COLOURS) - 1) + 1, 0)
    return (table[index] / 255 * (0.6 ** lap[..., None])).permute(2, 0, 1)


def _sheet(rows: Sequence[Sequence[Tensor]], heads: Sequence[str], tile: int) -> Image.Image:
    width, height = len(heads) * (tile + _GAP) + _GAP, len(rows) * (tile + _GAP) + _GAP + _HEAD
    sheet = Image.new("RGB", (width, height), (238, 238, 238))
    pen = ImageDraw.Draw(sheet)
    for column, head in enumerate(heads):
        pen.text((_GAP + column * (tile + _GAP), 1), head, fill=(0, 0, 0))
    for line, row in enumerate(rows):
        for column, one in enumerate(row):
            array = (one.cpu().permute(1, 2, 0).numpy() * 255 + 0.5).astype(np.uint8)
            picture = Image.fromarray(array).resize((tile, tile), Image.Resampling.NEAREST)
            sheet.paste(picture, (_GAP + column * (tile + _GAP), _HEAD + _GAP + line * (tile + _GAP)))
    return sheet
