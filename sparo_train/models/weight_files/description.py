"""Recognition of the model that weights belong to: from its description if there is one, otherwise from shapes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import open_clip
from torch import Tensor

from ...core.config import resolve
from ...core.errors import CheckpointError
from ...core.files import read_json
from ...core.registries import READOUTS
from ..clip_config import BACKBONES, OPENAI_MEAN, OPENAI_STD, ClipConfig

# Without our plug-in, open_clip's error only names the first key that it does not know; this key says what to
# do.
IMPORT_FIRST = "import sparo.openclip first (it comes with sparo)"
# The keys of exports that open_clip's error shows: the present one, and that of exports from before `sparo` was a
# package.
IMPORT_KEYS = frozenset({IMPORT_FIRST, "import sparo_train.openclip first (it comes with sparo)"})
CONFIG_KEY = "sparo_config"  # key of our `.pt` files with the model's description as plain values
# Preprocessing of every CLIP here, in open_clip's words.
_PREPROCESS = {"mode": "RGB", "interpolation": "bicubic", "resize_mode": "shortest"}


class ModelDescription(NamedTuple):
    """A model, and the mean and std that normalise its pixels in 0..1."""

    config: ClipConfig
    mean: tuple[float, ...] = OPENAI_MEAN
    std: tuple[float, ...] = OPENAI_STD


def read_config(content: Any, path: Path) -> ModelDescription | None:
    """Return the description in a file's content (`read_raw`) or in the `open_clip_config.json` next to the file; None without one.

    Raises:
        CheckpointError: the described model preprocesses images in another way than ours.
        ConfigError: the description is invalid.
    """
    if not isinstance(content, Mapping) or CONFIG_KEY not in content:
        config_path = path.parent / "open_clip_config.json"
        return read_export(config_path) if config_path.is_file() else None
    description, origin = content[CONFIG_KEY], f"{path}: {CONFIG_KEY}"
    if (
        not isinstance(description, dict) or "model" not in description
    ):  # descriptions of older versions had no mean and std
        return ModelDescription(resolve(ClipConfig, description, origin, stored=True))
    return ModelDescription(
        resolve(ClipConfig, description["model"], origin, stored=True), *parse_mean_std(description, origin)
    )


def parse_mean_std(description: Any, origin: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and std of a description. Raises `CheckpointError` if they are not for three channels."""
    try:
        return _per_channel(description["mean"]), _per_channel(description["std"], above=0)
    except (KeyError, ValueError, TypeError) as error:
        raise CheckpointError(f"{origin}: does not specify mean and std of three colours ({error!r})") from None


def read_export(path: Path) -> ModelDescription:
    """Return the content of an `open_clip_config.json`.

    Raises:
        CheckpointError: not such a file, or its model preprocesses images in another way than ours.
        ConfigError: the model has keys that ours do not have.
    """
    try:
        content = read_json(path, dict, CheckpointError)
        cfg, preprocess = content["model_cfg"], content.get("preprocess_cfg", {})
        # Weights would load and scores would look plausible, although images were squashed.
        odd = {k: v for k, v in preprocess.items() if k in _PREPROCESS and v not in (None, _PREPROCESS[k])}
        description = ModelDescription(
            from_model_cfg(cfg, str(path)),
            _per_channel(preprocess.get("mean") or OPENAI_MEAN),
            _per_channel(preprocess.get("std") or OPENAI_STD, above=0),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: not an open_clip config ({error!r})") from None
    for key, value in odd.items():
        raise CheckpointError(
            f"{path}: preprocess_cfg.{key}: sparo supports only {_PREPROCESS[key]!r}, got {value!r}. Load the weights "
            "into open_clip's own model: open_clip:NAME@FILE"
        )
    return description


def _per_channel(value: Any, above: float = -math.inf) -> tuple[float, ...]:
    """Return three numbers; a single one applies to all channels, as in open_clip. Raises `ValueError` or `TypeError`."""
    numbers = tuple(map(float, value if isinstance(value, list | tuple) else [value] * 3))
    if len(numbers) != 3 or not all(above < number < math.inf for number in numbers):
        raise ValueError(f"expected three numbers, one per colour, got {value!r}")
    return numbers


def from_model_cfg(cfg: Mapping[str, Any], origin: str) -> ClipConfig:
    """Return our description for an open_clip `model_cfg` with a ViT and a text transformer.

    Raises:
        ConfigError: it has keys that our towers do not have.
    """
    towers = ("vision_cfg", "text_cfg")
    vision, text = ({k: v for k, v in cfg[tower].items() if k not in IMPORT_KEYS} for tower in towers)
    text.pop("readout", None)
    tree = {
        "embed_dim": cfg["embed_dim"],
        "quick_gelu": cfg.get("quick_gelu", False),
        "init_logit_bias": cfg.get("init_logit_bias"),
        "readout": vision.pop("readout", {"kind": "token"}),
        "vision": vision,
        "text": text,
    }
    return resolve(ClipConfig, tree, origin)


def infer_config(state: Mapping[str, Tensor], image_size: int | None = None, quick_gelu: bool = False) -> ClipConfig:
    """Return the model that weights (in our layout) belong to, from their shapes.

    Shapes do not show the number of heads, which is taken from the published CLIP with the same widths and depths. The
    pooling is assumed to be the class token, not GAP.

    Raises:
        CheckpointError: not a ViT CLIP with a text transformer, or not of a published size.
    """
    try:
        conv, position = state["visual.conv1.weight"], state["visual.positional_embedding"]
        text_position, embedding = state["text.positional_embedding"], state["text.token_embedding.weight"]
    except KeyError as error:
        raise CheckpointError(
            f"weights: {error} is missing. Only CLIP models with a ViT and a text transformer are recognised."
        ) from None
    width, text_width = len(conv), embedding.shape[1]
    # The class token's position comes first, then the square of patches.
    grid = round((len(position) - 1) ** 0.5)
    layers, text_layers = (_blocks(state, tower) for tower in ("visual", "text"))
    readout = _infer_readout(state, 0)  # blocks are counted as they are
    heads = _heads_by_size(width, layers, text_width, text_layers, may_replace=readout["kind"] != "token")
    if heads is None:
        raise CheckpointError(
            "weights: the number of heads is unknown, because no published CLIP has both an image tower of width "
            f"{width} with {layers} blocks and a text tower of width {text_width} with {text_layers} blocks. Name "
            "the model: --model NAME, or --model FILE.json with an open_clip config."
        )
    embed_dim = readout.pop("embed_dim", None) or (state["visual.proj"].shape[1] if "visual.proj" in state else 512)
    return ClipConfig.model_validate(
        {
            "vision": {
                "image_size": image_size or grid * conv.shape[-1],
                "patch_size": conv.shape[-1],
                "width": width,
                "layers": layers,
                "head_width": width // heads.vision,
            },
            "text": {
                "context_length": len(text_position),
                "vocab_size": len(embedding),
                "width": text_width,
                "heads": heads.text,
                "layers": text_layers,
            },
            "embed_dim": embed_dim,
            "readout": readout,
            "quick_gelu": quick_gelu,
            "init_logit_bias": 0.0 if "logit_bias" in state else None,
        }
    )


def add_readout(config: ClipConfig, state: Mapping[str, Tensor]) -> ClipConfig:
    """Return a model that was named by its towers only, with the readout that the weights have."""
    readout = _infer_readout(state, config.vision.layers - _blocks(state, "visual"))
    if config.readout.kind != "token" or readout["kind"] == "token":
        return config
    embed_dim = readout.pop("embed_dim", config.embed_dim)
    return ClipConfig.model_validate({**config.model_dump(), "readout": readout, "embed_dim": embed_dim})


def _blocks(state: Mapping[str, Tensor], tower: str) -> int:
    prefix = f"{tower}.transformer.resblocks."
    return 1 + max((int(name.split(".")[3]) for name in state if name.startswith(prefix)), default=-1)


def _infer_readout(state: Mapping[str, Tensor], replaced: int) -> dict[str, Any]:
    """Return the `readout` block of a CLIP: of both towers if their head widths differ or texts have none."""
    readout = infer_readout(state, "visual.", replaced) or {"kind": "token"}
    keys = READOUTS.get(readout["kind"]).model_fields
    if "text" in keys:
        readout["text"] = any(name.startswith(f"text.{readout['kind']}.") for name in state)
    if "text_head_width" in keys:
        text = infer_readout(state, "text.", replaced) or readout
        if text["head_width"] != readout["head_width"]:
            readout["text_head_width"] = text["head_width"]
    return readout


class _Heads(NamedTuple):
    """Attention heads of both towers."""

    vision: int
    text: int


def _heads_by_size(width: int, layers: int, text_width: int, text_layers: int, may_replace: bool) -> _Heads | None:
    """Return the heads of the published CLIP of these sizes, or None.

    Args:
        width, layers, text_width, text_layers: sizes in the weights.
        may_replace: the readout may have replaced the last block of the image tower, or of both.
    """
    published = _published_heads()
    for more, text_more in ((0, 0), (1, 1), (1, 0)) if may_replace else ((0, 0),):
        if heads := published.get((width, layers + more, text_width, text_layers + text_more)):
            return heads
    return None


@cache
def _published_heads() -> dict[tuple[int, int, int, int], _Heads]:
    """Return heads by (width, layers, text width, text layers) of every ViT CLIP that open_clip lists, and of our own small ones.

    Sizes that are listed with two numbers of heads are excluded.
    """
    heads_by_size: dict[tuple[int, int, int, int], set[_Heads]] = {}
    configs = [open_clip.get_model_config(name) or {} for name in open_clip.list_models()]
    configs += [{"vision_cfg": vision, "text_cfg": text} for vision, text, _ in BACKBONES.values()]
    for cfg in configs:
        v, t = cfg.get("vision_cfg", {}), cfg.get("text_cfg", {})
        sizes = (v.get("width"), v.get("layers"), t.get("width"), t.get("layers"))
        if all(isinstance(size, int) for size in sizes) and isinstance(t.get("heads"), int):
            heads_by_size.setdefault(sizes, set()).add(_Heads(sizes[0] // v.get("head_width", 64), t["heads"]))
    return {sizes: heads.pop() for sizes, heads in heads_by_size.items() if len(heads) == 1}


def infer_readout(state: Mapping[str, Tensor], prefix: str, replaced: int) -> dict[str, Any] | None:
    """Return the `readout` block of a tower whose weights are below `prefix`, from names and shapes of its modules; None without one.

    Args:
        state: the weights.
        prefix: prefix of the tower.
        replaced: number of blocks that it replaces, if that is configurable.
    """
    parts = {name.removeprefix(prefix).partition(".")[0] for name in state if name.startswith(prefix)}
    for kind in (kind for kind in READOUTS.names() if kind in parts):
        own = f"{prefix}{kind}."
        weights = {name.removeprefix(own): value for name, value in state.items() if name.startswith(own)}
        return {"kind": kind, **READOUTS.get(kind).infer(weights, replaced)}
    return None
