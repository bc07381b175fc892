"""Images, captions and shards for tests."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from PIL import Image

from sparo_data.writer import write_wds_layout

WORDS = ["red", "blue", "green", "dark", "bright", "square", "circle", "plain"]


def jpeg(seed: int, size: tuple[int, int] = (40, 36)) -> bytes:
    rng = np.random.default_rng(seed)
    base = np.full((size[1], size[0], 3), rng.integers(0, 255, 3), dtype=np.uint8)
    noise = rng.integers(0, 40, base.shape, dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(np.clip(base.astype(int) + noise, 0, 255).astype(np.uint8)).save(buffer, format="JPEG", quality=92)
    return buffer.getvalue()


def sample(i: int) -> tuple[str, dict[str, bytes]]:
    return f"{i:06d}", {"jpg": jpeg(i), "txt": f"a {WORDS[i % 8]} {WORDS[(i // 8) % 8]} number {i}".encode()}


def eval_sets(root: Path) -> dict[str, dict[str, str]]:
    """Write a zero-shot, a retrieval and a pairs set of twelve images each; return the recipe's `eval.tasks`."""
    images = [jpeg(1000 + i) for i in range(12)]
    zero = [(f"{i:03d}", {"jpg": data, "cls": str(i % 3).encode()}) for i, data in enumerate(images)]
    write_wds_layout(
        root / "zero", zero, classnames=["red square", "blue circle", "plain"], templates=["a {c}", "the {c}"]
    )
    pair = b'{"kind": "%s", "caption": "a red square", "negative_caption": "a blue square"}'
    write_wds_layout(
        root / "ret", [(f"{i:03d}", {"jpg": d, "txt": f"a thing {i}".encode()}) for i, d in enumerate(images)]
    )
    kinds = [b"replace_att", b"swap_att"]
    write_wds_layout(
        root / "pairs", [(f"{i:03d}", {"jpg": d, "json": pair % kinds[i % 2]}) for i, d in enumerate(images)]
    )
    return {
        "zero": {"task": "zeroshot", "root": str(root / "zero")},
        "ret": {"task": "retrieval", "root": str(root / "ret")},
        "pairs": {"task": "pairs", "root": str(root / "pairs")},
    }


def image_folder(folder: Path, count: int = 24, classes: int = 2) -> Path:
    """Write images of several sizes in class folders; return the folder."""
    for i in range(count):
        path = folder / f"class{i % classes}" / f"{i:03d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(jpeg(i, (60 + i, 50 + i)))
    return folder
