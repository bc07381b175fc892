"""Exports of layout `transformers`: DINO's backbone as a folder; CLIP is in `transformers_clip.py`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from sparo_train.core.errors import ConfigError
from sparo_train.core.files import write_whole
from sparo_train.models.clip_config import ClipConfig
from sparo_train.models.vit_config import VitConfig

from .backbone_exports import backbone_weights, refuse_mixtures, with_readout, write_folder
from .exporting import Export, TrainedWeights
from .transformers_clip import CLIP_LOAD, write_clip_folder

_HF_LOAD = """from transformers import AutoImageProcessor, AutoModel

model = AutoModel.from_pretrained("PLACE").eval()
pixels = AutoImageProcessor.from_pretrained("PLACE")(image, return_tensors="pt")["pixel_values"]  # a PIL image
tokens = model(pixels).last_hidden_state  # (n, prefix + patches, width), normalized; the class token first"""


def _transformers(trained: TrainedWeights, folder: Path) -> Path:
    if isinstance(trained.objective.model, ClipConfig):
        return write_clip_folder(trained, folder)
    config, weights = backbone_weights(trained)
    if config.timm_model_name is not None:
        raise ConfigError(
            f"--layout transformers: has no class for timm's {config.timm_model_name}. Use --layout timm, which transformers' TimmWrapper loads."
        )
    trunk = {name: t for name, t in weights.items() if not name.startswith(f"{config.readout.kind}.")}
    content, names = _transformers_model(config)
    state: dict[str, Tensor] = {}
    for name, value in trunk.items():
        if match := re.fullmatch(r"(blocks\.\d+\.)attn\.qkv\.(weight|bias)", name):
            for part, piece in zip(("query", "key", "value"), value.chunk(3), strict=True):
                if not (config.positions == "rope" and part == "key" and match[2] == "bias"):
                    state[_hf_name(f"{match[1]}attn.{part}.{match[2]}", names)] = piece
        elif config.positions == "rope" and ".mlp.w12." in name:
            state[_hf_name(name.replace("w12", "gate"), names)], state[_hf_name(name.replace("w12", "up"), names)] = (
                value.chunk(2)
            )
        else:
            state[_hf_name(name, names)] = value
    if config.registers or config.positions == "rope":  # these models always have one
        shape = (1, 1, config.width) if config.positions == "rope" else (1, config.width)
        state["embeddings.mask_token"] = state["embeddings.cls_token"].new_zeros(shape)
    processor = {
        "image_processor_type": "BitImageProcessor",
        "do_resize": True,
        "size": {"shortest_edge": round(config.image_size * 256 / 224)},
        "resample": 3,
        "do_center_crop": True,
        "crop_size": {"height": config.image_size, "width": config.image_size},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(trained.objective.mean),
        "image_std": list(trained.objective.std),
    }
    write_folder(folder, content, state, config, weights)
    write_whole(folder / "preprocessor_config.json", json.dumps(processor, indent=2) + "\n")
    return folder


_HF_BLOCK = {
    "norm1.": "norm1.", "norm2.": "norm2.", "attn.query.": "attention.attention.query.", "attn.key.": "attention.attention.key.",
    "attn.value.": "attention.attention.value.", "attn.proj.": "attention.output.dense.", "ls1.gamma": "layer_scale1.lambda1",
    "ls2.gamma": "layer_scale2.lambda1", "mlp.w12.": "mlp.weights_in.", "mlp.w3.": "mlp.weights_out.",
}  # fmt: skip
_HF_VIT_BLOCK = {
    **_HF_BLOCK, "norm1.": "layernorm_before.", "norm2.": "layernorm_after.", "mlp.fc1.": "intermediate.dense.", "mlp.fc2.": "output.dense.",
}  # fmt: skip
_HF_ROPE_BLOCK = {
    **_HF_BLOCK, "attn.query.": "attention.q_proj.", "attn.key.": "attention.k_proj.", "attn.value.": "attention.v_proj.",
    "attn.proj.": "attention.o_proj.", "mlp.gate.": "mlp.gate_proj.", "mlp.up.": "mlp.up_proj.", "mlp.fc1.": "mlp.up_proj.",
    "mlp.fc2.": "mlp.down_proj.", "mlp.w3.": "mlp.down_proj.",
}  # fmt: skip
_HF_STEM = {
    "cls_token": "embeddings.cls_token", "pos_embed": "embeddings.position_embeddings", "register_tokens": "embeddings.register_tokens",
    "patch_embed.proj.": "embeddings.patch_embeddings.projection.", "norm.": "layernorm.",
}  # fmt: skip

_HfNames = tuple[str, Mapping[str, str], Mapping[str, str]]  # prefix of blocks, names in a block, other names


def _transformers_model(config: VitConfig) -> tuple[dict[str, Any], _HfNames]:
    """Return transformers' config and its names. Raises `ConfigError` if transformers has no such model."""
    refuse_mixtures(config, "transformers")
    if config.pre_norm:
        raise ConfigError("--layout transformers: has no model with pre_norm=true. Use --layout timm or torch.")
    content: dict[str, Any] = {
        "hidden_size": config.width,
        "num_hidden_layers": config.blocks,
        "num_attention_heads": config.heads,
        "image_size": config.image_size,
        "patch_size": config.patch_size,
        "num_channels": config.bands,
        "layer_norm_eps": config.norm_eps,
        "hidden_act": "gelu",
        "torch_dtype": "float32",
    }
    gated = config.ffn_layer == "swiglu"
    hidden = config.mlp_width
    if config.positions == "rope":
        content |= {
            "model_type": "dinov3_vit",
            "architectures": ["DINOv3ViTModel"],
            "num_register_tokens": config.registers,
        }
        content |= {
            "rope_theta": config.rope_base,
            "intermediate_size": hidden,
            "use_gated_mlp": gated,
            "key_bias": False,
        }
        content |= {"hidden_act": "silu" if gated else "gelu", "layerscale_value": config.layer_scale or 1.0}
        stem = {**_HF_STEM, "patch_embed.proj.": "embeddings.patch_embeddings.", "norm.": "norm."}
        return content, ("layer.", _HF_ROPE_BLOCK, stem)
    if config.layer_scale is None and not gated and not config.registers:
        content |= {"model_type": "vit", "architectures": ["ViTModel"], "intermediate_size": hidden, "qkv_bias": True}
        return content, ("encoder.layer.", _HF_VIT_BLOCK, _HF_STEM)
    if config.layer_scale is None:
        raise ConfigError(
            "--layout transformers: registers and gated MLPs need objective.model.layer_scale, got none. Use --layout timm or torch."
        )
    if not config.mlp_ratio.is_integer():
        raise ConfigError(
            f"--layout transformers: objective.model.mlp_ratio must be a whole number, got {config.mlp_ratio}. Use "
            "--layout timm or torch."
        )
    kind = "dinov2_with_registers" if config.registers else "dinov2"
    content |= {
        "model_type": kind,
        "architectures": ["Dinov2WithRegistersModel" if config.registers else "Dinov2Model"],
    }
    content |= {
        "mlp_ratio": int(config.mlp_ratio),
        "use_swiglu_ffn": gated,
        "layerscale_value": config.layer_scale,
        "use_mask_token": False,
    }
    content |= {"num_register_tokens": config.registers} if config.registers else {}
    return content, ("encoder.layer.", _HF_BLOCK, _HF_STEM)


def _hf_name(name: str, names: _HfNames) -> str:
    prefix, block, stem = names
    if match := re.match(r"blocks\.(\d+)\.(.+)", name):
        rest = match[2]
        new = next((to + rest.removeprefix(own) for own, to in block.items() if rest.startswith(own)), rest)
        return f"{prefix}{match[1]}.{new}"
    return next((to + name.removeprefix(own) for own, to in stem.items() if name.startswith(own)), name)


def _use(objective: Any) -> str:
    return CLIP_LOAD if isinstance(objective.model, ClipConfig) else with_readout(_HF_LOAD, objective)


TRANSFORMERS = Export(_transformers, "transformers", _use, folder=True, library="transformers")
