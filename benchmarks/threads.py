"""Training of a small transformer on all cores, alone and next to another computation, with threads that spin or sleep while they wait.

python benchmarks/threads.py [--rounds 5]
"""

from __future__ import annotations

import os
import subprocess
import sys

import common

_SPINS = {"default": {}, "GOMP_SPINCOUNT=3000": {"GOMP_SPINCOUNT": "3000"}}  # the second is what `sparo` sets
_STEPS = """
import sys, time, torch
from torch import nn
layer = nn.TransformerEncoderLayer(128, 4, 512, batch_first=True, norm_first=True)
model, x = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), torch.randn(64, 65, 128)
for _ in range(2):
    model(x).sum().backward()
begin, steps = time.perf_counter(), 0
while time.perf_counter() - begin < float(sys.argv[1]):
    model(x).sum().backward()
    steps += 1
print(64 * steps / (time.perf_counter() - begin))
"""


def rate(spin: dict[str, str], seconds: float) -> float:
    """Return the samples per second of a process that starts with this setting."""
    clean = {key: value for key, value in os.environ.items() if key not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    done = subprocess.run(
        [sys.executable, "-c", _STEPS, str(seconds)], env={**clean, **spin}, capture_output=True, text=True, check=True
    )
    return float(done.stdout)


def main() -> None:
    flags = common.parser(__doc__)
    flags.add_argument("--rounds", type=int, default=5)
    options = flags.parse_args()
    rounds, seconds = (2, 1.5) if options.quick else (options.rounds, 4.0)
    rows = []
    for name in ("alone", "beside a program on one core"):
        other = None if name == "alone" else subprocess.Popen([sys.executable, "-c", "while True: pass"])
        try:
            pairs = common.interleave(
                lambda: rate(_SPINS["GOMP_SPINCOUNT=3000"], seconds), lambda: rate(_SPINS["default"], seconds), rounds
            )
        finally:
            if other is not None:
                other.kill()
        rows.append(common.row(name, pairs, None, "samples/s", True))
    common.report("GOMP_SPINCOUNT=3000 (ours) / libgomp's default", rows, options.json)


if __name__ == "__main__":
    main()
