"""SPARO, the separate-head attention read-out (Vani et al., ECCV 2024; Sec. 3.2 and Appendix A).

Each of L slots is one attention head over the backbone's tokens with a learned query q_l:

    y_l = W K_l H^T softmax(H K_l^T q_l / sqrt(D))                                               (Eq. 1)

with biases on K_l and W as in Appendix A. Written that way, the keys are a (B, N, L*D) tensor. The same function,
exactly, without it:

    w_l = K_l^T q_l / sqrt(D)             d numbers per slot; the key bias adds a constant over positions: softmax drops it
    a_l = softmax_n(x_n . w_l)
    p_l = sum_n a_ln x_n                  pool the tokens first …
    y_l = W (V_l p_l + b_l) + b_W         … then project, because the a_ln sum to one

V_l is K_l unless `share_kv=False`. `plain()` keeps Appendix A's form: it is the oracle of the tests and the baseline
of benchmarks/readout.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

import torch
from pydantic import model_validator
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ..core.config import setting
from .slots import Placement, ReadOut, ReadOutConfig, ReadOutPair, Slots


class SparoReadOut(ReadOutConfig):
    """SPARO on every tower with the same number of slots L and the same slot width V (Sec. 3.3, 3.4).

    What the paper leaves open for DINO is a key, and CLIP+SPARO's own choice the default.
    """

    kind: Literal["sparo"] = "sparo"
    slots: int = setting(64, "L, concepts attended separately", gt=0)
    slot_width: int = setting(64, "V, numbers of a slot", gt=0)
    head_width: int = setting(64, "D, width of keys and queries", gt=0)
    grp_size: int = setting(1, "slots that share one key projection (Appendix A); divides slots", gt=0)
    share_kv: bool = setting(True, "keys are the values too, as in the paper")
    replace_last_block: bool = setting(True, "takes the place of the last transformer block, as in the paper")
    norm_first: bool = setting(True, "the tower's last norm on all tokens before it; false reads the blocks' output")
    attend_cls: bool = setting(True, "the image's class token is one of the positions that slots attend to")
    normalize: bool | None = setting(
        None, "every slot to one norm (Eq. 2); null: in CLIP, and not before DINO's head", examples=[False]
    )

    @model_validator(mode="after")
    def _groups(self) -> SparoReadOut:
        if self.slots % self.grp_size:
            raise ValueError(f"readout.grp_size={self.grp_size} does not divide readout.slots={self.slots}")
        return self

    @property
    def placement(self) -> Placement:
        return Placement(
            int(self.replace_last_block),
            "tokens" if self.norm_first else "nothing",
            self.attend_cls,
            bool(self.normalize),
        )

    def resolved(self, normalize: bool) -> Self:
        return self if self.normalize is not None else self.model_copy(update={"normalize": normalize})

    def shape(self, embed_dim: int) -> tuple[int, int]:
        return self.slots, self.slot_width

    def build(self, image_dim: int | None, text_dim: int | None, embed_dim: int) -> ReadOutPair:
        """Two modules without anything in common (the paper's towers share none)."""
        return ReadOutPair(self._of(image_dim), self._of(text_dim))

    def _of(self, dim: int | None) -> Sparo | None:
        if dim is None:
            return None
        return Sparo(dim, self.slots, self.slot_width, self.head_width, self.grp_size, self.share_kv)

    @classmethod
    def infer(cls, weights: Mapping[str, Tensor], replaced: int) -> dict[str, Any]:
        _, heads, group, _, head_width = weights["q_emb"].shape
        return {
            "slots": heads * group,
            "grp_size": group,
            "head_width": head_width,
            "slot_width": len(weights["proj.weight"]),
            "share_kv": "v.weight" not in weights,
            "replace_last_block": bool(replaced),
        }


class _AttendPoolProject(torch.autograd.Function):
    """Scores, softmax, pooling and value projection with the backward written out.

    Autograd would hold two gradients of the tokens and two of K at once and copy between layouts; here each second
    contribution is added by the matrix product that makes it (peak memory and a third of the time, see benchmarks/readout.py).

    Shapes: tokens (B, N, d); query (H, G, D), scaled; key (H, D, d); value likewise, None when it is the key;
    constant (L,) or None; keep (B, N) bool or None. Returns read (H, B*G, D) and attention (B, L, N), L = H*G.
    """

    @staticmethod
    def forward(
        ctx: Any,
        tokens: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor | None,
        constant: Tensor | None,
        keep: Tensor | None,
    ):
        heads, group, _ = query.shape
        # The inputs were cast when they came in; a second cast inside would copy them.
        with torch.autocast(tokens.device.type, enabled=False):
            # The keys of all tokens are never made: d numbers per slot take their place.
            weight = torch.bmm(query, key).flatten(0, 1)  # w_l, (L, d)
            scores = weight @ tokens.transpose(1, 2)
            if constant is not None:
                scores = scores + constant.to(scores.dtype)[:, None]
            if keep is not None:
                # In place: nothing before it is needed again.
                scores = scores.masked_fill_(~keep[:, None, :], -torch.inf)
            attention = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(scores.dtype)
            pooled = _by_head(attention @ tokens, heads, group)  # p_l, (H, B*G, d)
            read = torch.bmm(pooled, (key if value is None else value).transpose(1, 2))
        ctx.save_for_backward(tokens, query, key, value, weight, attention, pooled)
        ctx.constant = constant is not None
        ctx.set_materialize_grads(False)  # attention maps are mostly looked at, seldom differentiated
        return read, attention

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor | None):  # pyright: ignore[reportIncompatibleMethodOverride]
        d_read, d_attention = grad_outputs
        d_read = (
            torch.zeros_like(ctx.saved_tensors[-1][..., : ctx.saved_tensors[1].shape[-1]]) if d_read is None else d_read
        )
        tokens, query, key, value, weight, attention, pooled = ctx.saved_tensors
        heads, group, _ = query.shape
        d_value = torch.bmm(d_read.transpose(1, 2), pooled)
        d_pooled = (
            torch.bmm(d_read, key if value is None else value)
            .view(heads, len(tokens), group, -1)
            .transpose(0, 1)
            .flatten(1, 2)
        )
        d_scores = d_pooled @ tokens.transpose(1, 2)
        if d_attention is not None:
            d_scores = d_scores + d_attention
        # The softmax's own gradient, from the map that is saved anyway.
        d_scores = attention * (d_scores - (attention * d_scores).sum(-1, keepdim=True))
        d_tokens = torch.bmm(attention.transpose(1, 2), d_pooled)
        # Added by the product itself: a second gradient of the tokens is never held.
        d_tokens.baddbmm_(d_scores.transpose(1, 2), weight.expand(len(tokens), -1, -1))
        d_weight = d_scores.transpose(0, 1).flatten(1) @ tokens.flatten(0, 1)
        d_weight = d_weight.view(heads, group, -1)
        d_query = torch.bmm(d_weight, key.transpose(1, 2))
        if value is None:  # K's two gradients in one buffer
            d_key, d_value = d_value.baddbmm_(query.transpose(1, 2), d_weight), None
        else:
            d_key = torch.bmm(query.transpose(1, 2), d_weight)
        d_constant = d_scores.sum((0, 2)) if ctx.constant else None
        return d_tokens, d_query, d_key, d_value, d_constant, None


def _by_head(x: Tensor, heads: int, group: int) -> Tensor:
    """(B, L, d) -> (H, B*G, d)."""
    return x.view(len(x), heads, group, -1).transpose(0, 1).flatten(1, 2)


class Sparo(ReadOut):
    """Separate-head attention read-out.

    Args:
        dim: d, width of the tokens.
        slots: L, how many concepts are attended separately.
        slot_width: V, numbers per slot.
        head_width: D, width of keys and queries (the paper: 64).
        grp_size: slots that share one K_l (Appendix A); divides `slots`.
        share_kv: use K_l for the values too (the paper). Otherwise V_l are parameters of their own.

    Parameters keep the names and shapes of the sparo-clip repository: `q_emb` (1, L/grp, grp, 1, D), `k.weight`
    (L/grp*D, d), `k.bias`, `v.*` (only without sharing), `proj.weight` (V, D), `proj.bias`.

    Raises:
        ValueError: `grp_size` does not divide `slots`.
    """

    def __init__(
        self,
        dim: int,
        slots: int,
        slot_width: int,
        head_width: int = 64,
        grp_size: int = 1,
        share_kv: bool = True,
    ):
        super().__init__()
        if slots % grp_size:
            raise ValueError(f"grp_size={grp_size} does not divide slots={slots}")
        self.dim, self.slots, self.width, self.head_width = dim, slots, slot_width, head_width
        self.heads, self.grp_size = slots // grp_size, grp_size
        self.scale = head_width**-0.5
        self.q_emb = nn.Parameter(torch.empty(1, self.heads, grp_size, 1, head_width))
        self.k = nn.Linear(dim, self.heads * head_width)
        # No parameter at all: an alias would be saved and counted twice.
        self.v = None if share_kv else nn.Linear(dim, self.heads * head_width)
        self.proj = nn.Linear(head_width, slot_width)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """q ~ N(0, 1); K (and V) xavier-uniform over the whole matrix; W torch's default; biases zero (Appendix A)."""
        nn.init.normal_(self.q_emb)
        for linear in (self.k, self.v):
            if linear is not None:
                nn.init.xavier_uniform_(linear.weight)
                nn.init.zeros_(linear.bias)
        self.proj.reset_parameters()
        nn.init.zeros_(self.proj.bias)

    def forward(self, tokens: Tensor, keep: Tensor | None = None, *, need_attention: bool = False) -> Slots:
        """Read L slots out of tokens.

        Args:
            tokens: (B, N, d), any float dtype; autocast applies.
            keep: (B, N) bool, True where a position may be attended (text: up to and including EOS); None for all.
                Every row needs at least one True.
            need_attention: also return the attention maps.

        Returns:
            Slots with `values` (B, L, V), not normalised, and `attention` (B, L, N) in fp32 or None.
        """
        values = self.v or self.k
        device = tokens.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else self.k.weight.dtype
        query = (self.q_emb * self.scale).view(self.heads, self.grp_size, self.head_width)
        key = self.k.weight.view(self.heads, self.head_width, self.dim)
        value = None if self.v is None else self.v.weight.view(self.heads, self.head_width, self.dim).to(dtype)
        # With values of their own the key bias would get no gradient at all; as a constant per slot it gets its zero.
        constant = None if self.v is None else torch.bmm(query, self.k.bias.view(self.heads, -1, 1)).flatten()
        read, attention = _AttendPoolProject.apply(
            tokens.to(dtype), query.to(dtype), key.to(dtype), value, constant, keep
        )  # (heads, B*grp, D), (B, L, N)
        out = self.proj(read + values.bias.view(self.heads, 1, self.head_width).to(dtype))
        out = out.view(self.heads, -1, self.grp_size, self.width).transpose(0, 1).flatten(1, 2)
        return Slots(out, attention.to(torch.promote_types(dtype, torch.float32)) if need_attention else None)

    def plain(self, tokens: Tensor, keep: Tensor | None = None) -> Slots:
        """Appendix A as written: keys and values for every token and head. Same parameters, same result, slower."""
        batch, length, _ = tokens.shape

        def heads(linear: nn.Linear) -> Tensor:
            x = linear(tokens).view(batch, length, self.heads, 1, self.head_width)
            return x.expand(-1, -1, -1, self.grp_size, -1).permute(0, 2, 3, 1, 4)  # (B, heads, grp, N, D)

        keys = heads(self.k)
        values = keys if self.v is None else heads(self.v)
        scores = (self.q_emb * self.scale) @ keys.transpose(-2, -1)  # (B, heads, grp, 1, N)
        if keep is not None:
            scores = scores.masked_fill(~keep[:, None, None, None, :], -torch.inf)
        attention = scores.softmax(dim=-1)
        read = (attention @ values).reshape(batch, self.slots, self.head_width)
        return Slots(self.proj(read), attention.reshape(batch, self.slots, length))
