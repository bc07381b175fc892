"""Official DINO checkpoints in and out; tensors and plain values only, never code.

The official trainer writes `student` (`module.backbone.*`, `module.head.*`), `teacher` (`backbone.*`, `head.*`),
`optimizer`, `epoch`, `dino_loss` and `args`, an argparse.Namespace, which torch refuses by default. It is the one class
that is let through, and its values still have to be plain. Released backbones are flat state dicts.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...core.config import resolve
from ...core.errors import CheckpointError, ConfigError, did_you_mean
from ...core.tables import READOUTS
from ..vit_config import ARCHS, IMAGENET_MEAN, IMAGENET_STD, VitConfig
from .describe import CONFIG_KEY, infer_readout, told_pixels

_PREFIXES = ("module.", "backbone.")
_HEADS = {arch["width"]: arch["heads"] for arch in ARCHS.values()}

Normalisation = tuple[tuple[float, ...], tuple[float, ...]]


class DinoFile(NamedTuple):
    """A backbone's weights under their own names, the file's description of the model where it is ours, and its normalisation."""

    backbone: dict[str, Tensor]
    config: VitConfig | None
    normalisation: Normalisation
    origin: str


def is_dino(raw: Any) -> bool:
    """Whether a file's content is a DINO checkpoint or a backbone alone."""
    if not isinstance(raw, Mapping):
        return False
    names = {_bare(str(name)) for name in raw}
    return "teacher" in raw or "student" in raw or ("cls_token" in names and "head.weight" not in names)


def read_dino(raw: Mapping[str, Any], origin: str, key: str = "teacher") -> DinoFile:
    """The backbone in a file's content: the teacher's (or `key`'s) where there are both.

    Raises:
        CheckpointError: no backbone in it.
        ConfigError: its description of the model is none of ours.
    """
    # The teacher is what DINO evaluates and releases.
    state = raw.get(key, raw)
    if not isinstance(state, Mapping):
        raise CheckpointError(f"{origin}: {key!r} is no state dict")
    named = {_bare(name): value for name, value in state.items() if isinstance(value, Tensor)}
    backbone = {name: value for name, value in named.items() if not name.startswith("head.")}
    if "cls_token" not in backbone:
        raise CheckpointError(
            f"{origin}: {key!r} holds no ViT backbone (there is no cls_token); it has {list(state)[:4]} …"
        )
    described = raw.get(CONFIG_KEY)
    config = None if described is None else resolve(VitConfig, described["model"], f"{origin}: {CONFIG_KEY}")
    pixels = (IMAGENET_MEAN, IMAGENET_STD) if described is None else told_pixels(described, f"{origin}: {CONFIG_KEY}")
    return DinoFile(backbone, config, pixels, origin)


def vit_config(file: DinoFile, name: str | None = None) -> tuple[VitConfig, str]:
    """The model that a file's weights belong to, and what was taken for granted to know it.

    Args:
        name: `vit_tiny`, `vit_small` or `vit_base`; default: the file's own description, else by its shapes, with the
            official number of heads at that width.

    Raises:
        CheckpointError: a width of none of them, and no name.
        ConfigError: an unknown name.
    """
    if file.config is not None and name is None:
        return file.config, ""
    if name is not None and name not in ARCHS:
        raise ConfigError(f"--model {name}: {did_you_mean(name, ARCHS)}")
    weights = file.backbone
    patch = weights["patch_embed.proj.weight"].shape[-1]
    width = weights["cls_token"].shape[-1]
    heads = ARCHS[name]["heads"] if name else _HEADS.get(width)
    if heads is None:
        raise CheckpointError(
            f"{file.origin}: shapes do not tell the number of heads at width {width}; name the model (--model)"
        )
    blocks = 1 + max((int(n.split(".")[1]) for n in weights if n.startswith("blocks.")), default=-1)
    tree: dict[str, Any] = {
        "image_size": patch * round((weights["pos_embed"].shape[1] - 1) ** 0.5),
        "patch_size": patch,
        "width": width,
        "depth": blocks,
        "heads": heads,
        "mlp_ratio": weights["blocks.0.mlp.fc1.weight"].shape[0] / width,
        "readout": {"kind": "cls"},
    }
    said = (
        f"{file.origin}: taken for a backbone of DINO, told from the shapes: ViT {width}x{blocks} with patches of {patch} and {heads} "
        "heads (for one of timm's write timm:NAME@FILE)"
    )
    if readout := infer_readout(weights, "", 1):
        readout.pop("embed_dim", None)  # a backbone's is its width
        replaced = READOUTS.row(readout["kind"]).model_validate(readout).placement.replaced
        tree |= {"depth": blocks + replaced, "readout": readout}
        said += f", {readout['kind'].upper()} in place of {replaced} more block(s), behind `norm`"
    return VitConfig.model_validate(tree), said


def write_dino(
    path: Path, objective: Mapping[str, Tensor], description: Mapping[str, Any], args: Mapping[str, Any], epoch: int
) -> Path:
    """An objective's state in the official layout, `args` as a dict, which torch loads without being told to trust anything.

    Args:
        objective: `student.*`, `teacher.*` and `center`.
        description: plain values: `model` (a VitConfig), `mean`, `std`; the official loader ignores it.
        args: what the official code calls its options (`arch`, `patch_size`, …).
        epoch: epochs done.
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
    path.parent.mkdir(parents=True, exist_ok=True)
    # Renamed when it is whole: a kill leaves no half of a file under this name.
    partial = path.with_name(f".{path.name}.partial")
    torch.save(content, partial)
    partial.replace(path)
    return path


def _bare(name: str) -> str:
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return name
