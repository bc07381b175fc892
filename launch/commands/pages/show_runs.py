"""`sparo slots show`: attention of slots over images and captions, as pictures and as one page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image

from evals.encoders.selection import keep_units, read_selection
from evals.report.results_file import refuse_unwritable
from evals.sets.pictures import decode_image
from evals.slots.attend import Attended, attend_pixels, caption_per_image, preprocess_image
from evals.slots.eval_inputs import open_images
from sparo_train.core.errors import ConfigError
from sparo_train.core.files import read_bytes

from ...views.progress import Bar
from ...views.slot_report import CaptionedImage, write_report
from ...views.terminal import out
from ..slot_work import Bench, SlotOptions

_BATCH_SIZE = 32


class ShowOptions(NamedTuple):
    """Options of `sparo slots show`.

    Attributes:
        task_name: a task, whose images are shown.
        images, captions: the user's own, instead of it or first.
        slots: only these.
        num_images: images of the task that are analyzed.
        examples: images that are shown completely.
        tiles: images per gallery.
        cosine, share: thresholds of the paper's filter.
    """

    task_name: str | None
    images: list[Path]
    captions: list[str]
    slots: tuple[int, ...] | Path | None
    num_images: int
    examples: int
    tiles: int
    cosine: float
    share: float


def show_slots(checkpoint: str, show_options: ShowOptions, options: SlotOptions, folder: Path) -> None:
    """Write FOLDER/report.html and its pictures."""
    # Captions may be absent, because slots of images can be shown without texts.
    if len(show_options.images) != len(show_options.captions) and show_options.captions:
        raise ConfigError(
            f"--caption: {len(show_options.captions)} captions for {len(show_options.images)} images. Give one --caption per --image."
        )
    if show_options.task_name is None and not show_options.images:
        raise ConfigError(
            "sparo slots show: nothing to draw. Name a task of the run (--task retrieval) or your own images (--image FILE --caption TEXT)."
        )
    # Before the checkpoint is loaded, so that a missing file is reported at once.
    files = [(path, read_bytes(path, ConfigError), caption) for path, caption in _user_images(show_options)]
    bench = Bench(checkpoint, options)
    own = [
        CaptionedImage(str(path), decode_image(data, path, bench.encoder.decoding), caption)
        for path, data, caption in files
    ]
    names: dict[int, str] = {}
    slot_ids: list[int] | None = None
    if isinstance(show_options.slots, Path):
        selection = read_selection(show_options.slots)
        keep_units(bench.encoder, selection, f"--slots {show_options.slots}")
        if selection.units != "slots":
            raise ConfigError(f"--slots {show_options.slots}: selects {selection.units}, but only slots can be drawn.")
        names, slot_ids = selection.names, list(selection.chosen)
    elif show_options.slots is not None:
        if wrong := [slot for slot in show_options.slots if slot >= bench.encoder.slots]:
            raise ConfigError(
                f"--slots {wrong[0]}: {bench.encoder.label} has {bench.encoder.slots} slots, numbered from 0"
            )
        slot_ids = list(show_options.slots)
    # Before hundreds of images are analyzed.
    refuse_unwritable(folder, "--out")
    samples = own + (_task_samples(bench, show_options) if show_options.task_name is not None else [])
    attended = _attend_samples(bench, samples)
    facts = {
        "checkpoint": checkpoint,
        "n": len(samples),
        "task": show_options.task_name or "images given",
        "slots": bench.encoder.slots,
    }
    page = write_report(folder, bench.encoder, samples, attended, facts, show_options, slot_ids, names, len(own))
    for path in page:
        out.print(str(path), soft_wrap=True)


def _user_images(show_options: ShowOptions) -> Sequence[tuple[Path, str | None]]:
    captions: list[Any] = [*show_options.captions] or [None] * len(show_options.images)
    return list(zip(show_options.images, captions, strict=True))


def _task_samples(bench: Bench, show_options: ShowOptions) -> list[CaptionedImage]:
    name, task = bench.single_task(str(show_options.task_name), "--task")
    source = open_images(task)
    caption = caption_per_image(task, source, "texts" in bench.encoder.offers)
    count = min(show_options.num_images, len(source))
    samples = []
    with Bar() as bar:
        row = bar.start_task_named(f"{name}: reading images", count)
        for i in range(count):
            key, image, fact = source.read(i * len(source) // count)
            samples.append(CaptionedImage(key, image, caption(fact)))
            bar.show(row, i + 1, count)
    return samples


def _attend_samples(bench: Bench, samples: list[CaptionedImage]) -> list[Attended]:
    captions = [sample.caption for sample in samples]
    # All or none: text attention of half of the images would be mistaken for that of all.
    texts = None if any(caption is None for caption in captions) else [str(caption) for caption in captions]
    done: list[Attended] = []
    with Bar() as bar, torch.inference_mode():
        row = bar.start_task_named(f"{bench.checkpoint}: attention", len(samples))
        for begin in range(0, len(samples), _BATCH_SIZE):
            some = slice(begin, begin + _BATCH_SIZE)
            images: list[Image.Image] = [shown.image for shown in samples[some]]
            pixels = [preprocess_image(bench.encoder, image) for image in images]
            done += attend_pixels(bench.encoder, pixels, texts[some] if texts is not None else None)
            bar.show(row, len(done), len(samples))
    return done
