"""An attentive probe: a read-out and a linear layer trained on frozen tokens (Psomas et al. 2026, and before it CAPI, V-JEPA, AIM).

What the read-out gives is standardised by its batch (no scale, no offset, as MAE's linear probe has it) and classified by one linear
layer; both are trained by AdamW with a warm-up and a cosine per step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparo_train.core.errors import DataError

from .probe import Labelled
from .result import Result
from .zeroshot import rank_classes, result_from_ranking

_BLOCK = 256  # images that are scored at once


class AttentiveTraining(NamedTuple):
    """How a probe is trained."""

    lr: float
    weight_decay: float
    epochs: int
    batch_size: int
    warmup_epochs: float
    seed: int
    device: torch.device


class AttentiveProbe(nn.Module):
    """Tokens (B, N, d) to logits (B, classes).

    Args:
        head: tokens to encodings (B, width).
    """

    def __init__(self, head: nn.Module, width: int, classes: int):
        super().__init__()
        self.head, self.norm = head, nn.BatchNorm1d(width, affine=False, eps=1e-6)
        self.linear = nn.Linear(width, classes)
        nn.init.trunc_normal_(self.linear.weight, std=0.01)
        nn.init.zeros_(self.linear.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        # Standardised between both: what read-outs give differs by factors of a hundred, and one rate has to do.
        return self.linear(self.norm(self.head(tokens)))


def train_attentive(
    build: Callable[[], AttentiveProbe],
    train: Labelled,
    how: AttentiveTraining,
    on_epoch_end: Callable[[int], None] = lambda epoch: None,
) -> AttentiveProbe:
    """Train on rows (m, N, d); the start and the order of images are drawn from `how.seed`. A last batch of one image is left out: it
    has no deviation.

    Raises:
        DataError: fewer than two images.
    """
    if len(train.labels) < 2:
        raise DataError(f"attentive_probe: {len(train.labels)} training image(s); at least two are needed")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(how.seed)
        probe = build().to(how.device)
        # All orders at once, from the stream that the start came from: a training takes the same ones whatever else draws.
        orders = [torch.randperm(len(train.labels)) for _ in range(how.epochs)]
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in probe.parameters() if p.ndim > 1], "weight_decay": how.weight_decay},
            {"params": [p for p in probe.parameters() if p.ndim <= 1], "weight_decay": 0.0},
        ],
        lr=how.lr,
    )
    per_epoch = -(-len(train.labels) // how.batch_size)
    warm, steps, step = how.warmup_epochs * per_epoch, how.epochs * per_epoch, 0
    # Cosine and warm-up per step, not per epoch: small sets have few epochs' worth of steps.
    for epoch, order in enumerate(orders):
        for rows in order.split(how.batch_size):
            for group in optimizer.param_groups:
                group["lr"] = (
                    how.lr * min(1.0, (step + 1) / max(1.0, warm)) * 0.5 * (1 + math.cos(math.pi * step / steps))
                )
            step += 1
            if len(rows) < 2:
                continue
            loss = F.cross_entropy(probe(train.rows(rows).to(how.device)), train.labels[rows].to(how.device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        on_epoch_end(epoch)
    return probe.eval()


@torch.no_grad()
def score(probe: AttentiveProbe, test: Labelled, classes: int, device: torch.device) -> Result:
    """acc1, acc5 and mean per-class recall.

    Raises:
        DataError: a logit that is not finite: what the probe says is no answer.
    """
    top_classes = []
    for rows in torch.arange(len(test.labels)).split(_BLOCK):
        logits = probe(test.rows(rows).to(device)).float()
        if not logits.isfinite().all():
            raise DataError("attentive_probe: its logits are not finite, so it diverged; lower the task's lr")
        top_classes.append(rank_classes(logits, min(5, classes)).cpu())
    return result_from_ranking(torch.cat(top_classes), test.labels, classes, "attentive_probe")
