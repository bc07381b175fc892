"""The gate that updates a slot, with the biases and the initial weights of torch, flax or Keras.

All three compute `r, z = sigmoid(..)`, `n = tanh(W_n x + b_n + r * (U_n h + c_n))`, `h' = (1 - z) n + z h`. torch has two biases per gate, of
which one is redundant in r and z; flax has that of the input alone, and `c_n`; Keras (`reset_after`) has both. They begin
differently: torch uniformly, biases included; flax and Keras orthogonal over the state, with biases at zero.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

GruKind = Literal["torch", "flax", "keras"]


class Gru(nn.Module):
    """(…, W) input and (…, D) state to the next state.

    Gates stand in torch's order: r, z, n. `weight_ih` (3 D, W), `weight_hh` (3 D, D), `bias_ih` (3 D,); `bias_hh` (3 D,), of flax (D,):
    that of n.

    Args:
        width: D.  input_size: W; default: D.
    """

    def __init__(self, width: int, kind: GruKind = "torch", input_size: int | None = None):
        super().__init__()
        self.width, self.kind, self.input_size = width, kind, input_size or width
        self.weight_ih, self.weight_hh = (
            nn.Parameter(torch.empty(3 * width, wide)) for wide in (self.input_size, width)
        )
        self.bias_ih = nn.Parameter(torch.zeros(3 * width))
        self.bias_hh = nn.Parameter(torch.zeros(width if kind == "flax" else 3 * width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As the library of this kind begins."""
        if self.kind == "torch":
            for parameter in self.parameters():
                nn.init.uniform_(parameter, -(self.width**-0.5), self.width**-0.5)
            return
        for gate in self.weight_ih.data.chunk(3):
            if self.kind == "flax":
                lecun_normal_(gate)
        if self.kind == "keras":  # one kernel for all gates: (D, 3 D)
            limit = (6 / (3 * self.width + self.input_size)) ** 0.5
            nn.init.uniform_(self.weight_ih, -limit, limit)
            nn.init.orthogonal_(self.weight_hh)
        else:
            for gate in self.weight_hh.data.chunk(3):
                nn.init.orthogonal_(gate)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        lead = h.shape
        x, h = x.reshape(-1, x.shape[-1]), h.reshape(-1, h.shape[-1])  # one product, whatever is in front
        # flax has a bias of the candidate's state alone; in torch's layout the other two are zeros.
        bias = self.bias_hh if self.kind != "flax" else F.pad(self.bias_hh, (2 * self.width, 0))
        # The products in the dtype of autocast, the gates in fp32: a slot is a sum over many rounds.
        gates_x, gates_h = F.linear(x, self.weight_ih, self.bias_ih), F.linear(h, self.weight_hh, bias)
        xr, xz, xn = gates_x.to(h.dtype).chunk(3, dim=-1)
        hr, hz, hn = gates_h.to(h.dtype).chunk(3, dim=-1)
        z = torch.sigmoid(xz + hz)
        n = torch.tanh(xn + torch.sigmoid(xr + hr) * hn)
        return torch.lerp(n, h, z).view(lead)


def lecun_normal_(weight: Tensor) -> None:
    """flax's default: a normal cut at two deviations, of variance 1 / fan_in."""
    std = weight.shape[1] ** -0.5 / 0.87962566103423978
    nn.init.trunc_normal_(weight, 0.0, std, -2 * std, 2 * std)
