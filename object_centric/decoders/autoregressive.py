"""Transformer that predicts an image's tokens one after another, with cross-attention to slots (Singh et al. 2022)."""

from __future__ import annotations

from typing import Literal, NamedTuple, Self

import torch
from pydantic import model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from sparo_train.core.config import Frozen, field


class AutoregressiveConfig(Frozen):
    """Blocks of causal self-attention, cross-attention to slots, and an MLP of four times the width."""

    width: int = field(192, "Token width.", gt=0, le=65536)
    blocks: int = field(8, "Transformer blocks.", gt=0, le=256)
    heads: int = field(4, "Attention heads.", gt=0)
    dropout: float = field(
        0.1, "Dropout of attention weights, outputs and embedded tokens during training.", ge=0, lt=1
    )
    first_norm: Literal["stream", "branch"] = field(
        "stream",
        "stream: the first block also normalizes its residual stream, as in SLATE's code. branch: it does not.",
    )

    @model_validator(mode="after")
    def _check_heads(self) -> Self:
        if self.width % self.heads:
            raise ValueError(f"heads={self.heads} does not divide width={self.width}")
        return self


class KVCache(NamedTuple):
    """Keys and values (b, heads, n, width / heads) of the tokens so far, and of the slots."""

    tokens: tuple[Tensor, Tensor] | None
    slots: tuple[Tensor, Tensor]


class AutoregressiveDecoder(nn.Module):
    """Decoder of embedded tokens (b, n, width) and slots (b, K, width) to a prediction of each next token, (b, n, width)."""

    def __init__(self, config: AutoregressiveConfig):
        super().__init__()
        self.blocks = nn.ModuleList(
            DecoderBlock(config, on_stream=number == 0 and config.first_norm == "stream")
            for number in range(config.blocks)
        )
        self.norm = nn.LayerNorm(config.width)

    def forward(self, x: Tensor, slots: Tensor) -> Tensor:
        for block in self.blocks:
            x, _ = block(x, slots, None)
        return self.norm(x)

    def decode_next(self, x: Tensor, slots: Tensor, past: list[KVCache] | None) -> tuple[Tensor, list[KVCache]]:
        """Decode the next token only, (b, 1, width), with the cache of earlier tokens."""
        presents: list[KVCache] = []
        for number, block in enumerate(self.blocks):
            x, present = block(x, slots, past[number] if past else None)
            presents.append(present)
        return self.norm(x), presents


class DecoderBlock(nn.Module):
    """One block; `past` caches tokens before those in `x`."""

    def __init__(self, config: AutoregressiveConfig, on_stream: bool):
        super().__init__()
        wide, gain = config.width, (3 * config.blocks) ** -0.5
        self.on_stream = on_stream
        self.norm_tokens, self.norm_slots, self.norm_mlp = (nn.LayerNorm(wide) for _ in range(3))
        self.to_tokens, self.to_slots = (_Attention(config, gain) for _ in range(2))
        self.mlp = nn.Sequential(
            nn.Linear(wide, 4 * wide), nn.ReLU(), nn.Linear(4 * wide, wide), nn.Dropout(config.dropout)
        )
        nn.init.kaiming_uniform_(self.mlp[0].weight, nonlinearity="relu")  # type: ignore[arg-type]
        nn.init.xavier_uniform_(self.mlp[2].weight, gain)  # type: ignore[arg-type]
        for layer in (self.mlp[0], self.mlp[2]):
            nn.init.zeros_(layer.bias)  # type: ignore[arg-type]

    def forward(self, x: Tensor, slots: Tensor, past: KVCache | None) -> tuple[Tensor, KVCache]:
        normed = self.norm_tokens(x)
        k, v = self.to_tokens.project_kv(normed)
        if past is not None and past.tokens is not None:
            # Earlier tokens are not recomputed, so a token costs one row of attention.
            k, v = torch.cat([past.tokens[0], k], dim=2), torch.cat([past.tokens[1], v], dim=2)
        self_attn_out = self.to_tokens(normed, k, v, causal=past is None)
        x = (normed if self.on_stream else x) + self_attn_out
        # Slots do not change during the generation of an image.
        slot_kv = past.slots if past is not None else self.to_slots.project_kv(slots)
        x = x + self.to_slots(self.norm_slots(x), *slot_kv)
        return x + self.mlp(self.norm_mlp(x)), KVCache((k, v), slot_kv)


class _Attention(nn.Module):
    """Multi-head attention without biases."""

    def __init__(self, config: AutoregressiveConfig, gain: float):
        super().__init__()
        wide = config.width
        self.heads, self.rate = config.heads, config.dropout
        self.to_q, self.to_k, self.to_v, self.out = (nn.Linear(wide, wide, bias=False) for _ in range(4))
        for layer in (self.to_q, self.to_k, self.to_v):
            nn.init.xavier_uniform_(layer.weight)
        nn.init.xavier_uniform_(self.out.weight, gain)

    def project_kv(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of (b, n, width)."""
        return self._split(self.to_k(x)), self._split(self.to_v(x))

    def forward(self, x: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
        dropout_p = self.rate if self.training else 0.0
        attn_out = F.scaled_dot_product_attention(
            self._split(self.to_q(x)), k, v, dropout_p=dropout_p, is_causal=causal
        )
        return F.dropout(self.out(attn_out.transpose(1, 2).flatten(2)), self.rate, self.training)

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)
