"""DINO's projection head (Caron et al. 2021, Sec. 3.1), with the official parameter names, and a student or teacher whole."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..core.config import Frozen, field
from ..core.ring import sum_over_ranks
from .vit import Vit, init_linears
from .vit_config import VitConfig


class DinoHeadConfig(Frozen):
    """The official head."""

    out_dim: int = field(65536, "prototypes", gt=1)
    hidden_dim: int = field(2048, "width of the MLP", gt=0)
    bottleneck_dim: int = field(256, "width that prototypes are compared in", gt=0)
    nlayers: int = field(3, "linear layers of the MLP", ge=1)
    use_bn: bool = field(False, "batch norm over the global batch in the MLP")
    norm_last_layer: bool = field(True, "the prototypes keep norm one")
    weight_init: Literal["official", "xavier"] = field("official", "of the MLP, as the backbone's")


class PrototypeLayer(nn.Module):
    """`weight_g * weight_v / |weight_v|` applied to unit vectors: a linear layer without bias under the old weight norm.

    The names are those of `nn.utils.weight_norm`, which the official checkpoints have and torch deprecates.
    """

    def __init__(self, in_dim: int, out_dim: int, norm_one: bool):
        super().__init__()
        self.weight_g = nn.Parameter(torch.ones(out_dim, 1), requires_grad=not norm_one)
        self.weight_v = nn.Parameter(nn.Linear(in_dim, out_dim, bias=False).weight.detach())

    # torch's own kernel: what weight_norm computes, without its deprecated hooks.
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, torch._weight_norm(self.weight_v, self.weight_g, 0))  # pyright: ignore[reportPrivateImportUsage]


class GlobalBatchNorm(nn.BatchNorm1d):
    """Batch norm over the batches of all ranks, on any backend (torch's SyncBatchNorm runs on GPUs alone)."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        # Sums of squares in 16 bits would overflow for wide batches.
        x = input.to(torch.promote_types(input.dtype, torch.float32))
        # One exchange for sums, squares and counts: three small ones would wait three times.
        sums = sum_over_ranks(torch.cat([x.sum(0), x.square().sum(0), x.new_tensor([len(x)])]))
        mean, square = sums[:-1].view(2, -1) / sums[-1]
        var = square - mean.square()
        with torch.no_grad():
            keep, count = 1 - (self.momentum or 0.1), sums[-1]
            # Running statistics take the unbiased variance, the batch itself the biased one, as torch has it.
            for running_stat, batch_stat in ((self.running_mean, mean), (self.running_var, var * count / (count - 1))):
                running_stat.mul_(keep).add_(batch_stat, alpha=1 - keep)  # type: ignore[union-attr]
            self.num_batches_tracked.add_(1)  # type: ignore[union-attr]
        return (self.weight * (x - mean) * (var + self.eps).rsqrt() + self.bias).to(input.dtype)


class DinoHead(nn.Module):
    """Encodings (B, in_dim) -> logits (B, out_dim): MLP, unit norm, prototypes."""

    def __init__(self, in_dim: int, config: DinoHeadConfig):
        super().__init__()
        widths = [in_dim, *[config.hidden_dim] * (config.nlayers - 1), config.bottleneck_dim]
        layers: list[nn.Module] = []
        for number, (of, to) in enumerate(itertools.pairwise(widths)):
            layers.append(nn.Linear(of, to))
            nn.init.zeros_(layers[-1].bias)  # type: ignore[arg-type]
            if number < config.nlayers - 1:
                layers += [GlobalBatchNorm(to), nn.GELU()] if config.use_bn else [nn.GELU()]
        self.mlp = layers[0] if len(layers) == 1 else nn.Sequential(*layers)
        init_linears(self.mlp, config.weight_init)
        self.last_layer = PrototypeLayer(config.bottleneck_dim, config.out_dim, config.norm_last_layer)

    def forward(self, x: Tensor) -> Tensor:
        x = self.mlp(x)
        # Prototypes are compared by angle: the official head normalises here as well.
        return self.last_layer(F.normalize(x.to(torch.promote_types(x.dtype, torch.float32)), dim=-1))


class DinoNet(nn.Module):
    """A student or a teacher: `backbone` once per resolution, `head` once."""

    def __init__(self, model: VitConfig, head: DinoHeadConfig):
        super().__init__()
        self.backbone = Vit(model)
        self.head = DinoHead(model.out_width, head)

    def forward(self, crops: Sequence[Tensor], drops: Sequence[Tensor | None]) -> Tensor:
        """Crops by resolution, each (B_i, 3, H_i, W_i), to logits (sum of B_i, out_dim) in the same order."""
        # One head over all crops: batch norm in it counts them together, as published.
        return self.head(torch.cat([self.backbone(x, drop) for x, drop in zip(crops, drops, strict=True)]))
