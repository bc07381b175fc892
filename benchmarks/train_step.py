"""A whole training step: CLIP+SPARO ViT-B/32 compared with open_clip's CLIP ViT-B/32, on the same batch.

    python benchmarks/train_step.py [--quick] [--json FILE] [--rounds 15]

open_clip's side has its model, ClipLoss and AdamW as its trainer configures them. Each side has a separate process, so
that the settings of the C library's allocator affect our side only; both take turns. In the main rows, captions have 77 tokens
on both sides. `captions cut` shows the effect of our default, which cuts captions after the longest of the batch (an exact
change), for captions of up to 24 tokens.
"""

from __future__ import annotations

import math
import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import open_clip
import torch
from common import interleave, parser, report, row, seconds, training_step

from sparo_train.core.contracts import Progress
from sparo_train.engine.local import LocalEngine, LocalEngineConfig
from sparo_train.engine.optim import AdamWConfig
from sparo_train.models.clip_config import ClipConfig
from sparo_train.objectives.clip import ClipObjective
from sparo_train.objectives.clip_config import ClipObjectiveConfig


def tokens(batch: int, longest: int) -> torch.Tensor:
    """Return captions of 8 to `longest` tokens, padded to 77."""
    generator = torch.Generator().manual_seed(0)
    text = torch.zeros(batch, 77, dtype=torch.long)
    for i, line in enumerate(text):
        length = longest if i == 0 else int(torch.randint(8, longest + 1, (1,), generator=generator))
        line[0], line[length - 1] = 49406, 49407
        line[1 : length - 1] = torch.randint(300, 40000, (length - 2,), generator=generator)
    return text


def our_step(batch: int, bf16: bool, cut: bool) -> Callable[[], None]:
    torch.manual_seed(0)
    config = ClipObjectiveConfig(
        model=ClipConfig.model_validate({"backbone": "ViT-B-32", "readout": {"kind": "sparo"}})
    )
    engine = LocalEngine(LocalEngineConfig(precision="bf16" if bf16 else "fp32"), AdamWConfig())
    engine.prepare(ClipObjective(config))
    text = tokens(batch, 24 if cut else 77)
    data = {
        "image": torch.randint(0, 255, (batch, 3, 224, 224), dtype=torch.uint8),
        "text": text[:, :24].clone() if cut else text,
    }
    return training_step(engine, data, Progress(0, 100, 0))


def their_step(batch: int, bf16: bool, cut: bool, device: str) -> Callable[[], None]:
    torch.manual_seed(0)
    model: Any = open_clip.create_model("ViT-B-32", device=device).train()
    decayed = [
        p
        for n, p in model.named_parameters()
        if not (p.ndim < 2 or "bn" in n or "ln" in n or "bias" in n or "logit_scale" in n)
    ]
    rest = [p for p in model.parameters() if not any(p is d for d in decayed)]
    optimizer = torch.optim.AdamW(
        [{"params": rest, "weight_decay": 0.0}, {"params": decayed, "weight_decay": 0.2}],
        lr=5e-4,
        betas=(0.9, 0.98),
        eps=1e-6,
    )
    loss_function: Any = open_clip.ClipLoss()
    image = torch.randn(batch, 3, 224, 224)
    text = tokens(batch, 24 if cut else 77)

    def run() -> None:
        optimizer.zero_grad()
        with torch.autocast(device, torch.bfloat16, enabled=bf16):
            features = model(image.to(device), text.to(device))
            loss = loss_function(*features)
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            model.logit_scale.clamp_(0, math.log(100))
        if device == "cuda":
            torch.cuda.synchronize()

    return run


def stepping(wire: Connection, make: Callable[..., Callable[[], None]], arguments: tuple[Any, ...]) -> None:
    """Run one side: for each message, take a step, and return its seconds of wall time, and of processor time of all threads."""
    step = make(*arguments)
    step()
    while wire.recv():
        before = time.process_time()
        wall = seconds(step)
        wire.send((wall, time.process_time() - before))


class Side:
    """One of both sides, in its process."""

    def __init__(self, make: Callable[..., Callable[[], None]], *arguments: Any):
        context = multiprocessing.get_context("spawn")
        self._wire, other = context.Pipe()
        self._process = context.Process(target=stepping, args=(other, make, arguments), daemon=True)
        self._process.start()
        other.close()
        self.batch, self.processor_rates = arguments[0], list[float]()

    def rate(self) -> float:
        """Samples per second; `processor_rates` has those per second of processor time, which other work does not change."""
        self._wire.send(True)
        wall, spent = self._wire.recv()
        self.processor_rates.append(self.batch / spent)
        return self.batch / wall

    def end(self) -> None:
        self._wire.send(False)
        self._process.join()


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--rounds", type=int, help="default: 3 with --quick, 15 without")
    options = flags.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    batch = 256 if device == "cuda" else 16
    cases = [(True, False, 1.15)] + ([] if options.quick else [(True, True, None), (False, False, 1.1)])
    rows = []
    for bf16, cut, bar in cases:
        ours, theirs = Side(our_step, batch, bf16, cut), Side(their_step, batch, bf16, cut, device)
        rounds = options.rounds or (3 if options.quick else 15)
        pairs = interleave(ours.rate, theirs.rate, rounds)
        ours.end()
        theirs.end()
        label = f"{'bf16' if bf16 else 'fp32'}, batch {batch}{', captions cut' if cut else ''}"
        rows.append(row(label, pairs, bar, "samples/s", True))
        if device == "cpu":
            spent = list(zip(ours.processor_rates, theirs.processor_rates, strict=True))[1:]
            rows.append(row(f"{label}: processor time", spent, None, "samples/CPU s", True))
    report("training step, ViT-B/32: CLIP+SPARO (ours) / CLIP (open_clip)", rows, options.json)


if __name__ == "__main__":
    main()
