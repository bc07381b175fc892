"""DINO's ViT (Caron et al. 2021) on timm's blocks, with the CLS token or SPARO, and its projection head."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ..core.config import Frozen, field
from ..core.distributed import sum_over_ranks
from .precision import patchify
from .readout import Slots, read_slots
from .vit_config import DROP_RANGE, VitConfig


def init_linears(module: nn.Module, kind: Literal["official", "xavier"]) -> None:
    """Initialize the weights of a module's linear layers: a truncated normal with standard deviation 0.02 (as in timm), or xavier-uniform."""
    for part in module.modules():
        if isinstance(part, nn.Linear) and kind == "xavier":
            nn.init.xavier_uniform_(part.weight)
        elif isinstance(part, nn.Linear):
            nn.init.trunc_normal_(part.weight, std=0.02)


def _residual(before: Tensor, x: Tensor, branch: Callable[[Tensor], Tensor], scale: Tensor | None) -> Tensor:
    """Return `before + scale * branch(x)`; in training on a CPU, compute the branch only for samples whose path is kept."""
    if scale is None:
        return before + branch(x)
    if x.device.type == "cpu" and torch.is_grad_enabled():
        # On a GPU, the host would have to wait for `scale`.
        active = scale.nonzero().flatten()
        # Scatter into a copy, so that samples whose path was dropped are unchanged.
        return before.index_add(0, active, (branch(x[active]) * scale[active, None, None]).to(before.dtype))
    return torch.addcmul(before, branch(x).to(before.dtype), scale[:, None, None])


class DropBlock(Block):
    """timm's block with dropped paths passed in, so that they depend on the sample only."""

    def forward(self, x: Tensor, scale: Tensor | None = None, cls_only: bool = False) -> Tensor:  # type: ignore[override]
        """Return tokens (B, N, d), or (B, 1, d) with `cls_only`, for tokens (B, N, d).

        Args:
            x: tokens.
            scale: (B, 2), factors of the outputs of attention and MLP: 0 or 1/keep; None: 1.
            cls_only: compute only the first token, which still attends to the others.
        """
        attention = self._first if cls_only else self.attn
        before = x[:, :1] if cls_only else x
        x = _residual(before, x, lambda t: attention(self.norm1(t)), None if scale is None else scale[:, 0])
        return _residual(x, x, lambda t: self.mlp(self.norm2(t)), None if scale is None else scale[:, 1])

    def _first(self, x: Tensor) -> Tensor:
        """Return self-attention's output at the first token."""
        batch, length, width = x.shape
        attn: Any = self.attn
        weight, bias = attn.qkv.weight, attn.qkv.bias
        query = (
            # The queries of the other tokens are not used.
            F.linear(x[:, :1], weight[:width], bias[:width])
            .view(batch, 1, attn.num_heads, attn.head_dim)
            .transpose(1, 2)
        )
        key, value = (
            F.linear(x, weight[width:], bias[width:])
            .view(batch, length, 2, attn.num_heads, attn.head_dim)
            .permute(2, 0, 3, 1, 4)
        )
        read = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        return attn.proj(read)

    def attention_map(self, x: Tensor) -> Tensor:
        """Return softmax(q k^T / sqrt(d)), (B, heads, N, N), for tokens (B, N, d)."""
        batch, length, _ = x.shape
        attn: Any = self.attn
        query, key, _ = (
            attn.qkv(self.norm1(x)).view(batch, length, 3, attn.num_heads, attn.head_dim).permute(2, 0, 3, 1, 4)
        )
        return (query @ key.transpose(-2, -1) * attn.scale).softmax(-1)


class Vit(VisionTransformer):
    """Backbone of `config`: normalised pixels (B, 3, H, W) to encodings (B, out_width).

    Any H and W are supported (96-pixel crops, larger images): positions are interpolated as in the official code.
    """

    def __init__(self, config: VitConfig):
        super().__init__(
            img_size=config.image_size,
            patch_size=config.patch_size,
            num_classes=0,
            global_pool="",
            embed_dim=config.width,
            depth=config.blocks,
            num_heads=config.heads,
            mlp_ratio=config.mlp_ratio,
            norm_layer=functools.partial(nn.LayerNorm, eps=1e-6),
            block_fn=DropBlock,
        )
        self.config, self.patch = config, config.patch_size
        # Initialization of the official code; timm's smaller one changes the first thousand steps.
        nn.init.trunc_normal_(self.cls_token, std=0.02)  # pyright: ignore[reportArgumentType]  timm's is 1e-6
        self.place = config.readout.placement
        readout = config.readout.build(config.width, None, config.width).image
        self.read_by = config.readout.kind if readout is not None else None
        if readout is not None:
            self.add_module(config.readout.kind, readout)
        if self.place.norm == "nothing":
            # Probes of earlier blocks apply this norm, and official files contain it; the loss does not depend on it.
            self.norm.requires_grad_(False)
        # Two paths per block: attention and MLP. The drop probability rises linearly with depth from 0 to `drop_path`.
        rates = torch.linspace(0, config.drop_path, config.blocks).repeat_interleave(2)
        # Not part of the state, because official checkpoints do not have it.
        self.register_buffer("drop_rates", rates, persistent=False)
        if config.weight_init == "xavier":
            init_linears(self.blocks, config.weight_init)
        self.checkpointed = False

    def forward(self, x: Tensor, drop: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """Return the encoding: CLS after `norm`, or the flat slots, not normalised.

        Args:
            x: pixels.
            drop: (B, 2 * blocks) int32, uniform below `DROP_RANGE`: a path is dropped if its number is below the rate's
                share of the range; None: nothing is dropped. Integers, because FSDP2 rounds floating-point inputs to 16
                bits.
        """
        if self.read_by is not None:
            # Flat and not normalised, because DINO's head is an MLP over all values (App. C.2).
            return self.slots(x, drop).flat()
        return self.norm(self._run(self.embed(x), drop, cls_only=True))[:, 0]

    def slots(self, x: Tensor, drop: Tensor | None = None, need_attention: bool = False) -> Slots:
        """Return slots (B, L, V) with attention (B, L, N) over CLS and patches (only patches if `attend_cls` is false); needs a readout."""
        return self._read(self._run(self.embed(x), drop), need_attention)

    def intermediate(self, x: Tensor, n: int) -> list[Tensor]:
        """Return all tokens of the last `n` blocks, each after `norm`, like the official `get_intermediate_layers`."""
        x, outputs = self.embed(x), []
        for number, block in enumerate(self.blocks):
            x = block(x)
            # Count from the end, so that earlier outputs need not be kept.
            if len(self.blocks) - number <= n:
                outputs.append(self.norm(x))
        return outputs

    def probe_features(self, x: Tensor, n: int = 4, avgpool: bool = False) -> Tensor:
        """Return the input of the official linear probe: CLS after `norm` of the last `n` blocks, and the mean patch of the last if `avgpool`.

        With a readout, its encoding replaces the last block's CLS (App. C.2, where SPARO's is not normalised): ViT-S
        with L = V = 64 gives 3 * 384 + 4096 = 5,248 values.
        """
        x, outputs = self.embed(x), []
        for block in self.blocks:
            x = block(x)
            outputs.append(x)
        if self.read_by is None:
            parts = [self.norm(tokens[:, :1])[:, 0] for tokens in outputs[-n:]]
        else:
            # A readout that replaces no block still takes the place of the last one here. The blocks are equal in both
            # cases.
            outputs = outputs if self.place.replaced else outputs[:-1]
            parts = [self.norm(tokens[:, :1])[:, 0] for tokens in outputs[max(0, len(outputs) - n + 1) :]]
            parts.append(self._read(x, False).flat())
        if avgpool:
            parts.append(self.norm(x)[:, 1:].mean(dim=1))
        return torch.cat(parts, dim=-1)

    def last_attention(self, x: Tensor) -> Tensor:
        """Return self-attention of the last block, (B, heads, N, N), like the official `get_last_selfattention`."""
        x = self.embed(x)
        for block in self.blocks[:-1]:
            x = block(x)
        return self.blocks[-1].attention_map(x)  # type: ignore[operator]

    def embed(self, x: Tensor) -> Tensor:
        """Return tokens with position embeddings, (B, 1 + patches, d), for pixels."""
        rows, columns = x.shape[-2] // self.patch, x.shape[-1] // self.patch
        proj: Any = self.patch_embed.proj
        tokens = F.linear(patchify(x, self.patch), proj.weight.flatten(1), proj.bias)
        start = self.cls_token.expand(len(x), -1, -1).to(tokens.dtype)  # type: ignore[union-attr]
        return torch.cat([start, tokens], dim=1) + self.positions(rows, columns).to(tokens.dtype)

    def positions(self, rows: int, columns: int) -> Tensor:
        """Return position embeddings of a grid, (1, 1 + rows * columns, d).

        They are interpolated (bicubic) with a scale that is larger by a tenth of a patch, with which the official code
        prevents rounding from losing a row (vision_transformer.py, `interpolate_pos_encoding`).
        """
        table: Tensor = self.pos_embed  # type: ignore[assignment]
        side = math.isqrt(table.shape[1] - 1)
        # Interpolation to the same size would change every value by rounding.
        if (rows, columns) == (side, side):
            return table
        grid = table[:, 1:].unflatten(1, (side, side)).permute(0, 3, 1, 2)
        # The tenth is part of the official function: without it, positions of 96-pixel crops differ in the third digit.
        scale = ((rows + 0.1) / side, (columns + 0.1) / side)
        grid = F.interpolate(grid, scale_factor=scale, mode="bicubic")
        return torch.cat([table[:, :1], grid.flatten(2).transpose(1, 2)], dim=1)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.checkpointed = enable

    def _run(self, x: Tensor, drop: Tensor | None, cls_only: bool = False) -> Tensor:
        scales = None
        if drop is not None:
            rates: Tensor = self.drop_rates  # type: ignore[assignment]
            # Scale kept paths up, so that their mean equals the value in evaluation.
            scales = ((drop >= rates * DROP_RANGE) / (1 - rates)).to(x.dtype).unflatten(1, (-1, 2))
        for number, block in enumerate(self.blocks):
            scale = None if scales is None else scales[:, number]
            last = cls_only and number == len(self.blocks) - 1
            again = self.checkpointed and torch.is_grad_enabled()
            # Recomputing without a graph would only cost time.
            x = checkpoint(block, x, scale, last, use_reentrant=False) if again else block(x, scale, last)  # type: ignore[assignment]
        return x

    def _read(self, x: Tensor, need_attention: bool) -> Slots:
        assert self.read_by is not None
        return read_slots(self.get_submodule(self.read_by), self.place, self.norm, x, None, need_attention)


class DinoHeadConfig(Frozen):
    """The official head."""

    out_dim: int = field(65536, "Number of prototypes.", gt=1)
    hidden_dim: int = field(2048, "Width of the MLP.", gt=0)
    bottleneck_dim: int = field(256, "Width in which outputs are compared with prototypes.", gt=0)
    nlayers: int = field(3, "Linear layers of the MLP.", ge=1)
    use_bn: bool = field(False, "Batch normalization over the global batch in the MLP.")
    norm_last_layer: bool = field(True, "Keep the norm of every prototype at one.")
    weight_init: Literal["official", "xavier"] = field(
        "official", "Initialization of the MLP; options as for the backbone."
    )


class PrototypeLayer(nn.Module):
    """Linear layer without bias under weight norm: `weight_g * weight_v / |weight_v|`, applied to unit vectors.

    The names are those of `nn.utils.weight_norm`, which official checkpoints have and torch deprecates.
    """

    def __init__(self, in_dim: int, out_dim: int, norm_one: bool):
        super().__init__()
        self.weight_g = nn.Parameter(torch.ones(out_dim, 1), requires_grad=not norm_one)
        self.weight_v = nn.Parameter(nn.Linear(in_dim, out_dim, bias=False).weight.detach())

    # torch's own kernel, as in weight_norm, without its deprecated hooks.
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, torch._weight_norm(self.weight_v, self.weight_g, 0))  # pyright: ignore[reportPrivateImportUsage]


class GlobalBatchNorm(nn.BatchNorm1d):
    """Batch norm over the batches of all ranks, on any backend (torch's SyncBatchNorm supports GPUs only)."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        # Sums of squares in 16 bits would overflow for wide batches.
        x = input.to(torch.promote_types(input.dtype, torch.float32))
        # One exchange for sums, squares and counts instead of three.
        sums = sum_over_ranks(torch.cat([x.sum(0), x.square().sum(0), x.new_full((1,), len(x))]))
        mean, square = sums[:-1].view(2, -1) / sums[-1]
        var = square - mean.square()
        with torch.no_grad():
            keep, count = 1 - (self.momentum or 0.1), sums[-1]
            # Running statistics use the unbiased variance, the batch itself the biased one, as in torch.
            for running_stat, batch_stat in ((self.running_mean, mean), (self.running_var, var * count / (count - 1))):
                running_stat.mul_(keep).add_(batch_stat, alpha=1 - keep)  # type: ignore[union-attr]
            self.num_batches_tracked.add_(1)  # type: ignore[union-attr]
        return (self.weight * (x - mean) * (var + self.eps).rsqrt() + self.bias).to(input.dtype)


class DinoHead(nn.Module):
    """Head that maps encodings (B, in_dim) to logits (B, out_dim): MLP, unit norm, prototypes."""

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
        # Prototypes are compared by angle; the official head normalises here, too.
        return self.last_layer(F.normalize(x.to(torch.promote_types(x.dtype, torch.float32)), dim=-1))


class DinoNet(nn.Module):
    """A student or a teacher, which runs `backbone` once per resolution and `head` once."""

    def __init__(self, model: VitConfig, head: DinoHeadConfig):
        super().__init__()
        self.backbone = Vit(model)
        self.head = DinoHead(model.out_width, head)

    def forward(self, crops: Sequence[Tensor], drops: Sequence[Tensor | None]) -> Tensor:
        """Return logits (sum of B_i, out_dim) for crops by resolution, each (B_i, 3, H_i, W_i), in the same order."""
        # One head over all crops, so that its batch norm covers them together, as published.
        return self.head(torch.cat([self.backbone(x, drop) for x, drop in zip(crops, drops, strict=True)]))
