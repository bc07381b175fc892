"""Norms of gradients, and clipping by them (`optim.clip_grad_norm`, `optim.clip_per`)."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..core.accelerator import has_fp64, indices_by_device
from ..core.contracts import Objective
from ..core.distributed import Ranks
from .optim import OptimConfig


def clip_gradients(
    config: OptimConfig,
    gradients: Mapping[int, Tensor],
    norms: Mapping[int, Tensor],
    norm: Tensor,
    unclipped: Collection[int],
) -> None:
    """Scale gradients whose norm is above `clip_grad_norm`: all together, or each by its own norm.

    DeepSpeed clips all together itself, so its engine calls this for `clip_per=tensor` only.

    Args:
        config: the recipe's `optim` block.
        gradients: gradients by the id of their parameter, or this rank's shards of them; scaled in place.
        norms: norm of each whole gradient, by the id of its parameter.
        norm: norm of all gradients together.
        unclipped: ids of parameters that `clip_per=tensor` does not clip.
    """
    if config.clip_grad_norm is None or not gradients:
        return
    if config.clip_per == "global":
        clip_global_norm(gradients.values(), norm, config.clip_grad_norm)
        return
    clipped = {key: gradient for key, gradient in gradients.items() if key not in unclipped}
    clip_per_tensor(clipped, norms, config.clip_grad_norm)


def clip_global_norm(gradients: Collection[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale all gradients if their norm is above `max_norm`; unlike torch's clip_grads_with_norm_, also shards."""
    # The small constant is that of clip_grad_norm_, so that both scale alike. Double precision, as in Python; a
    # gradient below the limit is multiplied by one, which changes no bit.
    exact = norm.double() if has_fp64(norm.device) else norm
    factor, tensors = torch.where(norm > max_norm, max_norm / (exact + 1e-6), 1.0), list(gradients)
    for group in indices_by_device(tensors):
        here = [tensors[i] for i in group]
        torch._foreach_mul_(here, factor.to(here[0].device, here[0].dtype))  # pyright: ignore[reportPrivateImportUsage]


def clip_per_tensor(gradients: Mapping[int, Tensor], norms: Mapping[int, Tensor], max_norm: float) -> None:
    """Scale every gradient whose own norm is above `max_norm`."""
    if not gradients:
        return
    # No branch on a value, because that would wait for the device, and one copy for all gradients of a place.
    factors = (max_norm / (torch.stack([norms[key] for key in gradients]) + 1e-6)).clamp(max=1.0)
    tensors = list(gradients.values())
    for group in indices_by_device(tensors):
        here, own = [tensors[i] for i in group], factors.to(tensors[group[0]].device).unbind()
        torch._foreach_mul_(here, [own[i] for i in group])  # pyright: ignore[reportPrivateImportUsage]


def total_norms(groups: Mapping[str, nn.Module], param_norms: Mapping[int, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the norm of the whole gradient and of each of the objective's parts, from the norms of parameters by their id."""
    parts = {
        name: _join_norms([param_norms[id(p)] for p in module.parameters() if id(p) in param_norms])
        for name, module in groups.items()
    }
    return _join_norms(list(param_norms.values())), parts


def sum_norms(
    objective: Objective, shards: Mapping[int, Tensor], ranks: Ranks, device: torch.device
) -> dict[int, Tensor]:
    """Return the norm of each gradient by the id of its parameter.

    Args:
        objective: its trained parameters have the same order on every rank.
        shards: this rank's parts of the gradients, by the id of their parameter; no element is on two ranks.
        ranks, device: the ranks, and the device on which they exchange.
    """
    trained = [id(p) for p in objective.parameters() if p.requires_grad]
    sums = torch.zeros(len(trained), device=device)
    keys, gradients = list(shards), list(shards.values())
    for group in indices_by_device(gradients):  # one copy for all gradients of a place
        values = torch._foreach_norm([gradients[i] for i in group], dtype=torch.float32)  # pyright: ignore[reportPrivateImportUsage]
        here, nothing = (
            dict(zip((keys[i] for i in group), values, strict=True)),
            torch.zeros((), device=values[0].device),
        )
        sums += torch.stack([here.get(key, nothing) for key in trained]).square().to(device)
    # One exchange for all norms instead of one per parameter.
    if ranks.size > 1:
        with ranks.error_context("summing the gradient's norm"):
            dist.all_reduce(sums)
    return dict(zip(trained, sums.sqrt(), strict=True))


def _join_norms(norms: list[Tensor]) -> Tensor:
    return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())
