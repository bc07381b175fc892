"""One optimizer step's gradients from micro-batches, equal to those of the whole batch.

Where the loss of a sample depends on that sample alone, micro-batches are weighed by their size. Where it couples the
batch, embeddings are cached (GradCache, Gao et al. 2021): every micro-batch is embedded without a graph, the loss and its
gradient with respect to the embeddings are computed over all of them, and every micro-batch is embedded again with a
graph, from the same random state, to carry that gradient into the parameters.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.contracts import Batch, CoupledObjective, Engine, Loss, Objective, Progress


def gradients(engine: Engine, objective: Objective, batch: Batch, progress: Progress, micro_batch_size: int) -> Loss:
    """Run forward and backward over this rank's batch, at most `micro_batch_size` samples at a time.

    Returns:
        the loss of the whole batch, detached.
    """
    parts = split(batch, micro_batch_size)
    # The plain way where it will do: no second forward, no sums whose order could change a bit.
    if len(parts) == 1:
        loss = engine.forward(batch, progress, last=True)
        engine.backward(loss.total, last=True)
        return loss._replace(total=loss.total.detach())
    if isinstance(objective, CoupledObjective):
        return _cached_backward(engine, objective, parts, progress)
    return _weighted_backward(engine, parts, progress)


def split(batch: Batch, size: int) -> list[dict[str, Tensor]]:
    """The batch in pieces of `size` samples, the last one perhaps smaller."""
    # Any entry will do: all of a batch have the same number of rows.
    total = len(next(iter(batch.values())))
    return [{key: value[begin : begin + size] for key, value in batch.items()} for begin in range(0, total, size)]


def _weighted_backward(engine: Engine, parts: list[dict[str, Tensor]], progress: Progress) -> Loss:
    sizes = [len(next(iter(part.values()))) for part in parts]
    total: Tensor | None = None
    metrics: dict[str, Tensor] = {}
    shares: dict[str, float] = {}
    for number, (part, size) in enumerate(zip(parts, sizes, strict=True)):
        # By size, not by number: the last micro-batch may be smaller.
        weight = size / sum(sizes)
        last = number == len(parts) - 1
        loss = engine.forward(part, progress, last=last)
        engine.backward(loss.total * weight, last=last)
        total = loss.total.detach() * weight + (0 if total is None else total)
        # Weighed like the loss: what is logged does not depend on how the batch was cut.
        for name, value in loss.metrics.items():
            metrics[name] = value * weight + metrics.get(name, 0)
            shares[name] = weight + shares.get(name, 0.0)
    assert total is not None
    # Of those that have it: a part without a metric is no zero. Shares of all parts are one but for rounding.
    whole = {name: value if shares[name] > 1 - 1e-9 else value / shares[name] for name, value in metrics.items()}
    return Loss(total, whole)


def _cached_backward(
    engine: Engine, objective: CoupledObjective, parts: list[dict[str, Tensor]], progress: Progress
) -> Loss:
    states, cached = [], []
    for part in parts:
        # Dropout must fall alike in both forwards, or the cached gradient would belong to other embeddings.
        states.append(engine.device_context.random_state())
        with torch.no_grad():
            cached.append(engine.embed(part, last=False))
    leaves = tuple(torch.cat(pieces).requires_grad_() for pieces in zip(*(c.features for c in cached), strict=True))
    # Copies: a gradient left on the parameters themselves would be exchanged with the first backward.
    own = tuple(p.detach().clone().requires_grad_() for p in cached[0].loss_params)
    loss = objective.loss(leaves, own, progress)
    # Once for all micro-batches: this is where a coupled loss talks to the other ranks.
    grads = torch.autograd.grad(loss.total, [*leaves, *own])
    embedding_grads, param_grads = grads[: len(leaves)], grads[len(leaves) :]
    begin = 0
    for number, (part, state) in enumerate(zip(parts, states, strict=True)):
        last = number == len(parts) - 1
        engine.device_context.set_random_state(state)
        rows, parameters = engine.embed(part, last=last)
        end = begin + len(rows[0])
        # Its gradient with respect to the embeddings is the cached one, so an ordinary backward carries it on.
        carrier = torch.stack([(e * g[begin:end]).sum() for e, g in zip(rows, embedding_grads, strict=True)]).sum()
        if last:  # the loss's own parameters join the last backward, where ranks exchange gradients
            carrier = carrier + sum(
                ((p * g).sum() for p, g in zip(parameters, param_grads, strict=True)), carrier.new_zeros(())
            )
        engine.backward(carrier, last=last)
        begin = end
    return loss._replace(total=loss.total.detach())
