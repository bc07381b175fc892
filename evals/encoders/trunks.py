"""Weights of a ViT that has timm's names (timm's own, DINO's, open_clip's TimmModel, ours), for a tower that timm builds."""

from __future__ import annotations

from collections.abc import Mapping

from timm.layers.pos_embed import resample_abs_pos_embed
from torch import Tensor

from sparo_train.core.errors import CheckpointError
from sparo_train.models.timm_tower import TimmTower

_PREFIXES = ("visual.trunk.", "trunk.", "")


def trunk_weights(state: Mapping[str, Tensor], tower: TimmTower, origin: str) -> dict[str, Tensor]:
    """Those of the trunk under our names; positions of images of another size are interpolated as timm does.

    Raises:
        CheckpointError: no ViT with timm's names.
    """
    prefix = next((p for p in _PREFIXES if f"{p}blocks.0.norm1.weight" in state), None)
    if prefix is None:
        raise CheckpointError(
            f"{origin}: has no ViT by timm's names (blocks.0.norm1); for a CLIP's tower leave vision.timm_model_name away"
        )
    own, trunk = tower.state_dict(), tower.trunk
    found = {f"trunk.{name.removeprefix(prefix)}": value for name, value in state.items() if name.startswith(prefix)}
    if "trunk.norm.weight" not in found:  # timm's models that pool by the mean have their norm behind it
        found = {name.replace("trunk.fc_norm.", "trunk.norm."): value for name, value in found.items()}
    name = "trunk.pos_embed"
    if name in found and name in own and found[name].shape[-1] == own[name].shape[-1]:
        without = 0 if trunk.no_embed_class else trunk.num_prefix_tokens
        if found[name].shape != own[name].shape:
            grid = list(trunk.patch_embed.grid_size)
            found[name] = resample_abs_pos_embed(found[name], grid, num_prefix_tokens=without)
    return found
