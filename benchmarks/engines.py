"""All engines on two ranks with the same recipe and batches: steps per second, memory per rank, and losses.

    python benchmarks/engines.py [--quick] [--json FILE] [--model ViT-B-32] [--batch 8] [--device cpu]
                                 [--precision fp32] [--compile] [--ranks 2]

Whole runs of `sparo train` in two processes; engines take turns and are compared with ddp. `--ranks 1`, for a machine
with one GPU, omits engines that need several. Memory on a CPU is the peak of a rank's resident set above that of a run of
two steps of the smallest model (Python, torch and the libraries of the engine); on a GPU, it is the peak of the
allocator. The losses of every step are compared with those of ddp; in bf16 they may differ, because sums are rounded.
"""

from __future__ import annotations

import os
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml
from common import device_flag, noise_shards, parser, report, row

from sparo_train.core.disk import metrics

ENGINES: dict[str, dict[str, Any]] = {
    "ddp": {"kind": "ddp"},
    "fsdp2": {"kind": "fsdp2"},
    "fsdp2, reshard_after_forward: false": {"kind": "fsdp2", "reshard_after_forward": False},
    "fsdp2, cpu_offload: true": {"kind": "fsdp2", "cpu_offload": True},
    "deepspeed, stage: 1": {"kind": "deepspeed", "stage": 1},
    "deepspeed, stage: 2": {"kind": "deepspeed", "stage": 2},
    "deepspeed, stage: 3": {"kind": "deepspeed", "stage": 3},
}
WARM = 4


def recipe(place: Path, name: str, options: Any, engine: dict[str, Any], model: str, steps: int) -> Path:
    readout = {"kind": "sparo", "slots": 64, "slot_width": 64, "head_width": 64}
    tree = {
        "name": name,
        "out": str(place),
        "batch_size": options.batch * options.ranks,
        "steps": steps,
        "objective": {"kind": "clip", "model": {"backbone": model, "readout": readout}},
        "data": {"sources": {"a": {"shards": str(place / "shards")}}, "workers": 1, "streams": 4},
        "optim": {"lr": 1e-4, "warmup_steps": 1},
        "engine": {"device": options.device, "precision": options.precision, "compile": options.compile, **engine},
        "checkpoint": {"every_steps": 0, "every_minutes": 0},
        "log": {"every_steps": 1, "tensorboard": False},
    }
    path = place / f"{name}.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def run(place: Path, name: str, options: Any, engine: dict[str, Any], model: str, steps: int) -> list[dict[str, Any]]:
    """Return the records of a run on `options.ranks` ranks."""
    path = recipe(place, name, options, engine, model, steps)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    threads = str(max(1, (os.cpu_count() or 2) // options.ranks))
    env = {
        **os.environ,
        "OMP_NUM_THREADS": threads,
        "WORLD_SIZE": str(options.ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    command = [sys.executable, "-m", "launch.cli", "train", str(path)]
    logs = [place / f"{name}-{r}.err" for r in range(options.ranks)]
    ranks = [
        subprocess.Popen(
            command,
            env={**env, "RANK": str(r), "LOCAL_RANK": str(r)},
            stdout=subprocess.DEVNULL,
            stderr=log.open("w"),
        )
        for r, log in enumerate(logs)
    ]
    codes = [process.wait() for process in ranks]
    if any(codes):
        sys.exit("\n".join(log.read_text() for log in logs))
    return metrics.read(place / name / "metrics.jsonl", "train")


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--model", default="ViT-B-32")
    flags.add_argument("--batch", type=int, default=8, help="pairs per rank")
    device_flag(flags)
    flags.add_argument("--precision", default="fp32", choices=("fp32", "bf16"))
    flags.add_argument("--compile", action="store_true", help="engine.compile=true in all of them")
    flags.add_argument("--ranks", type=int, default=2, choices=(1, 2))
    options = flags.parse_args()
    rounds, steps = (1, 8) if options.quick else (2, 20)
    model = "ViT-Tiny-16" if options.quick else options.model
    names = ["ddp", "fsdp2", "deepspeed, stage: 2"] if options.quick else list(ENGINES)
    several = {name for name, keys in ENGINES.items() if keys["kind"] == "deepspeed" or keys.get("cpu_offload")}
    engines = {name: ENGINES[name] for name in names if options.ranks > 1 or name not in several}
    speed: dict[str, list[float]] = {name: [] for name in engines}
    memory: dict[str, list[float]] = {name: [] for name in engines}
    losses: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        noise_shards(place / "shards", 1024)
        base = {}
        for number, (name, engine) in enumerate(engines.items()):
            small = (
                []
                if options.device == "cuda" or options.quick
                else run(place, f"base-{number}", options, engine, "ViT-Tiny-16", 2)
            )
            base[name] = small[-1]["memory"] if small else 0.0
        for turn in range(rounds):
            for number, (name, engine) in enumerate(engines.items()):
                records = run(place, f"run-{turn}-{number}", options, engine, model, steps)
                speed[name].append(1 / statistics.median(r["step_seconds"] for r in records[WARM:]))
                memory[name].append(records[-1]["memory"] - base[name])
                losses[name] = [r["loss"] for r in records]
    rows, bar = [], None if options.quick or options.precision == "bf16" else 1e-5
    for name in engines:
        difference = max(abs(a - b) / abs(b) for a, b in zip(losses[name], losses["ddp"], strict=True))
        rows.append(row(f"{name}: steps/s", list(zip(speed[name], speed["ddp"], strict=True)), None, "steps/s", True))
        if not options.quick:
            rows.append(row(f"{name}: memory", list(zip(memory[name], memory["ddp"], strict=True)), None, "GiB", False))
        facts = {
            "ours": difference,
            "theirs": 0.0,
            "unit": "relative",
            "ratio": difference,
            "spread": [difference] * 2,
            "n": steps,
        }
        rows.append(
            {
                "name": f"{name}: largest loss difference",
                **facts,
                "bar": bar,
                "ok": bar is None or difference <= bar,
            }
        )
    report(
        f"engines on {options.ranks} rank(s), {model}, {options.batch} pairs a rank, {options.precision}"
        f"{', compiled' if options.compile else ''}: engine (ours) / ddp",
        rows,
        options.json,
    )


if __name__ == "__main__":
    main()
