"""iDSPN, the baseline of Zhang et al. (2022): slots are found by gradient descent, so that their encoding equals that of the image.

    E(Y) = |g(Y) - z|^2 / 2,    Y <- Y - lr * (velocity of dE/dY)

z is the encoding of the image, and g a permutation-invariant encoder of the set Y that sorts every feature over the
elements (FSPool, Zhang et al. 2020), which makes the model exclusively multiset-equivariant. The gradient of training
passes through the last step only, as if the Hessian were the identity (Zhang et al. ICLR 2022, approximate implicit
differentiation).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparo_train.models.precision import at_least_fp32

from .slot_attention import GroupingOutput
from .slot_config import SlotAttentionConfig


class SetEncoder(nn.Module):
    """Encoder g of sets (b, K, D) to (b, latent): an MLP, then each feature sorted over elements, with one weight per rank."""

    adamw_only_parameters = ("rank_weight",)

    def __init__(self, width: int, hidden: int, latent: int, elements: int):
        super().__init__()
        self.first, self.second = nn.Linear(width, hidden), nn.Linear(hidden, latent)
        self.rank_weight = nn.Parameter(torch.full((elements, latent), elements**-0.5))

    def forward(self, elements: Tensor) -> Tensor:
        values = self.second(self.first(elements).relu())
        return (values.sort(1, descending=True).values * self.rank_weight).sum(1)

    def energy_gradient(self, elements: Tensor, target: Tensor) -> Tensor:
        """Return the gradient of `|g(Y) - target|^2 / 2` with respect to Y, (b, K, D), as differentiable operations.

        Written out, so that it needs no autograd inside of a forward pass: evaluation, compilation and wrapped
        parameters work as in any layer.
        """
        # Weights may have 16 bits, in which many small steps would be lost.
        parameters = (*self.first.parameters(), *self.second.parameters(), self.rank_weight)
        first, first_bias, second, second_bias, rank_weight = (p.to(elements.dtype) for p in parameters)
        inner = F.linear(elements, first, first_bias)
        values = F.linear(inner.relu(), second, second_bias)
        order = values.argsort(dim=1, descending=True)
        residual = (values.gather(1, order) * rank_weight).sum(1) - target
        by_element = torch.zeros_like(values).scatter(1, order, residual[:, None] * rank_weight)
        return ((by_element @ second) * (inner > 0)) @ first


class SetRefinement(nn.Module):
    """Grouping of features (…, N, in_width) to slots (…, K, D) without attention; `attention` is uniform.

    Args:
        config: options, with a block `idspn`.
        in_width: width of the features.
    """

    adamw_only_parameters = ("initial_slots",)

    def __init__(self, config: SlotAttentionConfig, in_width: int):
        super().__init__()
        assert config.idspn is not None
        self.config, c = config, config.idspn
        self.norm_input = nn.LayerNorm(in_width, eps=config.ln_eps)
        self.image = nn.Sequential(nn.Linear(in_width, c.hidden), nn.ReLU(), nn.Linear(c.hidden, c.latent))
        self.encoder = SetEncoder(config.width, c.hidden, c.latent, config.slots)
        self.initial_slots = nn.Parameter(torch.randn(config.slots, config.width))

    def forward(self, features: Tensor, noise: Tensor | None = None) -> GroupingOutput:
        """Return slots; `noise` is ignored, because nothing is sampled."""
        c, lead = self.config.idspn, features.shape[:-2]
        assert c is not None
        x = self.norm_input(features).reshape(-1, *features.shape[-2:])
        # The mean over tokens, whose features contain their positions.
        target = self.image(x).mean(1)
        with torch.autocast(features.device.type, enabled=False):  # forty small steps add up
            target = at_least_fp32(target)
            slots = self._descend(self.initial_slots.to(target.dtype).expand(len(x), -1, -1), target)
        slots = slots.to(self.initial_slots.dtype)
        attention = slots.new_full((*slots.shape[:2], x.shape[1]), 1 / slots.shape[1])
        return GroupingOutput(slots.view(*lead, *slots.shape[1:]), attention.view(*lead, *attention.shape[1:]))

    def _descend(self, slots: Tensor, target: Tensor) -> Tensor:
        c, start = self.config.idspn, slots
        assert c is not None
        velocity = torch.zeros_like(slots)
        with torch.no_grad():
            for _ in range(c.steps - 1):
                velocity = c.momentum * velocity + self.encoder.energy_gradient(slots, target)
                slots = slots - c.lr * velocity
        # A straight-through gradient also trains the initial slots.
        slots = slots.detach() + start - start.detach()
        return slots - c.lr * (c.momentum * velocity + self.encoder.energy_gradient(slots, target))
