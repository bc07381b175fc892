"""Cost of saving checkpoints: the same training with a checkpoint every 20 steps, and with none.

    python benchmarks/checkpoint.py [--quick] [--json FILE] [--model ViT-Tiny-8] [--batch 64] [--steps 80] [--rounds 6]

Checkpoints are written in the background, or the training waits for them. Whole runs of `sparo train` on generated
images take turns. Steps per second are those of the trainer's records, without the first 20 steps, and include the wait
for a save that has not finished.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from common import interleave, noise_shards, parser, report, row

from launch.commands.train import train
from sparo_train.core.config import resolve
from sparo_train.core.disk import checkpoint_store as store
from sparo_train.core.disk import metrics
from sparo_train.train.run_config import RunConfig

EVERY = 20


def run(place: Path, number: int, options: Any, saving: str) -> tuple[float, float]:
    """Return the steps per second, and the MB per checkpoint, of one run."""
    tree = {
        "name": f"run-{number}",
        "out": str(place / "runs"),
        "batch_size": options.batch,
        "steps": options.steps,
        "objective": {
            "kind": "clip",
            "model": {
                "backbone": options.model,
                "readout": {"kind": "sparo", "slots": 32, "slot_width": 32, "head_width": 32},
            },
        },
        "data": {"sources": {"a": {"shards": str(place / "shards")}}, "workers": 1},
        "engine": {"precision": "fp32"},
        "checkpoint": {
            "every_steps": 0 if saving == "none" else EVERY,
            "every_minutes": 0,
            "background": saving != "waited for",
            "keep_last": 1,
        },
        "log": {"every_steps": EVERY, "tensorboard": False},
    }
    config = resolve(RunConfig, tree, "benchmark")
    done = train(config)
    records = metrics.read(config.folder / "metrics.jsonl", "train")[1:]
    assert done.checkpoint is not None
    size = sum(facts["bytes"] for facts in store.read_meta(done.checkpoint)["files"].values()) / 1e6
    return EVERY * len(records) / sum(EVERY * r["step_seconds"] for r in records), size


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--model", default="ViT-Tiny-8")
    flags.add_argument("--batch", type=int, default=64)
    flags.add_argument("--steps", type=int, default=80)
    flags.add_argument("--rounds", type=int, help="default: 1 with --quick, 6 without")
    options = flags.parse_args()
    rounds = options.rounds or (1 if options.quick else 6)
    if options.quick:
        options.steps, options.batch = 40, min(options.batch, 32)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        noise_shards(place / "shards", 4096)
        runs = iter(range(1000))
        full = (("in the background", 0.95), ("waited for", None))
        for saving, bar in (("in the background", None),) if options.quick else full:
            sizes = []

            def with_saving(saving: str = saving, sizes: list[float] = sizes) -> float:
                rate, size = run(place, next(runs), options, saving)
                sizes.append(size)
                return rate

            pairs = interleave(with_saving, lambda: run(place, next(runs), options, "none")[0], rounds)
            name = f"{saving}, every {EVERY} steps, {sizes[-1]:.0f} MB"
            rows.append(row(name, pairs, bar, "steps/s", True))
    report(f"checkpoints, {options.model}, batch {options.batch}: with saving (ours) / without", rows, options.json)


if __name__ == "__main__":
    main()
