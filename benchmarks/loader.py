"""Images per second of one loader worker: this project against open_clip (`open_clip_train.data`), on the same JPEG shards.

    python benchmarks/loader.py --setup                 # once: open_clip 3.3.0 + pandas + webdataset<=0.2.86 in an environment of their own
    python benchmarks/loader.py [--quick] [--json FILE]

Both return normalised fp32 batches of 64 with random crops of 224 pixels. The training process normalises our batches,
open_clip's workers normalise each image. Rows: `data.decode=fast` (the default), `data.decode=exact` (the pixels of
Pillow, as open_clip's), and `fast` with `data.scaled_decoding`.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

BATCH = 64
# Pixels of the shorter side, and the ratio that each mode must reach.
SIZES: dict[int, dict[str, float | None]] = {
    256: {"fast": 3.5, "exact": 1.7},
    512: {"fast": 2.8, "exact": 1.35},
    1024: {"fast": None, "exact": None, "scaled": None},
}
ENVIRONMENT = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sparo" / "bench-open-clip"
PINNED = ("open_clip_torch==3.3.0", "torch", "torchvision", "pandas", "webdataset<=0.2.86")


def photo(rng: np.random.Generator, shortest: int) -> bytes:
    """Return a JPEG that resembles a photo: 1/f colour noise, a few flat shapes, fine grain; quality 90, 4:2:0."""
    ratio = rng.choice([3 / 4, 1.0, 4 / 3, 3 / 2, 16 / 9])
    width, height = (round(shortest * ratio), shortest) if ratio >= 1 else (shortest, round(shortest / ratio))
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None])
    frequency[0, 0] = 1

    def noise(power: float) -> np.ndarray:
        spectrum = (rng.standard_normal(frequency.shape) + 1j * rng.standard_normal(frequency.shape)) / frequency**power
        field = np.fft.irfft2(spectrum, s=(height, width))
        return (field - field.mean()) / field.std()

    light = noise(1.5)
    image = Image.fromarray(
        np.clip(np.stack([120 + 40 * light + 20 * noise(1.6) for _ in range(3)], -1), 0, 255).astype(np.uint8)
    )
    draw = ImageDraw.Draw(image)
    for _ in range(6):
        x, y, r = int(rng.integers(width)), int(rng.integers(height)), int(rng.integers(10, shortest // 4))
        draw.ellipse([x - r, y - r, x + r, y + r], fill=tuple(int(v) for v in rng.integers(0, 255, 3)))
    grain = 1.5 * rng.standard_normal((height, width, 1)) + 2 * noise(0.7)[..., None]
    buffer = io.BytesIO()
    Image.fromarray(np.clip(np.asarray(image) + grain, 0, 255).astype(np.uint8)).save(
        buffer, "JPEG", quality=90, subsampling=2
    )
    return buffer.getvalue()


def make_shards(root: Path, shortest: int, count: int) -> list[str]:
    """Write two shards with `count` samples together, from 64 distinct images."""
    from sparo_data.writer import write_shards

    rng = np.random.default_rng(0)
    photos = [photo(rng, shortest) for _ in range(64)]
    words = [
        "a",
        "the",
        "red",
        "small",
        "old",
        "dog",
        "car",
        "tree",
        "on",
        "in",
        "under",
        "near",
        "street",
        "house",
        "green",
        "water",
        "people",
    ]
    samples = (
        (
            f"{i:06d}",
            {"jpg": photos[i % 64], "txt": " ".join(rng.choice(words, rng.integers(6, 18))).encode(), "json": b"{}"},
        )
        for i in range(count)
    )
    return [str(p) for p in write_shards(root / str(shortest), samples, count // 2)]


def timed(batches: Iterator[int], count: int) -> float:
    """Return images per second over `count` batches, after six that fill the queues."""
    for _ in range(6):
        next(batches)
    begin = time.perf_counter()
    images = sum(next(batches) for _ in range(count))
    return images / (time.perf_counter() - begin)


def our_rate(urls: list[str], count: int, mode: str) -> float:
    import torch

    from sparo_train.data.examples.image_text import ClipTokenizer, ImageTextExamples
    from sparo_train.data.read.loader import Pipeline
    from sparo_train.data.sources.base import DataConfig
    from sparo_train.data.sources.shards import ShardsConfig
    from sparo_train.models.clip_config import ClipConfig
    from sparo_train.objectives.clip import ClipObjective
    from sparo_train.objectives.clip_config import ClipObjectiveConfig

    torch.set_num_threads(1)
    tiny = {"vision": {"width": 64, "layers": 2}, "text": {"width": 64, "heads": 1, "layers": 2}}
    pixels = ClipObjective(ClipObjectiveConfig(model=ClipConfig.model_validate(tiny))).pixels
    keys = {"fast": {}, "exact": {"decode": "exact"}, "scaled": {"scaled_decoding": True}}[mode]
    config = DataConfig(sources={"x": ShardsConfig(shards=tuple(urls))}, workers=1, **keys)
    pipeline = Pipeline(config, BATCH, ImageTextExamples(config, 224, 77, ClipTokenizer(77)), 0)
    return timed((len(pixels(d.batch["image"])) for d in pipeline.start()), count)


def their_rate(urls: list[str], count: int) -> float:
    """Return the rate of open_clip's loader as its trainer builds it; runs in the other environment."""
    import types

    import open_clip
    import torch
    from open_clip_train.data import get_wds_dataset

    torch.set_num_threads(1)
    arguments = types.SimpleNamespace(
        train_data="::".join(urls), train_num_samples=BATCH * (count + 8), val_data=None, dataset_resampled=True,
        train_data_upsampling_factors=None, seed=0, batch_size=BATCH, workers=1, world_size=1,
    )  # fmt: skip
    transform = open_clip.image_transform(224, is_train=True)
    loader = get_wds_dataset(arguments, transform, True, tokenizer=open_clip.get_tokenizer("ViT-B-32")).dataloader
    return timed((len(images) for images, _ in loader), count)


def in_process(python: str, kind: str, urls: list[str], count: int) -> float:
    """Return one measurement, taken in a separate process, so that both sides start alike."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    command = [python, __file__, "--measure", json.dumps([kind, urls, count])]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise SystemExit(f"{kind}: {done.stderr[-2000:]}")
    return float(done.stdout.strip().splitlines()[-1])


def set_up() -> None:
    venv.create(ENVIRONMENT, with_pip=True)
    subprocess.run([str(ENVIRONMENT / "bin" / "pip"), "install", "-q", *PINNED], check=True)


def main() -> None:
    from common import parser, report, row

    arguments = parser(__doc__)
    arguments.add_argument("--setup", action="store_true", help="make open_clip's environment and end")
    arguments.add_argument(
        "--theirs", default=str(ENVIRONMENT / "bin" / "python"), help="python of open_clip's environment"
    )
    options = arguments.parse_args()
    if options.setup:
        set_up()
        return
    if not Path(options.theirs).exists():
        raise SystemExit(f"{options.theirs}: not there; run `python benchmarks/loader.py --setup` once")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for shortest, bars in SIZES.items():
            urls = make_shards(Path(folder), shortest, 512)
            count, rounds = (8, 1) if options.quick else (8 if shortest > 512 else 32 if shortest == 256 else 16, 5)
            rates = []
            for _ in range(rounds):
                ours = {mode: in_process(sys.executable, mode, urls, 3 * count) for mode in bars}
                rates.append((ours, in_process(options.theirs, "theirs", urls, count)))
            for mode, bar in bars.items():
                pairs = [(ours[mode], theirs) for ours, theirs in rates]
                rows.append(row(f"{shortest} px, {mode}", pairs, bar, "images/s", True))
    report("loader, one worker, 224 px crops", rows, options.json)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        what, shard_urls, batches_to_time = json.loads(sys.argv[2])
        if what == "theirs":
            print(their_rate(shard_urls, batches_to_time))
        else:
            print(our_rate(shard_urls, batches_to_time, what))
    else:
        main()
