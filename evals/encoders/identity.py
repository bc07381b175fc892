"""Identities of weights, by which stored features and selections are recognised."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

from torch import Tensor, nn

from sparo_train.models.weight_files.weights import weights_sha256


def hash_again_if_changed(hashes: dict[str, Any], name: str, model: nn.Module, compute: Callable[[], str]) -> str:
    """Return `compute()`, or its earlier value in `hashes` if no weight of the model was replaced or written to since."""
    tensors = chain(model.parameters(), model.buffers())
    state = [(id(tensor), 0 if tensor.is_inference() else tensor._version) for tensor in tensors]
    if name not in hashes or hashes[name][0] != state:
        hashes[name] = (state, compute())
    return hashes[name][1]


def text_identity(tensors: Mapping[str, Tensor], architecture: str) -> str:
    """Return the identity of a CLIP's text side: all weights outside `visual.` except logit scale and bias, and the architecture."""
    weights_digest = weights_sha256(tensors, lambda n: not n.startswith(("visual.", "logit_")))
    return hashlib.sha256(f"{weights_digest}\n{architecture}".encode()).hexdigest()
