"""`sparo slots show`: attention of slots over images and captions, as pictures and as one page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image

from evals.encoders.selection import read_selection, selected
from evals.report.results_file import refuse_unwritable
from evals.sets.base import decoded
from evals.slots.attend import Attended, attend, captions_of
from evals.slots.material import open_images
from sparo_train.core.errors import ConfigError
from sparo_train.core.untrusted import read_bytes

from ...views.progress import Bar
from ...views.slot_report import Shown, write_report
from ...views.terminal import out
from ..slot_work import Bench, SlotOptions

_AT_ONCE = 32


class Wanted(NamedTuple):
    """What to show.

    on: a task, whose images are shown.  images, captions: the user's own, in place of it or first.  slots: these alone.
    number: images of the task that are looked at.  examples: those that are shown whole.  tiles: per gallery.
    cosine, share: of the paper's filter.
    """

    on: str | None
    images: list[Path]
    captions: list[str]
    slots: tuple[int, ...] | Path | None
    number: int
    examples: int
    tiles: int
    cosine: float
    share: float


def show_slots(checkpoint: str, wanted: Wanted, options: SlotOptions, folder: Path) -> None:
    """Write FOLDER/report.html and its pictures."""
    # None at all is an answer: slots of images are shown without texts, too.
    if len(wanted.images) != len(wanted.captions) and wanted.captions:
        raise ConfigError(
            f"--caption: {len(wanted.captions)} captions for {len(wanted.images)} images; give one behind each --image"
        )
    if wanted.on is None and not wanted.images:
        raise ConfigError(
            "sparo slots show: name a task of the run (--on, as in --on retrieval), or images of your own (--image FILE --caption TEXT)"
        )
    # Before the checkpoint is loaded: a file that is missing is told at once.
    files = [(path, read_bytes(path, ConfigError), caption) for path, caption in _own(wanted)]
    bench = Bench(checkpoint, options)
    own = [Shown(str(path), decoded(data, path, bench.encoder.decoding), caption) for path, data, caption in files]
    names: dict[int, str] = {}
    chosen: list[int] | None = None
    if isinstance(wanted.slots, Path):
        selection = read_selection(wanted.slots)
        selected(bench.encoder, selection, f"--slots {wanted.slots}")
        if selection.units != "slots":
            raise ConfigError(f"--slots {wanted.slots}: chooses {selection.units}; pictures are of slots")
        names, chosen = selection.names, list(selection.chosen)
    elif wanted.slots is not None:
        if wrong := [slot for slot in wanted.slots if slot >= bench.encoder.slots]:
            raise ConfigError(
                f"--slots {wrong[0]}: {bench.encoder.label} has {bench.encoder.slots} slots, numbered from 0"
            )
        chosen = list(wanted.slots)
    # Before hundreds of images are looked at.
    refuse_unwritable(folder, "--out")
    found = own + (_of_task(bench, wanted) if wanted.on is not None else [])
    attended = _attended(bench, found)
    facts = {
        "checkpoint": checkpoint,
        "n": len(found),
        "task": wanted.on or "images given",
        "slots": bench.encoder.slots,
    }
    page = write_report(folder, bench.encoder, found, attended, facts, wanted, chosen, names, len(own))
    for path in page:
        out.print(str(path), soft_wrap=True)


def _own(wanted: Wanted) -> Sequence[tuple[Path, str | None]]:
    captions: list[Any] = [*wanted.captions] or [None] * len(wanted.images)
    return list(zip(wanted.images, captions, strict=True))


def _of_task(bench: Bench, wanted: Wanted) -> list[Shown]:
    name, task = bench.one(str(wanted.on), "--on")
    source = open_images(task)
    caption = captions_of(task, source, "texts" in bench.encoder.offers)
    count = min(wanted.number, len(source))
    found = []
    with Bar() as bar:
        row = bar.start_task_named(f"{name}: reading images", count)
        for i in range(count):
            key, image, fact = source.read(i * len(source) // count)
            found.append(Shown(key, image, caption(fact)))
            bar.show(row, i + 1, count)
    return found


def _attended(bench: Bench, found: list[Shown]) -> list[Attended]:
    captions = [shown.caption for shown in found]
    # All or none: the text's attention of half of the images would be read as that of all.
    known = None if any(caption is None for caption in captions) else [str(caption) for caption in captions]
    done: list[Attended] = []
    with Bar() as bar, torch.inference_mode():
        row = bar.start_task_named(f"{bench.checkpoint}: attention", len(found))
        for begin in range(0, len(found), _AT_ONCE):
            some = slice(begin, begin + _AT_ONCE)
            images: list[Image.Image] = [shown.image for shown in found[some]]
            done += attend(bench.encoder, images, known[some] if known is not None else None)
            bar.show(row, len(done), len(found))
    return done
