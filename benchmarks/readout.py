"""SPARO's readout compared with the code of the paper's Appendix A: time of forward and backward, and peak memory.

    python benchmarks/readout.py [--quick] [--compile] [--batches 256 1024] [--json FILE]

`--compile` adds two rows per size: the readout compiled by torch compared with the readout as it is, and compared with its
matrix products alone. A kernel of our own would be worth writing where the second ratio is below 1/1.5.
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


def step(form: str, case: tuple[int, int, int], device: str, batch: int = 32) -> Any:
    """Return a function that runs forward and backward once."""
    dim, tokens, slots = case
    torch.manual_seed(0)
    module = Sparo(dim, slots, 64, 64).to(device)
    x = torch.randn(batch, tokens, dim, device=device, requires_grad=True)
    call = {"plain": module.plain, "fast": module, "compiled": torch.compile(module, dynamic=False)}[form]

    def run() -> None:
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            call(x).values.float().square().sum().backward()
        if device == "cuda":
            torch.cuda.synchronize()

    return run


def products(case: tuple[int, int, int], device: str) -> Any:
    """Return a function that runs the matrix products of one forward and backward: each product, and two of its size for backward."""
    dim, tokens, slots = case
    made = {"device": device, "dtype": torch.bfloat16 if device == "cuda" else torch.float32}
    x, directions = torch.randn(32, tokens, dim, **made), torch.randn(dim, slots, **made)
    shares, pooled = torch.randn(32, slots, tokens, **made), torch.randn(slots, 32, dim, **made)
    keys, values, last = (torch.randn(*shape, **made) for shape in ((slots, dim, 64), (32 * slots, 64), (64, 64)))

    def run() -> None:
        for _ in range(3):
            for a, b in ((x, directions), (shares, x), (pooled, keys), (values, last)):
                torch.matmul(a, b)
        if device == "cuda":
            torch.cuda.synchronize()

    return run


def peak_bytes(form: str, case: tuple[int, int, int], device: str) -> float:
    """Return the peak memory of one forward and backward above that of parameters and input."""
    if device == "cuda":
        run = step(form, case, device)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        return torch.cuda.max_memory_allocated() - before
    command = [sys.executable, __file__, "--measure", form, *map(str, case)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def measure_here(form: str, case: tuple[int, int, int]) -> float:
    """Return the growth of the peak resident set during one step; runs in a new process."""
    small = step(form, (8, 4, 4), "cpu")
    small()  # threads and kernels are loaded before the baseline is taken
    run = step(form, case, "cpu")
    return peak_growth(run)


def compiled_rows(case: tuple[int, int, int], device: str, rounds: int) -> list[dict[str, Any]]:
    label = f"d={case[0]} N={case[1]} L={case[2]}"
    compiled, fast, bare = step("compiled", case, device), step("fast", case, device), products(case, device)
    found = []
    for name, other, bar in (("compiled / not", fast, None), ("compiled / its products alone", bare, 1 / 1.5)):
        pairs = interleave(lambda: 1e3 * seconds(compiled), lambda f=other: 1e3 * seconds(f), rounds)
        found.append(row(f"time {label}: {name}", pairs, bar if device == "cuda" else None, "ms", False))
    return found


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument(
        "--compile", action="store_true", help="also what torch.compile makes of it, and what it leaves"
    )
    arguments.add_argument("--batches", type=int, nargs="*", default=[], help="further batch sizes for the time rows")
    arguments.add_argument("--measure", nargs=4, help="internal: form d N L")
    options = arguments.parse_args()
    if options.measure:
        form, d, n, slots = options.measure
        print(measure_here(form, (int(d), int(n), int(slots))))
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
        for batch in options.batches:
            fast, plain = step("fast", case, device, batch), step("plain", case, device, batch)
            pairs = interleave(lambda f=fast: 1e3 * seconds(f), lambda p=plain: 1e3 * seconds(p), rounds)
            rows.append(row(f"time {label}, batch {batch}", pairs, None, "ms", False))
        if options.compile:
            rows += compiled_rows(case, device, rounds)
        if memory_bar:
            both = [
                (peak_bytes("fast", case, device) / 2**20, peak_bytes("plain", case, device) / 2**20)
                for _ in range(1 if options.quick else 3)
            ]
            rows.append(row(f"peak memory {label}", both, memory_bar, "MiB", False))
    report(
        f"read-out, forward + backward, batch 32 where no other is named, {'bf16' if device == 'cuda' else 'fp32'}",
        rows,
        options.json,
    )


if __name__ == "__main__":
    main()
