"""Any image backbone of timm (ResNet, ConvNeXt, Swin, ViT, …) as DINO's backbone, with its own pooling or a readout of its last features."""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import timm
import torch
from timm.models import adapt_input_conv
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..core.errors import did_you_mean
from .global_batch_norm import make_global
from .readout import Slots, read_slots

# Arguments by which families of models accept other image sizes than the one they are built for; convnets need none.
_ANY_SIZE: tuple[dict[str, Any], ...] = ({"dynamic_img_size": True}, {"strict_img_size": False}, {})


class BackboneFacts(NamedTuple):
    """Sizes that a model's name implies.

    Attributes:
        width: channels of the last features.
        pooled: number of values after the model's own pooling.
        stride: pixels of the image per position of the last features.
        batch_norm: it normalizes over the batch.
    """

    width: int
    pooled: int
    stride: int
    batch_norm: bool


@functools.lru_cache(maxsize=64)
def backbone_facts(name: str, image_size: int, size: int | None = None) -> BackboneFacts:
    """Return the facts of a model for square images of `image_size` pixels, which is built and run without memory.

    Args:
        name, image_size: timm's name, and the size that the model is built for.
        size: pixels of the image that it is run on. Default: `image_size`.

    Raises:
        ValueError: timm has no such model, or it does not take images of this size.
    """
    size = image_size if size is None else size
    model_name, _, tag = name.partition(".")
    if tag and timm.is_model(model_name):
        raise ValueError(
            f"timm_model_name={name}: the suffix {tag} names pretrained weights, which this key does not load. Set "
            f"timm_model_name={model_name}, and init=timm:{name}@FILE for the weights."
        )
    if not timm.is_model(name):
        raise ValueError(f"timm_model_name={name}: {did_you_mean(name.split('.')[0], timm.list_models())}")
    try:
        with torch.device("meta"):
            model = _create(name, image_size)[0].eval()
            features = model.forward_features(torch.zeros(1, 3, size, size))
            pooled = model.forward_head(features, pre_logits=True)
    except (TypeError, ValueError, AttributeError, IndexError, RuntimeError, AssertionError) as error:
        raise ValueError(f"timm_model_name={name}: does not take images of {size} pixels ({error})") from None
    tokens, prefix = as_tokens(model, features)
    side = round((tokens.shape[1] - prefix) ** 0.5)
    if pooled.ndim != 2 or side < 1 or side**2 != tokens.shape[1] - prefix:
        raise ValueError(f"timm_model_name={name}: has no square grid of features for images of {size} pixels")
    batch_norm = any(isinstance(part, _BatchNorm) for part in model.modules())
    return BackboneFacts(tokens.shape[2], pooled.shape[1], -(-size // side), batch_norm)


@functools.lru_cache(maxsize=64)
def count_written_values(name: str, image_size: int, size: int) -> int:
    """Return the number of values that the layers of a model, built for `image_size`, write for one image of `size` pixels."""
    counts: list[int] = []

    def count(_module: nn.Module, _inputs: Any, output: Any) -> None:
        counts.append(output.numel() if isinstance(output, Tensor) else 0)

    with torch.device("meta"):
        model = _create(name, image_size)[0].eval()
        for part in model.modules():
            if not list(part.children()):
                part.register_forward_hook(count)
        model.forward_features(torch.zeros(1, 3, size, size))
    return sum(counts)


def as_tokens(model: Any, features: Tensor) -> tuple[Tensor, int]:
    """Return features of `forward_features` as tokens (n, prefix + P, D), row by row, and the number before the patches."""
    if features.ndim == 3:
        return features, getattr(model, "num_prefix_tokens", 0)
    channels_last = getattr(model, "output_fmt", "NCHW") == "NHWC"
    return (features.flatten(1, 2) if channels_last else features.flatten(2).mT), 0


class TimmBackbone(nn.Module):
    """Backbone of a `VitConfig` with `timm_model_name`: normalised pixels (B, C, H, W) to encodings (B, out_width).

    The encoding is what timm calls pre-logits, or the flat slots of a readout of the last features. Weights are those
    of timm, below `model.`.
    """

    blocks: Sequence[nn.Module] = ()

    def __init__(self, config: Any):
        super().__init__()
        self.config = config
        # `args`: further arguments of timm.create_model.
        self.model, self.args = _create(config.timm_model_name, config.image_size, config.bands)
        make_global(self.model)
        self.embed_dim, self.prefix = config.width, getattr(self.model, "num_prefix_tokens", 0)
        self.place = config.readout.placement
        readout = config.readout.build(config.width, None, config.width).image
        self.read_by = config.readout.kind if readout is not None else None
        # Families differ in whether their last features are normed.
        normed = readout is not None and self.place.norm != "nothing"
        self.readout_norm = nn.LayerNorm(config.width) if normed else nn.Identity()
        if readout is not None:
            self.add_module(config.readout.kind, readout)

    def forward(self, x: Tensor, drop: Tensor | None = None) -> Tensor:
        """Return the encoding; `drop` must be None, because timm draws dropped paths itself."""
        assert drop is None
        features = self.model.forward_features(x)
        if self.read_by is None:
            return self.model.forward_head(features, pre_logits=True)
        return self._read(features, False).flat()

    def slots(self, x: Tensor, drop: Tensor | None = None, need_attention: bool = False) -> Slots:
        """Return slots (B, L, V) with attention (B, L, N) over all positions of the last features; needs a readout."""
        return self._read(self.model.forward_features(x), need_attention)

    def with_patches(self, x: Tensor, drop: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the encoding, and the last features as patches (B, P, d), row by row; `drop` must be None."""
        assert drop is None
        features = self.model.forward_features(x)
        patches = as_tokens(self.model, features)[0][:, self.prefix :]
        if self.read_by is None:
            return self.model.forward_head(features, pre_logits=True), patches
        return self._read(features, False).flat(), patches

    def intermediate(self, x: Tensor, n: int) -> list[Tensor]:
        """Return the last features as tokens (B, prefix + P, d) in a list; `n` must be 1."""
        assert n == 1
        return [as_tokens(self.model, self.model.forward_features(x))[0]]

    def fit(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return weights under the names of this model, adapted to its image size and bands by timm, without the classifier."""
        adapt = getattr(sys.modules[type(self.model).__module__], "checkpoint_filter_fn", None)
        own = dict(weights) if adapt is None else adapt(dict(weights), self.model)
        known = self.model.state_dict()
        classifier = str(self.model.default_cfg.get("classifier") or "")
        first = self.model.default_cfg.get("first_conv") or ()
        for name in (f"{layer}.weight" for layer in ([first] if isinstance(first, str) else first)):
            if name in own and name in known and own[name].shape[1] == 3 != known[name].shape[1]:
                own[name] = adapt_input_conv(known[name].shape[1], own[name])
        return {name: t for name, t in own.items() if name in known or not name.startswith(f"{classifier}.")}

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.model.set_grad_checkpointing(enable)

    def _read(self, features: Tensor, need_attention: bool) -> Slots:
        assert self.read_by is not None
        tokens, prefix = as_tokens(self.model, features)
        readout = self.get_submodule(self.read_by)
        return read_slots(readout, self.place, self.readout_norm, tokens, None, need_attention, prefix)


def _create(name: str, size: int, bands: int = 3) -> tuple[Any, dict[str, Any]]:
    """Return a model without classifier and weights for images of `size` pixels, which accepts others if its family does, and its arguments."""
    kwargs: Any
    channels = {} if bands == 3 else {"in_chans": bands}
    for kwargs in (*({"img_size": size, **more, **channels} for more in _ANY_SIZE), channels):
        try:
            return timm.create_model(name, pretrained=False, num_classes=0, **kwargs), kwargs
        except TypeError:  # another family, unless there were no arguments
            if "img_size" not in kwargs:
                raise
    raise AssertionError
