"""Seconds until a data set of many shards is open, from a merged index (`sparo data index --merge`).

    python benchmarks/open_shards.py [--quick] [--json FILE]

The index has 41,408 shards of 1,000 samples, as many shards as LAION-400M. The shards themselves do not exist: opening asks
for none of them. Each round is a new process. The file is in the page cache, as for the second rank of a node.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

SHARDS, SAMPLES = 41_408, 1000


def write(file: Path) -> None:
    """Write an index of shards on a server."""
    from sparo_train.data.sources.merged_index import MergedShard, write_merged_index
    from sparo_train.data.sources.tar import ShardIndex

    rng, shards = np.random.default_rng(0), []
    for number in range(SHARDS):
        offsets = np.concatenate([[0], np.cumsum(rng.integers(20, 200, SAMPLES) * 512)])
        index = ShardIndex(offsets, True, rng.bytes(32))
        shards.append(MergedShard(f"s3://bucket/{number:05d}.tar", index, int(offsets[-1]) + 1024))
    write_merged_index(file, shards)


def measure(file: str) -> list[float]:
    """Return the seconds to open the source, and to its fingerprint and first sample of the plan."""
    from sparo_train.data.read.plan import Plan
    from sparo_train.data.sources.base import open_source
    from sparo_train.data.sources.fingerprint import fingerprint
    from sparo_train.data.sources.shards import ShardsConfig

    begin = time.perf_counter()
    source = open_source("a", ShardsConfig(shards=f"s3://bucket/{{00000..{SHARDS - 1:05d}}}.tar", index=file))
    opened = time.perf_counter() - begin
    fingerprint([source])
    Plan([[len(storage) for storage in source.storages]], [1.0], 0, 512).sample_at(0, 0)
    return [opened, time.perf_counter() - begin]


def main() -> None:
    from common import parser

    options = parser(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as root:
        file = Path(root, "index.safetensors")
        write(file)
        command = [sys.executable, __file__, "--measure", str(file)]
        rounds = [
            json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
            for _ in range(2 if options.quick else 5)
        ]
    for name, seconds in zip(("open", "open, fingerprint and plan"), zip(*rounds, strict=True), strict=True):
        print(f"{name}: {np.median(seconds):.2f} s ({min(seconds):.2f}-{max(seconds):.2f}), n {len(seconds)}")
    if options.json:
        Path(options.json).write_text(json.dumps(rounds))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        print(json.dumps(measure(sys.argv[2])))
    else:
        main()
