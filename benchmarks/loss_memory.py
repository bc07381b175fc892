"""The contrastive loss at a global batch of 32,768 on 64 ranks: memory and time of one rank, compared with open_clip's ClipLoss.

    python benchmarks/loss_memory.py [--quick] [--device cuda] [--json FILE]
    python benchmarks/loss_memory.py --rounding

Forward and backward of one rank's 512 of 32,768 pairs in a separate process; features of other ranks are copied from
memory. Gradients are compared on four real gloo ranks. open_clip's loss is `ClipLoss(local_loss=True,
gather_with_grad=True)`, the setting with exact gradients. On a GPU, features are on the device and the peak is that of its
allocator; gradients are compared on the CPU in any case.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn
from common import device_flag, parser, peak_growth, report, row, seconds
from open_clip.loss import ClipLoss
from torch import Tensor
from torch.multiprocessing.spawn import start_processes
from torch.nn import functional as F

from sparo_train.core.distributed import Ring, Shift
from sparo_train.objectives.contrastive import SoftmaxLoss, contrastive

RANKS, SHARE = 64, 512
CASES = (4096, 8192)
MEMORY_BAR, TIME_BAR = 4.0, 1 / 1.15


class OneOf64(Ring):
    """Communication of rank 0 of 64: what arrives has the shape of what is sent, and is copied from memory."""

    def __init__(self) -> None:
        super().__init__()
        self.size = RANKS

    def shift(self, *tensors: Tensor) -> Shift:
        return Shift([], tuple(t.clone() for t in tensors), tensors)


class GatherOf64(torch.autograd.Function):
    """all_gather with gradient for rank 0 of 64; the backward returns its slice, like a reduce-scatter."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.roll(k, dims=1) for k in range(RANKS))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].clone()


def features(d: int, b: int = SHARE, seed: int = 0, device: str = "cpu") -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(2, b, d, generator=generator)
    image, text = (F.normalize(x, dim=1).to(device).requires_grad_() for x in drawn)
    return image, text


def run(form: str, image: Tensor, text: Tensor, scale: Tensor) -> None:
    if form == "ours":
        contrastive(image, text, scale, loss=SoftmaxLoss(exchange="ring"), ring=OneOf64()).total.backward()
    else:
        torch.distributed.nn.all_gather = GatherOf64.apply
        ClipLoss(local_loss=True, gather_with_grad=True, rank=0, world_size=RANKS)(image, text, scale).backward()


def measure(form: str, d: int, device: str) -> None:
    """Print the MiB above the features, and the seconds; runs in a separate process."""
    scale = torch.tensor(20.0, device=device, requires_grad=True)
    run(form, *features(8, 4, device=device), scale)  # kernels are loaded before the baseline is taken
    image, text = features(d, device=device)
    spent: list[float] = []
    grown = peak_growth(lambda: spent.append(seconds(lambda: run(form, image, text, scale), device)), device)
    print(json.dumps([grown / 2**20, *spent]))


def gradients_on(rank: int, folder: str, form: str, size: int) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)  # open_clip's gather is deprecated in torch
    dist.init_process_group("gloo", init_method=f"file://{folder}/{form}", rank=rank, world_size=size)
    image, text = features(1024, 32, seed=rank)
    scale = torch.tensor(20.0, requires_grad=True)
    if form == "ours":
        contrastive(image, text, scale, loss=SoftmaxLoss(exchange="ring")).total.backward()
    else:
        loss = ClipLoss(local_loss=True, gather_with_grad=True, rank=rank, world_size=size)
        loss(image, text, scale).backward()
    assert scale.grad is not None
    dist.all_reduce(scale.grad)
    torch.save([image.grad, text.grad, scale.grad], f"{folder}/{form}-{rank}")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def gradient_difference(size: int = 4) -> float:
    """Return the largest relative difference between the gradients of both sides, over ranks and tensors."""
    with tempfile.TemporaryDirectory() as folder:
        for form in ("ours", "theirs"):
            start_processes(gradients_on, (folder, form, size), nprocs=size, start_method="fork")
        found = [
            [torch.load(f"{folder}/{form}-{rank}", weights_only=True) for rank in range(size)]
            for form in ("ours", "theirs")
        ]
    pairs = [(a, b) for ours, theirs in zip(*found, strict=True) for a, b in zip(ours, theirs, strict=True)]
    return max(float((a - b).norm() / b.norm()) for a, b in pairs)


def rounding_errors(d: int, pairs: int = 4096, seeds: int = 5) -> tuple[list[float], list[float]]:
    """Return the relative errors of the loss and of the images' gradient with `exchange_dtype: bf16`.

    logit_scale is log(100). The cosine of a pair is 3 / sqrt(d), three standard deviations of the cosines of others.
    """
    losses, gradients = [], []
    for seed in range(seeds):
        image, noise = features(d, pairs, seed)
        text = F.normalize((3 / d**0.5 * image + noise).detach(), dim=1)
        exact, rounded = (
            _loss_and_gradient(image, text, SoftmaxLoss(exchange="ring", exchange_dtype=dtype))
            for dtype in ("fp32", "bf16")
        )
        losses.append(abs(rounded[0] / exact[0] - 1))
        gradients.append(float((rounded[1] - exact[1]).norm() / exact[1].norm()))
    return losses, gradients


def _loss_and_gradient(image: Tensor, text: Tensor, loss: SoftmaxLoss) -> tuple[float, Tensor]:
    total = contrastive(image, text, torch.tensor(100.0), loss=loss).total
    (gradient,) = torch.autograd.grad(total, image)
    return float(total.detach()), gradient


def child(form: str, d: int, device: str) -> tuple[float, float]:
    command = [sys.executable, __file__, "--measure", form, str(d), "--device", device]
    grown, spent = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return grown, spent


def main() -> None:
    arguments = device_flag(parser(__doc__))
    arguments.add_argument("--rounding", action="store_true", help="measure the error of exchange_dtype=bf16 instead")
    arguments.add_argument("--measure", nargs=2, help="internal: form d")
    options = arguments.parse_args()
    if options.measure:
        measure(options.measure[0], int(options.measure[1]), options.device)
        return
    if options.rounding:
        for d in (512, *CASES[1:]):
            errors = [f"{max(found):.1e}" for found in rounding_errors(d)]
            print(
                f"bf16 exchange, width {d}: largest relative error of the loss {errors[0]}, of the gradient {errors[1]} (5 seeds)"
            )
        return
    difference = gradient_difference()
    rows = []
    for d in CASES[:1] if options.quick else CASES:
        pairs = [
            tuple(child(form, d, options.device) for form in ("ours", "theirs"))
            for _ in range(1 if options.quick else 3)
        ]
        rows.append(row(f"peak memory d={d}", [(a[0], b[0]) for a, b in pairs], MEMORY_BAR, "MiB", False))
        rows.append(row(f"time d={d}", [(a[1], b[1]) for a, b in pairs], TIME_BAR, "s", False))
    rows.append(
        {
            "name": "gradients, 4 ranks, relative difference",
            "ours": difference,
            "theirs": 0.0,
            "unit": "",
            "ratio": difference,
            "spread": [difference, difference],
            "n": 1,
            "bar": 1e-5,
            "ok": difference <= 1e-5,
        }
    )
    report(f"softmax loss, forward + backward, {SHARE} of {SHARE * RANKS} pairs, fp32", rows, options.json)


if __name__ == "__main__":
    main()
