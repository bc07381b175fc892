"""Transformer blocks of `Vit`: timm's, with the variants of DINOv2 and DINOv3."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from timm.models.vision_transformer import Block
from torch import Tensor, nn
from torch.nn import functional as F


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


class SwiGlu(nn.Module):
    """Gated MLP of DINOv2 and DINOv3: `w3(silu(a) * b)` with `[a, b] = w12(x)`. Its width is two thirds of an MLP's, rounded up to a multiple of eight."""

    def __init__(self, in_features: int, hidden_features: int, **_timm_options: Any):
        super().__init__()
        hidden = (int(hidden_features * 2 / 3) + 7) // 8 * 8
        self.w12 = nn.Linear(in_features, 2 * hidden)
        self.w3 = nn.Linear(hidden, in_features)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.w12(x).chunk(2, dim=-1)
        return self.w3(F.silu(gate) * value)


def interpolate_positions(table: Tensor, grid: tuple[int, int], offset: float, antialias: bool) -> Tensor:
    """Return learned positions (1, 1 + P, d) for another grid (rows, columns), bicubic; unchanged if it is theirs.

    DINO's scale is larger by a tenth of a patch, which prevents rounding from losing a row (vision_transformer.py,
    `interpolate_pos_encoding`). DINOv2 with registers has no such offset, but antialiasing.
    """
    side = math.isqrt(table.shape[1] - 1)
    # Interpolation to the same size would change every value by rounding.
    if grid == (side, side):
        return table
    # In fp32, as in the official code, also for weights with 16 bits.
    patches = (
        table[:, 1:].to(torch.promote_types(table.dtype, torch.float32)).unflatten(1, (side, side)).permute(0, 3, 1, 2)
    )
    # The offset is part of the official function: without it, positions of 96-pixel crops differ in the third digit.
    scale = ((grid[0] + offset) / side, (grid[1] + offset) / side)
    size: dict[str, Any] = {"scale_factor": scale} if offset else {"size": grid}
    patches = F.interpolate(patches, mode="bicubic", antialias=antialias, **size)
    return torch.cat([table[:, :1], patches.flatten(2).transpose(1, 2).to(table.dtype)], dim=1)


def rotation(rows: int, columns: int, head_width: int, base: float, device: torch.device) -> Rotation:
    """Return sine and cosine of DINOv3's rotary embedding for a grid of patches, each (rows * columns, head_width) fp32.

    Patch centres are scaled to -1..1 in each direction, so an image of another size covers the same angles (Siméoni et
    al. 2025, Sec. 3.2).
    """
    centres = [2 * torch.arange(0.5, side, device=device) / side - 1 for side in (rows, columns)]
    places = torch.stack(torch.meshgrid(*centres, indexing="ij"), dim=-1).flatten(0, 1)
    quarter = head_width // 4
    periods = base ** (2 * torch.arange(quarter, device=device, dtype=torch.float32) / (head_width // 2))
    angles = (2 * math.pi * places[:, :, None] / periods).flatten(1).tile(2)
    return Rotation(angles.sin(), angles.cos())


@dataclass(frozen=True)
class Rotation:
    """Sine and cosine of the rotary embedding of patches, each (patches, head_width) fp32.

    Not a tuple, because FSDP2 rounds the tensors in tuples that a block receives to 16 bits.
    """

    sin: Tensor
    cos: Tensor

    def rotate(self, x: Tensor) -> Tensor:
        """Return queries or keys (B, heads, N, head_width) whose last tokens, the patches, are rotated."""
        prefix = x.shape[-2] - len(self.sin)
        patches = x[:, :, prefix:].to(self.sin.dtype)
        first, second = patches.chunk(2, dim=-1)
        turned = patches * self.cos + torch.cat([-second, first], dim=-1) * self.sin
        return torch.cat([x[:, :, :prefix], turned.to(x.dtype)], dim=-2)


class DropBlock(Block):
    """timm's block with dropped paths passed in, so that they depend on the sample only, and with rotary embeddings."""

    def forward(  # type: ignore[override]
        self, x: Tensor, scale: Tensor | None = None, cls_only: bool = False, rotary: Rotation | None = None
    ) -> Tensor:
        """Return tokens (B, N, d), or (B, 1, d) with `cls_only`, for tokens (B, N, d).

        Args:
            x: tokens.
            scale: (B, 2), factors of the outputs of attention and MLP: 0 or 1/keep; None: 1.
            cls_only: compute only the first token, which still attends to the others.
            rotary: rotation of the patches' queries and keys; None: no rotary embedding.
        """
        before = x[:, :1] if cls_only else x

        def attend(tokens: Tensor) -> Tensor:
            tokens = self.norm1(tokens)
            plain = rotary is None and not cls_only
            return self.ls1(self.attn(tokens) if plain else self._attention(tokens, rotary, cls_only))

        x = _residual(before, x, attend, None if scale is None else scale[:, 0])
        return _residual(x, x, lambda t: self.ls2(self.mlp(self.norm2(t))), None if scale is None else scale[:, 1])

    def _attention(self, x: Tensor, rotary: Rotation | None, cls_only: bool) -> Tensor:
        """Return self-attention's output, at the first token only with `cls_only`."""
        query, key, value = self._heads(x, rotary, cls_only)
        attn: Any = self.attn
        return attn.proj(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor, rotary: Rotation | None, cls_only: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, each (B, heads, N, head_width); with `cls_only` only the first token's query."""
        attn: Any = self.attn
        width, weight, bias = x.shape[-1], attn.qkv.weight, attn.qkv.bias
        if rotary is not None:
            # DINOv3 has no bias for keys: under a rotation, it would change the attention.
            bias = torch.cat([bias[:width], torch.zeros_like(bias[:width]), bias[2 * width :]])

        def split(source: Tensor, begin: int, parts: int) -> Tensor:
            end = (begin + parts) * width
            out = F.linear(source, weight[begin * width : end], bias[begin * width : end])
            return out.unflatten(-1, (parts, attn.num_heads, attn.head_dim)).permute(2, 0, 3, 1, 4)

        # With `cls_only`, the queries of the other tokens are not used.
        (query,) = split(x[:, :1] if cls_only else x, 0, 1)
        key, value = split(x, 1, 2)
        if rotary is None:
            return query, key, value
        return query if cls_only else rotary.rotate(query), rotary.rotate(key), value

    def attention_map(self, x: Tensor, rotary: Rotation | None = None) -> Tensor:
        """Return softmax(q k^T / sqrt(d)), (B, heads, N, N), for tokens (B, N, d)."""
        attn: Any = self.attn
        query, key, _ = self._heads(self.norm1(x), rotary, cls_only=False)
        return (query @ key.transpose(-2, -1) * attn.scale).softmax(-1)
