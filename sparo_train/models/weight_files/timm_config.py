"""The `config.json` next to a file of timm weights, which describes its model as on timm's hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from timm import create_model
from timm.data.config import resolve_data_config
from torch import nn

from ...core.errors import CheckpointError
from ...core.files import read_json
from .state_dicts import split_state


def read_timm_config(weights: Path, name: str, label: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the transform (pretrained_cfg) and the model's arguments in a `config.json` next to a file; empty without one."""
    config_file = weights.parent / "config.json"
    if not weights.is_file() or not config_file.is_file():
        return {}, {}
    content = read_json(config_file, dict, CheckpointError)
    for key in ("pretrained_cfg", "model_args"):
        if not isinstance(content.setdefault(key, {}), dict):
            raise CheckpointError(
                f"{label}: {config_file}: {key} is not a mapping. Fetch the file again, or remove it."
            )
    same = content.get("architecture") == name.partition(".")[0]
    return content["pretrained_cfg"], content["model_args"] if same else {}


def build_on_meta(name: str, file: str, label: str) -> tuple[nn.Module, dict[str, Any]]:
    """Return a timm model without its classifier on the meta device, and its data config.

    Args:
        name: a model that timm knows.
        file: weights, whose `config.json` takes precedence over the name; may be empty.
        label: name for errors.

    Raises:
        CheckpointError: timm cannot build the model that the `config.json` describes.
    """
    transform, arguments = read_timm_config(Path(split_state(file)[0]), name, label)
    try:
        with torch.device("meta"):  # asking for weights could start a download
            model = create_model(name, pretrained=False, **{**arguments, "num_classes": 0})
    except (RuntimeError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"{label}: timm cannot build this model ({str(error)[:300]}). Check config.json."
        ) from None
    own: Any = model.pretrained_cfg
    return model, resolve_data_config({}, {**own, **transform}, model)
