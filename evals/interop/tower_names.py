"""Towers of a CLIP under our names, from state dicts of open_clip, timm and transformers.

Weights whose shapes match but whose function differs are refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Self

import torch
from open_clip.transformer import TextTransformer as OpenClipText
from torch import Tensor, nn

from sparo_train.core.errors import CheckpointError
from sparo_train.models.clip_towers import TextTower
from sparo_train.models.weight_files.vit_fit import same_epsilon

_ROUNDED = 1e-3  # published values are rounded to three or more digits


class Normalisation(NamedTuple):
    """Normalisation of pixels in 0..1."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def find(cls, holder: Any) -> Self | None:
        """Return that of an objective, an encoder (both have tensors) or a recipe's block (numbers); None without a unique one."""
        if not (hasattr(holder, "mean") and hasattr(holder, "std")):
            return None
        # As tensors in either case: a buffer (3, 1, 1) and three numbers of a recipe are equal.
        return cls(*(tuple(torch.as_tensor(value).flatten().tolist()) for value in (holder.mean, holder.std)))


def refuse_other_pixels(origin: str, theirs: Normalisation | None, own: Normalisation | None) -> None:
    """Raise `CheckpointError` if weights were trained with another normalisation, because colours would differ."""
    if theirs is None or own is None or len(theirs.mean) != len(own.mean):  # other bands cannot be compared
        return
    pairs = zip(theirs.mean + theirs.std, own.mean + own.std, strict=True)
    if max(abs(one - other) for one, other in pairs) > _ROUNDED:
        # In the form of a recipe, because fp32 digits would look like another number.
        mean, std = ([round(v, 6) for v in values] for values in theirs)
        raise CheckpointError(
            f"{origin}: was trained with another normalization of pixels. Set objective.mean={mean} and objective.std={std}."
        )


def refuse_unlike(origin: str, theirs: nn.Module, own: nn.Module) -> None:
    """Raise `CheckpointError` for another number of heads, activation or epsilon, or texts that are read in another way."""
    their_heads, own_heads = _heads(theirs), _heads(own)
    # By name if both have one (both towers of a CLIP), otherwise by the first one.
    pairs = [(their_heads[n], own_heads[n]) for n in their_heads if n in own_heads] or list(
        zip(their_heads.values(), own_heads.values(), strict=False)
    )[:1]
    if unlike := [pair for pair in pairs if pair[0] != pair[1]]:
        raise CheckpointError(
            f"{origin}: has {unlike[0][0]} attention heads, but the model of the run has {unlike[0][1]} (the tensors "
            "have equal shapes in both). Give the run the same number of heads."
        )
    kinds = [_activations(m) for m in (theirs, own)]
    if unknown := kinds[0] - kinds[1] - {"gelu", "quick_gelu"}:
        raise CheckpointError(
            f"{origin}: was trained with the activation {min(unknown)}, which the model of the run does not have. Use other weights."
        )
    quick = ["quick_gelu" in kind for kind in kinds]
    if quick[0] != quick[1]:
        raise CheckpointError(
            f"{origin}: was trained {'with' if quick[0] else 'without'} OpenAI's approximation of GELU. Set objective.model.quick_gelu={str(quick[0]).lower()}."
        )
    if any(isinstance(part, TextTower) for part in own.modules()) and (reading := _other_reading(theirs)):
        raise CheckpointError(
            f"{origin}: its text tower {reading}, but the run's text tower is causal and takes its output at the end "
            "of the text. Use other weights."
        )
    their_eps, own_eps = _epsilons(theirs), _epsilons(own)
    if own_eps and (other := [value for value in their_eps if not any(same_epsilon(value, e) for e in own_eps)]):
        raise CheckpointError(
            f"{origin}: was trained with a layer-norm epsilon of {other[0]:g}, but the model of the run uses another epsilon. Use other weights."
        )


def _epsilons(model: nn.Module) -> set[float]:
    return {part.eps for part in model.modules() if isinstance(part, nn.LayerNorm)}


def _other_reading(model: nn.Module) -> str:
    """Return how a text tower of open_clip or transformers differs from CLIP's; empty if it does not."""
    for part in model.modules():
        if type(part) is OpenClipText:
            if part.attn_mask is None:
                return "attends to all tokens"
            if part.cls_emb is not None:
                return "reads a class token"
            if part.pool_type not in ("argmax", "eos"):
                return f"pools tokens in another way ({part.pool_type})"
        elif type(part).__name__.startswith("Siglip") and "Text" in type(part).__name__:
            return "attends to all tokens"
    return ""


def _activations(model: nn.Module) -> set[str]:
    """Return the activations of a model's MLPs: gelu, quick_gelu, gelu_tanh or relu."""
    found = set()
    for part in model.modules():
        # By the class's name, because open_clip, transformers and sparo each have their own classes.
        name = type(part).__name__.lower()
        if "gelu" in name:
            tanh = "tanh" in name or name.startswith("newgelu") or getattr(part, "approximate", "none") == "tanh"
            found.add("quick_gelu" if name.startswith("quickgelu") else "gelu_tanh" if tanh else "gelu")
        elif name == "relu":
            found.add("relu")
    return found


def _heads(model: nn.Module) -> dict[str, int]:
    """Return the number of heads of every attention in the model, by name."""
    attention_heads = (
        (name.removeprefix("model."), getattr(part, "num_heads", None)) for name, part in model.named_modules()
    )
    return {name: heads for name, heads in attention_heads if isinstance(heads, int)}


_TIMM_BLOCK = {
    "norm1": "ln_1", "norm2": "ln_2", "attn.qkv.": "attn.in_proj_", "attn.proj": "attn.out_proj", "mlp.fc1": "mlp.c_fc", "mlp.fc2": "mlp.c_proj",
}  # fmt: skip
_TIMM = {"norm_pre": "ln_pre", "norm": "ln_post", "patch_embed.proj": "conv1"}
_HF_BLOCK = {
    "layer_norm1": "ln_1",
    "layer_norm2": "ln_2",
    "self_attn.out_proj": "attn.out_proj",
    "mlp.fc1": "mlp.c_fc",
    "mlp.fc2": "mlp.c_proj",
}
_HF = {
    "embeddings.class_embedding": "class_embedding", "embeddings.patch_embedding.weight": "conv1.weight",
    "embeddings.position_embedding.weight": "positional_embedding", "embeddings.token_embedding.weight": "token_embedding.weight",
    "pre_layrnorm.weight": "ln_pre.weight", "pre_layrnorm.bias": "ln_pre.bias", "post_layernorm.weight": "ln_post.weight",
    "post_layernorm.bias": "ln_post.bias", "final_layer_norm.weight": "ln_final.weight", "final_layer_norm.bias": "ln_final.bias",
}  # fmt: skip


def to_our_names(state: Mapping[str, Tensor], origin: str) -> Mapping[str, Tensor]:
    """Rename transformers' CLIP to our names; other state dicts are unchanged."""
    if not {"visual_projection.weight", "text_projection.weight", "logit_scale"} <= set(state):
        return state
    towers = {
        f"{part}.{name}": value
        for part in ("visual", "text")
        for name, value in tower_weights(state, part, origin).items()
    }
    return {**towers, "logit_scale": state["logit_scale"]}


def tower_weights(state: Mapping[str, Tensor], part: str, origin: str) -> dict[str, Tensor]:
    """Return one tower of a CLIP under our names, from a state dict of ours, of open_clip's, or of timm's or transformers' CLIP.

    Args:
        state, origin: the state dict, and its name for errors.
        part: `visual` or `text`.

    Raises:
        CheckpointError: the model has no such tower, or a ViT unlike a CLIP's (biased patches, no norm before the
            blocks).
    """
    named = {name.removeprefix(f"{part}."): value for name, value in state.items() if name.startswith(f"{part}.")}
    if any(name.startswith("transformer.resblocks.") for name in named):
        return {name: value for name, value in named.items() if name != "attn_mask"}
    if part == "visual" and "blocks.0.attn.qkv.weight" in state:
        if "norm_pre.weight" not in state or "patch_embed.proj.bias" in state:
            raise CheckpointError(
                f"{origin}: differs from CLIP's ViT: the patch embedding has a bias, or there is no norm "
                f"before the blocks. Load the file with vision.timm_model_name."
            )
        return _rename_keys(state, r"blocks\.(\d+)\.(.+)", _TIMM_BLOCK, lambda name: _replace_prefix(name, _TIMM))
    whole = "vision_model." if part == "visual" else "text_model."
    bare = {
        name.removeprefix(whole): value
        for name, value in state.items()
        if name.startswith((whole, "encoder.layers.", *_HF))
    }
    # A model with a single tower has no prefix; patches identify an image tower.
    own_kind = ("embeddings.patch_embedding.weight" in bare) == (part == "visual")
    if own_kind and part == "visual" and "embeddings.class_embedding" not in bare:
        raise CheckpointError(
            f"{origin}: its image tower has no class token, as in SigLIP. Load it with vision.timm_model_name."
        )
    if own_kind and any(name.startswith("encoder.layers.0.self_attn.q_proj") for name in bare):
        projection = state.get("visual_projection.weight" if part == "visual" else "text_projection.weight")
        return _from_transformers(bare) | (
            {} if projection is None else {"proj" if part == "visual" else "text_projection": projection.T}
        )
    more = ". For a timm model, set vision.timm_model_name" if part == "visual" else ""
    raise CheckpointError(f"{origin}: has no {'image' if part == 'visual' else 'text'} tower of a CLIP{more}")


def _from_transformers(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Join queries, keys and values, which are one matrix in our models."""
    joined: dict[str, Tensor] = {}
    for name in state:
        if match := re.fullmatch(r"(encoder\.layers\.\d+\.self_attn\.)q_proj\.(weight|bias)", name):
            # transformers has three matrices, open_clip one with three times the rows.
            parts = [state[f"{match[1]}{which}_proj.{match[2]}"] for which in "qkv"]
            joined[f"{match[1].replace('self_attn.', 'attn.')}in_proj_{match[2]}"] = torch.cat(parts)
    rest = {n: t for n, t in state.items() if not re.search(r"self_attn\.[qkv]_proj|position_ids", n)}
    return _rename_keys(rest | joined, r"encoder\.layers\.(\d+)\.(.+)", _HF_BLOCK, lambda name: _HF.get(name, name))


def _rename_keys(
    state: Mapping[str, Tensor], block: str, inside: Mapping[str, str], outside: Callable[[str], str]
) -> dict[str, Tensor]:
    out = {}
    for name, value in state.items():
        if match := re.fullmatch(block, name):
            out[f"transformer.resblocks.{match[1]}.{_replace_prefix(match[2], inside)}"] = value
        elif name == "cls_token":
            out["class_embedding"] = value.flatten()
        elif name == "pos_embed":
            out["positional_embedding"] = value[0]
        else:
            new = outside(name)
            out[new] = value.flatten() if new == "class_embedding" else value
    return out


def _replace_prefix(name: str, words: Mapping[str, str]) -> str:
    return next((new + name.removeprefix(old) for old, new in words.items() if name.startswith(old)), name)
