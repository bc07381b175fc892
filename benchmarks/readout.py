"""SPARO's exact fast form against the paper's Appendix A: forward + backward time and peak memory.

python benchmarks/readout.py [--quick] [--json FILE]
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import torch
from common import interleave, parser, peak_growth, report, row, seconds

from sparo_train.models.sparo import Sparo

CASES = [  # (d, N, L), bar on time, bar on memory; batch 32, V = D = 64
    ((768, 50, 64), 8.0, None),
    ((768, 197, 64), 16.0, 5.0),
    ((768, 50, 128), 10.0, None),
    ((384, 197, 64), 18.0, 5.0),
]


def step(form: str, case: tuple[int, int, int], device: str) -> Any:
    """A closure that runs forward and backward once."""
    dim, tokens, slots = case
    torch.manual_seed(0)
    module = Sparo(dim, slots, 64, 64).to(device)
    x = torch.randn(32, tokens, dim, device=device, requires_grad=True)
    call = module.plain if form == "plain" else module

    def run() -> None:
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            call(x).values.float().square().sum().backward()
        if device == "cuda":
            torch.cuda.synchronize()

    return run


def peak_bytes(form: str, case: tuple[int, int, int], device: str) -> float:
    """Peak memory of one forward and backward above what parameters and input take."""
    if device == "cuda":
        run = step(form, case, device)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        return torch.cuda.max_memory_allocated() - before
    command = [sys.executable, __file__, "--measure", form, *map(str, case)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def measure_here(form: str, case: tuple[int, int, int]) -> float:
    """In a fresh process: growth of the peak resident set over one step."""
    small = step(form, (8, 4, 4), "cpu")
    small()  # threads and kernels are loaded before the baseline is taken
    run = step(form, case, "cpu")
    return peak_growth(run)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--measure", nargs=4, help="internal: form d N L")
    options = arguments.parse_args()
    if options.measure:
        form, *case = options.measure
        print(measure_here(form, tuple(map(int, case))))
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = []
    for case, bar, memory_bar in CASES:
        fast, plain = step("fast", case, device), step("plain", case, device)
        rounds = 9 if options.quick else 25
        pairs = interleave(lambda f=fast: (seconds(f) + seconds(f)) / 2, lambda p=plain: seconds(p), rounds)
        label = f"d={case[0]} N={case[1]} L={case[2]}"
        pairs = [(1e3 * a, 1e3 * b) for a, b in pairs]
        rows.append(row(f"time {label}", pairs, bar if device == "cpu" else None, "ms", False))
        if memory_bar:
            both = [
                (peak_bytes("fast", case, device) / 2**20, peak_bytes("plain", case, device) / 2**20)
                for _ in range(1 if options.quick else 3)
            ]
            rows.append(row(f"peak memory {label}", both, memory_bar, "MiB", False))
    report(f"read-out, forward + backward, batch 32, {'bf16' if device == 'cuda' else 'fp32'}", rows, options.json)


if __name__ == "__main__":
    main()
