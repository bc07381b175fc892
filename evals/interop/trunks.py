"""Weights of a ViT that has timm's names (timm's own, DINO's, open_clip's TimmModel, ours), for a tower that timm builds."""

from __future__ import annotations

from collections.abc import Mapping

import timm
import torch
from timm.data.config import resolve_model_data_config
from torch import Tensor

from sparo_train.core.errors import CheckpointError, did_you_mean

from ..encoders.foreign import timm_state
from .compatibility import Normalisation

_PREFIXES = ("visual.trunk.", "trunk.", "")


def trunk_weights(state: Mapping[str, Tensor], origin: str) -> dict[str, Tensor]:
    """Those of the trunk under our names.

    Raises:
        CheckpointError: no ViT with timm's names.
    """
    prefix = next((p for p in _PREFIXES if f"{p}blocks.0.norm1.weight" in state), None)
    if prefix is None:
        raise CheckpointError(
            f"{origin}: has no ViT by timm's names (blocks.0.norm1); for a CLIP's tower leave vision.timm_model_name away"
        )
    trunk_state = {
        f"trunk.{name.removeprefix(prefix)}": value for name, value in state.items() if name.startswith(prefix)
    }
    if "trunk.norm.weight" not in trunk_state:  # timm's models that pool by the mean have their norm behind it
        trunk_state = {name.replace("trunk.fc_norm.", "trunk.norm."): value for name, value in trunk_state.items()}
    return trunk_state


def timm_file(source: str) -> tuple[dict[str, Tensor], Normalisation] | None:
    """The weights in `timm:NAME@FILE` and what NAME's pixels are normalised with, whatever sizes the file's model has; None of another source.

    Raises:
        CheckpointError: the file cannot be read, or timm has no such name.
    """
    scheme, _, rest = source.partition(":")
    name, at, file = rest.partition("@")
    if scheme != "timm" or not at:
        return None
    if not timm.is_model(name):
        raise CheckpointError(f"{source}: {did_you_mean(name.split('.')[0], timm.list_models())}")
    # Only its data's description is wanted, which weights of its own would take a download for.
    with torch.device("meta"):
        pixels = resolve_model_data_config(timm.create_model(name))
    return timm_state(file, source), Normalisation(pixels["mean"], pixels["std"])
