"""`sparo slots search`: images that are alike in some slots and different in the others."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor

from evals.report.results_file import refuse_unwritable
from evals.sets.pictures import decode_image
from evals.slots.attend import preprocess_image
from evals.slots.eval_inputs import open_images
from evals.slots.overlay import ImageCrop, thumbnail
from evals.slots.slot_search import DIFFERENT, Match, search_slots
from evals.slots.units import get_text_tower
from sparo_train.core.errors import ConfigError
from sparo_train.core.files import escape_control_chars, read_bytes, write_whole
from sparo_train.data.decode.decoding import display_image

from ..views import slot_tables
from ..views.html import data_uri, render
from ..views.terminal import out
from .slot_naming import captions_of_set
from .slot_work import Bench, SlotOptions, write_facts

_BLOCK = 4096  # images whose encodings are in memory
_SIZE = 192  # pixels of a picture on the page


class SearchOptions(NamedTuple):
    """Options of `sparo slots search`.

    Attributes:
        query: path of an image, or a text.
        slots: slots in which results are alike, or a selection.
        task_name: task whose images are searched.
        different: weight of the difference in other slots; None: the default for an image, 0 for a text.
        num_results: number of results.
        out: folder for a page; None: no page.
        json_file: file.
    """

    query: str
    slots: tuple[int, ...] | Path
    task_name: str
    different: float | None
    num_results: int
    out: Path | None
    json_file: Path | None


def search_images(checkpoint: str, search: SearchOptions, options: SlotOptions) -> None:
    """Print the best matches of a query, and write a page with their pictures if requested."""
    if search.out is not None:
        refuse_unwritable(search.out, "--out")
    is_image = _is_image(search.query)
    if not is_image and search.different is not None:
        raise ConfigError(
            "--different: requires an image as the query, because a text describes only the slots that --slots names. Remove --different."
        )
    data = read_bytes(Path(search.query), ConfigError) if is_image else b""
    bench = Bench(checkpoint, options)
    chosen = _slot_numbers(bench, search.slots)
    picture = decode_image(data, search.query, bench.encoder.decoding) if is_image else None
    query = _encode_text(bench, search.query) if picture is None else _encode_image(bench, picture)
    name, task = bench.single_task(search.task_name, "--index")
    source = open_images(task)
    features = bench.images(source)
    different = 0.0 if not is_image else DIFFERENT if search.different is None else search.different
    blocks: Iterator[Tensor] = (bench.units.images(rows) for rows in features.blocks(_BLOCK))
    matches = search_slots(blocks, query, chosen, different, search.num_results)
    captions = captions_of_set(source, [features.facts[one.image] for one in matches]) or [[]] * len(matches)
    rows = [_row(one, features.keys[one.image], texts) for one, texts in zip(matches, captions, strict=True)]
    slots = ", ".join(map(str, chosen))
    out.print(slot_tables.matches_table(f"{search.query}: images of {name}, alike in slots {slots}", rows, is_image))
    write_facts(search.json_file, {"query": search.query, "slots": chosen, "different": different, "matches": rows})
    if search.out is not None:
        pictures = [display_image(source.read(one.image)[1], bench.encoder.decoding) for one in matches]
        page = render(
            "search.html.jinja",
            query=escape_control_chars(search.query),
            picture=None if picture is None else _uri(display_image(picture, bench.encoder.decoding)),
            facts={
                "checkpoint": escape_control_chars(checkpoint),
                "index": name,
                "slots": slots,
                "different": different,
            },
            rows=[{**row, "picture": _uri(one)} for row, one in zip(rows, pictures, strict=True)],
        )
        search.out.mkdir(parents=True, exist_ok=True)
        out.print(str(write_whole(search.out / "report.html", page)), soft_wrap=True)


def _is_image(query: str) -> bool:
    """Return whether a query is a file. Raises `ConfigError` for an empty query, a folder, and a path that does not exist."""
    if not query.strip():
        raise ConfigError("QUERY: is empty. Name an image, or type a text.")
    try:
        path = Path(query)
        if path.is_file():
            return True
        if path.is_dir():
            raise ConfigError(f"{query}: is a folder. Name an image, or type a text.")
    except (OSError, ValueError):  # too long for a path, or with a null byte
        return False
    if " " not in query.strip() and (os.sep in query or path.suffix):
        raise ConfigError(f"{query}: file not found. Name an image, or type a text.")
    return False


def _slot_numbers(bench: Bench, slots: tuple[int, ...] | Path) -> list[int]:
    if isinstance(slots, Path):
        selection = bench.read_selection(slots, "--slots")
        if selection.mask:
            raise ConfigError(
                f"--slots {slots}: is a mask, but images are compared by whole slots. Name a selection without a mask, or slot numbers."
            )
        return sorted(selection.chosen)
    if wrong := [slot for slot in slots if not 0 <= slot < bench.units.number]:
        raise ConfigError(
            f"--slots {wrong[0]}: no such slot; {bench.checkpoint} has {bench.units.number} slots, numbered from 0"
        )
    return list(slots)


def _encode_image(bench: Bench, image: Image.Image) -> Tensor:
    pixels = bench.encoder.stack([preprocess_image(bench.encoder, image)])
    with torch.inference_mode():
        return bench.units.images(bench.encoder.encode(pixels).flatten(1).cpu())[0]


def _encode_text(bench: Bench, text: str) -> Tensor:
    return bench.units.texts(get_text_tower(bench.units).text([text]).cpu())[0]


def _row(match: Match, key: str, captions: list[str]) -> dict[str, Any]:
    return {
        "image": match.image,
        "key": escape_control_chars(key),
        "caption": escape_control_chars(captions[0] if captions else ""),
        "alike": match.alike,
        "rest": match.rest,
    }


def _uri(image: Image.Image) -> str:
    return data_uri(thumbnail(ImageCrop(image, (0, 0, image.width, image.height)), _SIZE))
