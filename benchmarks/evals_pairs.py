"""SugarCrepe for `benchmarks/evals.py`: how often each image and text is encoded, and how long that takes."""

from __future__ import annotations

import contextlib
import itertools
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import interleave, row, seconds, silent
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader

from evals.encoders.clip_encoder import ClipEncoder
from evals.sets.captions import SPLITS
from evals.suite.image_text_tasks import PairsTaskConfig
from evals.suite.suite import Suite
from sparo_train.models.clip_config import ClipConfig
from sparo_train.models.clip_model import Clip


def sugar_crepe_rows(quick: bool, device: str) -> list[dict[str, Any]]:
    """Return the table rows of SugarCrepe, with the published numbers of images and pairs: five captions per image, and a wrong caption in each pair."""
    from clip_benchmark.datasets.builder import image_captions_collate_fn
    from clip_benchmark.datasets.sugar_crepe import SugarCrepe
    from clip_benchmark.metrics import image_caption_selection

    torch.manual_seed(0)
    sizes = {"vision": {"image_size": 64}, "text": {"context_length": 77, "width": 128, "heads": 4, "layers": 4}}
    encoder = ClipEncoder(
        Clip(ClipConfig.model_validate({"backbone": "ViT-Tiny-16", "readout": {"kind": "token"}, **sizes})).to(device)
    )
    found: dict[str, dict[str, float]] = {}
    counts: dict[str, dict[str, int]] = {}
    with tempfile.TemporaryDirectory() as name, encodings_counted(encoder.model) as counted:
        folder = Path(name)
        write_sugar_crepe(folder, 20 if quick else 1)

        def ours() -> None:
            counted.clear()
            task = PairsTaskConfig(task="pairs", root=name, layout="sugar_crepe", workers=0)
            found["ours"] = Suite({"pairs": task}).run(encoder)["pairs"].metrics
            counts["ours"] = dict(counted)

        def prepared(image: Image.Image) -> Tensor:
            return encoder.normalize(encoder.stack([np.asarray(encoder.transform(image.convert("RGB")))])).cpu()[0]

        def theirs() -> None:
            counted.clear()
            found["theirs"] = {}
            for split in SPLITS:
                source = SugarCrepe(str(folder / "val2017"), str(folder / f"{split}.json"), transform=prepared)
                loader = DataLoader(source, 64, collate_fn=image_captions_collate_fn)
                with silent():
                    scores = image_caption_selection.evaluate(
                        encoder.model, loader, encoder.tokenizer.batch, device, amp=False
                    )
                found["theirs"][split] = scores["text_acc"]
            counts["theirs"] = dict(counted)

        timed = interleave(lambda: seconds(ours, device), lambda: seconds(theirs, device), 1 if quick else 3)
    for split in SPLITS:
        assert abs(found["ours"][split] - found["theirs"][split]) < 0.01, split  # ties: none; rounding of near ones
    distinct, pairs = distinct_of_sugar_crepe(20 if quick else 1)
    assert counts["ours"] == distinct and counts["theirs"] == {"images": pairs, "texts": 2 * pairs}, (counts, distinct)
    out = [row(f"SugarCrepe, {pairs:,} pairs, ViT-Tiny-16 at 64 px", timed, None, "s", False)]
    for kind, number in distinct.items():
        both = [(number, counts["theirs"][kind])]
        out.append(row(f"SugarCrepe: {kind} encoded (ours: each distinct one once)", both, None, kind, False))  # type: ignore[arg-type]
    return out


def _sugar_crepe(fraction: int) -> dict[str, dict[str, dict[str, str]]]:
    """Return items by split, with the sizes that the SPARO paper scored, or one in `fraction` of them."""
    rng, number, out = np.random.default_rng(0), itertools.count(), {}
    images = 1561 // fraction
    published = {"add_att": 692, "add_obj": 2062, "replace_att": 788, "replace_obj": 1652, "replace_rel": 1406}
    for split, size in {**published, "swap_att": 666, "swap_obj": 246}.items():
        items = out[split] = {}
        for key in range(max(1, size // fraction)):
            here = next(number)
            image = here if here < images else int(rng.integers(images))  # every image has a pair
            caption = f"caption {rng.integers(5)} of picture {image} with some more words behind it"
            changed = f"{caption} changed into number {here}"
            items[str(key)] = {"filename": f"{image:012d}.jpg", "caption": caption, "negative_caption": changed}
    return out


def write_sugar_crepe(folder: Path, fraction: int) -> None:
    """Write the seven files of SugarCrepe, and JPEG files of noise."""
    rng = np.random.default_rng(0)
    (folder / "val2017").mkdir()
    for split, items in _sugar_crepe(fraction).items():
        (folder / f"{split}.json").write_text(json.dumps(items), encoding="utf-8")
    for image in range(1561 // fraction):
        pixels = rng.integers(0, 255, (64, 64, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / "val2017" / f"{image:012d}.jpg")


def distinct_of_sugar_crepe(fraction: int) -> tuple[dict[str, int], int]:
    """Return the number of distinct images and texts, and of pairs."""
    items = [item for found in _sugar_crepe(fraction).values() for item in found.values()]
    texts = {item[kind] for item in items for kind in ("caption", "negative_caption")}
    return {"images": len({item["filename"] for item in items}), "texts": len(texts)}, len(items)


@contextlib.contextmanager
def encodings_counted(model: Clip) -> Iterator[dict[str, int]]:
    """Count the images and texts that the towers encode."""
    counted: dict[str, int] = {}

    def count(kind: str) -> Any:
        def hook(_module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            counted[kind] = counted.get(kind, 0) + len(inputs[0])

        return hook

    handles = [
        tower.register_forward_pre_hook(count(kind))
        for kind, tower in (("images", model.visual), ("texts", model.text))
    ]
    yield counted
    for handle in handles:
        handle.remove()
