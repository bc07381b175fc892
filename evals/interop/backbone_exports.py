"""Exports of DINO's backbone: a folder for timm, the readout next to it, and a program for torch without sparo."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from sparo_train.core.config import resolve
from sparo_train.core.errors import CheckpointError, ConfigError
from sparo_train.core.files import read_json, whole_file, write_whole
from sparo_train.models.dino_head import build_backbone
from sparo_train.models.readout import ReadOut, Slots, read_slots
from sparo_train.models.timm_backbone import TimmBackbone, as_tokens
from sparo_train.models.vit import Vit
from sparo_train.models.vit_config import VitConfig
from sparo_train.models.weight_files.dino_files import dinov2_as_timm

from .exporting import Export, TrainedWeights

_READOUT, _READOUT_CONFIG = "readout.safetensors", "readout.json"
_TIMM_LOAD = """import timm

model = timm.create_model("local-dir:PLACE", pretrained=True).eval()
transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model), is_training=False)
pixels = transform(image.convert("RGB"))[None]  # a PIL image of 8 bits without transparency
tokens = model.forward_features(pixels)  # (n, prefix + patches, width), normalized; the class token first"""
_READOUT_LOAD = """

from sparo import load_readout  # this library's model has no readout

slots = load_readout("PLACE")(tokens).values  # (n, slots, width); concatenated, they are the encoding that sparo scores"""
_TORCH_LOAD = """import torch

model = torch.export.load("PLACE").module()
# uint8 (n, 3, S, S): the shorter side resized (bicubic) to 256/224 of S, then the center; the program normalizes them
encoding, patches, attention = model(pixels)  # attention is empty without slots"""


def backbone_weights(trained: TrainedWeights) -> tuple[VitConfig, dict[str, Tensor]]:
    """Return the config and the weights of the backbone that is scored: DINO's teacher, or the student of a distillation."""
    own = "teacher.backbone." if any(name.startswith("teacher.") for name in trained.weights) else "student.backbone."
    weights = {name.removeprefix(own): t for name, t in trained.weights.items() if name.startswith(own)}
    weights.pop("mask_token", None)
    return trained.objective.model, weights


def _timm(trained: TrainedWeights, folder: Path) -> Path:
    config, weights = backbone_weights(trained)
    arch, args = _timm_model(config) if config.timm_model_name is None else (config.timm_model_name, {})
    trunk = {name: t for name, t in weights.items() if not name.startswith(f"{config.readout.kind}.")}
    pretrained_cfg = {
        "input_size": [config.bands, config.image_size, config.image_size],
        "mean": list(trained.objective.mean),
        "std": list(trained.objective.std),
        "interpolation": "bicubic",
        # timm rounds the quotient down.
        "crop_pct": config.image_size / (round(config.image_size * 256 / 224) + 1e-3),
        "num_classes": 0,
    }
    content = {"architecture": arch, "num_classes": 0, "num_features": config.width, "pretrained_cfg": pretrained_cfg}
    if config.timm_model_name is None:
        content |= {"global_pool": "token", "model_args": args}
        trunk = _timm_names(trunk, config)
    else:
        content["model_args"] = TimmBackbone(config).args
        trunk = {name.removeprefix("model."): t for name, t in trunk.items() if name.startswith("model.")}
    write_folder(folder, content, trunk, config, weights)
    return folder


def _timm_model(config: VitConfig) -> tuple[str, dict[str, Any]]:
    """Return timm's architecture and its arguments. Raises `ConfigError` if timm has no such model."""
    refuse_mixtures(config, "timm")
    if config.layer_scale is None and (config.positions == "rope" or config.ffn_layer == "swiglu"):
        raise ConfigError(
            "--layout timm: timm's models with rope or swiglu have a layer_scale, but this run has none. Use "
            "--layout torch or dino."
        )
    args: dict[str, Any] = {
        "img_size": config.image_size,
        "patch_size": config.patch_size,
        "in_chans": config.bands,
        "embed_dim": config.width,
        "depth": config.blocks,
        "num_heads": config.heads,
        "mlp_ratio": config.mlp_ratio,
        "init_values": config.layer_scale,
        "global_pool": "token",  # timm's models with rope otherwise average their patches
    }
    args = {key: value for key, value in args.items() if value is not None}
    if config.positions == "rope":
        gated = {"swiglu_mlp": True, "mlp_ratio": config.mlp_width / config.width, "swiglu_align_to": 8}
        more = gated if config.ffn_layer == "swiglu" else {}
        arch, eps = "vit_small_patch16_dinov3_qkvb", 1e-5
        args |= {"num_reg_tokens": config.registers, "rope_temperature": config.rope_base, **more}
    elif config.pre_norm:
        arch, eps = ("vit_base_patch16_clip_quickgelu_224" if config.quick_gelu else "vit_base_patch16_clip_224"), 1e-5
    elif config.ffn_layer == "swiglu":
        # timm counts both halves of the gated layer.
        arch, eps = "vit_giant_patch14_dinov2", 1e-6
        args |= {
            "mlp_ratio": 2 * config.mlp_width / config.width,
            "reg_tokens": config.registers,
            "no_embed_class": config.registers > 0,
        }
    else:
        arch, eps = "vit_base_patch16_224", 1e-6
        args |= {"reg_tokens": config.registers, "no_embed_class": config.registers > 0}
    if config.norm_eps != eps:
        raise ConfigError(
            f"--layout timm: timm's {arch} has layer norms with epsilon {eps:g}, got norm_eps={config.norm_eps:g}. Use --layout torch or dino."
        )
    return arch, args


def refuse_mixtures(config: VitConfig, layout: str) -> None:
    """Raise `ConfigError` for combinations of DINO's and CLIP's keys, which no model of other libraries has."""
    more = config.registers or config.ffn_layer == "swiglu" or config.positions == "rope"
    if (config.quick_gelu and not config.pre_norm) or (config.pre_norm and more):
        raise ConfigError(
            f"--layout {layout}: has no model with these settings, got pre_norm={config.pre_norm}, "
            f"quick_gelu={config.quick_gelu}, registers={config.registers}, ffn_layer={config.ffn_layer}, "
            f"positions={config.positions}. Use --layout torch or dino."
        )


def _timm_names(weights: Mapping[str, Tensor], config: VitConfig) -> dict[str, Tensor]:
    if config.positions != "rope":
        return dinov2_as_timm(weights)
    state: dict[str, Tensor] = {}
    for name, value in weights.items():
        new = re.sub(r"ls(1|2)\.gamma", r"gamma_\1", name.replace("register_tokens", "reg_token"))
        if new.endswith("attn.qkv.bias"):
            query, _, own = value.chunk(3)
            state[new.replace("qkv.bias", "q_bias")], state[new.replace("qkv.bias", "v_bias")] = query, own
        elif ".mlp.w12." in new:
            state[new.replace("w12", "fc1_g")], state[new.replace("w12", "fc1_x")] = value.chunk(2)
        else:
            state[new.replace("mlp.w3.", "mlp.fc2.")] = value
    return state


def write_folder(
    folder: Path,
    content: Mapping[str, Any],
    state: Mapping[str, Tensor],
    config: VitConfig,
    weights: Mapping[str, Tensor],
) -> None:
    """Write a folder of another library, and the readout, which other libraries do not have, next to the backbone.

    Args:
        folder: the folder.
        content: the library's config.json.
        state: weights under the library's names.
        config, weights: the model, and its weights under our names.

    Raises:
        ConfigError: the readout reads tokens before the last norm, which other libraries do not return.
    """
    own = f"{config.readout.kind}."
    readout = {name.removeprefix(own): t.contiguous().clone() for name, t in weights.items() if name.startswith(own)}
    if readout and config.timm_model_name is not None:  # it has a norm before it, which timm does not know
        readout |= {name: t for name, t in weights.items() if name.startswith("readout_norm.")}
    if (readout or not config.readout.reads_cls) and config.readout.placement.norm != "tokens":
        raise ConfigError(
            "--layout: the readout reads tokens from before the last norm, but this layout does not return them. Use --layout torch or dino."
        )
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "config.json", json.dumps(content, indent=2) + "\n")
    _save(folder / "model.safetensors", state, {"format": "pt"})
    if readout:
        _save(folder / _READOUT, readout)
        write_whole(folder / _READOUT_CONFIG, config.model_dump_json(indent=2) + "\n")


def _save(path: Path, state: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    with whole_file(path) as temporary:
        save_file({name: t.contiguous().clone() for name, t in state.items()}, temporary, metadata=metadata)


class PlacedReadout(nn.Module):
    """Readout of an export: maps the output of the library's `forward_features` to slots, with the tokens and norms of training."""

    def __init__(self, module: ReadOut, config: VitConfig):
        super().__init__()
        self.module, self.place, self.width = module, config.readout.placement, config.width
        if config.timm_model_name is None:
            self.prefix = 1 + config.registers
        else:
            with torch.device("meta"):  # only the model knows how many tokens come before its patches
                self.prefix = TimmBackbone(config).prefix
        self.readout_norm = nn.Identity() if config.timm_model_name is None else nn.LayerNorm(config.width)

    def forward(self, tokens: Tensor, need_attention: bool = False) -> Slots:
        """Return slots (B, L, V), and attention if it is needed, of tokens (B, N, d) or features (B, d, H, W) or (B, H, W, d)."""
        if tokens.ndim == 4:
            tokens = tokens.flatten(2).mT if tokens.shape[1] == self.width else tokens.flatten(1, 2)
        return read_slots(self.module, self.place, self.readout_norm, tokens, None, need_attention, self.prefix)


def load_readout(folder: str | Path) -> PlacedReadout:
    """Return the readout of an export of layout `timm` or `transformers`; it maps normed tokens (B, N, d) to slots.

    Args:
        folder: the exported folder.

    Raises:
        CheckpointError: the folder has no readout.
    """
    place = Path(folder)
    if not (place / _READOUT).is_file():
        raise CheckpointError(f"{place}: has no readout ({_READOUT}). Export a run with a readout.")
    config = resolve(
        VitConfig, read_json(place / _READOUT_CONFIG, dict, CheckpointError), str(place / _READOUT_CONFIG), stored=True
    )
    readout = config.readout.build(config.width, None, config.width).image
    assert readout is not None
    placed, state = PlacedReadout(readout, config), load_file(place / _READOUT)
    own = "readout_norm."
    norm = {name.removeprefix(own): state.pop(name) for name in list(state) if name.startswith(own)}
    readout.load_state_dict(state)
    placed.readout_norm.load_state_dict(norm)
    return placed.eval()


class BackboneProgram(nn.Module):
    """Backbone with its normalization, for torch.export and ONNX."""

    def __init__(self, vit: Vit | TimmBackbone, mean: Tensor, std: Tensor):
        super().__init__()
        self.vit = vit
        self.register_buffer("mean", mean.view(-1, 1, 1))
        self.register_buffer("std", std.view(-1, 1, 1))

    def forward(self, pixels: Tensor) -> tuple[Tensor, ...]:
        """Return encoding (n, D), normed patches (n, P, d), and the slots' attention (n, L, N), for uint8 pixels."""
        x = (pixels.float() / 255 - self.get_buffer("mean")) / self.get_buffer("std")
        vit = self.vit
        if isinstance(vit, TimmBackbone):
            features = vit.model.forward_features(x)
            hidden, _ = as_tokens(vit.model, features)
            norm, normed, pooled = vit.readout_norm, hidden, vit.model.forward_head(features, pre_logits=True)
        else:
            norm, hidden = vit.norm, vit.hidden(x, None)
            normed = norm(hidden)
            pooled = normed[:, 0]
        patches = normed[:, vit.prefix :]
        if vit.read_by is None:
            return pooled, patches, normed.new_zeros(normed.shape[0], 0, 0)
        slots = read_slots(vit.get_submodule(vit.read_by), vit.place, norm, hidden, None, True, vit.prefix)
        assert slots.attention is not None
        return slots.flat(), patches, slots.attention


def _torch(trained: TrainedWeights, path: Path) -> Path:
    config, weights = backbone_weights(trained)
    vit = build_backbone(config)
    vit.load_state_dict(weights)
    program = BackboneProgram(
        vit.eval(), torch.tensor(trained.objective.mean), torch.tensor(trained.objective.std)
    ).eval()
    example = torch.zeros(2, config.bands, config.image_size, config.image_size, dtype=torch.uint8)
    with torch.no_grad():
        exported = torch.export.export(program, (example,), dynamic_shapes=({0: torch.export.Dim("n", min=1)},))
    with whole_file(path) as temporary, temporary.open("wb") as stream:
        torch.export.save(exported, stream)
    return path


def with_readout(use: str, objective: Any) -> str:
    """Return the program of a model card, with the readout of the export if it has one."""
    config = objective.model
    with torch.device("meta"):
        readout = config.readout.build(config.width, None, config.width).image
    return use if readout is None else use + _READOUT_LOAD


TIMM = Export(_timm, "timm", lambda objective: with_readout(_TIMM_LOAD, objective), folder=True, library="timm")
TORCH = Export(_torch, "backbone.pt2", _TORCH_LOAD)
