"""Evaluation in this project compared with the functions of clip-benchmark 1.6.2 (k-NN: of DINO), on equal inputs.

    python benchmarks/evals.py [--quick] [--device cuda] [--json FILE]

Needs clip-benchmark, which the test extra installs. Features are random. Results are compared before times are reported;
if the weight decay of the probe differs, both values are printed. With `--device cuda`, both sides encode, train probes
and search neighbours on the GPU; retrieval runs on the CPU. The classifier is built by an untrained text tower (ViT-Tiny
with a context of 77 for all 80,000 prompts, ViT-B-32 for some of them), which takes as long as a trained one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from common import device_flag, interleave, parser, peak_growth, report, row, seconds, silent
from evals_pairs import sugar_crepe_rows
from open_clip import IMAGENET_CLASSNAMES
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from evals.encoders.clip_encoder import ClipEncoder
from evals.sets.image_files import imagenet_templates
from evals.tasks import knn, probe, retrieval, zeroshot
from sparo_train.models.clip_config import ClipConfig
from sparo_train.models.clip_model import Clip

KS = (10, 20, 100, 200)


class Stock(nn.Module):
    """Stand-in for a model in clip-benchmark: images are features already, and texts are rows of a table."""

    def __init__(self, table: Tensor):
        super().__init__()
        self.table = table

    def encode_image(self, images: Tensor) -> Tensor:
        return images.flatten(1)

    def encode_text(self, tokens: Tensor) -> Tensor:
        return self.table[tokens]


def retrieval_rows(quick: bool) -> list[dict[str, Any]]:
    from clip_benchmark.metrics import zeroshot_retrieval

    images, captions, width = (1000, 5, 512) if quick else (5000, 5, 512)
    image, noise = torch.randn(images, width), torch.randn(images * captions, width)
    owner = torch.arange(images).repeat_interleave(captions)
    text = image[owner] + 4 * noise
    texts = [[str(i * captions + j) for j in range(captions)] for i in range(images)]
    numbers: Any = lambda words: torch.tensor([int(word) for word in words])  # noqa: E731
    found: dict[str, dict[str, float]] = {}

    def ours() -> None:
        found["ours"] = retrieval.score(image, text, owner).metrics

    def theirs() -> None:
        rows: Any = list(zip(image.unflatten(1, (1, -1)), texts, strict=True))
        loader = DataLoader(
            rows, 64,
            collate_fn=lambda rows: (torch.stack([x for x, _ in rows]), [t for _, t in rows]),
        )  # fmt: skip
        with silent():
            found["theirs"] = zeroshot_retrieval.evaluate(Stock(text), loader, numbers, "cpu", False, [1, 5, 10])

    ours()
    growth = [(peak_growth(ours), peak_growth(theirs))]
    pairs = [(seconds(ours), seconds(theirs)) for _ in range(1 if quick else 9)]
    for k in (1, 5, 10):
        assert abs(found["ours"][f"image_R@{k}"] - found["theirs"][f"image_retrieval_recall@{k}"]) < 1e-6
        assert abs(found["ours"][f"text_R@{k}"] - found["theirs"][f"text_retrieval_recall@{k}"]) < 1e-6
    name = f"retrieval, {images:,} x {images * captions:,}, D = {width}, intervals included"
    memory = [(a / 2**20, b / 2**20) for a, b in growth]
    return [
        row(name, pairs, None if quick else 10, "s", False),
        row(f"{name}: memory", memory, None if quick else 10, "MiB", False),
    ]


def classifier_rows(quick: bool, device: str) -> list[dict[str, Any]]:
    small, whole = {"context_length": 77, "width": 128, "heads": 4, "layers": 4}, {}
    cases = (("ViT-Tiny-16", small, 25 if quick else 1000), ("ViT-B-32", whole, 2 if quick else 20))
    return [_classifier_row(*case, 1 if quick or case[2] == 1000 else 3, device) for case in cases]


def _classifier_row(backbone: str, text: dict[str, int], classes: int, rounds: int, device: str) -> dict[str, Any]:
    from clip_benchmark.metrics import zeroshot_classification

    torch.manual_seed(0)
    tree = {"backbone": backbone, "readout": {"kind": "token"}, **({"text": text} if text else {})}
    encoder = ClipEncoder(Clip(ClipConfig.model_validate(tree)).to(device))
    names, templates = IMAGENET_CLASSNAMES[:classes], imagenet_templates()
    found: dict[str, Tensor] = {}

    def ours() -> None:
        found["ours"] = zeroshot.classifier(encoder.text(zeroshot.prompts(names, templates)), classes)

    def theirs() -> None:
        with silent(), torch.no_grad():
            found["theirs"] = zeroshot_classification.zero_shot_classifier(
                encoder.model, encoder.tokenizer.batch, names, templates, device, amp=False
            )

    pairs = [(seconds(ours, device), seconds(theirs, device)) for _ in range(rounds)]
    difference = float((found["ours"].T.cpu() - found["theirs"].cpu()).abs().max())
    assert difference < (1e-5 if device == "cpu" else 1e-4), difference
    bar = 5 if classes in (1000, 20) else None  # --quick has fewer classes, for which it is not meant
    return row(f"classifier, {backbone}, {classes:,} classes x {len(templates)}", pairs, bar, "s", False)


def probe_rows(quick: bool, device: str) -> list[dict[str, Any]]:
    from clip_benchmark.metrics import linear_probe

    n, width, classes, epochs = (1000, 128, 10, 2) if quick else (10000, 512, 100, 10)
    centres = torch.randn(classes, width)
    y, answers = torch.randint(0, classes, (n,)), torch.randint(0, classes, (n // 5,))
    x, held = (F.normalize(centres[t] + 3 * torch.randn(len(t), width), dim=1) for t in (y, answers))
    decays = np.logspace(-6, 2, num=97).tolist()
    found: dict[str, float] = {}

    def ours() -> None:
        train, other = probe.Labelled(lambda at: x[at], y), probe.Labelled(lambda at: held[at], answers)
        found["ours"] = probe.search(train, other, classes, probe.Training(epochs=epochs, device=torch.device(device)))[
            0
        ]

    def loader(features: Tensor, labels: Tensor) -> DataLoader[Any]:
        return DataLoader(linear_probe.FeatureDataset(features, labels), 64, shuffle=True)

    def theirs() -> None:
        arguments = (loader(x, y), loader(held, answers), width, classes, 0.1, epochs, False, device, False, 0)
        with silent(), on_cpu() if device == "cpu" else contextlib.nullcontext():
            peak = linear_probe.find_peak(decays, list(range(0, 97, 16)), *arguments)
            for span in (8, 4, 2, 1):
                around = [max(peak - span, 0), peak, min(peak + span, 96)]
                peak = linear_probe.find_peak(decays, around, *arguments)
        found["theirs"] = decays[peak]

    pairs = [(seconds(ours, device), seconds(theirs, device)) for _ in range(1 if quick else 2)]
    if found["ours"] != found["theirs"]:
        print(f"weight decays differ: {found}")
    name = f"probe, search over 97 weight decays, {n:,} x {width}, {classes} classes, {epochs} epochs"
    return [row(name, pairs, None if quick else 5, "s", False)]


def knn_rows(quick: bool, device: str) -> list[dict[str, Any]]:
    queries, rows, width, classes = (500, 20000, 384, 1000) if quick else (2000, 200000, 384, 1000)
    bank, labels = torch.randn(rows, width), torch.randint(0, classes, (rows,))
    asked, answers = torch.randn(queries, width), torch.randint(0, classes, (queries,))
    found: dict[str, list[float]] = {}

    def ours() -> None:
        near = knn.find_nearest(asked.to(device), bank, max(KS))
        result = knn.score(near, labels, answers, classes, KS, 0.07, 20)
        found["ours"] = [result.metrics[f"acc1_k{k}"] for k in KS]

    def theirs() -> None:
        # As eval_knn.py begins: features and labels are moved, then all is done on the device.
        moved, y, right = bank.to(device), labels.to(device), answers.to(device)
        columns, q = F.normalize(moved, dim=1).T.contiguous(), F.normalize(asked.to(device), dim=1)
        found["theirs"] = [_official_knn(columns, y, q, right, k, classes) for k in KS]

    pairs = interleave(lambda: seconds(ours, device), lambda: seconds(theirs, device), 1 if quick else 3)
    assert np.allclose(found["ours"], found["theirs"], atol=1.1 / queries), found
    return [row(f"k-NN, four k, {queries:,} x {rows:,} x {width}", pairs, None if quick else 4, "s", False)]


def _official_knn(columns: Tensor, labels: Tensor, queries: Tensor, answers: Tensor, k: int, classes: int) -> float:
    """Search as in eval_knn.py of DINO: in a hundred pieces, with a one-hot vote."""
    right, size = 0, max(1, len(queries) // 100)
    for begin in range(0, len(queries), size):
        part = queries[begin : begin + size]
        similarity, found = torch.mm(part, columns).topk(k, largest=True, sorted=True)
        one_hot = torch.zeros(len(part) * k, classes, device=part.device).scatter_(1, labels[found].view(-1, 1), 1)
        weights = similarity.div(0.07).exp()
        votes = (one_hot.view(len(part), -1, classes) * weights.view(len(part), -1, 1)).sum(1)
        right += int(votes.sort(1, True).indices[:, 0].eq(answers[begin : begin + size]).sum())
    return right / len(queries)


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """Let clip-benchmark's probe, which asks for CUDA by name, run on the CPU."""
    kept = {kind: kind.cuda for kind in (Tensor, nn.Module)}
    try:
        for kind in kept:
            kind.cuda = lambda self, *_: self  # type: ignore[method-assign, assignment]
        yield
    finally:
        for kind, method in kept.items():
            kind.cuda = method  # type: ignore[method-assign]


def main() -> None:
    options = device_flag(parser(__doc__)).parse_args()
    torch.manual_seed(0)
    rows: list[dict[str, Any]] = []
    rows += retrieval_rows(options.quick)
    for case in (classifier_rows, sugar_crepe_rows, probe_rows, knn_rows):
        rows += case(options.quick, options.device)
    report("evaluation against clip-benchmark 1.6.2 and DINO's k-NN", rows, options.json)


if __name__ == "__main__":
    main()
