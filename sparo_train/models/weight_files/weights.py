"""Foreign checkpoints in and out: sparo-clip files, open_clip files, our own checkpoints; tensors only, never code.

Our layout is open_clip's `CustomTextCLIP` with `visual.sparo.*` and `text.sparo.*`. The sparo-clip repository keeps
the text tower's names without prefix and its SPARO at `text_sparo.*`, saves the tied values twice (`sparo.v.*` = `sparo.k.*`),
and puts `module.` before everything.
"""

from __future__ import annotations

import argparse
import hashlib
import pickle
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from ...core.errors import CheckpointError, SparoError

Weights = dict[str, Tensor]

_TEXT_NAMES = ("positional_embedding", "token_embedding", "transformer", "ln_final", "text_projection")
_PREFIXES = ("module.", "_orig_mod.", "model.")


def read_weights(path: str | Path) -> Weights:
    """Read a .safetensors or .pt/.pth/.bin file (`weights_only`) into our layout.

    Accepts a flat dict or one under `state_dict`, with `module.`, `_orig_mod.` or our objective's `model.` prefix.

    Raises:
        CheckpointError: missing, damaged, or holding anything but tensors and plain values.
    """
    found = _state_dict(read_raw(path), path)
    if "cls_token" in found and "head.weight" in found:
        raise CheckpointError(f"{path}: is an image classifier's ViT, as timm saves it; write timm:NAME@{path}")
    return to_ours(found)


def read_raw(path: str | Path, plain_namespaces: bool = False) -> Any:
    """What a weight file holds: tensors and plain values, never code. Raises `CheckpointError`.

    Args:
        plain_namespaces: also let argparse.Namespace through, whose attributes have to be plain themselves (DINO's `args`).
    """
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file")
    try:
        safe = path.suffix == ".safetensors"
        with torch.serialization.safe_globals([argparse.Namespace] if plain_namespaces else []):
            return load_file(path) if safe else torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL (\S+)", str(error))
        if named is None:
            raise CheckpointError(f"{path}: not a torch checkpoint (is it a web page, or a git-lfs pointer?)") from None
        raise CheckpointError(
            f"{path}: holds objects that could run code ({named[1]}) and is refused; re-save its state_dict as safetensors"
        ) from None
    except (OSError, RuntimeError, EOFError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise CheckpointError(f"{path}: not a readable checkpoint ({error})") from None


def _state_dict(found: Any, path: str | Path) -> Mapping[str, Tensor]:
    found = found.get("state_dict", found) if isinstance(found, Mapping) else None
    if not isinstance(found, Mapping) or not all(isinstance(v, Tensor) for v in found.values()):
        raise CheckpointError(f"{path}: holds no state dict of tensors")
    if not found or not all(isinstance(name, str) for name in found):
        raise CheckpointError(f"{path}: its tensors have no names; it is no model's state dict")
    return found


def to_ours(state: Mapping[str, Tensor]) -> Weights:
    """Rename any known layout to ours; unknown names stay, so that loading can report them."""
    out = {_strip(name): value for name, value in state.items()}
    # sparo-clip's and OpenAI's text towers stand without a prefix beside `visual`.
    if not any(name.startswith("text.") for name in out):
        out = {_from_flat_text(name): value for name, value in out.items()}
    for tower in ("visual", "text"):
        pairs = [(f"{tower}.sparo.v.{leaf}", f"{tower}.sparo.k.{leaf}") for leaf in ("weight", "bias")]
        if all(v in out and k in out and torch.equal(out[v], out[k]) for v, k in pairs):  # tied, and saved twice
            for v, _ in pairs:
                del out[v]
    # A buffer of old open_clip files that follows from the context length.
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


def load_into(model: nn.Module, state: Mapping[str, Tensor], origin: str) -> None:
    """Load weights strictly; raises `CheckpointError` naming what is missing, unexpected or of another shape."""
    own = model.state_dict()
    problems = [f"missing {n}" for n in own if n not in state] + [f"unexpected {n}" for n in state if n not in own]
    problems += [
        f"{n}: {tuple(state[n].shape)} in the file, {tuple(own[n].shape)} in the model"
        for n in own
        if n in state and _sizes(state[n]) != _sizes(own[n])
    ]
    if problems:
        more = f" and {len(problems) - 6} more" if len(problems) > 6 else ""
        raise CheckpointError(f"{origin}: does not fit the model: {'; '.join(problems[:6])}{more}")
    model.load_state_dict({n: t.view(own[n].shape) for n, t in state.items()})


def weights_sha256(tensors: Mapping[str, Tensor], keep: Callable[[str], bool] = lambda name: True) -> str:
    """Hex SHA-256 over names, dtypes, shapes and values."""
    digest = hashlib.sha256()
    for name in filter(keep, sorted(tensors)):
        # Bytes as they lie: 0.0 and -0.0 are two weights, and a hash of values would say one.
        t = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {t.dtype} {tuple(t.shape)}\n".encode())
        digest.update(t.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def refuse_non_finite(weights: Mapping[str, Tensor], origin: str, error: type[SparoError] = CheckpointError) -> None:
    """Raise `error` for weights that are no numbers: of a run that diverged, or a file that was damaged.

    What a model gives does not tell: torch's fused attention takes a NaN among its scores for a masked place, and an argmax makes a number
    of it.
    """
    lost = [name for name, t in weights.items() if t.is_floating_point() and not t.isfinite().all()]
    if lost:
        more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        raise error(f"{origin}: {lost[0]}{more}: numbers that are not finite; take a checkpoint from before")


def _sizes(tensor: Tensor) -> list[int]:
    """Without those of one: a scale is saved as a number or as a row of one, and a transposed matrix is another matrix."""
    return [size for size in tensor.shape if size != 1]


def _strip(name: str) -> str:
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return name


def _from_flat_text(name: str) -> str:
    if name.startswith("text_sparo."):
        return "text.sparo." + name.removeprefix("text_sparo.")
    return "text." + name if name.split(".")[0] in _TEXT_NAMES else name
