"""Attentive probe: a readout and a linear layer trained on frozen tokens (Psomas et al. 2026, and before it CAPI, V-JEPA, AIM).

The readout's output is standardised over the batch (without scale and offset, as in MAE's linear probe) and classified
by one linear layer; both are trained by AdamW with warm-up and a cosine per step.
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
    """Training options of a probe."""

    lr: float
    weight_decay: float
    epochs: int
    batch_size: int
    warmup_epochs: float
    seed: int
    device: torch.device


class AttentiveProbe(nn.Module):
    """Probe of tokens (B, N, d) that returns logits (B, classes).

    Args:
        head: tokens to encodings (B, width).
        width, classes: sizes of the linear layer.
    """

    def __init__(self, head: nn.Module, width: int, classes: int):
        super().__init__()
        self.head, self.norm = head, nn.BatchNorm1d(width, affine=False, eps=1e-6)
        self.linear = nn.Linear(width, classes)
        nn.init.trunc_normal_(self.linear.weight, std=0.01)
        nn.init.zeros_(self.linear.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        # Standardise between both, because readouts' outputs differ by factors of a hundred, and one rate must fit all.
        return self.linear(self.norm(self.head(tokens)))


def train_attentive(
    build: Callable[[], AttentiveProbe],
    train: Labelled,
    how: AttentiveTraining,
    on_epoch_end: Callable[[int], None] = lambda epoch: None,
) -> AttentiveProbe:
    """Train on rows (m, N, d); initial weights and the order of images come from `how.seed`.

    A last batch with a single image is skipped, because it has no deviation.

    Raises:
        DataError: fewer than two images.
    """
    if len(train.labels) < 2:
        raise DataError(f"attentive_probe: needs at least two training images, got {len(train.labels)}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(how.seed)
        probe = build().to(how.device)
        # All orders at once, from the stream of the initial weights, so that they do not depend on other random
        # numbers.
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
    # Cosine and warm-up per step, not per epoch, because small sets have few epochs.
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
    """Compute acc1, acc5 and mean per-class recall.

    Raises:
        DataError: a logit is not finite.
    """
    top_classes = []
    for rows in torch.arange(len(test.labels)).split(_BLOCK):
        logits = probe(test.rows(rows).to(device)).float()
        if not logits.isfinite().all():
            raise DataError(
                "attentive_probe: some logits are not finite, because training diverged. Lower the task's lr."
            )
        top_classes.append(rank_classes(logits, min(5, classes)).cpu())
    return result_from_ranking(torch.cat(top_classes), test.labels, classes, "attentive_probe")
