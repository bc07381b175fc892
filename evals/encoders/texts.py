"""Encoding texts in batches of equal length, and telling weights apart by their content."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from sparo_train.core.signals import stop_here
from sparo_train.models.weight_files.weights import weights_sha256

TEXTS = {"cpu": 64, "cuda": 2048}  # in a batch: on a CPU a small one stays in its caches


def encode_texts(
    captions: Sequence[str],
    tokenize: Callable[[list[str]], Tensor],
    encode: Callable[[Tensor], Tensor],
    batch: int,
    cut: bool = True,
    normalize: bool = True,
) -> Tensor:
    """Return fp32 encodings (n, D) on the CPU, unit-norm by default; each distinct caption is encoded once, in batches sorted by length.

    Args:
        tokenize: texts to ids (n, N) whose largest id is EOT.
        cut: shorten a batch behind its last EOT, which is exact where attention is causal and EOT is what is read.

    Raises:
        StoppedError: the run was told to stop.
    """
    # SugarCrepe has each caption of an image in many pairs.
    distinct = sorted(set(captions))
    tokens = tokenize(distinct)
    # EOT is the largest id there is.
    lengths = tokens.argmax(dim=1) + 1
    # Batches of equal lengths, so that short captions are not padded to the longest.
    order = lengths.argsort(stable=True) if cut else torch.arange(len(distinct))
    parts = []
    for rows in order.split(batch):
        stop_here()  # 80 prompts for each of 1,000 classes take minutes
        length = int(lengths[rows].max()) if cut else tokens.shape[1]
        encoded = encode(tokens[rows, :length]).float()
        parts.append((F.normalize(encoded, dim=-1) if normalize else encoded).cpu())
    encodings = torch.cat(parts)
    # Back to the order of `distinct`: batches went by length.
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order))
    where = {caption: int(i) for caption, i in zip(distinct, place, strict=True)}
    return encodings[[where[c] for c in captions]]


def text_identity(tensors: Mapping[str, Tensor], architecture: str) -> str:
    """Of a CLIP's text side: all weights outside `visual.`, logit scale and bias left away, and the architecture."""
    weights_digest = weights_sha256(tensors, lambda n: not n.startswith(("visual.", "logit_")))
    return hashlib.sha256(f"{weights_digest}\n{architecture}".encode()).hexdigest()
