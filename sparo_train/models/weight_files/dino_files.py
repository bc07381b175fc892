"""Official DINO checkpoints, read and written, and backbones of DINOv2 and DINOv3, read.

The official trainer writes `student` (`module.backbone.*`, `module.head.*`), `teacher` (`backbone.*`, `head.*`),
`optimizer`, `epoch`, `dino_loss` and `args`, an argparse.Namespace. Released backbones are flat state dicts.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...core.config import resolve
from ...core.errors import CheckpointError, ConfigError, did_you_mean
from ...core.files import whole_file
from ..vit_config import ARCHS, IMAGENET_MEAN, IMAGENET_STD, VitConfig
from .description import CONFIG_KEY, parse_mean_std
from .state_dicts import extract_state, strip_wrapper_prefixes
from .vit_names import backbone_name, infer_vit, official_vit_names

Normalisation = tuple[tuple[float, ...], tuple[float, ...]]


class DinoFile(NamedTuple):
    """Weights of a backbone under their own names, our description of the model if the file has one, and its normalisation."""

    backbone: dict[str, Tensor]
    config: VitConfig | None
    normalisation: Normalisation
    origin: str


def is_dino(raw: Any) -> bool:
    """Return whether a file's content is a DINO checkpoint or a backbone."""
    if not isinstance(raw, Mapping):
        return False
    if "teacher" in raw or "student" in raw:
        return True
    try:
        state = extract_state(raw, "")
    except CheckpointError:
        return False
    # A classifier is read as timm's model of its name, because files do not say which of timm's variants it is.
    names = {backbone_name(name) for name in state}
    return bool(names & {"cls_token", "embeddings.cls_token"}) and "head.weight" not in names


def read_dino(raw: Mapping[str, Any], origin: str, key: str | None = None) -> DinoFile:
    """Return the backbone in a file's content: the teacher's by default, or that of `key`.

    Raises:
        CheckpointError: the backbone is missing.
        ConfigError: its description of the model is invalid.
    """
    # DINO evaluates and releases the teacher.
    key = "teacher" if key is None and "teacher" in raw else key
    state = extract_state(raw, origin, key)
    backbone = official_vit_names(state)
    if "cls_token" not in backbone:
        raise CheckpointError(f"{origin}: holds no ViT backbone (no cls_token), got {', '.join(list(state)[:4])}, …")
    # Only iBOT's loss reads it.
    backbone.pop("mask_token", None)
    described = raw.get(CONFIG_KEY)
    config = (
        None if described is None else resolve(VitConfig, described["model"], f"{origin}: {CONFIG_KEY}", stored=True)
    )
    pixels = (
        (IMAGENET_MEAN, IMAGENET_STD) if described is None else parse_mean_std(described, f"{origin}: {CONFIG_KEY}")
    )
    return DinoFile(backbone, config, pixels, origin)


def read_dino_training(content: Any) -> dict[str, Tensor] | None:
    """Return `student.*`, `teacher.*` and `center` of a training checkpoint of the official code; None for another file."""
    if not isinstance(content, Mapping) or not {"student", "teacher", "dino_loss"} <= content.keys():
        return None
    weights: dict[str, Tensor] = {}
    for net in ("student", "teacher"):
        state = {strip_wrapper_prefixes(name): value for name, value in content[net].items()}
        backbone = {n: t for n, t in state.items() if n.startswith("backbone.")}
        if not backbone or len(backbone) == len(state):  # without a head, it cannot be continued
            return None
        weights |= {f"{net}.backbone.{n}": t for n, t in official_vit_names(backbone).items()}
        weights |= {f"{net}.{n}": t for n, t in state.items() if n.startswith("head.")}
    return {**weights, "center": content["dino_loss"]["center"]}


def vit_config(file: DinoFile, name: str | None = None) -> tuple[VitConfig, str]:
    """Return the model that a file's weights belong to, and the assumptions made.

    Args:
        file: the weights.
        name: an official name such as `vit_small`; default: from the file's own description, otherwise from shapes,
            with the official number of heads for the width.

    Raises:
        CheckpointError: no published model has this width, and no name was given.
        ConfigError: an unknown name.
    """
    if file.config is not None and name is None:
        return file.config, ""
    if name is not None and name not in ARCHS:
        raise ConfigError(f"--model {name}: {did_you_mean(name, ARCHS)}")
    tree = infer_vit(file.backbone, file.origin, ARCHS[name]["heads"] if name else None)
    note = f"{file.origin}: inferred from shapes: ViT {tree['width']}x{tree['depth']} with patches of {tree['patch_size']} and {tree['heads']} heads"
    options = [
        f"{key} {tree[key]}" for key in ("bands", "registers", "ffn_layer", "positions", "pre_norm") if key in tree
    ]
    note += "".join(f", {option}" for option in options)
    config = VitConfig.model_validate(tree)
    if config.readout.kind != "cls":
        note += f", {config.readout.kind.upper()} in place of {config.readout.placement.replaced} block(s)"
    default = (IMAGENET_MEAN, IMAGENET_STD)
    note += f", GELU, class token, pixels normalised by {'ImageNet' if file.normalisation == default else 'the file'}'s mean and std"
    return config, f"{note} (for a model of timm: timm:NAME@FILE)"


def write_dino(
    path: Path, objective: Mapping[str, Tensor], description: Mapping[str, Any], args: Mapping[str, Any], epoch: int
) -> Path:
    """Write an objective's state in the official layout, with `args` as a dict, which torch loads with `weights_only`.

    Args:
        path: the file.
        objective: `student.*`, `teacher.*` and `center`.
        description: plain values: `model` (a VitConfig), `mean`, `std`; the official loader ignores it.
        args: options under their official names (`arch`, `patch_size`, …).
        epoch: completed epochs.
    """
    nets = {
        net: {n.removeprefix(f"{net}."): t for n, t in objective.items() if n.startswith(f"{net}.")}
        for net in ("student", "teacher")
    }
    content = {
        "student": {f"module.{name}": value for name, value in nets["student"].items()},
        "teacher": nets["teacher"],
        "epoch": epoch,
        "args": dict(args),
        "dino_loss": {"center": objective["center"]},
        CONFIG_KEY: dict(description),
    }
    with whole_file(path) as temporary, temporary.open("wb") as stream:
        torch.save(content, stream)
    return path


def dinov2_as_timm(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename a DINOv2 backbone's weights to timm's names; other weights are unchanged.

    timm adds the class token's position to the token if there are registers, and names SwiGLU's layers fc1 and fc2.
    """
    marks = ("mask_token", "register_tokens", "blocks.0.mlp.w12.weight")
    if not any(name in state for name in marks):
        return dict(state)
    timm_state = {
        name.replace("mlp.w12.", "mlp.fc1.").replace("mlp.w3.", "mlp.fc2."): value
        for name, value in state.items()
        if name != "mask_token"
    }
    if "register_tokens" in timm_state:
        timm_state["reg_token"] = timm_state.pop("register_tokens")
        positions = timm_state["pos_embed"]
        timm_state["cls_token"], timm_state["pos_embed"] = timm_state["cls_token"] + positions[:, :1], positions[:, 1:]
    return timm_state


def select_backbone(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights below `backbone.` of a teacher's or student's state dict, or all if no name has that prefix."""
    below = {name.removeprefix("backbone."): value for name, value in state.items() if name.startswith("backbone.")}
    return below or dict(state)
