"""`sparo export`: a run's newest weights in the layouts of other programs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from evals.checkpoints import read_run, run_weights
from sparo_train.core.errors import ConfigError
from sparo_train.models.describe import CONFIG_KEY
from sparo_train.models.dino_files import write_dino
from sparo_train.models.vit_config import ARCHS, VitConfig
from sparo_train.models.weights import to_sparo_clip
from sparo_train.objectives.clip import ClipObjectiveConfig
from sparo_train.objectives.dino import DinoObjectiveConfig
from sparo_train.train.run import RunConfig

LAYOUTS = {"clip": ("open_clip", "sparo-clip"), "dino": ("dino",)}


def export_run(run: Path, to: Path | None, layout: str | None) -> Path:
    """Write a run's newest weights; returns the path.

    Args:
        layout: `open_clip` (a `local-dir:` folder) or `sparo-clip` (one .pt file) for CLIP, `dino` (one .pth file with
            student, teacher and centre) for DINO; None: the first of them that fits.

    Raises:
        ConfigError: a layout of the other objective.
    """
    if layout not in (None, *LAYOUTS["clip"], *LAYOUTS["dino"]):
        raise ConfigError(f"--layout {layout!r}: open_clip, sparo-clip or dino")
    config, step = read_run(run)
    fitting = LAYOUTS[config.objective.kind]
    layout = layout or fitting[0]
    if layout not in fitting:
        raise ConfigError(
            f"--layout {layout!r}: a run of objective {config.objective.kind} goes to {' or '.join(fitting)}"
        )
    home = (run.parent.parent if (run / "meta.json").is_file() else run) / "export"
    return export_weights(config, run_weights(step, ""), home, to, layout)


def export_weights(
    config: RunConfig, weights: Mapping[str, Tensor], home: Path, to: Path | None = None, layout: str | None = None
) -> Path:
    """Write an objective's state dict; returns the path: `to`, or the layout's usual name in `home`."""
    objective = config.objective
    if isinstance(objective, DinoObjectiveConfig):
        return _dino(config, objective, weights, to or home / "dino.pth")
    model = {name.removeprefix("model."): t for name, t in weights.items() if name.startswith("model.")}
    if layout == "sparo-clip":
        return _sparo_clip(config, objective, model, to or home / "sparo_clip.pt")
    from sparo_train import openclip  # wraps open_clip's builders

    return openclip.export(objective.model, model, to or home, objective.mean, objective.std)


def _sparo_clip(config: RunConfig, objective: ClipObjectiveConfig, weights: Mapping[str, Tensor], path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    model = objective.model.model_dump(mode="json")  # what shapes do not tell; sparo-clip's loader ignores it
    torch.save({"epoch": 0, "name": config.name, "state_dict": to_sparo_clip(weights), CONFIG_KEY: model}, path)
    return path


def _dino(config: RunConfig, objective: DinoObjectiveConfig, weights: Mapping[str, Tensor], path: Path) -> Path:
    description = objective.model_dump(mode="json", include={"model", "mean", "std"})
    args = {
        "arch": _arch(objective.model),
        **{
            key: getattr(objective.model, name)
            for key, name in (("patch_size", "patch_size"), ("drop_path_rate", "drop_path"))
        },
        **{key: getattr(objective.head, key) for key in ("out_dim", "norm_last_layer")},
        "use_bn_in_head": objective.head.use_bn,
        "batch_size": config.batch_size,
        "lr": config.optim.lr,
    }
    return write_dino(path, dict(weights), description, args, int(config.epochs or 0))


def _arch(model: VitConfig) -> str:
    """The official name of a model of these sizes; its own for others."""
    sizes = {"width": model.width, "depth": model.depth, "heads": model.heads}
    return next((name for name, known in ARCHS.items() if known == sizes), f"vit_{model.width}x{model.depth}")
