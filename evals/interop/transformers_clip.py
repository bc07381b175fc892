"""Exports of CLIP as a folder that transformers' `CLIPModel` and `CLIPProcessor` load."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from sparo_train.core.errors import ConfigError
from sparo_train.core.files import whole_file, write_whole
from sparo_train.data.examples.image_text import EOT, SOT
from sparo_train.models.clip_config import ClipConfig
from sparo_train.objectives.clip import scored_weights

from .exporting import TrainedWeights
from .tokenizer_file import tokenizer_json

logger = logging.getLogger(__name__)

CLIP_LOAD = """from transformers import CLIPModel, CLIPProcessor

model = CLIPModel.from_pretrained("PLACE").eval()
processor = CLIPProcessor.from_pretrained("PLACE")
inputs = processor(text=["a cat", "a dog"], images=image, return_tensors="pt", padding=True, truncation=True)  # a PIL image
shares = model(**inputs).logits_per_image.softmax(-1)"""

_BLOCK = {
    "ln_1.": "layer_norm1.", "ln_2.": "layer_norm2.", "attn.out_proj.": "self_attn.out_proj.", "mlp.c_fc.": "mlp.fc1.", "mlp.c_proj.": "mlp.fc2.",
}  # fmt: skip
_OTHERS = {
    "visual.class_embedding": "vision_model.embeddings.class_embedding",
    "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
    "visual.conv1.weight": "vision_model.embeddings.patch_embedding.weight",
    "visual.ln_pre.": "vision_model.pre_layrnorm.",
    "visual.ln_post.": "vision_model.post_layernorm.",
    "text.token_embedding.weight": "text_model.embeddings.token_embedding.weight",
    "text.positional_embedding": "text_model.embeddings.position_embedding.weight",
    "text.ln_final.": "text_model.final_layer_norm.",
    "logit_scale": "logit_scale",
}
_TOWERS = {"visual": "vision_model", "text": "text_model"}


def write_clip_folder(trained: TrainedWeights, folder: Path) -> Path:
    """Write config, weights, tokenizer and preprocessing. Raises `ConfigError` if transformers has no such model."""
    config: ClipConfig = trained.objective.model
    _refuse_others(config)
    state: dict[str, Tensor] = {}
    for name, value in scored_weights(trained.weights).items():
        if name == "logit_bias":
            logger.warning(
                "--layout transformers: CLIPModel has no logit_bias, so logits of the export differ by a constant. "
                "Rankings and softmax probabilities do not change."
            )
        elif name in ("visual.proj", "text.text_projection"):
            state["visual_projection.weight" if name[0] == "v" else "text_projection.weight"] = value.T.contiguous()
        else:
            state |= _rename(name, value)
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "config.json", json.dumps(_config(config), indent=2) + "\n")
    with whole_file(folder / "model.safetensors") as temporary:
        save_file({name: t.contiguous().clone() for name, t in state.items()}, temporary, {"format": "pt"})
    _write_processor(folder, config, trained.objective)
    return folder


def _refuse_others(config: ClipConfig) -> None:
    if config.readout.kind != "token":
        raise ConfigError(
            f"--layout transformers: CLIPModel has no readout {config.readout.kind}. Use --layout open_clip or onnx."
        )
    if config.vision.timm_model_name is not None:
        raise ConfigError(
            "--layout transformers: the image tower is a timm model, which CLIPModel of transformers does not contain. Use --layout open_clip or onnx."
        )


def _rename(name: str, value: Tensor) -> dict[str, Tensor]:
    """Return a weight of open_clip under transformers' names; queries, keys and values are separate there."""
    block = re.fullmatch(r"(visual|text)\.transformer\.resblocks\.(\d+)\.(.+)", name)
    if block is None:
        ours = next(prefix for prefix in _OTHERS if name.startswith(prefix))
        return {_OTHERS[ours] + name.removeprefix(ours): value}
    place = f"{_TOWERS[block[1]]}.encoder.layers.{block[2]}."
    if part := re.fullmatch(r"attn\.in_proj_(weight|bias)", block[3]):
        names = (f"{place}self_attn.{letter}_proj.{part[1]}" for letter in "qkv")
        return dict(zip(names, value.chunk(3), strict=True))
    ours = next(prefix for prefix in _BLOCK if block[3].startswith(prefix))
    return {f"{place}{_BLOCK[ours]}{block[3].removeprefix(ours)}": value}


def _config(config: ClipConfig) -> dict[str, Any]:
    vision, text = config.vision, config.text
    shared = {
        "hidden_act": "quick_gelu" if config.quick_gelu else "gelu", "layer_norm_eps": 1e-5, "projection_dim": config.embed_dim,
    }  # fmt: skip
    return {
        "model_type": "clip",
        "architectures": ["CLIPModel"],
        "torch_dtype": "float32",
        "projection_dim": config.embed_dim,
        "vision_config": {
            **shared,
            "model_type": "clip_vision_model",
            "hidden_size": vision.width,
            "intermediate_size": int(vision.width * vision.mlp_ratio),
            "num_hidden_layers": vision.layers,
            "num_attention_heads": vision.width // vision.head_width,
            "image_size": vision.image_size,
            "patch_size": vision.patch_size,
        },
        "text_config": {
            **shared,
            "model_type": "clip_text_model",
            "vocab_size": text.vocab_size,
            "hidden_size": text.width,
            "intermediate_size": int(text.width * text.mlp_ratio),
            "num_hidden_layers": text.layers,
            "num_attention_heads": text.heads,
            "max_position_embeddings": text.context_length,
            "bos_token_id": SOT,
            "eos_token_id": EOT,
            "pad_token_id": EOT,
        },
    }


def _write_processor(folder: Path, config: ClipConfig, objective: Any) -> None:
    length, size = config.text.context_length, config.vision.image_size
    write_whole(folder / "tokenizer.json", json.dumps(tokenizer_json(length), ensure_ascii=False))
    tokenizer = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": length,
        "bos_token": "<start_of_text>",
        "eos_token": "<end_of_text>",
        "pad_token": "<end_of_text>",  # the tower reads the first one
    }
    write_whole(folder / "tokenizer_config.json", json.dumps(tokenizer, indent=2) + "\n")
    images = {
        "image_processor_type": "CLIPImageProcessor",
        "processor_class": "CLIPProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"shortest_edge": size},
        "resample": 3,
        "do_center_crop": True,
        "crop_size": {"height": size, "width": size},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(objective.mean),
        "image_std": list(objective.std),
    }
    write_whole(folder / "preprocessor_config.json", json.dumps(images, indent=2) + "\n")
