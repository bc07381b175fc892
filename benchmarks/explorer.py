"""The explorer in Debian's chromium: time from a click to new scores, first paint, and size of the page.

    python benchmarks/explorer.py [--quick] [--json FILE]

128 slots, 500 images, and tasks of every kind that such a model has: zero-shot with 100 classes, retrieval among 500
captions, and 7,500 pairs. Each row is compared with the value that we aimed at. Switching a slot is measured from the press
of Space until all scores are in the table and laid out; the row has the 95th percentile of each round of 50 clicks. Needs
chromium and playwright.
"""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from common import noise_shards, parser, report, row
from PIL import Image

from sparo_data.writer import write_wds_layout

SLOTS, IMAGES, CLASSES, PAIRS = 128, 500, 100, 7500
_SWITCH = """() => {
    const times = [];
    const list = document.getElementById("slots"), table = document.getElementById("score-bar");
    for (let i = 0; i < 50; i++) {
        const box = list.children[(i * 37) % list.children.length];
        box.focus();
        const begin = performance.now();
        box.dispatchEvent(new KeyboardEvent("keydown", { key: " ", bubbles: true }));
        table.getBoundingClientRect();
        times.push(performance.now() - begin);
    }
    return times;
}"""


def jpegs() -> Iterator[bytes]:
    rng = np.random.default_rng(0)
    with tempfile.NamedTemporaryFile(suffix=".jpg") as file:
        for _ in range(IMAGES):
            Image.fromarray(rng.integers(0, 255, (64, 64, 3), dtype=np.uint8)).save(file.name)
            yield Path(file.name).read_bytes()


def prepared(folder: Path) -> None:
    """Train a run of a few steps with 128 slots, and write its sets."""
    noise_shards(folder / "shards", 256)
    images = list(jpegs())
    rows = [(f"{i:05d}", {"jpg": data, "cls": str(i % CLASSES).encode()}) for i, data in enumerate(images)]
    write_wds_layout(folder / "zero", rows, classnames=[f"thing {i}" for i in range(CLASSES)], templates=["a {c}"])
    write_wds_layout(
        folder / "ret", [(f"{i:05d}", {"jpg": d, "txt": f"number {i} of many".encode()}) for i, d in enumerate(images)]
    )
    pair = '{"kind": "kind %d", "caption": "a %d of %d", "negative_caption": "a %d of %d"}'
    rows = [
        (f"{i:05d}", {"jpg": images[i % IMAGES], "json": (pair % (i % 7, i, i // 7, i // 7, i)).encode()})
        for i in range(PAIRS)
    ]
    write_wds_layout(folder / "pairs", rows)
    kinds = {"zero": "zeroshot", "ret": "retrieval", "pairs": "pairs"}
    tasks = {name: {"task": kind, "root": str(folder / name)} for name, kind in kinds.items()}
    model = {
        "vision": {"image_size": 64, "patch_size": 16, "width": 64, "layers": 2, "head_width": 32},
        "text": {"context_length": 16, "width": 64, "heads": 2, "layers": 2},
        "readout": {"kind": "sparo", "slots": SLOTS, "slot_width": 32, "head_width": 16},
    }
    recipe = {
        "name": "run", "out": str(folder), "batch_size": 16, "steps": 2, "objective": {"kind": "clip", "model": model},
        "data": {"sources": {"a": {"shards": str(folder / "shards")}}, "workers": 0}, "engine": {"device": "cpu", "precision": "fp32"},
        "log": {"tensorboard": False},
    }  # fmt: skip
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    (folder / "tasks.yaml").write_text(yaml.safe_dump({"tasks": tasks}))
    subprocess.run([*_SPARO, "train", "recipe.yaml"], cwd=folder, check=True)


_SPARO = (sys.executable, "-m", "launch.cli")


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Start the explorer, and return its address."""
    words = ("slots", "explore", "run", "--data", "tasks.yaml", "--port", "0", "--features", "store")
    with (folder / "out").open("w") as out:
        process = subprocess.Popen([*_SPARO, *words], cwd=folder, stdout=out, stderr=out)
    try:
        while not (found := re.search(r"http://\S+", (folder / "out").read_text())):
            if process.poll() is not None:
                raise SystemExit((folder / "out").read_text())
            time.sleep(0.2)
        yield found.group()
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(30)


def sized(answer: Any) -> dict[str, int]:
    """Return the address of a response, and its bytes."""
    return {answer.url: int(answer.headers.get("content-length", 0))}


def measured(address: str, rounds: int) -> dict[str, list[float]]:
    """Return for each round: 95th percentile of 50 clicks, first paint, time until slots and images are listed (seconds), and size of page and arrays (MB)."""
    from playwright.sync_api import sync_playwright

    found: dict[str, list[float]] = {name: [] for name in ("switch", "paint", "there", "page", "arrays")}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
        )
        for _ in range(rounds):
            page: Any = browser.new_context(viewport={"width": 1300, "height": 900}).new_page()
            sizes: dict[str, int] = {}
            page.on("response", lambda answer, sizes=sizes: sizes.update(sized(answer)))
            page.goto(address)
            page.wait_for_selector(f"#slots [role=option]:nth-child({SLOTS})")
            page.wait_for_selector(f"#images [role=option]:nth-child({IMAGES})")
            found["there"].append(page.evaluate("performance.now()") / 1000)
            page.wait_for_selector("body[data-ready=yes]", timeout=120_000)
            page.wait_for_timeout(500)
            paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
            found["paint"].append(paint / 1000)
            found["switch"].append(float(np.percentile(page.evaluate(_SWITCH), 95)) / 1000)
            kind = {url: url.removeprefix(address).split("/")[0] for url in sizes}
            found["arrays"].append(sum(size for url, size in sizes.items() if kind[url] == "task") / 1e6)
            rest = sum(size for url, size in sizes.items() if kind[url] not in ("task", "image", "attention"))
            found["page"].append(rest / 1e6)
            page.context.close()
        browser.close()
    return found


def main() -> None:
    options = parser(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepared(folder)
        with served(folder) as address:
            found = measured(address, 3 if options.quick else 10)
    named = (
        ("switch", f"a switch to all scores, p95 of 50, {SLOTS} slots, {IMAGES} images", 0.05, "s"),
        ("paint", "first paint", 2, "s"),
        ("there", "all slots and images there to be used", 2, "s"),
        ("page", "the page before pictures and arrays", 2, "MB"),
    )
    rows: list[dict[str, Any]] = [
        row(f"{title} (bar: {bar:g} {unit})", [(value, bar) for value in found[key]], 1, unit, False)
        for key, title, bar, unit in named
    ]
    report("the explorer", rows, options.json)
    print(f"arrays of the scores, fetched after the first paint: {found['arrays'][0]:.1f} MB")


if __name__ == "__main__":
    main()
