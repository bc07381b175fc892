"""Vision backbones of Hugging Face's transformers as encoders: `hf:FOLDER`, or a name whose files are in the library's cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparo_train.core.errors import CheckpointError, ConfigError
from sparo_train.core.files import read_json

from .capabilities import PatchesEncoder, TokensEncoder
from .foreign import READOUT_REMEDY, BackboneEncoder, refuse_ignored_readout
from .hf_pooling import hf_pooling, refuse_unsteady
from .pixels import FlooredPixels, Pixels, SquarePixels

# Model types whose last hidden state is normed, with the tokens before the patches other than registers.
_PREFIX = {"dinov2": 1, "dinov2_with_registers": 1, "dinov3_vit": 1, "vit": 1, "vit_msn": 1, "deit": 2}


class HfVitEncoder(BackboneEncoder, PatchesEncoder, TokensEncoder):
    """One of transformers' vision transformers: class token and registers come before its patches."""

    model: Any

    @property
    def prefix_tokens(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        config = self.model.config
        return _PREFIX[config.model_type] + getattr(config, "num_register_tokens", 0)

    @property
    def token_width(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.model.config.hidden_size

    @torch.inference_mode()
    def tokens(self, pixels: Tensor) -> Tensor:
        with self.autocast():
            return self.model(pixel_values=self.normalize(pixels)).last_hidden_state.float()

    def patch_tokens(self, normalised: Tensor) -> Tensor:
        return self.model(pixel_values=normalised).last_hidden_state[:, self.prefix_tokens :]


def from_huggingface(place: str) -> BackboneEncoder:
    """Load a vision backbone from a Hugging Face folder (or by name, from its cache), pooled as transformers documents it.

    Raises:
        CheckpointError: a model that lacks weights, needs more than an image, or does not encode one image twice alike.
        ConfigError: transformers is not installed, or no pooling of the model is documented.
    """
    try:
        from transformers import AutoConfig, AutoImageProcessor, AutoModel  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ConfigError(
            f"hf:{place}: needs transformers. Run `pip install -e '.[hf]'` in sparo's checkout."
        ) from None
    label = f"hf:{place}"
    if remedy := _timm_remedy(place):
        raise CheckpointError(f"{label}: {remedy}")
    refuse_ignored_readout(Path(place), label)
    try:
        config = AutoConfig.from_pretrained(place)
        processor = AutoImageProcessor.from_pretrained(place, backend="pil").to_dict()
        model, loaded = AutoModel.from_pretrained(place, config=config, use_safetensors=True, output_loading_info=True)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{label}: transformers cannot load it ({str(error)[:300]})") from None
    # transformers initializes missing weights at random. That does not matter for a classifier's pooler, which is not
    # used, but it does for others.
    # The registers of a model without any are an empty tensor, which files may omit.
    empty = {name for name, p in model.named_parameters() if not p.numel()}
    lacking = sorted(name for name in set(loaded["missing_keys"]) - empty if not name.startswith("text_model."))
    unpooled = bool(lacking) and all("pooler." in name for name in lacking)
    if lacking and not unpooled:
        raise CheckpointError(
            f"{label}: its weights lack {', '.join(lacking[:4])}, which would be initialized at random. Fetch the weights again."
        )
    # For a model with two towers, only the image tower is scored; its pooled output is before the projection. Missing
    # text weights do not matter.
    source = None if any(name.startswith("text_model.") for name in loaded["missing_keys"]) else model
    model = getattr(model, "vision_model", model).eval().float()  # transformers keeps the dtype of the file
    transform = _hf_pixels(processor, label)
    pooling, forward = hf_pooling(model, transform.size, unpooled, label)
    normalisation = (processor["image_mean"], processor["image_std"])
    kind = HfVitEncoder if model.config.model_type in _PREFIX else BackboneEncoder
    encoder = kind(
        model,
        forward,
        transform,
        normalisation,
        transform.size,
        f"hf {config.to_json_string()}",
        label,
        pooling,
        source,
    )
    refuse_unsteady(encoder)
    return encoder


def folder_remedy(place: str | Path) -> str:
    """Return what to write for a folder with a config.json."""
    if (Path(place) / "readout.safetensors").is_file():
        return READOUT_REMEDY
    if remedy := _timm_remedy(str(place)):
        return remedy
    texts = "text_config" in read_json(Path(place) / "config.json", dict, CheckpointError)
    only = " for its image tower; tasks with texts need the run, or an export of layout open_clip" if texts else ""
    return f"is a model folder of Hugging Face transformers. Write hf:{place}{only}."


def _timm_remedy(place: str) -> str:
    """Return what to write for a folder in timm's layout, which looks like one of transformers; empty for others."""
    config = Path(place) / "config.json"
    if not config.is_file() or "architecture" not in (facts := read_json(config, dict, CheckpointError)):
        return ""
    weights = next(
        (file for name in ("model.safetensors", "pytorch_model.bin") if (file := config.with_name(name)).is_file()),
        "FILE",
    )
    return f"is in the layout of timm. Write timm:{facts['architecture']}@{weights}."


def _hf_pixels(processor: dict[str, Any], label: str) -> Pixels:
    """Return the processor's resize and crop if ours computes the same (bicubic, shorter side, centre); otherwise raise an error."""
    scale = processor.get("rescale_factor", 1 / 255)
    if not processor.get("do_rescale", True) or abs(255 * scale - 1) > 1e-3 or processor.get("rescale_offset"):
        raise ConfigError(
            f"{label}: its image processor has do_rescale={processor.get('do_rescale')}, rescale_factor={scale}, rescale_offset="
            f"{processor.get('rescale_offset')}. sparo always scales pixels to the range 0 to 1 and then "
            "normalises them, but this model was trained with another scaling. Score another model."
        )
    size, crop = processor.get("size") or {}, processor.get("crop_size") or {}
    cropped = bool(processor.get("do_center_crop")) and crop.get("height") == crop.get("width")
    bicubic = processor.get("resample") == 3
    if processor.get("do_resize") and bicubic and cropped and "shortest_edge" in size and processor.get("do_normalize"):
        return FlooredPixels(crop["height"], size["shortest_edge"])
    square = (
        set(size) == {"height", "width"} and size["height"] == size["width"] and not processor.get("do_center_crop")
    )
    if processor.get("do_resize") and square and processor.get("resample") in (2, 3) and processor.get("do_normalize"):
        return SquarePixels(size["height"], size["height"], bicubic=bicubic)
    raise ConfigError(
        f"{label}: sparo does not support its image processor, so images cannot be preprocessed as in the model's "
        f"training, got size {size}, crop_size {crop}, resample {processor.get('resample')}. Use a model whose image "
        "processor normalises and either resizes the shortest side (bicubic) and crops the centre, or resizes "
        "directly to a square."
    )
