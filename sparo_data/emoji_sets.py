"""Writer of the emoji data set: training shards and five held-out tests.

ROOT/train/00000.tar …       key.png key.txt key.json {"vendor", "hexcode", "label", "tags"}
ROOT/zeroshot_vendor/        the held-out vendor's drawings of known concepts, with all their labels as classes
ROOT/zeroshot_concepts/      every vendor's drawings of held-out concepts, with the held-out labels as classes
ROOT/retrieval/              held-out vendor, known concepts, caption = label and tags
ROOT/pairs/                  held-out vendor: replace_obj (another emoji of the subgroup), replace_att (one attribute
word)
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from sparo_train.core.errors import DataError
from sparo_train.core.rng import generator

from .emoji import (
    TEMPLATES,
    TEST_VENDOR,
    VENDORS,
    Drawing,
    Emoji,
    attribute_pairs,
    is_held_out,
    rasterise,
    read_drawings,
    read_emoji,
    sibling_pairs,
    training_caption,
)
from .pool import process_pool
from .writer import Fields, write_shards, write_wds_layout

_RETRIEVAL = 1000


def make_emoji(
    root: Path,
    modules: Path,
    size: int = 64,
    seed: int = 0,
    processes: int = 2,
    on_progress: Callable[[int, int], None] | None = None,
) -> dict[str, int]:
    """Rasterise all drawings and write the data set to `root`; return the number of samples in each part.

    Args:
        root: folder of the data set.
        modules: the node_modules folder that `emoji.install` filled.
        size: pixels per side.
        seed: random seed of captions and order.
        processes: number of processes.
        on_progress: called with (finished drawings, number of drawings).
    """
    emoji = read_emoji(modules)
    drawings = [d for vendor in VENDORS for d in read_drawings(modules, vendor, emoji)]
    if not drawings:
        raise DataError(
            f"{modules}: none of the drawings matches any of the texts. Remove the folder and run `sparo data emoji` again."
        )
    pixels = _rasterise_all(drawings, size, processes, on_progress)
    # By vendor, too, because a code point has a drawing of each.
    png = {(d.vendor, d.emoji.hexcode): data for d, data in zip(drawings, pixels, strict=True)}
    train = [d for d in drawings if d.vendor != TEST_VENDOR and not is_held_out(d.emoji)]
    # Shuffled once, because a shard with one vendor's drawings would make batches of one style.
    order = generator(seed, "emoji", "order").permutation(len(train))
    write_shards(root / "train", (_training(train[i], png, seed) for i in order), 1000)
    counts = {"train": len(train)}
    train_concepts = [d.emoji for d in drawings if d.vendor == TEST_VENDOR and not is_held_out(d.emoji)]
    counts |= _write_zeroshot(root, drawings, train_concepts, png)
    counts |= _write_captioned(root, train_concepts, png, seed)
    facts = {"size": size, "seed": seed, "counts": counts, "vendors": VENDORS}
    (root / "emoji.json").write_text(json.dumps(facts, indent=1), encoding="utf-8")
    return counts


def _write_zeroshot(
    root: Path, drawings: Sequence[Drawing], train_concepts: Sequence[Emoji], png: dict[tuple[str, str], bytes]
) -> dict[str, int]:
    # Without skin tones, whose labels differ in a word that many models cannot know.
    base_emoji = [e for e in train_concepts if e.is_base]
    new = [d for d in drawings if is_held_out(d.emoji) and d.emoji.is_base]
    for name, pairs in (
        ("zeroshot_vendor", [(TEST_VENDOR, e) for e in base_emoji]),
        ("zeroshot_concepts", [(d.vendor, d.emoji) for d in new]),
    ):
        # Sorted, because a class's number must not depend on the order of drawings.
        labels = sorted({e.label for _, e in pairs})
        label_ids = {label: i for i, label in enumerate(labels)}
        samples = [
            (f"{vendor}_{e.hexcode}", {"png": png[vendor, e.hexcode], "cls": str(label_ids[e.label]).encode()})
            for vendor, e in pairs
        ]
        write_wds_layout(root / name, samples, classnames=labels, templates=TEMPLATES)
    return {"zeroshot_vendor": len(base_emoji), "zeroshot_concepts": len(new)}


def _write_captioned(
    root: Path, train_concepts: Sequence[Emoji], png: dict[tuple[str, str], bytes], seed: int
) -> dict[str, int]:
    def image(e: Emoji) -> bytes:
        return png[TEST_VENDOR, e.hexcode]

    base = [e for e in train_concepts if e.is_base]
    # A random choice, because labels are in the order of Unicode's groups, faces first.
    picked = [base[i] for i in generator(seed, "emoji", "retrieval").permutation(len(base))[:_RETRIEVAL]]
    samples = [(e.hexcode, {"png": image(e), "txt": e.caption(e.tags[:3]).encode()}) for e in picked]
    write_wds_layout(root / "retrieval", samples, dataset_type="retrieval")
    pairs = [
        ("replace_obj", e, false) for e, false in sibling_pairs(train_concepts, generator(seed, "emoji", "siblings"))
    ]
    pairs += [
        ("replace_att", e, false)
        for e, false in attribute_pairs(train_concepts, generator(seed, "emoji", "attributes"))
    ]

    def pair_samples() -> Iterator[tuple[str, Fields]]:
        for number, (kind, e, false) in enumerate(pairs):
            text = json.dumps({"kind": kind, "caption": e.label, "negative_caption": false})
            yield f"{kind}_{number:05d}", {"png": image(e), "json": text.encode()}

    write_wds_layout(root / "pairs", pair_samples(), dataset_type="pairs")
    return {"retrieval": len(samples), "pairs": len(pairs)}


def _training(drawing: Drawing, png: dict[tuple[str, str], bytes], seed: int) -> tuple[str, Fields]:
    e = drawing.emoji
    facts = {"vendor": drawing.vendor, "hexcode": e.hexcode, "label": e.label, "tags": e.tags}
    return f"{drawing.vendor}_{e.hexcode}", {
        "png": png[drawing.vendor, e.hexcode],
        "txt": training_caption(e, drawing.vendor, seed).encode(),
        "json": json.dumps(facts).encode(),
    }


def _rasterise_all(
    drawings: Sequence[Drawing], size: int, processes: int, on_progress: Callable[[int, int], None] | None
) -> list[bytes]:
    out: list[bytes] = []
    # Jobs of two hundred drawings, because starting a process costs as much as a few dozen.
    chunks = [list(drawings[i : i + 200]) for i in range(0, len(drawings), 200)]
    if on_progress:
        on_progress(0, len(drawings))
    with process_pool(processes, len(chunks)) as pool:
        for part in pool.map(_png_chunk, chunks, [size] * len(chunks)):
            out += part
            if on_progress:
                on_progress(len(out), len(drawings))
    return out


def _png_chunk(drawings: Sequence[Drawing], size: int) -> list[bytes]:
    out = []
    for drawing in drawings:
        buffer = io.BytesIO()
        rasterise(drawing.svg, size).save(buffer, format="PNG")
        out.append(buffer.getvalue())
    return out
