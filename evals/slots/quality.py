"""What slots are like: how much they repeat each other, how many there are in effect, how sharply they look, what they mean alone."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def similarity(slots: Tensor) -> Tensor:
    """(L, L) fp64: linear CKA between slots over images (Kornblith et al. 2019, equation 3), 1 where one is a rotation of the other.

    Args:
        slots: (n, L, V).
    """
    x = (slots - slots.mean(0)).double().transpose(0, 1)  # (L, n, V)
    n, (count, _, width) = x.shape[1], x.shape
    if n > width:  # |X^T Y|^2 by the smaller of two matrices
        cross = torch.stack([(torch.matmul(x[i].T, x) ** 2).sum((1, 2)) for i in range(count)])
    else:
        grams = torch.matmul(x, x.transpose(1, 2)).flatten(1)
        cross = grams @ grams.T
    # A slot that is the same for all images is like none, not like all.
    own = cross.diagonal().clamp(min=1e-300).sqrt()
    return cross / own[:, None] / own


def redundancy(alike: Tensor) -> float:
    """The mean similarity of two different slots."""
    count = len(alike)
    return float((alike.sum() - alike.diagonal().sum()) / (count * (count - 1)))


def effective_number(alike: Tensor) -> float:
    """exp of the entropy of the eigenvalues of `alike`/L: L where no slot repeats another, 1 where all are one (Roy & Vetterli 2007)."""
    # Rounding leaves eigenvalues of -1e-17, which have no logarithm.
    values = torch.linalg.eigvalsh(alike / len(alike)).clamp(min=0)
    share = values / values.sum()
    return float(torch.exp(torch.special.entr(share).sum()))


def monosemanticity(activations: Tensor, embeddings: Tensor) -> Tensor:
    """(K,) fp64: the MonoSemanticity score of neurons (Pach et al. 2025, arXiv 2504.02821, Section 3.2).

    The mean cosine of two images' embeddings, each pair weighted by the product of a neuron's two activations, which are scaled
    to 0..1 over the images. A neuron that fires for one kind of image alone has 1.

    Args:
        activations: (n, K).  embeddings: (n, D), by an encoder that has nothing to do with the neurons.
    """
    low, high = activations.min(0).values, activations.max(0).values
    a = ((activations - low) / (high - low).clamp(min=1e-12)).double()
    e = F.normalize(embeddings.double(), dim=-1)
    # Over pairs of different images, without the n x n table: |sum a e|^2 holds each pair twice, and each image with itself.
    own = a.square().sum(0)
    # A neuron that fires for one image alone has no pairs, and scores 0.
    together = (a.T @ e).square().sum(-1) - own
    return together / (a.sum(0).square() - own).clamp(min=1e-12)


def sharpness(attention: Tensor, keep: Tensor | None = None) -> Tensor:
    """(n, L) in [0, 1]: 1 less the entropy of attention (n, L, N) over its greatest value; 1 is a single position.

    Args:
        keep: (n, N) bool, positions that may be attended; None: all.
    """
    places = torch.full((len(attention), 1), attention.shape[-1]) if keep is None else keep.sum(-1, keepdim=True)
    most = places.clamp(min=2).to(attention.dtype).log()
    return 1 - torch.special.entr(attention).sum(-1) / most
