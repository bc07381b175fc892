"""Official DINO checkpoints, read and written.

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
from ...core.registries import READOUTS
from ..vit_config import ARCHS, IMAGENET_MEAN, IMAGENET_STD, VitConfig
from .description import CONFIG_KEY, infer_readout, parse_mean_std
from .state_dicts import state_of, strip_wrapper_prefixes

_HEADS = {(arch["width"], arch["depth"]): arch["heads"] for arch in ARCHS.values()}
_DINOV2 = ("mask_token", "register_tokens", "blocks.0.ls1.gamma")  # parameter names that DINO's models do not have
_HEAD_NAMES = ("head.", "dino_head.", "ibot_head.")
_DINOV2_SIZES = {384: "small", 768: "base", 1024: "large", 1536: "giant"}

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
        names = {_backbone_name(name) for name in state_of(raw, "")}
    except CheckpointError:
        return False
    return "cls_token" in names and "head.weight" not in names


def read_dino(raw: Mapping[str, Any], origin: str, key: str | None = None) -> DinoFile:
    """Return the backbone in a file's content: the teacher's by default, or that of `key`.

    Raises:
        CheckpointError: the backbone is missing, or it is DINOv2's.
        ConfigError: its description of the model is invalid.
    """
    # DINO evaluates and releases the teacher.
    key = "teacher" if key is None and "teacher" in raw else key
    state = {_backbone_name(name): value for name, value in state_of(raw, origin, key).items()}
    backbone = {name: value for name, value in state.items() if not name.startswith(_HEAD_NAMES)}
    if "cls_token" not in backbone:
        raise CheckpointError(f"{origin}: holds no ViT backbone (no cls_token), got {', '.join(list(state)[:4])}, …")
    _refuse_dinov2(backbone, origin)
    described = raw.get(CONFIG_KEY)
    config = (
        None if described is None else resolve(VitConfig, described["model"], f"{origin}: {CONFIG_KEY}", stored=True)
    )
    pixels = (
        (IMAGENET_MEAN, IMAGENET_STD) if described is None else parse_mean_std(described, f"{origin}: {CONFIG_KEY}")
    )
    return DinoFile(backbone, config, pixels, origin)


def vit_config(file: DinoFile, name: str | None = None) -> tuple[VitConfig, str]:
    """Return the model that a file's weights belong to, and the assumptions made.

    Args:
        file: the weights.
        name: `vit_tiny`, `vit_small` or `vit_base`; default: from the file's own description, otherwise from shapes,
            with the official number of heads for the width.

    Raises:
        CheckpointError: the width is not that of a named model, and no name was given.
        ConfigError: an unknown name.
    """
    if file.config is not None and name is None:
        return file.config, ""
    if name is not None and name not in ARCHS:
        raise ConfigError(f"--model {name}: {did_you_mean(name, ARCHS)}")
    weights = file.backbone
    patch = weights["patch_embed.proj.weight"].shape[-1]
    width = weights["cls_token"].shape[-1]
    blocks = 1 + max((int(n.split(".")[1]) for n in weights if n.startswith("blocks.")), default=-1)
    depth = blocks + bool(infer_readout(weights, "", 1))  # a readout may have replaced a block
    heads = ARCHS[name]["heads"] if name else _HEADS.get((width, blocks), _HEADS.get((width, depth)))
    if heads is None:
        raise CheckpointError(
            f"{file.origin}: shapes do not show the number of heads, got width {width} with {blocks} blocks. Name the model (--model)."
        )
    tree: dict[str, Any] = {
        "image_size": patch * round((weights["pos_embed"].shape[1] - 1) ** 0.5),
        "patch_size": patch,
        "width": width,
        "depth": blocks,
        "heads": heads,
        "mlp_ratio": weights["blocks.0.mlp.fc1.weight"].shape[0] / width,
        "readout": {"kind": "cls"},
    }
    note = (
        f"{file.origin}: taken for a backbone of DINO, told from the shapes: ViT {width}x{blocks} with patches of {patch} and {heads} "
        "heads (for one of timm's write timm:NAME@FILE)"
    )
    if readout := infer_readout(weights, "", 1):
        readout.pop("embed_dim", None)  # a backbone's width
        replaced = READOUTS.get(readout["kind"]).model_validate(readout).placement.replaced
        tree |= {"depth": blocks + replaced, "readout": readout}
        note += f", {readout['kind'].upper()} in place of {replaced} more block(s), behind `norm`"
    return VitConfig.model_validate(tree), note


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


def _backbone_name(name: str) -> str:
    name = strip_wrapper_prefixes(name)
    while name.startswith("backbone."):
        name = strip_wrapper_prefixes(name.removeprefix("backbone."))
    return name


def _refuse_dinov2(backbone: Mapping[str, Tensor], origin: str) -> None:
    if not (odd := [name for name in _DINOV2 if name in backbone]):
        return
    size = _DINOV2_SIZES.get(backbone["cls_token"].shape[-1], "SIZE")
    registers = "_reg4" if "register_tokens" in backbone else ""
    raise CheckpointError(
        f"{origin}: is a DINOv2 backbone (it contains {', '.join(odd)}), which can be loaded only as a timm "
        f"model. Write timm:vit_{size}_patch14{registers}_dinov2@{origin}"
    )


def dinov2_as_timm(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename a DINOv2 backbone's weights to timm's names; other weights are unchanged.

    timm adds the class token's position to the token if there are registers, and names SwiGLU's layers fc1 and fc2.
    """
    if "mask_token" not in state and "register_tokens" not in state:
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


def backbone_of(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights below `backbone.` of a teacher's or student's state dict, or all if no name has that prefix."""
    below = {name.removeprefix("backbone."): value for name, value in state.items() if name.startswith("backbone.")}
    return below or dict(state)
