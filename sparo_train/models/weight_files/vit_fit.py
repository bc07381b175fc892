"""A backbone's weights adapted to a `Vit` of another image size, patch size, number of bands or readout."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from timm.layers.patch_embed import resample_patch_embed
from torch import Tensor, nn

from ...core.errors import CheckpointError
from ...core.recipe.config_keys import value_text
from ..vit_blocks import interpolate_positions
from ..vit_config import VitConfig
from .vit_names import find_published_heads, infer_vit, official_vit_names

# Keys on which the function of the weights depends, in the order in which an error suggests them.
_FUNCTION = (
    "width", "depth", "heads", "mlp_ratio", "registers", "layer_scale", "ffn_layer", "positions", "rope_base", "norm_eps", "pre_norm",
)  # fmt: skip
# Layer norms with smaller epsilons are alike; transformers writes 1e-12 for models that were trained with 1e-6.
SMALL_EPSILON = 1e-6


class FittedVit(NamedTuple):
    """Weights under a `Vit`'s names and in its shapes, the changes of size, and names that are not used."""

    weights: dict[str, Tensor]
    size_changes: list[str]
    unused: list[str]


def fit_vit(
    state: Mapping[str, Tensor],
    config: VitConfig,
    theirs: VitConfig | Mapping[str, Any] | None = None,
    mask_token: bool = False,
    block: str = "objective.model",
) -> FittedVit:
    """Return a backbone's weights for the model of `config`.

    Positions are interpolated as the backbone's own code does for images of another size. Patch embeddings are resampled
    so that a resized patch has the same embedding (Beyer et al. 2023, FlexiViT, Sec. 3.4); other bands get the mean
    over the backbone's bands. Blocks that a readout replaces are not used.

    Args:
        state: weights under the names of any supported program.
        config: the model that they are for.
        theirs: the model that they belong to, or its keys that weights do not show; the rest is inferred from names
            and shapes.
        mask_token: keep the parameter that only iBOT's loss reads.
        block: dotted key of `config`, for errors.

    Raises:
        CheckpointError: not a ViT's weights, or those of a model that computes something else; with the keys to set.
    """
    weights = official_vit_names(state)
    if not mask_token:
        weights.pop("mask_token", None)
    if not isinstance(theirs, VitConfig):
        heads = find_published_heads(weights, config.depth) if "cls_token" in weights else None
        inferred = infer_vit(weights, "the checkpoint", heads or config.heads)
        theirs = VitConfig.model_validate({**inferred, **(theirs or {})})
    _refuse_other_model(theirs, config, block)
    unused = [name for name in weights if _block_number(name) >= config.blocks]
    weights = {name: value for name, value in weights.items() if name not in unused}
    size_changes: list[str] = []
    _fit_patches(weights, config, size_changes)
    if "pos_embed" in weights and config.positions == "learned":
        table, side = weights["pos_embed"], config.image_size // config.patch_size
        weights["pos_embed"] = interpolate_positions(
            table, (side, side), theirs.interpolate_offset, theirs.interpolate_antialias
        )
        if table.shape != weights["pos_embed"].shape:
            size_changes.append(f"positions from {table.shape[1] - 1} to {side * side} patches")
    return FittedVit(weights, size_changes, unused)


def _block_number(name: str) -> int:
    match = re.match(r"blocks\.(\d+)\.", name)
    return int(match[1]) if match else -1


def _refuse_other_model(theirs: VitConfig, config: VitConfig, block: str) -> None:
    pairs = {key: (getattr(theirs, key), getattr(config, key)) for key in _FUNCTION}
    if theirs.mlp_width == config.mlp_width:  # a ratio that was inferred from a rounded width
        del pairs["mlp_ratio"]
    changes: dict[str, Any] = {key: pair[0] for key, pair in pairs.items() if _differs(key, *pair)}
    # A readout on top of all blocks of the backbone, or in place of its last one.
    if theirs.readout.kind == "cls" and config.blocks in (
        theirs.depth,
        theirs.depth - config.readout.placement.replaced,
    ):
        changes.pop("depth", None)
    if theirs.readout.kind not in ("cls", config.readout.kind):
        changes["readout.kind"] = theirs.readout.kind
    if theirs.positions != "rope":
        changes.pop("rope_base", None)
    if changes:
        words = " ".join(f"{block}.{key}={value_text(value)}" for key, value in changes.items())
        raise CheckpointError(f"contains a different model than {block} describes. Set {words}.")


def _differs(key: str, one: Any, other: Any) -> bool:
    if key == "layer_scale":  # its value is only initial
        return (one is None) != (other is None)
    return not same_epsilon(one, other) if key == "norm_eps" else one != other


def same_epsilon(one: float, other: float) -> bool:
    """Return whether layer norms with these epsilons are alike."""
    return one == other or max(one, other) <= SMALL_EPSILON


def hidden_keys(model: Any) -> dict[str, Any]:
    """Return the keys of a `VitConfig` that a ViT of timm or transformers has but its weights do not show."""
    keys: dict[str, Any] = {}
    epsilons = {part.eps for part in model.modules() if isinstance(part, nn.LayerNorm)}
    if len(epsilons) == 1:
        keys["norm_eps"] = max(epsilons.pop(), SMALL_EPSILON)
    config = getattr(model, "config", None)
    base = getattr(getattr(model, "rope", None), "temperature", None) or rope_theta(getattr(config, "__dict__", {}))
    return keys if base is None else {**keys, "rope_base": float(base)}


def rope_theta(config: Mapping[str, Any]) -> float | None:
    """Return the base of the rotary periods in a config of transformers, whose place depends on its version."""
    parameters = config.get("rope_parameters")
    return config.get("rope_theta") or (parameters.get("rope_theta") if isinstance(parameters, Mapping) else None)


def _fit_patches(weights: dict[str, Tensor], config: VitConfig, size_changes: list[str]) -> None:
    kernel, side, bands = weights["patch_embed.proj.weight"], config.patch_size, config.bands
    if kernel.shape[-1] != side:
        size_changes.append(f"patch embedding from {kernel.shape[-1]} to {side} pixels")
        kernel = resample_patch_embed(kernel, [side, side])
    if kernel.shape[1] != bands:
        size_changes.append(f"patch embedding from {kernel.shape[1]} to {bands} bands")
        # The sum over bands stays, so a grey image has the same embedding whatever its number of bands.
        mean = kernel.float().sum(1, keepdim=True) / bands
        kernel = mean.expand(-1, bands, -1, -1).to(kernel.dtype)
    weights["patch_embed.proj.weight"] = torch.as_tensor(kernel).contiguous()
