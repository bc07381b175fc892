"""Weights of image backbones under `Vit`'s names: those of DINO, DINOv2 and DINOv3, timm, transformers and CLIP's image towers."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...core.errors import CheckpointError
from ...core.registries import READOUTS
from ..vit_config import ARCHS
from .description import infer_readout
from .state_dicts import strip_wrapper_prefixes

_HEADS_BY_SIZE = {(arch["width"], arch["depth"]): arch["heads"] for arch in ARCHS.values()}
_HEADS_BY_WIDTH = {arch["width"]: arch["heads"] for arch in ARCHS.values()}
# Parts outside of the backbone, and tables that are computed from the config.
_NOT_BACKBONE = re.compile(
    r"(head|dino_head|ibot_head|fc|classifier|pooler|projectors|decoder|local_cls_norm)\.|.*(periods|bias_mask|position_ids|attn_mask)$"
)

_Rules = Sequence[tuple[str, str]]

_BLOCK = r"(?:encoder\.|model\.)?layers?\.(\d+)\."
_TRANSFORMERS: _Rules = (
    (r"embeddings\.(cls_token|mask_token|register_tokens)", r"\1"),
    (r"embeddings\.position_embeddings", "pos_embed"),
    (r"embeddings\.patch_embeddings\.(?:projection\.)?(weight|bias)", r"patch_embed.proj.\1"),
    (_BLOCK + r"(?:layernorm_before|norm1)\.(.+)", r"blocks.\1.norm1.\2"),
    (_BLOCK + r"(?:layernorm_after|norm2)\.(.+)", r"blocks.\1.norm2.\2"),
    (_BLOCK + r"attention\.(?:attention\.)?(query|key|value)\.(.+)", r"blocks.\1.attn.\2.\3"),
    (_BLOCK + r"attention\.q_proj\.(.+)", r"blocks.\1.attn.query.\2"),
    (_BLOCK + r"attention\.k_proj\.(.+)", r"blocks.\1.attn.key.\2"),
    (_BLOCK + r"attention\.v_proj\.(.+)", r"blocks.\1.attn.value.\2"),
    (_BLOCK + r"attention\.(?:output\.dense|o_proj)\.(.+)", r"blocks.\1.attn.proj.\2"),
    (_BLOCK + r"layer_scale(1|2)\.lambda1", r"blocks.\1.ls\2.gamma"),
    (_BLOCK + r"(?:intermediate\.dense|mlp\.fc1)\.(.+)", r"blocks.\1.mlp.fc1.\2"),
    (_BLOCK + r"(?:output\.dense|mlp\.fc2)\.(.+)", r"blocks.\1.mlp.fc2.\2"),
    (_BLOCK + r"mlp\.weights_in\.(.+)", r"blocks.\1.mlp.w12.\2"),
    (_BLOCK + r"mlp\.weights_out\.(.+)", r"blocks.\1.mlp.w3.\2"),
    (_BLOCK + r"mlp\.(gate|up|down)_proj\.(.+)", r"blocks.\1.mlp.\2.\3"),
    (r"(?:layernorm|norm)\.(weight|bias)", r"norm.\1"),
)
_TIMM: _Rules = (
    (r"reg_token", "register_tokens"),
    (r"(blocks\.\d+\.)gamma_(1|2)", r"\1ls\2.gamma"),
    (r"(blocks\.\d+\.attn\.)q_bias", r"\1query.bias"),
    (r"(blocks\.\d+\.attn\.)v_bias", r"\1value.bias"),
    (r"(blocks\.\d+\.mlp\.)fc1_g\.(.+)", r"\1gate.\2"),
    (r"(blocks\.\d+\.mlp\.)fc1_x\.(.+)", r"\1up.\2"),
    (r"fc_norm\.(.+)", r"norm.\1"),
)
_FACEBOOK: _Rules = (
    (r"storage_tokens", "register_tokens"),
    (r"blocks\.\d+\.(\d+)\.(.+)", r"blocks.\1.\2"),  # trainings of DINOv2 store blocks in chunks
    (r"(blocks\.\d+\.mlp\.)w1\.(.+)", r"\1gate.\2"),
    (r"(blocks\.\d+\.mlp\.)w2\.(.+)", r"\1up.\2"),
)
_CLIP: _Rules = (
    (r"class_embedding", "cls_token"),
    (r"positional_embedding", "pos_embed"),
    (r"conv1\.(weight|bias)", r"patch_embed.proj.\1"),
    (r"ln_pre\.(.+)", r"norm_pre.\1"),
    (r"ln_post\.(.+)", r"norm.\1"),
    (r"transformer\.resblocks\.(\d+)\.ln_(1|2)\.(.+)", r"blocks.\1.norm\2.\3"),
    (r"transformer\.resblocks\.(\d+)\.ls_(1|2)\.gamma", r"blocks.\1.ls\2.gamma"),
    (r"transformer\.resblocks\.(\d+)\.attn\.in_proj_(weight|bias)", r"blocks.\1.attn.qkv.\2"),
    (r"transformer\.resblocks\.(\d+)\.attn\.out_proj\.(.+)", r"blocks.\1.attn.proj.\2"),
    (r"transformer\.resblocks\.(\d+)\.mlp\.c_fc\.(.+)", r"blocks.\1.mlp.fc1.\2"),
    (r"transformer\.resblocks\.(\d+)\.mlp\.c_proj\.(.+)", r"blocks.\1.mlp.fc2.\2"),
)


def official_vit_names(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a backbone's weights under the names of DINO and DINOv2, which `Vit` has; other names are unchanged.

    Parts outside of the backbone (heads, poolers, a CLIP's text tower and projection) and constant tables are removed.
    Query, key and value become one matrix, as do the two matrices of a gated MLP. Where a model adds no position to its
    class token, its position is zero.
    """
    bare = {backbone_name(name): value for name, value in state.items()}
    if any(name.startswith("visual.") for name in bare):
        bare = {name.removeprefix("visual."): value for name, value in bare.items() if name.startswith("visual.")}
        bare.pop("proj", None)
    rules = [*_TRANSFORMERS] if "embeddings.cls_token" in bare else [*_TIMM, *_FACEBOOK, *_CLIP]
    named = {
        _rename(name, rules): value for name, value in bare.items() if not _NOT_BACKBONE.match(_rename(name, rules))
    }
    for name in [name for name in named if name.endswith("attn.qkv.weight")]:
        _zero_key_bias(named, name.removesuffix("weight"))
    _join(named)
    return _with_usual_shapes(named)


def backbone_name(name: str) -> str:
    """Return a name without the prefixes of wrappers and of models around the backbone (`backbone.`, `dinov2.`, `trunk.`)."""
    name = strip_wrapper_prefixes(name)
    while (
        match := re.match(r"(backbone|trunk|model|encoder|vit|dinov2|dinov2_with_registers|dinov3_vit)\.", name)
    ) and (not re.match(r"(encoder|model)\.layers?\.", name)):
        name = strip_wrapper_prefixes(name[match.end() :])
    return name


def _rename(name: str, rules: _Rules) -> str:
    for pattern, new in rules:
        if match := re.fullmatch(pattern, name):
            return match.expand(new)
    return name


def _zero_key_bias(named: dict[str, Tensor], prefix: str) -> None:
    """Set a bias of keys that is not finite to zero: DINOv3 masks it."""
    bias = named.get(f"{prefix}bias")
    if bias is not None and not bias.is_meta and not bias.isfinite().all():
        query, _, value = bias.chunk(3)
        named[f"{prefix}bias"] = torch.cat([query, torch.zeros_like(query), value])


def _join(named: dict[str, Tensor]) -> None:
    for name in [n for n in named if re.fullmatch(r"blocks\.\d+\.attn\.query\.weight", n)]:
        prefix = name.removesuffix("query.weight")
        named[f"{prefix}qkv.weight"] = torch.cat(
            [named.pop(f"{prefix}{part}.weight") for part in ("query", "key", "value")]
        )
    for name in [n for n in named if re.fullmatch(r"blocks\.\d+\.attn\.qkv\.weight", n)]:
        prefix, weight = name.removesuffix("qkv.weight"), named[name]
        # DINOv3 has no bias of keys, and several of its models none at all, which is the same as zero.
        none = weight.new_zeros(len(weight) // 3)
        parts = [named.pop(f"{prefix}{part}.bias", none) for part in ("query", "key", "value")]
        named.setdefault(f"{prefix}qkv.bias", torch.cat(parts))
    for name in [n for n in named if re.fullmatch(r"blocks\.\d+\.mlp\.up\..+", n)]:
        prefix, leaf = name.rsplit("up.", 1)
        up, down = named.pop(name), named.pop(f"{prefix}down.{leaf}", None)
        gate = named.pop(f"{prefix}gate.{leaf}", None)
        named[f"{prefix}fc1.{leaf}" if gate is None else f"{prefix}w12.{leaf}"] = (
            up if gate is None else torch.cat([gate, up])
        )
        if down is not None:
            named[f"{prefix}fc2.{leaf}" if gate is None else f"{prefix}w3.{leaf}"] = down
    gated = [n for n in named if re.fullmatch(r"blocks\.\d+\.mlp\.fc1\.weight", n) and _is_packed(named, n)]
    gated += [n for n in named if re.fullmatch(r"blocks\.\d+\.mlp\.w12\.weight", n)]
    for prefix in (n.rsplit(".", 2)[0] for n in gated):  # timm's SwiGLUPacked
        for leaf in ("weight", "bias"):
            for old, new in (("fc1", "w12"), ("fc2", "w3")):
                if f"{prefix}.{old}.{leaf}" in named:
                    named[f"{prefix}.{new}.{leaf}"] = named.pop(f"{prefix}.{old}.{leaf}")


def _is_packed(named: Mapping[str, Tensor], first: str) -> bool:
    second = named.get(first.replace("fc1", "fc2"))
    return second is not None and len(named[first]) == 2 * second.shape[1]


def _with_usual_shapes(named: dict[str, Tensor]) -> dict[str, Tensor]:
    if (token := named.get("cls_token")) is not None:
        named["cls_token"] = token.view(1, 1, -1)
    if (mask := named.get("mask_token")) is not None:
        named["mask_token"] = mask.view(1, -1)
    if (registers := named.get("register_tokens")) is not None and not registers.numel():
        del named["register_tokens"]
    if (table := named.get("pos_embed")) is not None:
        table = table if table.dim() == 3 else table[None]
        if math.isqrt(table.shape[1]) ** 2 == table.shape[1]:  # patches only
            table = torch.cat([torch.zeros_like(table[:, :1]), table], dim=1)
        named["pos_embed"] = table
    return named


def infer_vit(weights: Mapping[str, Tensor], origin: str, heads: int | None = None) -> dict[str, Any]:
    """Return the config of the `Vit` that weights under its names belong to, from their names and shapes.

    Args:
        weights: from `official_vit_names`.
        origin: name for errors.
        heads: number of heads; default: that of the published model of the same width and depth, or of the same width for
            DINOv2 and DINOv3.

    Raises:
        CheckpointError: not such a backbone, or the number of heads is unknown.
    """
    try:
        width, kernel = weights["cls_token"].shape[-1], weights["patch_embed.proj.weight"]
    except KeyError as error:
        raise CheckpointError(
            f"{origin}: has no ViT with a class token ({error} is missing), got {', '.join(list(weights)[:4])}, …. Give a "
            "backbone of DINO, DINOv2, DINOv3, timm, transformers or CLIP."
        ) from None
    blocks = 1 + max((int(n.split(".")[1]) for n in weights if n.startswith("blocks.")), default=-1)
    _refuse_other_vits(weights, origin)
    gated = "blocks.0.mlp.w12.weight" in weights
    hidden = (weights["blocks.0.mlp.w3.weight"] if gated else weights["blocks.0.mlp.fc2.weight"]).shape[1]
    rope, registers = "pos_embed" not in weights, weights.get("register_tokens")
    patch, clip = kernel.shape[-1], "norm_pre.weight" in weights
    tree: dict[str, Any] = {
        "image_size": 224 // patch * patch if rope else patch * math.isqrt(weights["pos_embed"].shape[1] - 1),
        "patch_size": patch,
        "width": width,
        "depth": blocks,
        "mlp_ratio": 1.5 * hidden / width if gated else hidden / width,
        "readout": {"kind": "cls"},
    }
    if readout := infer_readout(weights, "", 1):
        readout.pop("embed_dim", None)  # a backbone's width
        tree["readout"] = readout
        tree["depth"] += READOUTS.get(readout["kind"]).model_validate(readout).placement.replaced
    known = heads or find_published_heads(weights, tree["depth"])
    if known is None:
        raise CheckpointError(
            f"{origin}: shapes do not show the number of heads, got width {width} with {blocks} blocks. Name the model (--model), or "
            "set objective.model.heads in a recipe."
        )
    tree["heads"] = known
    options = {
        "bands": (kernel.shape[1], 3),
        "registers": (0 if registers is None else registers.shape[1], 0),
        "layer_scale": (1e-5 if "blocks.0.ls1.gamma" in weights else None, None),
        "ffn_layer": ("swiglu" if gated else "mlp", "mlp"),
        "positions": ("rope" if rope else "learned", "learned"),
        "norm_eps": (1e-5 if rope or clip else 1e-6, 1e-6),
        "pre_norm": (clip, False),
    }
    if registers is not None and not rope:  # as in DINOv2's models with registers
        options |= {"interpolate_offset": (0.0, 0.1), "interpolate_antialias": (True, False)}
    return {**tree, **{key: value for key, (value, default) in options.items() if value != default}}


def _refuse_other_vits(weights: Mapping[str, Tensor], origin: str) -> None:
    """Raise `CheckpointError` for kinds of ViT whose names are similar, but whose function is another one."""
    if "rope.freqs" in weights or ("pos_embed" not in weights and "register_tokens" not in weights):
        kind = "rotary positions that are not those of DINOv3"
    elif "blocks.0.mlp.w12.weight" in weights and not {"blocks.0.ls1.gamma", "register_tokens"} & {*weights}:
        kind = "a gated MLP without LayerScale, as in EVA-02"
    elif any(name.endswith(("dist_token", "distillation_token")) for name in weights):
        kind = "a distillation token, as in DeiT"
    elif "pos_embed" in weights and math.isqrt(rows := weights["pos_embed"].shape[1] - 1) ** 2 != rows:
        kind = f"{rows + 1} positions, which are not those of a class token and a square of patches"
    else:
        return
    raise CheckpointError(
        f"{origin}: is a ViT with {kind}, which the built-in ViT does not have. Score it as timm:NAME@FILE; in a recipe, set "
        "objective.model.timm_model_name=NAME."
    )


def find_published_heads(weights: Mapping[str, Tensor], depth: int | None = None) -> int | None:
    """Return the number of heads of the published model of these sizes, which shapes do not show; None if it is not certain.

    Args:
        weights: from `official_vit_names`.
        depth: number of blocks, with those that a readout replaced.
    """
    width = weights["cls_token"].shape[-1]
    blocks = 1 + max((int(n.split(".")[1]) for n in weights if n.startswith("blocks.")), default=-1)
    if width == 1280 and "pos_embed" in weights:  # ViT-H of MAE, timm and CLIP has 16 heads, that of DINOv3 has 20
        return None
    for size in ((width, blocks), (width, depth)):
        if size in _HEADS_BY_SIZE:
            return _HEADS_BY_SIZE[size]
    # Parts that only DINOv2 and DINOv3 have, whose models of one width have the same number of heads.
    marked = "blocks.0.ls1.gamma" in weights or "register_tokens" in weights
    return _HEADS_BY_WIDTH.get(width) if marked else None
