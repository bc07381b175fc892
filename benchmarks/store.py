"""Cost of the checksums of stored encodings: scoring with and without their verification.

    python benchmarks/store.py [--quick] [--json FILE]

50,000 encodings of 512 numbers with labels and 1,000 classes, as many as ImageNet's validation images; zero-shot, nothing
is encoded. Both sides open every part, score, and write predictions, like `sparo eval`. The aim: at most 2 % of the time.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from common import interleave, parser, report, row, seconds
from torch.nn import functional as F

from evals.feature_store import feature_table as parts
from evals.feature_store.feature_table import Features
from evals.report.results_file import append
from evals.tasks import zeroshot

IMAGES, WIDTH, CLASSES = 50_000, 512, 1000


def filled(folder: Path) -> list[tuple[int, int]]:
    """Write the parts of a set; return where each begins and ends."""
    rng, spans = np.random.default_rng(0), parts.part_bounds(IMAGES)
    for number, (begin, end) in enumerate(spans):
        array = rng.standard_normal((end - begin, WIDTH), dtype=np.float32)
        keys = [f"val/{i:08d}" for i in range(begin, end)]
        parts.write_part(folder, number, parts.Part(begin, array, keys, rng.integers(0, CLASSES, end - begin).tolist()))
    return spans


def score(folder: Path, spans: list[tuple[int, int]], weights: torch.Tensor) -> None:
    """Score the stored encodings, and write a line of results."""
    found = [parts.open_part(folder, number, span) for number, span in enumerate(spans)]
    whole = [part for part in found if part is not None]
    assert len(whole) == len(spans)
    facts = [fact for part in whole for fact in part.facts]
    features = Features([part.array for part in whole], [key for part in whole for key in part.keys], facts)
    result = zeroshot.score(features.blocks(), weights, torch.tensor(facts))
    append(folder / "results", "a checkpoint", "imagenet1k", result._replace(keys=tuple(features.keys)), {})


def main() -> None:
    options = parser(__doc__).parse_args()
    torch.manual_seed(0)
    weights = F.normalize(torch.randn(CLASSES, WIDTH), dim=1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        spans = filled(folder)
        known = {path: parts._hash_file(path) for path in folder.glob("part-*.npy")}

        def without() -> float:
            with patch.object(parts, "_hash_file", known.__getitem__):
                return seconds(lambda: score(folder, spans, weights))

        pairs = interleave(lambda: seconds(lambda: score(folder, spans, weights)), without, 3 if options.quick else 15)
    rows: list[dict[str, Any]] = [row(f"scoring {IMAGES:,} stored encodings, with checksums", pairs, 0.98, "s", False)]
    report("checksums of stored features", rows, options.json)


if __name__ == "__main__":
    main()
