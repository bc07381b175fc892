"""Our models inside stock open_clip: `import sparo.openclip`, then `open_clip.create_model_and_transforms("sparo-ViT-B-16", pretrained=PATH)`.

open_clip has no registry for towers, so importing this module wraps three of its functions: the two tower builders,
which look for a `readout` block in the model's JSON, and `convert_state_dict`, which learns the sparo-clip and our own
layouts. A self-test at import fails loudly where open_clip's internals moved. Programs that start their own process:

    python -m sparo.openclip run -- clip_benchmark.cli eval …
"""

from __future__ import annotations

import json
import runpy
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import open_clip
import open_clip.factory
import open_clip.model
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from .core.errors import ConfigError, SparoError, did_you_mean
from .core.files import give_usual_mode, whole_file
from .models.clip_config import BACKBONES, TINY_SPARO, TRAINING, ClipConfig
from .models.clip_model import build_text, build_vision
from .models.clip_towers import TextTower, VisionTower
from .models.readout import NoReadOut
from .models.weight_files.description import IMPORT_FIRST, IMPORT_KEYS, from_model_cfg
from .models.weight_files.state_dicts import archive_root, extract_state, read_raw, split_state, strip_wrapper_prefixes
from .models.weight_files.weights import OPENAI_MARKS, to_ours

_VISION_KEYS = (
    "image_size", "patch_size", "width", "layers", "head_width", "mlp_ratio", "patch_dropout", "timm_model_name", "timm_model_kwargs",
)  # fmt: skip
_TEXT_KEYS = ("context_length", "vocab_size", "width", "heads", "layers", "mlp_ratio")
TESTED = "3.3.0"


def model_cfg(config: ClipConfig) -> dict[str, Any]:
    """open_clip's `model_cfg` for one of our models; plain CLIP needs no `readout` and loads without this module."""
    plain = isinstance(config.readout, NoReadOut) and config.vision.timm_model_name is None
    extra = {} if plain else {IMPORT_FIRST: True, "readout": config.readout.model_dump()}
    text_extra = extra if config.readout.placement.text else {}
    return {
        "embed_dim": config.width,
        "custom_text": True,
        "quick_gelu": config.quick_gelu,
        "init_logit_scale": config.init_logit_scale,
        **({} if config.init_logit_bias is None else {"init_logit_bias": config.init_logit_bias}),
        "vision_cfg": {**extra, **config.vision.model_dump(exclude=config.vision.unused_keys)},
        "text_cfg": {**text_extra, **config.text.model_dump(exclude=TRAINING)},
    }


def names() -> dict[str, ClipConfig]:
    """Return the models that this plug-in adds to `open_clip.list_models()`."""
    out = {}
    for backbone in BACKBONES:
        small = TINY_SPARO if backbone.startswith("ViT-Tiny") else {}
        out[f"sparo-{backbone}"] = ClipConfig.model_validate(
            {"backbone": backbone, "readout": {"kind": "sparo", **small}}
        )
        if not small:
            out[f"sparo-{backbone}-L128"] = ClipConfig.model_validate(
                {"backbone": backbone, "readout": {"kind": "sparo", "slots": 128}}
            )
        out[f"gap-{backbone}"] = ClipConfig.model_validate({"backbone": backbone, "readout": {"kind": "gap"}})
        if small:
            out[backbone] = ClipConfig.model_validate({"backbone": backbone})
    return out


def find_config(name: str) -> ClipConfig:
    """Return our description of any ViT CLIP that open_clip lists, ours included.

    Raises:
        ConfigError: no such model, or one with parts that our towers do not have.
    """
    cfg = open_clip.get_model_config(name)
    if cfg is None:
        raise ConfigError(f"--model {name!r}: {did_you_mean(name, open_clip.list_models())}")
    return from_model_cfg(cfg, f"--model {name}")


def export(
    config: ClipConfig,
    state: Mapping[str, Tensor],
    folder: Path,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    own: Mapping[str, Any] | None = None,
) -> Path:
    """Write a folder that `open_clip.create_model_and_transforms("local-dir:FOLDER")` reads; return it. open_clip ignores `own`."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = folder / "open_clip_model.safetensors"
    whole: dict[int, str] = {}  # safetensors refuses two names of one tensor (a codebook of both towers)
    tensors = {n: t.contiguous() if whole.setdefault(t.data_ptr(), n) == n else t.clone() for n, t in state.items()}
    preprocess = {"mean": list(mean), "std": list(std), "interpolation": "bicubic", "resize_mode": "shortest"}
    described = {"model_cfg": model_cfg(config), "preprocess_cfg": preprocess, **({"sparo": dict(own)} if own else {})}
    text = json.dumps(described, indent=1)
    # Write both files before either replaces its predecessor, so that an older export stays complete if the disk is
    # full.
    with whole_file(weights) as new_weights, whole_file(folder / "open_clip_config.json") as config_file:
        save_file(tensors, new_weights)
        config_file.write_text(text, encoding="utf-8")
    give_usual_mode(weights)
    return folder


def register() -> None:
    """Wrap the builders once, add our model names, and test that a model is built correctly."""
    if getattr(open_clip.model._build_vision_tower, "_sparo", False):
        return
    for module, name, wrap in (
        (open_clip.model, "_build_vision_tower", _wrap_vision),
        (open_clip.model, "_build_text_tower", _wrap_text),
        (open_clip.factory, "convert_state_dict", _wrap_convert),
        (open_clip.factory, "load_state_dict", _wrap_load),
    ):
        if not callable(getattr(module, name, None)):
            _fail_incompatible(f"{module.__name__}.{name} is gone")
        wrapped = wrap(getattr(module, name))
        wrapped._sparo = True  # type: ignore[attr-defined]
        setattr(module, name, wrapped)
    with tempfile.TemporaryDirectory() as folder:
        for name, config in names().items():
            (Path(folder) / f"{name}.json").write_text(json.dumps(model_cfg(config)), encoding="utf-8")
        open_clip.add_model_config(Path(folder))
    _self_test()
    if open_clip.__version__ != TESTED:
        warnings.warn(
            f"sparo.openclip: registered with open_clip_torch {open_clip.__version__}; it is tested with {TESTED}",
            stacklevel=2,
        )


def _wrap_vision(original: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    def build(
        embed_dim: int, vision_cfg: Any, quick_gelu: bool = False, cast_dtype: torch.dtype | None = None
    ) -> nn.Module:
        if not (isinstance(vision_cfg, dict) and "readout" in vision_cfg):
            return original(embed_dim, vision_cfg, quick_gelu, cast_dtype)
        config = _config(embed_dim, quick_gelu, vision_cfg, "vision", _VISION_KEYS)
        return build_vision(config, cast_dtype)

    return build


def _wrap_text(original: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    def build(
        embed_dim: int, text_cfg: Any, quick_gelu: bool = False, cast_dtype: torch.dtype | None = None
    ) -> nn.Module:
        if not (isinstance(text_cfg, dict) and "readout" in text_cfg):
            return original(embed_dim, text_cfg, quick_gelu, cast_dtype)
        config = _config(embed_dim, quick_gelu, text_cfg, "text", _TEXT_KEYS)
        return build_text(config, cast_dtype)

    return build


def _wrap_convert(original: Callable[..., dict[str, Tensor]]) -> Callable[..., dict[str, Tensor]]:
    def convert(model: nn.Module, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        state_dict = {strip_wrapper_prefixes(name): value for name, value in state_dict.items()}
        if any(isinstance(m, VisionTower) for m in model.modules()):
            state_dict = to_ours(state_dict)
        return original(model, state_dict)

    return convert


def _wrap_load(original: Callable[..., dict[str, Tensor]]) -> Callable[..., dict[str, Tensor]]:
    def load(checkpoint_path: Any, device: Any = "cpu", weights_only: bool = True) -> dict[str, Tensor]:
        # open_clip only strips `module.` and looks for `state_dict`, and would have to run TorchScript archives.
        file, key = split_state(str(checkpoint_path))
        path = Path(file)
        if not path.is_file() or not weights_only:
            return original(checkpoint_path, device, weights_only)
        dropped = OPENAI_MARKS if archive_root(path) is not None else ()
        state = extract_state(read_raw(path), path, key)
        return {name: value.to(device) for name, value in state.items() if name not in dropped}

    return load


def _config(
    embed_dim: int, quick_gelu: bool, block: Mapping[str, Any], tower: str, keys: tuple[str, ...]
) -> ClipConfig:
    # open_clip adds the last one itself, next to a `timm_model_name`.
    unknown = set(block) - set(keys) - {"readout", *IMPORT_KEYS, "timm_model_pretrained"}
    if unknown:
        raise SparoError(
            f"{tower}_cfg: {', '.join(sorted(unknown))} cannot be combined with a readout block; supported keys: {', '.join(keys)}"
        )
    values = {k: v[0] if isinstance(v, tuple | list) else v for k, v in block.items() if k in keys}
    readout = dict(block["readout"])
    return ClipConfig.model_validate(
        {"embed_dim": embed_dim, "quick_gelu": quick_gelu, tower: values, "readout": readout}
    )


def _self_test() -> None:
    config = ClipConfig.model_validate(
        {
            "vision": {"image_size": 16, "patch_size": 8, "width": 16, "layers": 2, "head_width": 8},
            "text": {"context_length": 8, "vocab_size": 32, "width": 16, "heads": 2, "layers": 2},
            "readout": {"kind": "sparo", "slots": 2, "slot_width": 4, "head_width": 4},
        }
    )
    arguments = model_cfg(config)
    arguments.pop("custom_text")
    random = torch.get_rng_state()  # importing a module must not change the caller's random numbers
    try:
        model = open_clip.model.CustomTextCLIP(**arguments).eval()
        features = (
            model.encode_image(torch.zeros(1, 3, 16, 16)),
            model.encode_text(torch.tensor([[1, 31, 0, 0]])),
        )
    except Exception as error:
        _fail_incompatible(f"building a model failed: {error}")
    finally:
        torch.set_rng_state(random)
    if not isinstance(model.visual, VisionTower) or not isinstance(model.text, TextTower):
        _fail_incompatible("CustomTextCLIP no longer looks its tower builders up in open_clip.model")
    if any(abs(float(f.detach().norm()) - 1) > 1e-5 or f.shape != (1, 8) for f in features):
        _fail_incompatible("encodings are not the towers' own")
    for name in ("convert_state_dict", "load_state_dict"):
        if not getattr(open_clip.factory.load_checkpoint.__globals__[name], "_sparo", False):
            _fail_incompatible(f"load_checkpoint no longer uses open_clip.factory.{name}")


def _fail_incompatible(what: str) -> NoReturn:
    raise SparoError(
        f"sparo.openclip: does not work with open_clip_torch {open_clip.__version__}, whose internals changed "
        f"({what}). Install the tested version {TESTED}: pip install open_clip_torch=={TESTED}"
    )


def main(arguments: list[str]) -> None:
    """Run a module or script after registering SPARO's models in open_clip."""
    if len(arguments) < 3 or arguments[:2] != ["run", "--"]:
        raise SystemExit("usage: python -m sparo.openclip run -- MODULE-OR-SCRIPT.py [arguments …]")
    target, sys.argv = arguments[2], arguments[2:]
    if target.endswith(".py"):
        sys.path.insert(0, str(Path(target).resolve().parent))
        runpy.run_path(target, run_name="__main__")
    else:
        runpy.run_module(target, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    import sparo_train.openclip  # noqa: F401  under its own name, so that the program's import finds it registered

    main(sys.argv[1:])
else:
    register()
