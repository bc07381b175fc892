"""Norms and clipping of gradients. Nothing here waits for the device."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn


def total_norms(groups: Mapping[str, nn.Module], param_norms: Mapping[int, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """The gradient's norm, whole and within each of the objective's parts, from those of parameters by their id."""
    parts = {
        name: _joined([param_norms[id(p)] for p in module.parameters() if id(p) in param_norms])
        for name, module in groups.items()
    }
    return _joined(list(param_norms.values())), parts


def clip_global_norm(gradients: Collection[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale all gradients where their norm is above `max_norm`. (torch.nn.utils.clip_grads_with_norm_ takes no shards.)"""
    tensors = list(gradients)
    # The small number is clip_grad_norm_'s own, so that both scale alike.
    # In double precision, as Python would; a gradient below the limit is multiplied with one, which changes no bit.
    factor = torch.where(norm > max_norm, max_norm / (norm.double() + 1e-6), 1.0).to(
        tensors[0].device, tensors[0].dtype
    )
    torch._foreach_mul_(tensors, factor)  # pyright: ignore[reportPrivateImportUsage]


def clip_per_tensor(gradients: Mapping[int, Tensor], norms: Mapping[int, Tensor], max_norm: float) -> None:
    """Scale every gradient whose own norm is above `max_norm`."""
    # No branch on a value: it would wait for the device.
    factors = [
        (max_norm / (norms[key] + 1e-6)).clamp(max=1.0).to(gradient.device) for key, gradient in gradients.items()
    ]
    torch._foreach_mul_(list(gradients.values()), factors)  # pyright: ignore[reportPrivateImportUsage]


def _joined(norms: list[Tensor]) -> Tensor:
    return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())
