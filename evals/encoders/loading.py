"""Loading of checkpoints of every supported kind as encoders."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from sparo_train.core.accelerator import find_device
from sparo_train.core.config import resolve
from sparo_train.core.contracts import Objective
from sparo_train.core.disk import checkpoint_store as store
from sparo_train.core.errors import CheckpointError, ConfigError, SparoError
from sparo_train.core.files import read_json, read_text, suggest_path
from sparo_train.core.recipe.layers import override
from sparo_train.core.recipe.recipe_yaml import parse_yaml
from sparo_train.core.registries import CHECKPOINTS, ENCODERS
from sparo_train.core.torch_settings import standard_settings
from sparo_train.data.decode.bands import PixelRange
from sparo_train.data.sources.base import DataConfig
from sparo_train.models.clip_config import ClipConfig
from sparo_train.models.clip_model import Clip
from sparo_train.models.weight_files.description import (
    CONFIG_KEY,
    ModelDescription,
    add_readout,
    from_model_cfg,
    infer_config,
    read_config,
    read_export,
)
from sparo_train.models.weight_files.dino_files import is_dino, read_dino
from sparo_train.models.weight_files.state_dicts import read_raw, split_state
from sparo_train.models.weight_files.weights import Weights, clip_weights, load_into, read_weights, refuse_non_finite
from sparo_train.models.weight_files.zero_folder import is_zero_folder, read_zero_folder
from sparo_train.train.build import build_objective
from sparo_train.train.run_config import RunConfig

from .capabilities import TrainingRun
from .clip_encoder import ClipEncoder
from .encoder import Encoder

logger = logging.getLogger(__name__)


def load_encoder(
    checkpoint: str | Path,
    model: str | None = None,
    device: str = "cpu",
    slots: int | None = None,
) -> Encoder:
    """Load a checkpoint of any supported kind.

    Args:
        checkpoint: a run folder (its newest checkpoint), one of its `checkpoints/step-…` folders, an exported open_clip
            folder, a .pt/.safetensors file (ours, sparo-clip's, open_clip's, DINO's with teacher and student or with a
            backbone only), a DeepSpeed ZeRO folder; or NAME:… for an entry of `sparo.checkpoints`:
            `open_clip:NAME@FILE-or-tag`, `timm:NAME@FILE`, `hf:FOLDER`, `onnx:FOLDER?precision=int8`, `pixels:SIZE` (the images themselves), released
            slot models, or a plug-in's.
        model: for a file: an open_clip model name, ours included (`ViT-B-32-quickgelu`, `gap-ViT-B-16`), or for DINO
            `vit_tiny`, `vit_small`, `vit_base`; default: from the file's own description, otherwise from its shapes
            (assumptions are then logged).
        device: where the model runs: cpu, cuda, cuda:1, xpu, mps or auto.
        slots: number of slots of a trained slot model whose slots are sampled, instead of that in training; also
            written as `RUN?slots=N`.

    Raises:
        ConfigError: this machine has no such device.
        CheckpointError: there is nothing that can be read, or the content does not match the name or form.
    """
    place = find_device(device, "device")
    try:
        # Read the file to its end: one that is truncated in a matrix may have loaded up to there.
        # The device also for models that are built without memory: their frozen parts are loaded.
        with torch.device("cpu"), standard_settings():
            encoder = _load(checkpoint if slots is None else f"{checkpoint}?slots={slots}", model).to(str(place))
        refuse_non_finite(encoder.model.state_dict(), str(checkpoint))
        if encoder.assumed:
            logger.warning(encoder.assumed)
        return encoder
    except (SparoError, torch.OutOfMemoryError):
        raise
    # Foreign files and libraries fail in many ways; the cause is kept for debugging.
    except Exception as error:
        first = (str(error).splitlines() or [""])[0][:200]
        raise CheckpointError(
            f"{checkpoint}: its content does not match its name or format ({type(error).__name__}: {first}). Fetch it again, or name its model (--model)."
        ) from error


_DESCRIBED = (
    "config.yaml",
    "meta.json",
    "open_clip_config.json",
    "onnx.json",
)  # names in a run folder, a checkpoint folder and an export


def encoder_entry(kind: str) -> Callable[[Objective], Encoder]:
    """Return what makes an encoder of a method's objective. Raises `ConfigError` if the method has no entry of its name."""
    if kind not in ENCODERS.names():
        raise ConfigError(
            f"objective.kind={kind}: sparo.encoders has no entry of this name, so runs of this method cannot "
            f"be scored. Register one (docs/guides/extending.md)."
        )
    return ENCODERS.get(kind)


def split_slots(checkpoint: str | Path) -> tuple[str, int | None]:
    """Split `RUN?slots=N` into the run and N; existing paths and foreign files have no N."""
    place, mark, number = str(checkpoint).partition("?slots=")
    if not mark or place.partition(":")[0] in CHECKPOINTS.names() or Path(checkpoint).exists():
        return str(checkpoint), None
    if not number.isdecimal() or not 0 < int(number) <= 4096:
        raise ConfigError(f"{checkpoint}: expected a number of slots from 1 to 4096, got {number!r}")
    return place, int(number)


def _load(checkpoint: str | Path, model: str | None) -> Encoder:
    checkpoint, slots = split_slots(checkpoint)
    refuse_absent(checkpoint)
    file, key = split_state(checkpoint)
    path, (scheme, colon, rest) = Path(file), str(checkpoint).partition(":")
    # Only known names, because a folder's own name may contain a colon.
    named = colon and scheme in CHECKPOINTS.names()
    if model is not None and (named or any((path / name).is_file() for name in _DESCRIBED)):
        raise ConfigError(
            f"--model {model}: applies to bare weight files only, and {checkpoint} names its own model. Remove --model."
        )
    if named:
        return CHECKPOINTS.get(scheme)(rest)
    if (path / "config.yaml").is_file() or (path / "meta.json").is_file():
        return _from_run(path, slots)
    if slots is not None:
        raise ConfigError(
            f"{checkpoint}?slots={slots}: only runs of slot models accept a number of slots. Remove `?slots={slots}`."
        )
    if (path / "open_clip_config.json").is_file():
        encoder = _from_export(path)
    elif (path / "onnx.json").is_file():
        encoder = CHECKPOINTS.get("onnx")(str(path))
    # Read once: the content of a file, not its name, shows its kind.
    elif path.is_file() and (path.parent / "meta.json").is_file() and path.name.startswith("model"):
        # A checkpoint's weights do not determine pixels and activations; the run's recipe does.
        raise CheckpointError(f"{path}: is one file of a checkpoint. Give its folder, {path.parent}.")
    elif path.is_file():
        raw = read_raw(path)
        if is_dino(raw):
            parts = [part for part in (raw, *raw.values()) if isinstance(part, Mapping)]
            if any(str(name).endswith("fc_norm.weight") for part in parts for name in part):
                raise CheckpointError(
                    f"{checkpoint}: is a timm ViT that averages its patch tokens (fc_norm). Load it as timm:NAME@{checkpoint}, where NAME is its name in timm."
                )
            from .dino_encoder import from_dino_file  # imports DINO and its training

            encoder = from_dino_file(read_dino(raw, str(checkpoint), key), model)
        else:
            described = read_config(raw, path)
            openai = isinstance(raw, Mapping) and "input_resolution" in raw
            encoder = _from_weights(clip_weights(raw, checkpoint, key), str(checkpoint), described, model, openai)
        _read_as_trained(encoder, raw.get(CONFIG_KEY) if isinstance(raw, Mapping) else None)
    elif is_zero_folder(path):
        encoder = _from_weights(read_zero_folder(path), str(path), None, model)
    else:
        if colon and scheme.isidentifier() and not path.exists():
            CHECKPOINTS.get(scheme, "checkpoint")  # the error lists the valid ones
        if (path / "config.json").is_file():
            from .huggingface import folder_remedy  # imports timm and open_clip in seconds, so only for this error

            raise CheckpointError(f"{path}: {folder_remedy(path)}")
        raise CheckpointError(
            f"{path}: not a run folder, checkpoint folder, exported folder, DeepSpeed folder, or weight file"
        )
    return encoder


def refuse_absent(checkpoint: str | Path) -> None:
    """Raise `CheckpointError` if a path does not exist, or only contains runs or checkpoints."""
    path, (scheme, colon, _) = Path(split_state(split_slots(checkpoint)[0])[0]), str(checkpoint).partition(":")
    if not path.exists() and not (colon and scheme.isidentifier()):
        raise CheckpointError(f"{path}: no such file or folder; {suggest_path(path)}")
    if not path.is_dir() or any((path / name).is_file() for name in _DESCRIBED):
        return
    if path.name == "checkpoints" and (path.parent / "config.yaml").is_file():
        raise CheckpointError(
            f"{path}: is the folder of a run's checkpoints, not one of them. Give the run's folder ({path.parent}) or one checkpoint (a step-… folder)."
        )
    runs = sorted(file.parent for file in path.glob("*/config.yaml") if (file.parent / "checkpoints").is_dir())
    if runs:
        more = f" or another of the {len(runs)}" if len(runs) > 1 else ""
        raise CheckpointError(f"{path}: is a folder of runs, not a run. Give {runs[0]}{more}.")


def read_recipe(path: Path) -> RunConfig:
    """Return the recipe of a run folder, or of the run that a checkpoint folder belongs to. Raises CheckpointError."""
    refuse_absent(path)
    folder = path.parent.parent if (path / "meta.json").is_file() else path
    config_file = folder / "config.yaml"
    if not config_file.is_file():
        raise CheckpointError(f"{folder}: has no config.yaml, so it is not a run folder")
    tree = parse_yaml(read_text(config_file, CheckpointError), str(config_file))
    return resolve(RunConfig, tree, str(config_file), stored=True)


def read_run(path: Path) -> tuple[RunConfig, Path]:
    """Return the recipe of a run folder (or of one of its checkpoint folders) and the newest complete checkpoint."""
    config = read_recipe(path)
    # The newest checkpoint, from which `sparo train` would continue.
    step = store.newest_step(path)
    if step is None:
        raise CheckpointError(f"{path}: no complete checkpoint yet. Repeat the training command to continue the run.")
    return config, step


def run_weights(step: Path) -> dict[str, Tensor]:
    """Return the objective's weights in a checkpoint folder."""
    return store.read_part(step, "model")


def _from_run(path: Path, slots: int | None) -> Encoder:
    """Load a run by building its objective, whatever its method."""
    config, step = read_run(path)
    label = str(step)
    if slots is not None:
        label = f"{step}?slots={slots}"
        _check_slots(config.objective, slots, label)
        tree = override(config.model_dump(mode="json"), [f"objective.model.grouping.slots={slots}"], RunConfig)
        config = resolve(RunConfig, tree, label, stored=True)
    weights = run_weights(step)
    objective = build_objective(config, weights)
    load_into(objective, weights, label)
    encoder = encoder_entry(config.objective.kind)(objective)
    encoder.label, encoder.trained = label, TrainingRun(objective, config)
    encoder.read_like(config.data)
    encoder.assumed = store.checkpoint_warnings(path, step)
    return encoder


def _check_slots(objective: Any, slots: int, label: str) -> None:
    """Raise `ConfigError` if a run with this `objective` block cannot have another number of slots, because they are not sampled."""
    grouping = getattr(getattr(objective, "model", None), "grouping", None)
    if grouping is None or not hasattr(grouping, "slots"):
        raise ConfigError(
            f"{label}: the number of slots can be changed only in models whose slots compete for tokens (slot attention), got "
            f"objective.kind={objective.kind}. Remove `?slots=…`."
        )
    if slots != grouping.slots and grouping.slot_init not in ("gaussian", "same"):
        raise ConfigError(
            f"{label}: the model has {grouping.slots} slots with slot_init={grouping.slot_init}, each with its own "
            "parameters, so the number of slots cannot be changed. Remove `?slots=…`, or train with "
            "slot_init=gaussian."
        )


def _from_export(path: Path) -> Encoder:
    description = read_export(path / "open_clip_config.json")
    model = Clip(description.config)
    load_into(model, read_weights(path / "open_clip_model.safetensors"), str(path))
    encoder = ClipEncoder(model, description.mean, description.std, str(path))
    _read_as_trained(encoder, read_json(path / "open_clip_config.json", dict, CheckpointError).get("sparo"))
    return encoder


def _read_as_trained(encoder: Encoder, description: object) -> None:
    """Map pixels to 8 bits as in the run whose export has this description."""
    if not isinstance(description, Mapping) or "pixel_range" not in description:
        return
    try:
        pixel_range = TypeAdapter(PixelRange).validate_python(description["pixel_range"])
    except ValidationError as error:
        raise CheckpointError(
            f"{encoder.label}: pixel_range is invalid ({error.errors()[0]['msg']}). Export the run again."
        ) from None
    encoder.read_like(DataConfig.model_construct(pixel_range=pixel_range, bands=None))


def _from_weights(
    weights: Weights, label: str, described: ModelDescription | None, name: str | None, quick_gelu: bool = False
) -> Encoder:
    """Build the CLIP that weights in our layout belong to: as described, as named by `--model`, or as inferred from their shapes.

    Args:
        weights, label: weights, and name for messages.
        described: description of the model, if the file has one.
        name: the value of `--model`, if any.
        quick_gelu: whether the file is OpenAI's; shapes do not show the activation.
    """
    assumed = ""
    if name:  # --model names the architecture; preprocessing still comes from the file
        config = add_readout(_load_by_name(name), weights)
        if quick_gelu and not config.quick_gelu:
            raise ConfigError(
                f"--model {name}: {label} contains the weights of an OpenAI CLIP, which uses QuickGELU, but the named model uses GELU. "
                "Remove --model, or name a model with QuickGELU, as in ViT-B-32-quickgelu."
            )
        described = ModelDescription(config) if described is None else described._replace(config=config)
    if described is None:
        try:
            described = ModelDescription(infer_config(weights, quick_gelu=quick_gelu))
        except CheckpointError as error:
            raise CheckpointError(f"{label}: {error}") from None
        config = described.config
        v, t = config.vision, config.text
        readout_note = f" ({config.readout.inference_note})" if config.readout.inference_note else ""
        gelu = "OpenAI's QuickGELU" if quick_gelu else "GELU"
        assumed = (
            f"{label}: inferred from shapes: {config.readout.kind} readout{readout_note}, ViT {v.width}x{v.layers} with patches of {v.patch_size} "
            f"and {v.width // v.head_width} heads, text {t.width}x{t.layers} with {t.heads} heads, {gelu}, "
            "OpenAI's pixel normalization. --model NAME overrides this."
        )
    model = Clip(described.config)
    load_into(model, weights, label)
    encoder = ClipEncoder(model, described.mean, described.std, label)
    encoder.assumed = assumed
    return encoder


def _load_by_name(name: str) -> ClipConfig:
    from sparo_train import openclip  # wraps open_clip's builders, so only if a name is given

    if name.endswith(".json"):
        cfg = read_json(Path(name), dict, CheckpointError)
        cfg = cfg.get("model_cfg", cfg)
        if not isinstance(cfg, dict) or not {"embed_dim", "vision_cfg", "text_cfg"} <= cfg.keys():
            raise ConfigError(
                f"--model {name}: is not an open_clip config, which must have embed_dim, vision_cfg and text_cfg. Give open_clip's JSON file of the model."
            )
        return from_model_cfg(cfg, f"--model {name}")
    return openclip.find_config(name)
