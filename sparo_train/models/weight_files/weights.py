"""Foreign CLIP checkpoints, read and written: sparo-clip files, open_clip files, our own checkpoints.

Our layout is open_clip's `CustomTextCLIP` with `visual.sparo.*` and `text.sparo.*`. The sparo-clip repository keeps the
text tower's names without a prefix and its SPARO at `text_sparo.*`, saves tied values twice (`sparo.v.*` =
`sparo.k.*`), names its LinearBotneck and FDT differently, and adds the prefix `module.` to everything.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...core.errors import CheckpointError, SparoError
from .state_dicts import extract_state, read_raw, strip_wrapper_prefixes

Weights = dict[str, Tensor]

_TEXT_NAMES = ("positional_embedding", "token_embedding", "transformer", "ln_final", "text_projection")
# sparo-clip's names of readouts other than SPARO.
_BOTTLENECK = {"visual.proj": "visual.linear_bottleneck.proj", "text_projection": "text.linear_bottleneck.proj"}
_MODULES = {
    "vision_bottleproj.": "visual.linear_bottleneck.bottleproj.",
    "text_bottleproj.": "text.linear_bottleneck.bottleproj.",
    "img_query_model.": "visual.fdt.",
    "txt_query_model.": "text.fdt.",
    "text_sparo.": "text.sparo.",
}
# OpenAI's files store these as tensors, by which open_clip recognizes the files.
OPENAI_MARKS = ("input_resolution", "context_length", "vocab_size")


def read_weights(path: str | Path, key: str | None = None) -> Weights:
    """Read a CLIP weight file into our layout.

    Raises:
        CheckpointError: missing, damaged, of another kind, or containing anything but tensors and plain values.
    """
    return clip_weights(read_raw(path), path, key)


def clip_weights(raw: Any, path: str | Path, key: str | None = None) -> Weights:
    """Return the CLIP weights in a file's content (`read_raw`), in our layout. Raises `CheckpointError`."""
    state = extract_state(raw, path, key)
    if "cls_token" in state and "head.weight" in state:
        raise CheckpointError(f"{path}: is an image classifier of timm. Write timm:NAME@{path}.")
    if "space_dict" in state and "vision_bottleproj.weight" in state:
        raise CheckpointError(
            f"{path}: has a codebook (space_dict) and a bottleneck (vision_bottleproj); no readout of sparo has both, so the file cannot be read."
        )
    return to_ours(state)


def to_ours(state: Mapping[str, Tensor]) -> Weights:
    """Rename any known layout to ours; unknown names are kept, so that loading can report them."""
    out = {strip_wrapper_prefixes(name): value for name, value in state.items() if name not in OPENAI_MARKS}
    # sparo-clip's and OpenAI's text towers have no prefix.
    if not any(name.startswith("text.") for name in out):
        bottleneck = _BOTTLENECK if "vision_bottleproj.weight" in out else {}
        out = {_from_flat_text(bottleneck.get(name, name)): value for name, value in out.items()}
    if (codes := out.pop("space_dict", None)) is not None:  # one codebook for both towers
        out["visual.fdt.space_dict"] = out["text.fdt.space_dict"] = codes
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
    """Return our weights in the sparo-clip repository's layout, with tied values written twice."""
    out: Weights = {}
    for name, value in state.items():
        flat = name.removeprefix("text.") if name.startswith("text.") else name
        flat = flat.replace("sparo.", "text_sparo.", 1) if name.startswith("text.sparo.") else flat
        out[flat] = value
        if ".sparo.k." in name and name.replace(".sparo.k.", ".sparo.v.") not in state:
            out[flat.replace("sparo.k.", "sparo.v.")] = value
    return {f"module.{name}": value for name, value in out.items()} if module_prefix else out


def load_into(model: nn.Module, state: Mapping[str, Tensor], origin: str) -> None:
    """Load weights strictly; raises `CheckpointError` naming missing, unexpected and mismatched ones."""
    own = model.state_dict()
    problems = [f"missing {n}" for n in own if n not in state] + [f"unexpected {n}" for n in state if n not in own]
    problems += [
        f"{n}: {tuple(state[n].shape)} in the file, {tuple(own[n].shape)} in the model"
        for n in own
        if n in state and _sizes(state[n]) != _sizes(own[n])
    ]
    problems += [
        f"{n}: {state[n].dtype} in the file, {own[n].dtype} in the model"
        for n in own
        if n in state and own[n].is_floating_point() and not state[n].is_floating_point()
    ]
    if problems:
        more = f" and {len(problems) - 6} more" if len(problems) > 6 else ""
        raise CheckpointError(f"{origin}: does not fit the model: {'; '.join(problems[:6])}{more}")
    model.load_state_dict({n: t.view(own[n].shape) for n, t in state.items()})


def weights_sha256(tensors: Mapping[str, Tensor], keep: Callable[[str], bool] = lambda name: True) -> str:
    """Return the hex SHA-256 over names, dtypes, shapes and values."""
    digest = hashlib.sha256()
    for name in filter(keep, sorted(tensors)):
        # Hash bytes: 0.0 and -0.0 are different weights that compare equal.
        t = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {t.dtype} {tuple(t.shape)}\n".encode())
        digest.update(t.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def hash_again_if_changed(hashes: dict[str, Any], name: str, model: nn.Module, compute: Callable[[], str]) -> str:
    """Return `compute()`, or its earlier value in `hashes` if no weight of the model was replaced or written to since.

    Writes through `.data` leave a tensor's version unchanged, so sums of a few values are compared, too.
    """
    tensors = [*model.parameters(), *model.buffers()]
    sums = [tensor.detach().flatten()[:: 1 + tensor.numel() // 64].sum(dtype=torch.float32) for tensor in tensors]
    values = torch.stack([value.to(sums[0].device) for value in sums]).tolist() if sums else []
    state = [
        (id(tensor), 0 if tensor.is_inference() else tensor._version, value)
        for tensor, value in zip(tensors, values, strict=True)
    ]
    if name not in hashes or hashes[name][0] != state:
        hashes[name] = (state, compute())
    return hashes[name][1]


def refuse_non_finite(weights: Mapping[str, Tensor], origin: str, error: type[SparoError] = CheckpointError) -> None:
    """Raise `error` for weights that are not finite, from a run that diverged or a damaged file.

    Outputs do not reveal them: torch's fused attention treats a NaN score as masked, and an argmax returns a number.
    """
    lost = [name for name, t in weights.items() if t.is_floating_point() and not t.isfinite().all()]
    if lost:
        more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        raise error(f"{origin}: {lost[0]}{more}: has values that are not finite. Use an earlier checkpoint.")


def _sizes(tensor: Tensor) -> list[int]:
    """Return the shape without dimensions of size one: a scale is saved as a scalar or as one row, whereas a transposed matrix differs."""
    return [size for size in tensor.shape if size != 1]


def _from_flat_text(name: str) -> str:
    for theirs, ours in _MODULES.items():
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return "text." + name if name.split(".")[0] in _TEXT_NAMES else name
