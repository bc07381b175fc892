"""The model of a backbone's file, without loading it: its config and its normalization of pixels."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import timm

from ...core.config import resolve
from ...core.errors import CheckpointError, ConfigError, did_you_mean
from ...core.files import read_json, read_text
from ...core.recipe.recipe_yaml import parse_yaml
from ..vit_config import IMAGENET_MEAN, IMAGENET_STD, VitConfig
from .dino_files import is_dino, read_dino
from .state_dicts import extract_state, read_raw, read_raw_parts, split_state
from .timm_config import build_on_meta
from .vit_fit import SMALL_EPSILON, hidden_keys, rope_theta
from .vit_names import find_published_heads, infer_vit, official_vit_names


class BackboneDescription(NamedTuple):
    """Config of a backbone, the normalization that it was trained with, and the `data.pixel_range` of a run."""

    config: VitConfig
    mean: tuple[float, ...]
    std: tuple[float, ...]
    pixel_range: Any = None


def describe_backbone(place: str, heads: int | None = None) -> BackboneDescription | None:
    """Return the model of initial weights; None if it is none of DINO's kind.

    Args:
        place: a file, `hf:FOLDER`, `timm:NAME`, `timm:NAME@FILE`, or a run.
        heads: number of heads of a file that does not show it.

    Raises:
        CheckpointError: the file cannot be read, or its number of heads is unknown.
    """
    scheme, _, rest = place.partition(":")
    if scheme == "timm":
        name, _, weight_file = rest.partition("@")
        return _describe_timm(name, weight_file, heads)
    if scheme == "hf":
        return _describe_transformers(Path(rest))
    file, key = split_state(place)
    path = Path(file)
    run = path.parent.parent if (path / "meta.json").is_file() else path
    if (run / "config.yaml").is_file():
        recipe = parse_yaml(read_text(run / "config.yaml", CheckpointError), place)
        objective, data = recipe.get("objective", {}), recipe.get("data", {})
        try:
            config = resolve(VitConfig, objective["model"], place, stored=True)
        except (ConfigError, KeyError):  # a run with another kind of model
            return None
        return BackboneDescription(
            config, tuple(objective["mean"]), tuple(objective["std"]), data.get("pixel_range", "by_type")
        )
    if not path.is_file():
        return None
    content = read_raw(path)
    if not is_dino(content):
        return None
    found = read_dino(content, place, key)
    config = found.config or VitConfig.model_validate(
        infer_vit(found.backbone, place, find_published_heads(found.backbone) or heads)
    )
    return BackboneDescription(config, *found.normalisation)


def _describe_timm(name: str, file: str, heads: int | None) -> BackboneDescription:
    if not timm.is_model(name):
        raise CheckpointError(f"timm:{name}: {did_you_mean(name.split('.')[0], timm.list_models())}")
    label = f"timm:{name}@{file}" if file else f"timm:{name}"
    model: Any
    model, pixels = build_on_meta(name, file, label)
    mean, std = tuple(pixels["mean"]), tuple(pixels["std"])
    rotary = getattr(model, "rope", None) is not None and "dinov3" not in name
    # A convnet, or a Transformer that the built-in ViT cannot be.
    if getattr(model, "cls_token", None) is None or not hasattr(model, "blocks") or rotary:
        return BackboneDescription(_timm_config(name), mean, std)
    weights = official_vit_names(model.state_dict())
    if file:  # the file may have other sizes than its name
        path, key = split_state(file)
        weights = official_vit_names(extract_state(read_raw(path), label, key))
    same_width = "cls_token" in weights and weights["cls_token"].shape[-1] == model.embed_dim
    tree = infer_vit(weights, label, model.blocks[0].attn.num_heads if same_width else heads)
    return BackboneDescription(VitConfig.model_validate({**tree, **hidden_keys(model)}), mean, std)


def _timm_config(name: str) -> VitConfig:
    try:
        return VitConfig(timm_model_name=name.partition(".")[0], readout={"kind": "cls"})
    except ValueError as error:
        raise CheckpointError(f"timm:{name}: {error}") from None


def _describe_transformers(folder: Path) -> BackboneDescription | None:
    if not any((folder / name).is_file() for name in ("model.safetensors", "model.safetensors.index.json")):
        return None  # a name of the hub
    config = read_json(folder / "config.json", dict, CheckpointError)
    weights = official_vit_names(read_raw_parts(folder))
    tree = infer_vit(weights, f"hf:{folder}", config.get("num_attention_heads"))
    processor = folder / "preprocessor_config.json"
    pixels = read_json(processor, dict, CheckpointError) if processor.is_file() else {}
    mean, std = pixels.get("image_mean", IMAGENET_MEAN), pixels.get("image_std", IMAGENET_STD)
    epsilon, base = config.get("layer_norm_eps"), rope_theta(config)
    if isinstance(epsilon, float):
        tree["norm_eps"] = max(epsilon, SMALL_EPSILON)
    if base is not None:
        tree["rope_base"] = float(base)
    return BackboneDescription(VitConfig.model_validate(tree), tuple(mean), tuple(std))
