"""Memory, launches and collectives of training steps on the null GPU, compared with the estimates of `sparo train --dry-run`.

    python benchmarks/engines_null.py [--markdown]

The null GPU is a library that accepts CUDA calls and computes nothing (tests/nullgpu/README.md), so there are counts and
bytes, but no times. Each step runs as rank 0 of the number of ranks of its row. Steps are bf16 and not compiled.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.nullgpu.build import environment  # noqa: E402  after the path

CLIP, DINO = "clip/cc15m_sparo.yaml", "dino/imagenet_vits16_sparo.yaml"
L14 = ["objective.model.backbone=ViT-L-14"]


class Case(NamedTuple):
    """A step: its recipe, changes to it, the `engine` block, the number of ranks, and the samples per rank."""

    name: str
    recipe: str
    changes: list[str]
    engine: dict[str, Any]
    ranks: int
    samples: int


CASES = [
    Case("CLIP+SPARO B/16", CLIP, [], {"kind": "local"}, 1, 256),
    Case("CLIP B/16", CLIP, ["objective.model.readout={kind: token}"], {"kind": "local"}, 1, 256),
    Case("CLIP+SPARO B/16, grad_checkpointing", CLIP, [], {"kind": "local", "grad_checkpointing": True}, 1, 256),
    Case("CLIP+SPARO L/14", CLIP, L14, {"kind": "local"}, 1, 64),
    Case("DINO+SPARO S/16", DINO, [], {"kind": "local"}, 1, 16),
    Case("CLIP+SPARO B/16", CLIP, [], {"kind": "ddp"}, 64, 64),
    Case("CLIP+SPARO B/16", CLIP, [], {"kind": "fsdp2"}, 64, 64),
    Case("CLIP+SPARO B/16, cpu_offload", CLIP, [], {"kind": "fsdp2", "cpu_offload": True}, 64, 64),
    Case("CLIP+SPARO B/16, stage 2", CLIP, [], {"kind": "deepspeed", "stage": 2}, 64, 64),
    Case("CLIP+SPARO B/16, stage 3", CLIP, [], {"kind": "deepspeed", "stage": 3}, 64, 64),
    Case("CLIP+SPARO L/14, shard_size 8", CLIP, L14, {"kind": "fsdp2", "shard_size": 8}, 64, 32),
    Case("CLIP+SPARO L/14", CLIP, L14, {"kind": "ddp"}, 64, 32),
    Case("CLIP+SPARO B/16, gather", CLIP, ["objective.loss.exchange=gather"], {"kind": "ddp"}, 64, 512),
    Case("CLIP+SPARO B/16, ring", CLIP, ["objective.loss.exchange=ring"], {"kind": "ddp"}, 64, 512),
    Case("CLIP+SPARO B/16, gather", CLIP, ["objective.loss.exchange=gather"], {"kind": "ddp"}, 1024, 128),
    Case("CLIP+SPARO B/16, ring", CLIP, ["objective.loss.exchange=ring"], {"kind": "ddp"}, 1024, 128),
]


def measure(case: Case) -> dict[str, Any]:
    """Run a step in a separate process."""
    arguments = [case.recipe, case.changes, case.engine, case.ranks, case.samples]
    command = [sys.executable, "-m", "tests.nullgpu.programs", "against_estimate", json.dumps(arguments)]
    env = environment(NULLGPU_READS="stored", PYTHONPATH=str(ROOT))
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{case.name}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--markdown", action="store_true", help="print the table as in the documentation")
    columns = ("step", "engine", "ranks", "samples per rank", "peak (GB)", "estimate (GB)", "launches", "collectives")
    separator = " | " if flags.parse_args().markdown else "  "
    print(separator.join(("", *columns, "")).strip() if separator == " | " else separator.join(columns))
    if separator == " | ":
        print("|" + "---|" * len(columns))
    for case in CASES:
        step = measure(case)
        share = step["estimate"] / step["peak"] - 1
        cells = (
            case.name,
            case.engine["kind"],
            f"{case.ranks:,}",
            str(case.samples),
            f"{step['peak'] / 1e9:.1f}",
            f"{step['estimate'] / 1e9:.1f} ({share:+.1%})",
            f"{step['launch']:,}",
            f"{step['collectives']:,}",
        )
        print(separator.join(("", *cells, "")).strip() if separator == " | " else separator.join(cells), flush=True)


if __name__ == "__main__":
    main()
