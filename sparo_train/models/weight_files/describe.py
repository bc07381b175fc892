"""Which model a set of weights belongs to: by its description where there is one, by its shapes otherwise."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ...core.config import resolve
from ...core.errors import CheckpointError
from ...core.tables import READOUTS
from ..clip_config import OPENAI_MEAN, OPENAI_STD, ClipConfig
from .weights import read_raw

# open_clip without our plug-in names the first key that it does not know, and nothing else: this one says what to do.
IMPORT_FIRST = "import sparo_train.openclip first (it comes with sparo)"
CONFIG_KEY = "sparo_config"  # in a `.pt` of ours: the model's description as plain values
_HEAD_WIDTH = {128: 32, 192: 32, 384: 64, 512: 64, 640: 64, 768: 64, 896: 64, 1024: 64}  # width -> head width


def read_config(path: str | Path) -> ClipConfig | None:
    """The model's description, where a file carries one: a `.pt` of ours, or a weight file beside its `open_clip_config.json`.

    Raises:
        CheckpointError: the file cannot be read.
        ConfigError: its description is none of ours.
    """
    path = Path(path)
    if (beside := path.parent / "open_clip_config.json").is_file():
        return read_export(beside)[0]
    found = None if path.suffix == ".safetensors" else read_raw(path)
    if not isinstance(found, Mapping) or CONFIG_KEY not in found:
        return None
    return resolve(ClipConfig, found[CONFIG_KEY], f"{path}: {CONFIG_KEY}")


def read_export(path: Path) -> tuple[ClipConfig, tuple[float, ...], tuple[float, ...]]:
    """Model, mean and std of an `open_clip_config.json`.

    Raises:
        CheckpointError: not such a file.
        ConfigError: a model with keys that ours do not have.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        cfg, preprocess = content["model_cfg"], content.get("preprocess_cfg", {})
        return from_model_cfg(cfg, str(path)), preprocess.get("mean", OPENAI_MEAN), preprocess.get("std", OPENAI_STD)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: not an open_clip config ({error!r})") from None


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
