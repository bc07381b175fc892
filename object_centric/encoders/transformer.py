"""Transformer blocks over the slots of a frame, or over tokens, as in SAVi, SAVi++, STEVE, videosaur, SRT and PSB's scenes."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from sparo_train.core.config import Frozen, field
from sparo_train.core.errors import did_you_mean

# Sources: slot-attention-video (savi, savi++: modules/attention.py), singhgautam/steve (transformer.py),
# martius-lab/videosaur, stelzner/osrt and stelzner/srt (layers.py; neither has the SRT paper's post-norm and attention
# to the first features only), papers/parallel-spatiotemporal-binder, Table 8 (slsr). mlp_ratio: hidden units of the MLP
# as a multiple of the width.
PRESETS: dict[str, dict[str, Any]] = {
    "savi": {},
    "savi++": {"norm": "pre", "blocks": 4, "qkv_width": 64, "mlp_width": 1024},
    "steve": {"norm": "pre", "biases": False, "first_norm": "stream", "last_norm": True, "mlp_ratio": 4, "ln_eps": 1e-5},
    "videosaur": {"norm": "pre", "mlp_ratio": 4, "ln_eps": 1e-5, "scale_by_sqrt_d": True},
    "osrt": {"norm": "pre", "blocks": 5, "heads": 12, "mlp_width": 1536, "activation": "gelu", "biases": "out", "ln_eps": 1e-5},
    "srt": {"norm": "pre", "blocks": 10, "heads": 12, "mlp_width": 1536, "activation": "gelu", "biases": "out", "ln_eps": 1e-5},
    "slsr": {"norm": "pre", "blocks": 3, "mlp_ratio": 4, "activation": "gelu", "ln_eps": 1e-5},
}  # fmt: skip


class TransformerConfig(Frozen):
    """Blocks of self-attention and an MLP."""

    preset: str = field(
        "savi", "Named set of options. Options that the recipe sets explicitly take precedence.", examples=["savi++"]
    )
    blocks: int = field(1, "Number of blocks.", gt=0, le=100)
    heads: int = field(4, "Attention heads.", gt=0)
    qkv_width: int | None = field(
        None, "Width of queries, keys and values over all heads. Default: the token width.", gt=0, examples=[64]
    )
    mlp_width: int | None = field(256, "Hidden units of the MLP.", gt=0)
    mlp_ratio: int | None = field(
        None,
        "Hidden units of the MLP as a multiple of the token width. If set, mlp_width is ignored.",
        gt=0,
        examples=[4],
    )
    norm: Literal["post", "pre"] = field(
        "post", "LayerNorms after each branch (post: SAVi) or before it (pre: SAVi++, STEVE, videosaur)."
    )
    first_norm: Literal["stream", "branch"] = field(
        "branch",
        "With norm=pre: where the output of the first LayerNorm is used. branch: only as the input of the "
        "attention. stream: also as the residual stream (STEVE's code).",
    )
    last_norm: bool = field(False, "Apply a LayerNorm after the last block (STEVE).")
    biases: bool | Literal["out"] = field(
        True,
        "Which projections of the attention have biases. true: all; false: none; out: only the output projection (SRT).",
    )
    activation: Literal["relu", "gelu"] = field("relu", "Activation of the MLP.")
    scale_by_sqrt_d: bool = field(
        False,
        "Multiply attention scores by the square root of the head width instead of dividing by it (videosaur's code).",
    )
    dropout: float = field(0.0, "Dropout of attention weights and branches during training.", ge=0, lt=1)
    ln_eps: float = field(1e-6, "Epsilon of every LayerNorm.", gt=0)

    @model_validator(mode="before")
    @classmethod
    def _apply_preset(cls, values: Any) -> Any:
        if not isinstance(values, dict) or not isinstance(values.get("preset", "savi"), str):
            return values
        name = values.get("preset", "savi")
        if name not in PRESETS:
            raise ValueError(f"preset={name}: {did_you_mean(name, PRESETS)}")
        preset = dict(PRESETS[name])
        # If given, it takes precedence over the preset's multiple.
        if values.get("mlp_width") is not None:
            preset.pop("mlp_ratio", None)
        return {**preset, **values}

    @model_validator(mode="after")
    def _check_transformer_options(self) -> Self:
        if self.first_norm == "stream" and self.norm == "post":
            raise ValueError("first_norm=stream: applies to norm=pre only. Set norm: pre, or remove first_norm.")
        if self.mlp_ratio is None and self.mlp_width is None:
            raise ValueError("mlp_width: is not set. Set it, or mlp_ratio.")
        return self

    def refuse_width(self, width: int, where: str) -> None:
        """Raise `ValueError` if heads do not divide the attention width; `where` is the key of this block."""
        if (self.qkv_width or width) % self.heads:
            raise ValueError(f"{where}.heads={self.heads}: does not divide {self.qkv_width or width}")

    def build(self, width: int) -> nn.Module:
        """Return blocks (b, n, width) to (b, n, width)."""
        last = [nn.LayerNorm(width, eps=self.ln_eps)] if self.last_norm else []
        return nn.Sequential(*(SelfBlock(self, width, number == 0) for number in range(self.blocks)), *last)


class SelfBlock(nn.Module):
    """Block (b, n, width) to (b, n, width)."""

    def __init__(self, config: TransformerConfig, width: int, first: bool):
        super().__init__()
        self.config, c = config, config
        qkv, hidden = c.qkv_width or width, c.mlp_ratio * width if c.mlp_ratio else c.mlp_width
        assert hidden is not None
        self.on_stream = first and c.first_norm == "stream"
        self.norm_attention, self.norm_mlp = (nn.LayerNorm(width, eps=c.ln_eps) for _ in range(2))
        self.to_q, self.to_k, self.to_v = (nn.Linear(width, qkv, bias=c.biases is True) for _ in range(3))
        self.out = nn.Linear(qkv, width, bias=bool(c.biases))
        self.mlp = nn.Sequential(
            nn.Linear(width, hidden), (nn.GELU if c.activation == "gelu" else nn.ReLU)(), nn.Linear(hidden, width)
        )
        for layer in (self.to_q, self.to_k, self.to_v, self.out):
            nn.init.xavier_uniform_(layer.weight)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.config.norm == "post":
            x = self.norm_attention(x + self._self_attention(x))
            return self.norm_mlp(x + self._dropout(self.mlp(x)))
        normed = self.norm_attention(x)
        x = (normed if self.on_stream else x) + self._self_attention(normed)
        return x + self._dropout(self.mlp(self.norm_mlp(x)))

    def _self_attention(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (self.config.heads, -1)).transpose(1, 2)
            for layer in (self.to_q, self.to_k, self.to_v)
        )
        dropout_p = self.config.dropout if self.training else 0.0
        # videosaur multiplies where others divide, which makes attention almost one-hot.
        scale = q.shape[-1] ** (0.5 if self.config.scale_by_sqrt_d else -0.5)
        attn_out = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p, scale=scale)
        return self._dropout(self.out(attn_out.transpose(1, 2).flatten(2)))

    def _dropout(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.config.dropout, self.training)
