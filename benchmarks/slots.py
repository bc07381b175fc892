"""Slot models: speed of merged projections, cost of optimal transport, and speed of scoring masks and reading published files.

    python benchmarks/slots.py [--quick] [--json FILE]

A row compares our form with the plain form, or one method with another. Memory is what autograd stores for the backward
pass (saved_tensors_hooks). The aims: merged projections 1.6 times as fast; a step of SA-ME at most 1.2 times as long as one of
SA-Sinkhorn (0.83); a quarter of autograd's memory (4); a step of SA-EMD at most twice as long as one of SA-ME (0.5).
"""

from __future__ import annotations

import gzip
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import interleave, parser, report, row, seconds
from sklearn.metrics import adjusted_rand_score
from tfrecord.reader import tfrecord_loader
from tfrecord.writer import TFRecordWriter

from evals.sets.objects import WIDTH
from evals.tasks.objects.segmentation import image_scores
from object_centric.grouping.slot_attention import SlotAttention
from object_centric.grouping.slot_config import SlotAttentionConfig
from object_centric.grouping.transport import log_marginal, minimize_entropy, sinkhorn, sinkhorn_unrolled
from object_centric.objectives.set_prediction import SetPrediction, SetPredictionConfig
from sparo_data.official.formats import multi_object
from sparo_train.core.contracts import Progress


def attention(kv: str) -> Callable[[], float]:
    """Return a function that measures the seconds of forward and backward at B 4, N 4096, K 11, D 128, three iterations."""
    torch.manual_seed(0)
    module = SlotAttention(
        SlotAttentionConfig.model_validate({"preset": "sa2020", "slots": 11, "width": 128, "kv": kv}), 128
    )
    features, noise = torch.randn(4, 4096, 128, requires_grad=True), torch.randn(4, 11, 128)
    return lambda: seconds(lambda: module(features, noise).slots.sum().backward())


def set_step(preset: str) -> Callable[[], float]:
    """Return a function that measures the seconds of a training step of set prediction: 8 images of 128 pixels, the paper's encoder, N 1024, K 11."""
    torch.manual_seed(0)
    model = {"image_size": 128, "encoder": {"strides": (1, 2, 2, 1)}, "grouping": {"preset": preset, "slots": 11}}
    objective = SetPrediction(SetPredictionConfig.model_validate({"model": model}))
    optim = torch.optim.Adam(objective.parameters(), lr=4e-4)
    batch = {
        "image": torch.randint(0, 256, (8, 3, 128, 128), dtype=torch.uint8),
        "noise": torch.randn(8, *objective.config.model.noise),
        "objects": torch.rand(8, 11, WIDTH).round(),
    }

    def step() -> None:
        total: Any = objective(batch, Progress(0, 1, 0)).total
        total.backward()
        optim.step()
        optim.zero_grad()

    return lambda: seconds(step)


def kept(unrolled: bool) -> Callable[[], float]:
    """Return a function that measures the megabytes that one iteration of SA-ME stores for its backward pass, at B 8, N 1024, K 11."""

    def measure() -> float:
        cost = torch.rand(8, 11, 1024, requires_grad=True)
        log_a, log_b = log_marginal(torch.randn(8, 1024), 11).requires_grad_(), torch.zeros(8, 11)
        held: dict[int, int] = {}

        def keep(x: torch.Tensor) -> torch.Tensor:
            held[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            found, v = minimize_entropy(cost, log_a, log_b, 5, 4, 8.0, unrolled=unrolled)
            moved = (sinkhorn_unrolled if unrolled else sinkhorn)(found, log_a, log_b, 5, v).plan
        moved.sum().backward()
        return sum(held.values()) / 1e6

    return measure


def masks() -> tuple[Callable[[], float], Callable[[], float]]:
    """Return two functions that measure the seconds for all scores of 1,000 masks of 128 pixels, and for scikit-learn's ARI alone."""
    rng = np.random.default_rng(0)
    true = np.kron(rng.integers(0, 11, (1000, 16, 16)), np.ones((8, 8), np.int64))
    predicted = np.where(rng.random(true.shape) < 0.1, 0, true)
    pairs = list(zip(true, predicted, strict=True))

    def ours() -> float:
        return seconds(lambda: [image_scores(t, p) for t, p in pairs])

    def theirs() -> float:
        return seconds(lambda: [adjusted_rand_score(t[t > 0], p[t > 0]) for t, p in pairs])

    return ours, theirs


def readers(folder: Path, count: int) -> tuple[Callable[[], float], Callable[[], float]]:
    """Return two functions that measure the CLEVR records per second, from files with masks: ours, and those of tfrecord, which reads every pixel in a loop."""
    rng = np.random.default_rng(0)
    stored = {"image": ([bytes([v]) for v in rng.integers(0, 256, 240 * 320 * 3)], "byte"),
              "mask": ([bytes([v]) for v in rng.integers(0, 2, 11 * 240 * 320) * 255], "byte"), "x": ([0.5] * 11, "float")}  # fmt: skip
    plain, packed = folder / "c.tfrecords", folder / "c.tfrecords.gz"
    writer = TFRecordWriter(str(plain))
    for _ in range(count):
        writer.write(stored)
    writer.close()
    packed.write_bytes(gzip.compress(plain.read_bytes(), 1))

    def ours() -> float:
        return count / seconds(lambda: list(multi_object(packed, "clevr_with_masks")))

    def theirs() -> float:
        return 2 / seconds(lambda: [r for _, r in zip(range(2), tfrecord_loader(str(plain), None), strict=False)])

    return ours, theirs


def main() -> None:
    options = parser(__doc__).parse_args()
    rounds = 3 if options.quick else 10
    sa_me = set_step("sa_me")
    rows = [
        row(
            "folded against plain keys and values",
            interleave(attention("folded"), attention("plain"), rounds),
            1.6,
            "s",
            False,
        ),
        row(
            "set prediction, SA-ME against SA-Sinkhorn",
            interleave(sa_me, set_step("sa_sinkhorn"), rounds),
            1 / 1.2,
            "s",
            False,
        ),
        row("set prediction, SA-EMD against SA-ME", interleave(set_step("sa_emd"), sa_me, rounds), 0.5, "s", False),
        row("kept for SA-ME's backward, against autograd", interleave(kept(False), kept(True), 1), 4.0, "MB", False),
        row("all scores of 1,000 masks, against scikit-learn's ARI", interleave(*masks(), rounds), None, "s", False),
    ]
    with tempfile.TemporaryDirectory() as name:
        pairs = interleave(*readers(Path(name), 5 if options.quick else 20), 1 if options.quick else 3)
    rows.append(row("CLEVR with masks, against tfrecord's reader", pairs, None, "records/s", True))
    report("slot models", rows, options.json)


if __name__ == "__main__":
    main()
