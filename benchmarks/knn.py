"""k-NN at ImageNet's size in bounded memory: 50,000 queries and a bank of 1,281,167 rows in a memory map.

    python benchmarks/knn.py [--queries N] [--quick] [--device cuda] [--json FILE]

The bank is fp16 noise on disk, k = 200. Peak memory is what the search adds, including pages of the map. The official
evaluation computes all similarities of a hundredth of the queries with the whole bank at once, a top-k, and a one-hot
vote for each of four k. It needs the bank in memory, so both sides are compared on a part: time with 500 queries and
200,000 rows, memory with 2,000 queries and 200,000 normalised rows, each side in a separate process. On a GPU, the
queries are on the device, the blocks of the bank are copied to it, and memory is the peak of the allocator.
"""

from __future__ import annotations

import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
from common import device_flag, interleave, parser, peak_growth, report, row, seconds
from torch import Tensor
from torch.nn import functional as F

from evals.tasks import knn

KS, CLASSES, TEMPERATURE = (10, 20, 100, 200), 1000, 0.07


def memory_map(folder: str, rows: int, width: int) -> Tensor:
    """Write a bank of noise."""
    path = Path(folder) / "bank.f16"
    rng = np.random.default_rng(0)
    with path.open("wb") as stream:
        for begin in range(0, rows, 65536):
            rng.standard_normal((min(65536, rows - begin), width), dtype=np.float32).astype(np.float16).tofile(stream)
    return torch.from_numpy(np.memmap(path, np.float16, mode="c", shape=(rows, width)))


def ours(bank: Tensor, labels: Tensor, queries: Tensor, answers: Tensor) -> None:
    knn.score(knn.find_nearest(queries, bank, max(KS)), labels, answers, CLASSES, KS, TEMPERATURE, 20)


def theirs(bank: Tensor, labels: Tensor, queries: Tensor, answers: Tensor) -> None:
    voted(
        F.normalize(bank.to(queries.device).float(), dim=1).T.contiguous(),
        labels,
        F.normalize(queries, dim=1),
        answers,
        500,
    )


def voted(bank: Tensor, labels: Tensor, queries: Tensor, answers: Tensor, chunk: int = 20) -> None:
    """Run the official search of normalised rows (D, n), with `chunk` queries at once."""
    for k in KS:
        for begin in range(0, len(queries), chunk):
            part = queries[begin : begin + chunk]
            similarity, row_ = torch.mm(part, bank).topk(k, largest=True, sorted=True)
            one_hot = torch.zeros(len(part) * k, CLASSES, device=part.device).scatter_(1, labels[row_].view(-1, 1), 1)
            weights = similarity.div(TEMPERATURE).exp()
            votes = (one_hot.view(len(part), -1, CLASSES) * weights.view(len(part), -1, 1)).sum(1)
            votes.sort(1, True).indices.eq(answers[begin : begin + chunk].view(-1, 1))


def _added(mine: bool, device: str) -> float:
    """Return the MiB that a search of 2,000 queries in 200,000 rows of 384 numbers needs in addition to both; runs in a separate process."""
    g = torch.Generator().manual_seed(0)
    queries, bank = (F.normalize(torch.randn(n, 384, generator=g), dim=1).to(device) for n in (2000, 200000))
    answers, labels = (torch.randint(0, CLASSES, (n,), generator=g).to(device) for n in (2000, 200000))
    # Theirs takes them as they are, so no copy is made that its evaluation would not make.
    search = ours if mine else voted
    return peak_growth(lambda: search(bank if mine else bank.T, labels, queries, answers), device) / 2**20


def added(mine: bool, device: str) -> float:
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(_added, mine, device).result()


def main() -> None:
    arguments = device_flag(parser(__doc__))
    arguments.add_argument("--queries", type=int, default=50000, help="of the large search")
    options = arguments.parse_args()
    device = options.device
    bank_rows, width, count = (20000, 64, 400) if options.quick else (1281167, 384, options.queries)
    g = torch.Generator().manual_seed(0)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        bank = memory_map(folder, bank_rows, width)
        labels = torch.randint(0, CLASSES, (bank_rows,), generator=g).to(device)
        queries = torch.randn(count, width, generator=g).to(device)
        answers = torch.randint(0, CLASSES, (count,), generator=g).to(device)
        spent: list[float] = []
        grown = peak_growth(lambda: spent.append(seconds(lambda: ours(bank, labels, queries, answers), device)), device)
        few, small = min(500, count), bank[: min(200000, bank_rows)]
        pairs = [
            (
                seconds(lambda: ours(small, labels, queries[:few], answers[:few]), device),
                seconds(lambda: theirs(small, labels, queries[:few], answers[:few]), device),
            )
            for _ in range(3)
        ]
        rows.append(row(f"{few} x {len(small):,}, {width} wide, four k", pairs, None, "s", False))
    if not options.quick:
        pairs = interleave(lambda: added(True, device), lambda: added(False, device), 5)
        rows.append(row("memory, 2,000 x 200,000, four k", pairs, 1.0, "MiB", False))
    matrix = 4 * count * bank_rows / 2**30
    name = f"memory, {count:,} x {bank_rows:,} ({spent[0]:.0f} s) / the similarities whole"
    rows.append(row(name, [(grown / 2**30, matrix)], None, "GiB", False))
    report("k-NN", rows, options.json)


if __name__ == "__main__":
    main()
