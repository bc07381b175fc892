"""Foreign models as encoders: any open_clip model, and timm backbones.

    open_clip:ViT-B-32@laion2b_e16.pt   open_clip:ViT-B-32-quickgelu@openai
    timm:vit_small_patch16_224@weights.safetensors

Files are read as they are; a tag or a hub name is downloaded by the library itself unless its cache has it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import open_clip
import timm
import torch
from open_clip.transform import PreprocessCfg, image_transform_v2
from timm.data.config import resolve_data_config
from timm.data.transforms_factory import create_transform
from torch import Tensor, nn

from sparo_train.core.errors import CheckpointError, ConfigError, did_you_mean
from sparo_train.core.files import read_json
from sparo_train.core.logs import no_root_handler
from sparo_train.models.weight_files.dino_files import dinov2_as_timm, select_backbone
from sparo_train.models.weight_files.state_dicts import archive_root, extract_state, read_raw, split_state
from sparo_train.models.weight_files.timm_config import read_timm_config
from sparo_train.models.weight_files.weights import load_into

from .capabilities import PatchesEncoder, TokensEncoder
from .dense import DenseEncoder
from .encoder import Encoder, TwoTowerEncoder
from .hf_pooling import first_line as _first_line
from .hf_pooling import refuse_unsteady
from .pixels import LibraryPixels, Pixels


class OpenClipEncoder(TwoTowerEncoder, DenseEncoder):
    """A model that open_clip builds, with open_clip's own transform.

    Args:
        name: a model name.
        weights: a file, or a tag that open_clip knows.
    """

    def __init__(self, name: str, weights: str):
        import sparo_train.openclip  # noqa: F401  also our own names and readouts

        label = f"open_clip:{name}@{weights}"
        weights, state = split_state(weights)
        self._config = open_clip.get_model_config(name)
        if self._config is None:
            raise ConfigError(f"{label}: {did_you_mean(name, open_clip.list_models())}")
        # Check before building, because open_clip would treat a wrong tag as a download and report a network error.
        if not Path(weights).is_file() and weights not in open_clip.list_pretrained_tags_by_model(name):
            tags = ", ".join(open_clip.list_pretrained_tags_by_model(name)) or "none"
            raise CheckpointError(f"{label}: {weights} is neither a file nor a tag of {name}, whose tags are: {tags}")
        self._refuse_other_gelu(name, weights, label)
        described = _read_config(Path(weights)).get("model_cfg")
        for key, value in _numbers({"quick_gelu": False, **described} if isinstance(described, dict) else {}).items():
            own = _numbers({"quick_gelu": False, **self._config}).get(key, value)
            if own != value:
                raise ConfigError(
                    f"{label}: {name} has {key}={own}, but the open_clip_config.json next to the weights says {value}. Name the model "
                    f"that this config describes, score the folder itself ({Path(weights).parent}), or move the weights to another folder."
                )
        try:
            with no_root_handler():
                built: Any = open_clip.create_model_and_transforms(
                    name,
                    pretrained=None if state else weights,
                    force_custom_text=True,
                    **_preprocess_kwargs(Path(weights)),
                )
                if state:  # open_clip only accepts a path
                    open_clip.load_checkpoint(built[0], f"{weights}?state={state}")
                tokenizer = open_clip.get_tokenizer(name)
        except (OSError, RuntimeError, KeyError, AssertionError) as error:
            raise CheckpointError(f"{label}: open_clip cannot load it ({str(error)[:300]})") from None
        model, transform = built[0], built[2]
        if fill := _read_preprocess(Path(weights)).get("fill_color"):  # no argument of the builder
            settings = PreprocessCfg(**{**model.visual.preprocess_cfg, "fill_color": fill})
            transform: Any = image_transform_v2(settings, is_train=False)
        pixels = LibraryPixels(transform.transforms, label)
        super().__init__(model, pixels.mean, pixels.std, label)
        self.transform, self.tokenize = pixels, tokenizer
        size = model.visual.image_size
        self.image_size = size if isinstance(size, int) else size[0]
        text = model.text
        reads_eot = getattr(text, "attn_mask", None) is not None and getattr(text, "pool_type", "") == "argmax"
        # Only texts that are read at EOT under a causal mask may be cut after it; CoCa appends a class token with its
        # own position.
        reads_eot = reads_eot and getattr(text, "cls_emb", None) is None
        self.causal = reads_eot and isinstance(tokenizer, open_clip.SimpleTokenizer)

    def _refuse_other_gelu(self, name: str, weights: str, label: str) -> None:
        """Raise `ConfigError` if weights were trained with another GELU than this name builds; open_clip only warns, and for tags only."""
        if Path(weights).is_file():
            pretrained_cfg = (
                {"quick_gelu": True} if archive_root(Path(weights)) is not None else {}
            )  # OpenAI's archives
        else:
            pretrained_cfg = open_clip.get_pretrained_cfg(name, weights)
        if "quick_gelu" in pretrained_cfg and bool(pretrained_cfg["quick_gelu"]) != bool(
            (self._config or {}).get("quick_gelu", False)
        ):
            other = name.removesuffix("-quickgelu") if name.endswith("-quickgelu") else f"{name}-quickgelu"
            kind = "OpenAI's approximation of GELU" if pretrained_cfg["quick_gelu"] else "GELU itself"
            raise ConfigError(
                f"{label}: these weights were trained with {kind}, but {name} does not use it. Write "
                f"open_clip:{other}@{weights}."
            )

    @property
    def architecture(self) -> str:
        return "open_clip " + json.dumps(self._config, sort_keys=True, default=str)

    def _texts(self, tokens: Tensor) -> Tensor:
        if not self.causal:
            return super()._texts(tokens)
        text: Any = self.model.text
        whole = text.attn_mask
        text.attn_mask = whole[: tokens.shape[1], : tokens.shape[1]]  # open_clip does not cut it for shorter rows
        try:
            return super()._texts(tokens)
        finally:
            text.attn_mask = whole


class BackboneEncoder(Encoder):
    """A vision model without texts; encodings are unchanged.

    Args:
        forward: normalised pixels (n, 3, S, S) to encodings (n, D).
        architecture: see `Encoder`.
        pooling: description of how tokens become one encoding, which is part of the identity of stored features.
        source: the whole content of the checkpoint, `model` may be a part of it, for starting a training.
    """

    def __init__(
        self,
        model: nn.Module,
        forward: Callable[[Tensor], Tensor],
        transform: LibraryPixels | Pixels,
        normalisation: tuple[Sequence[float], Sequence[float]],
        size: int,
        architecture: str,
        label: str,
        pooling: str,
        source: nn.Module | None = None,
    ):
        super().__init__(model, *normalisation, label)
        self.pooling = pooling
        self.source = model if source is None else source
        self._forward, self.transform, self.image_size, self._architecture = forward, transform, size, architecture

    @property
    def architecture(self) -> str:
        return f"{self._architecture} pooling={self.pooling}"

    @torch.inference_mode()
    def encode(self, pixels: Tensor) -> Tensor:
        with self.autocast():
            return self._forward(self.normalize(pixels)).float()


class TimmVitEncoder(BackboneEncoder, PatchesEncoder, TokensEncoder):
    """One of timm's vision transformers: CLS and registers come before its patches."""

    model: Any

    @property
    def prefix_tokens(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.model.num_prefix_tokens

    @property
    def token_width(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.model.num_features

    @property
    def has_class_token(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return getattr(self.model, "cls_token", None) is not None

    @torch.inference_mode()
    def tokens(self, pixels: Tensor) -> Tensor:
        with self.autocast():
            return self.model.forward_features(self.normalize(pixels)).float()

    def patch_tokens(self, normalised: Tensor) -> Tensor:
        return self.model.forward_features(normalised)[:, self.model.num_prefix_tokens :]


def _read_config(weights: Path) -> dict[str, Any]:
    """Return the `open_clip_config.json` next to a weight file; empty without one."""
    config_file = weights.parent / "open_clip_config.json"
    if not weights.is_file() or not config_file.is_file():
        return {}
    return read_json(config_file, dict, CheckpointError)


# Keys of open_clip's configs on which the output of a model depends.
_ARCHITECTURE = {"embed_dim", "quick_gelu", "image_size", "patch_size", "width", "layers", "heads", "head_width", "mlp_ratio"} | {
    "context_length", "vocab_size",
}  # fmt: skip


def _numbers(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers and switches of these keys in a config of open_clip, by dotted key."""
    blocks = {"": config, **{f"{key}.": block for key, block in config.items() if isinstance(block, Mapping)}}
    return {
        f"{prefix}{key}": value
        for prefix, block in blocks.items()
        for key, value in block.items()
        if key in _ARCHITECTURE and isinstance(value, bool | int | float)
    }


def _preprocess_kwargs(weights: Path) -> dict[str, Any]:
    """Return the preprocessing of a file's model, in the arguments of open_clip's builder, if an `open_clip_config.json` is next to the file."""
    words, settings = ("mean", "std", "interpolation", "resize_mode"), _read_preprocess(weights)
    return {f"image_{key}": settings[key] for key in words if settings.get(key)}


def _read_preprocess(weights: Path) -> dict[str, Any]:
    settings = _read_config(weights).get("preprocess_cfg")
    return settings if isinstance(settings, dict) else {}


READOUT_REMEDY = (
    "has a readout (readout.safetensors), which the library's model ignores. Score the run, or an export of layout onnx or dino; "
    "`sparo.load_readout` applies the readout to the tokens of the library's model."
)


def refuse_ignored_readout(place: Path, label: str) -> None:
    """Raise `CheckpointError` for an export of sparo whose readout another library's model does not have."""
    if (place / "readout.safetensors").is_file():
        raise CheckpointError(f"{label}: {place} {READOUT_REMEDY}")


def from_open_clip(text: str) -> OpenClipEncoder:
    """Return the encoder of `open_clip:NAME@FILE` or `open_clip:NAME@TAG`."""
    name, at, weights = text.partition("@")
    if not at:
        raise ConfigError(
            f"open_clip:{text}: expected open_clip:NAME@FILE or open_clip:NAME@TAG, as in open_clip:ViT-B-32-quickgelu@openai"
        )
    return OpenClipEncoder(name, weights)


def from_timm(place: str) -> BackboneEncoder:
    """Return the encoder of `timm:NAME` or `timm:NAME@FILE`: a backbone without its classifier, with timm's pooling and evaluation transform."""
    name, _, weights = place.partition("@")
    label = f"timm:{name}@{weights}" if weights else f"timm:{name}"
    if not timm.is_model(name):
        raise ConfigError(f"{label}: {did_you_mean(name.split('.')[0], timm.list_models())}")
    if weights and not Path(split_state(weights)[0]).is_file():
        raise CheckpointError(f"{label}: {weights} is not a file")
    if weights:
        refuse_ignored_readout(Path(split_state(weights)[0]).parent, label)
    state = timm_state(weights, label) if weights else {}
    transform_config, arguments = read_timm_config(Path(split_state(weights)[0]), name, label)
    # A fine-tuned ViT may average its patches, although the model of this name reads the class token.
    pool_option: dict[str, Any] = {"global_pool": "avg"} if "fc_norm.weight" in state else {}
    try:
        # Without a classifier, because its input is scored.
        model = timm.create_model(name, pretrained=not weights, **{**arguments, **pool_option, "num_classes": 0})
    except (OSError, RuntimeError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"{label}: timm cannot build this model ({str(error)[:300]}). Name a file with its weights: timm:{name}@FILE."
        ) from None
    if weights:
        load_into(model, _without_head(state, model), weights)
    # A config next to the file describes these weights, so it takes precedence over that of the name.
    own: Any = model.pretrained_cfg
    config = resolve_data_config({}, {**own, **transform_config}, model)
    transform: Any = create_transform(**config, is_training=False)
    pixels = LibraryPixels(transform.transforms, label, rgb_first=True)
    size = config["input_size"][-1]
    # A ViT has prefix tokens and a sequence of features, so its patches can be read; other models only return one
    # vector.
    kind = (
        TimmVitEncoder
        if hasattr(model, "num_prefix_tokens") and _has_token_features(model, size, label)
        else BackboneEncoder
    )
    # In convnets, it is a layer of the model or of its head that has a name.
    pooled: Any = getattr(model, "global_pool", None) or getattr(getattr(model, "head", None), "global_pool", None)
    pooled = getattr(pooled, "pool_type", pooled)
    pooling = pooled if isinstance(pooled, str) and pooled else "timm's own"
    encoder = kind(model, model, pixels, (pixels.mean, pixels.std), size, f"timm {name}", label, pooling)
    refuse_unsteady(encoder)
    return encoder


@torch.inference_mode()
def _has_token_features(model: Any, size: int, label: str) -> bool:
    try:
        return model.eval().forward_features(torch.zeros(1, 3, size, size)).dim() == 3
    except Exception as error:  # foreign models may fail in any way
        raise CheckpointError(
            f"{label}: a test image of {size} pixels cannot be encoded ({_first_line(error)})"
        ) from None


def timm_state(place: str, label: str) -> dict[str, Tensor]:
    """Return the state dict in a timm, DINO or DINOv2 file (`FILE` or `FILE?state=KEY`) under timm's names. Raises `CheckpointError`."""
    file, key = split_state(place)
    raw = read_raw(file)
    key = "teacher" if key is None and isinstance(raw, dict) and "teacher" in raw else key
    return dinov2_as_timm(select_backbone(extract_state(raw, label, key)))


def _without_head(state_dict: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Remove the classifier that `model` does not have."""
    own, heads = (
        model.state_dict(),
        ("head.", "fc.", "classifier.", "head_dist.", "last_linear.", "dino_head.", "ibot_head."),
    )
    return {name: t for name, t in state_dict.items() if name in own or not name.startswith(heads)}
