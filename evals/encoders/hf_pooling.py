"""Pooling of transformers' vision models to one vector per image, as their documentation describes; other models are refused."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sparo_train.core.errors import CheckpointError, ConfigError

from .encoder import Encoder

# Input of the classification head of each model type without a pooler (transformers 5, `…ForImageClassification`).
_CLASS_TOKEN = {"vit", "deit", "vit_msn", "vit_mae", "pvt", "dpt", "yolos"}
_BY_CONFIG = {"beit", "data2vec-vision"}  # class token, or the mean of patches with config.use_mean_pooling
_MEAN_OF_TOKENS = {"ijepa"}
_MEAN_OF_MAP = {"segformer", "pvt_v2"}
Pool = Callable[[Any], Tensor]


def hf_pooling(model: Any, size: int, unpooled: bool, label: str) -> tuple[str, Callable[[Tensor], Tensor]]:
    """Return the pooling of a vision model in words, and the function from normalized pixels (n, 3, S, S) to encodings (n, D).

    Args:
        model: transformers' vision model, in evaluation mode.  unpooled: its file lacks the pooler's weights.

    Raises:
        CheckpointError: the model takes more than pixels, or fails on one image.
        ConfigError: no pooling is documented for this kind of model.
    """
    _refuse_other_inputs(model, label)
    extra: dict[str, Any] = {}
    if model.config.model_type == "vit_mae":
        # Its embeddings drop three quarters of the patches at random; a ratio of zero and sorted noise keep all, in
        # order.
        model.config.mask_ratio = 0.0
        extra["noise"] = torch.arange(model.embeddings.patch_embeddings.num_patches, dtype=torch.float32)

    def outputs(pixels: Tensor) -> Any:
        extra_inputs = {name: value.to(pixels.device).expand(len(pixels), -1) for name, value in extra.items()}
        return model(pixel_values=pixels, **extra_inputs)

    try:
        with torch.inference_mode():
            example_output = outputs(torch.zeros(1, 3, size, size))
    except Exception as error:  # foreign models may fail in any way
        raise CheckpointError(
            f"{label}: a test image of {size} pixels cannot be encoded ({first_line(error)})"
        ) from None
    name, pool = _documented_pooling(model.config, example_output, unpooled, label)
    return name, lambda pixels: pool(outputs(pixels))


def _documented_pooling(config: Any, example_output: Any, unpooled: bool, label: str) -> tuple[str, Pool]:
    pooled, hidden, kind = (
        getattr(example_output, "pooler_output", None),
        getattr(example_output, "last_hidden_state", None),
        config.model_type,
    )
    # The pooler of a convolutional network returns (n, C, 1, 1).
    if pooled is not None and not unpooled and pooled[0].numel() == pooled.shape[1]:
        return "pooler", lambda out: out.pooler_output.flatten(1)
    dims = hidden.dim() if isinstance(hidden, Tensor) else 0
    by_mean = kind in _BY_CONFIG and bool(config.use_mean_pooling)
    if dims == 3 and (kind in _CLASS_TOKEN or (kind in _BY_CONFIG and not by_mean)):
        return "class token", lambda out: out.last_hidden_state[:, 0]
    if dims == 3 and by_mean:
        return "mean of patches", lambda out: out.last_hidden_state[:, 1:].mean(1)
    if dims == 3 and kind in _MEAN_OF_TOKENS:
        return "mean of patches", lambda out: out.last_hidden_state.mean(1)
    if dims == 4 and kind in _MEAN_OF_MAP:
        return "mean of the map", lambda out: out.last_hidden_state.mean((2, 3))
    shape = tuple(hidden.shape) if isinstance(hidden, Tensor) else None
    raise ConfigError(
        f"{label}: sparo does not know how to pool the outputs of this model, got model_type={kind} with outputs of "
        f"shape {shape}. Score a model with a pooler or a class token, or score the same weights through "
        "timm:NAME@FILE."
    )


def _refuse_other_inputs(model: Any, label: str) -> None:
    """Raise `CheckpointError` for models of videos, or of pictures of any size, which need more than one picture's pixels."""
    required_inputs = [
        name
        for name, parameter in inspect.signature(model.forward).parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        and name not in ("self", "pixel_values")
    ]
    main = getattr(model, "main_input_name", "pixel_values")
    if required_inputs or main != "pixel_values":
        raise CheckpointError(
            f"{label}: can only score models whose single input is the pixels of one image, got the inputs "
            f"{', '.join(required_inputs or [main])}. Score another model."
        )


def refuse_unsteady(encoder: Encoder) -> None:
    """Encode one image twice; raise `CheckpointError` unless both give the same finite vector, because active masking or dropout shows no other sign."""
    size, chance = encoder.image_size, torch.Generator().manual_seed(0)
    # Noise instead of zeros, because masking does not show in a flat image.
    pixels = torch.randint(0, 256, (1, 3, size, size), generator=chance, dtype=torch.uint8)
    with torch.random.fork_rng(devices=[]):
        try:
            one, two = encoder.encode(pixels), encoder.encode(pixels)
        except Exception as error:  # foreign models may fail in any way
            raise CheckpointError(f"{encoder.label}: a test image cannot be encoded ({first_line(error)})") from None
    if not isinstance(one, Tensor) or one.dim() != 2 or len(one) != 1:
        raise CheckpointError(f"{encoder.label}: does not give one vector per image, got shape {tuple(one.shape)}")
    if not one.isfinite().all():
        raise CheckpointError(f"{encoder.label}: its encoding of an image is not finite. Fetch the weights again.")
    if not torch.equal(one, two):
        raise CheckpointError(
            f"{encoder.label}: two encodings of one image differ by {(one - two).abs().max():.3g}, so "
            "part of the model is random in evaluation mode. Score another model."
        )


def first_line(error: Exception) -> str:
    """Return an error's kind and the first line of its text."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"
