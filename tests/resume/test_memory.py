"""Memory of a training over an epoch of 200,000 samples (`pytest -m slow`)."""

import io
import time

import numpy as np
import psutil
import pytest
import yaml
from PIL import Image

from sparo_data.writer import write_shards
from tests.helpers.processes import start_sparo
from tests.helpers.recipes import tiny_recipe
from tests.helpers.runs import losses

SAMPLES, BATCH = 200_000, 500


def private_bytes(pid):
    """Return the memory of a process and its workers that no other process shares."""
    total = 0
    for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
        try:
            total += process.memory_full_info().uss
        except psutil.NoSuchProcess:
            continue
    return total


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_an_epoch_of_200_000_samples_needs_constant_memory(tmp_path):
    rng, images = np.random.default_rng(0), []
    for _ in range(500):
        buffer = io.BytesIO()
        Image.fromarray(rng.integers(0, 255, (4, 4, 3), dtype=np.uint8)).resize((32, 32)).save(buffer, "JPEG")
        images.append(buffer.getvalue())
    samples = ((f"{i:09d}", {"jpg": images[i % 500], "txt": f"caption {i}".encode()}) for i in range(SAMPLES))
    write_shards(tmp_path / "shards", samples, 2000)
    recipe = tiny_recipe(tmp_path / "shards", tmp_path / "runs", batch_size=BATCH, steps=SAMPLES // BATCH)
    recipe["data"] = {"sources": recipe["data"]["sources"], "workers": 2}
    recipe |= {"eval": {"tasks": {}}, "checkpoint": {"every_steps": 100}}
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(recipe))
    run = start_sparo("train", str(tmp_path / "r.yaml"))
    used = {}
    while run.poll() is None:
        done = len(losses(tmp_path / "runs/tiny")) if (tmp_path / "runs/tiny/metrics.jsonl").exists() else 0
        if done > 20:
            used[done] = private_bytes(run.pid)
        time.sleep(0.5)
    assert run.returncode == 0, run.stderr_now()
    early = max(size for step, size in used.items() if 50 < step < 150)
    late = max(size for step, size in used.items() if step > 300)
    print(f"{early / 1e6:.0f} MB until step 150, {late / 1e6:.0f} MB after step 300; {len(used)} samples")
    assert late < 1.05 * early
