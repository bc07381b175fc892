"""Which model a set of weights belongs to: by its description where there is one, by its shapes otherwise."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from ...core.config import resolve
from ...core.errors import CheckpointError
from ...core.tables import READOUTS
from ...core.untrusted import read_json
from ..clip_config import OPENAI_MEAN, OPENAI_STD, ClipConfig
from .weights import read_raw

# open_clip without our plug-in names the first key that it does not know, and nothing else: this one says what to do.
IMPORT_FIRST = "import sparo_train.openclip first (it comes with sparo)"
CONFIG_KEY = "sparo_config"  # in a `.pt` of ours: the model's description as plain values
# How images are shown to every CLIP here; open_clip's words for it.
_SHOWN = {"mode": "RGB", "interpolation": "bicubic", "resize_mode": "shortest"}
_HEAD_WIDTH = {128: 32, 192: 32, 384: 64, 512: 64, 640: 64, 768: 64, 896: 64, 1024: 64}  # width -> head width


class Described(NamedTuple):
    """A model, and what pixels in 0..1 are normalised with before it."""

    config: ClipConfig
    mean: tuple[float, ...] = OPENAI_MEAN
    std: tuple[float, ...] = OPENAI_STD


def read_config(path: str | Path) -> Described | None:
    """What a file says of its model, where it does: a `.pt` of ours, or a weight file beside its `open_clip_config.json`.

    Raises:
        CheckpointError: the file cannot be read, or is of a model that is shown images otherwise than ours are.
        ConfigError: its description is none of ours.
    """
    path = Path(path)
    found = None if path.suffix == ".safetensors" else read_raw(path)
    if not isinstance(found, Mapping) or CONFIG_KEY not in found:
        beside = path.parent / "open_clip_config.json"
        return read_export(beside) if beside.is_file() else None
    told, origin = found[CONFIG_KEY], f"{path}: {CONFIG_KEY}"
    if not isinstance(told, dict) or "model" not in told:  # as it was written before it had mean and std
        return Described(resolve(ClipConfig, told, origin))
    return Described(resolve(ClipConfig, told["model"], origin), *told_pixels(told, origin))


def told_pixels(told: Any, origin: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and std of a description of ours. Raises `CheckpointError` where it says none of three colours."""
    try:
        return _of_channels(told["mean"]), _of_channels(told["std"], above=0)
    except (KeyError, ValueError, TypeError) as error:
        raise CheckpointError(f"{origin}: says no mean and std of three colours ({error!r})") from None


def read_export(path: Path) -> Described:
    """What an `open_clip_config.json` says.

    Raises:
        CheckpointError: not such a file, or one of a model that is shown images otherwise than ours are.
        ConfigError: a model with keys that ours do not have.
    """
    try:
        content = read_json(path, dict, CheckpointError)
        cfg, preprocess = content["model_cfg"], content.get("preprocess_cfg", {})
        # Weights would load and scores be plausible: nothing else says that images were squashed.
        odd = {k: v for k, v in preprocess.items() if k in _SHOWN and v not in (None, _SHOWN[k])}
        found = Described(
            from_model_cfg(cfg, str(path)),
            _of_channels(preprocess.get("mean") or OPENAI_MEAN),
            _of_channels(preprocess.get("std") or OPENAI_STD, above=0),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: not an open_clip config ({error!r})") from None
    for key, value in odd.items():
        raise CheckpointError(
            f"{path}: preprocess_cfg.{key}={value!r}, and images are shown as {_SHOWN[key]!r} here; "
            "give its weights to open_clip's own model: open_clip:NAME@FILE"
        )
    return found


def _of_channels(given: Any, above: float = -math.inf) -> tuple[float, ...]:
    """Three numbers; one alone is that of all, as open_clip has it. Raises `ValueError` or `TypeError`."""
    numbers = tuple(map(float, given if isinstance(given, list | tuple) else [given] * 3))
    if len(numbers) != 3 or not all(above < number < math.inf for number in numbers):
        raise ValueError(f"{given!r} is no number of each colour")
    return numbers


def from_model_cfg(cfg: Mapping[str, Any], origin: str) -> ClipConfig:
    """Our description of an open_clip `model_cfg` with a ViT and a text transformer.

    Raises:
        ConfigError: it has keys that our towers do not have.
    """
    vision, text = ({k: v for k, v in cfg[tower].items() if k != IMPORT_FIRST} for tower in ("vision_cfg", "text_cfg"))
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


def infer_config(state: Mapping[str, Tensor], image_size: int | None = None) -> ClipConfig:
    """The model that a set of weights (in our layout) belongs to, from its shapes.

    What shapes do not tell is taken from the published CLIPs: heads 64 wide (ours for CPUs: 32), GELU, and the class
    token rather than GAP.

    Raises:
        CheckpointError: not a ViT CLIP with a text transformer, or of a width whose heads are not known.
    """
    try:
        conv, position = state["visual.conv1.weight"], state["visual.positional_embedding"]
        text_position, embedding = state["text.positional_embedding"], state["text.token_embedding.weight"]
    except KeyError as error:
        raise CheckpointError(
            f"weights: {error} is missing; only CLIP models with a ViT and a text transformer can be recognised"
        ) from None
    width, text_width = len(conv), embedding.shape[1]
    if width not in _HEAD_WIDTH or text_width not in _HEAD_WIDTH:
        raise CheckpointError(
            f"weights: shapes do not tell the number of heads at widths {width} and {text_width}; name the model (--model)"
        )
    # The class token has a place of its own before the square of patches.
    grid = round((len(position) - 1) ** 0.5)
    layers = {
        tower: 1 + max(int(n.split(".")[3]) for n in state if n.startswith(f"{tower}.transformer.resblocks."))
        for tower in ("visual", "text")
    }
    readout = infer_readout(state, "visual.", 0) or {"kind": "token"}  # the blocks are counted as they are
    if "text" in READOUTS.row(readout["kind"]).model_fields:
        readout["text"] = any(name.startswith(f"text.{readout['kind']}.") for name in state)
    embed_dim = readout.pop("embed_dim", None) or (state["visual.proj"].shape[1] if "visual.proj" in state else 512)
    return ClipConfig.model_validate(
        {
            "vision": {
                "image_size": image_size or grid * conv.shape[-1],
                "patch_size": conv.shape[-1],
                "width": width,
                "layers": layers["visual"],
                "head_width": _HEAD_WIDTH[width],
            },
            "text": {
                "context_length": len(text_position),
                "vocab_size": len(embedding),
                "width": text_width,
                "heads": text_width // _HEAD_WIDTH[text_width],
                "layers": layers["text"],
            },
            "embed_dim": embed_dim,
            "readout": readout,
            "init_logit_bias": 0.0 if "logit_bias" in state else None,
        }
    )


def infer_readout(state: Mapping[str, Tensor], prefix: str, replaced: int) -> dict[str, Any] | None:
    """The `readout` block of a tower whose weights are below `prefix`, from the names and shapes of its modules; None without one.

    Args:
        replaced: blocks that it takes the place of, where that is an option.
    """
    parts = {name.removeprefix(prefix).partition(".")[0] for name in state if name.startswith(prefix)}
    for kind in (kind for kind in READOUTS.names() if kind in parts):
        own = f"{prefix}{kind}."
        weights = {name.removeprefix(own): value for name, value in state.items() if name.startswith(own)}
        return {"kind": kind, **READOUTS.row(kind).infer(weights, replaced)}
    return None
