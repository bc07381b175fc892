"""Foreign checkpoints in and out: sparo-clip files, open_clip files, our own checkpoints; tensors only, never code.

Our layout is open_clip's `CustomTextCLIP` with `visual.sparo.*` and `text.sparo.*`. The sparo-clip repository keeps
the text tower's names without prefix and its SPARO at `text_sparo.*`, saves the tied values twice (`sparo.v.*` = `sparo.k.*`),
and puts `module.` before everything.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from ..core.errors import CheckpointError
from .clip import Clip
from .clip_config import ClipConfig

Weights = dict[str, Tensor]

_TEXT_NAMES = ("positional_embedding", "token_embedding", "transformer", "ln_final", "text_projection")
_PREFIXES = ("module.", "_orig_mod.", "model.")


def read_weights(path: str | Path) -> Weights:
    """Read a .safetensors or .pt/.pth/.bin file (`weights_only`) into our layout.

    Accepts a flat dict or one under `state_dict`, with `module.`, `_orig_mod.` or our objective's `model.` prefix.

    Raises:
        CheckpointError: missing, damaged, or holding anything but tensors and plain values.
    """
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file")
    try:
        safe = path.suffix == ".safetensors"
        found = load_file(path) if safe else torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path}: holds objects that could run code and is refused ({str(error).splitlines()[0]}); re-save its state_dict as safetensors"
        ) from None
    except (OSError, RuntimeError, EOFError, SafetensorError) as error:
        raise CheckpointError(f"{path}: not a readable checkpoint ({error})") from None
    found = found.get("state_dict", found) if isinstance(found, Mapping) else None
    if not isinstance(found, Mapping) or not all(isinstance(v, Tensor) for v in found.values()):
        raise CheckpointError(f"{path}: holds no state dict of tensors")
    return to_ours(found)


def to_ours(state: Mapping[str, Tensor]) -> Weights:
    """Rename any known layout to ours; unknown names stay, so that loading can report them."""
    out = {_strip(name): value for name, value in state.items()}
    if not any(name.startswith("text.") for name in out):
        out = {_from_flat_text(name): value for name, value in out.items()}
    for tower in ("visual", "text"):
        pairs = [(f"{tower}.sparo.v.{leaf}", f"{tower}.sparo.k.{leaf}") for leaf in ("weight", "bias")]
        if all(v in out and k in out and torch.equal(out[v], out[k]) for v, k in pairs):  # tied, and saved twice
            for v, _ in pairs:
                del out[v]
    for name in ("text.attn_mask", "attn_mask"):
        out.pop(name, None)
    return out


def to_sparo_clip(state: Mapping[str, Tensor], module_prefix: bool = True) -> Weights:
    """Our weights in the sparo-clip repository's layout, tied values written out."""
    out: Weights = {}
    for name, value in state.items():
        flat = name.removeprefix("text.") if name.startswith("text.") else name
        flat = flat.replace("sparo.", "text_sparo.", 1) if name.startswith("text.sparo.") else flat
        out[flat] = value
        if ".sparo.k." in name and name.replace(".sparo.k.", ".sparo.v.") not in state:
            out[flat.replace("sparo.k.", "sparo.v.")] = value
    return {f"module.{name}": value for name, value in out.items()} if module_prefix else out


def infer_config(state: Mapping[str, Tensor], image_size: int | None = None) -> ClipConfig:
    """The model that a set of weights (in our layout) belongs to, from its shapes.

    Heads are taken to be 64 wide, as in every published CLIP; CLIP and CLIP+GAP have equal shapes and read as CLIP.

    Raises:
        CheckpointError: not a ViT CLIP with a text transformer.
    """
    try:
        conv, position = state["visual.conv1.weight"], state["visual.positional_embedding"]
        text_position, embedding = state["text.positional_embedding"], state["text.token_embedding.weight"]
    except KeyError as error:
        raise CheckpointError(
            f"weights: {error} is missing; only CLIP models with a ViT and a text transformer can be recognised"
        ) from None
    grid = round((len(position) - 1) ** 0.5)
    layers = {
        tower: 1 + max(int(n.split(".")[3]) for n in state if n.startswith(f"{tower}.transformer.resblocks."))
        for tower in ("visual", "text")
    }
    readout: dict[str, object] = {"kind": "token"}
    if "visual.sparo.q_emb" in state:
        _, heads, group, _, width = state["visual.sparo.q_emb"].shape
        readout = {
            "kind": "sparo",
            "slots": heads * group,
            "grp_size": group,
            "head_width": width,
            "slot_width": len(state["visual.sparo.proj.weight"]),
            "share_kv": "visual.sparo.v.weight" not in state,
            "replace_last_block": False,  # the blocks are counted as they are
        }
    return ClipConfig.model_validate(
        {
            "vision": {
                "image_size": image_size or grid * conv.shape[-1],
                "patch_size": conv.shape[-1],
                "width": len(conv),
                "layers": layers["visual"],
            },
            "text": {
                "context_length": len(text_position),
                "vocab_size": len(embedding),
                "width": embedding.shape[1],
                "heads": max(1, embedding.shape[1] // 64),
                "layers": layers["text"],
            },
            "embed_dim": state["visual.proj"].shape[1] if "visual.proj" in state else 512,
            "readout": readout,
        }
    )


def load_into(model: Clip, state: Mapping[str, Tensor], origin: str) -> None:
    """Load weights strictly; raises `CheckpointError` naming what is missing, unexpected or of another shape."""
    own = model.state_dict()
    problems = [f"missing {n}" for n in own if n not in state] + [f"unexpected {n}" for n in state if n not in own]
    problems += [
        f"{n}: {tuple(state[n].shape)} in the file, {tuple(own[n].shape)} in the model"
        for n in own
        if n in state and state[n].numel() != own[n].numel()
    ]
    if problems:
        more = f" and {len(problems) - 6} more" if len(problems) > 6 else ""
        raise CheckpointError(f"{origin}: does not fit the model: {'; '.join(problems[:6])}{more}")
    model.load_state_dict({n: t.view(own[n].shape) for n, t in state.items()})


def _strip(name: str) -> str:
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return name


def _from_flat_text(name: str) -> str:
    if name.startswith("text_sparo."):
        return "text.sparo." + name.removeprefix("text_sparo.")
    return "text." + name if name.split(".")[0] in _TEXT_NAMES else name
