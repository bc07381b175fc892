"""Renamed recipe keys, by configuration class, new keys of old recipes, and renamed parameters of slot models.

A recipe with an old key is refused, and the error names the new key. Files that sparo wrote itself (run folders,
checkpoints, exports, submitted jobs) load with their old keys and parameter names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from ..registries import OPTIMIZERS
from .config_keys import RegistryBlock, child_shape

_FOURIER = {"octaves": "fourier_bands"}
_RAY_FOURIER = {**_FOURIER, "start_octave": "fourier_start"}
_CHUNKED = {"most_numbers": "max_activations"}

RENAMED: Mapping[str, Mapping[str, str]] = {
    "BinderConfig": {
        "window": "context_frames",
        "competes": "softmax_scope",
        "fades": "temporal_decay",
        "longest": "max_time_distance",
        **_FOURIER,
    },
    "BroadcastConfig": {
        "waves": "fourier_bands",
        "ups": "num_upsample",
        "last_up": "upsample_output",
        "start": "weight_init",
        "align": "padding_mode",
    },
    "CropsConfig": {
        "local_number": "local_crops_number",
        "global_scale": "global_crops_scale",
        "local_scale": "local_crops_scale",
    },
    "DataConfig": {"window": "shuffle_window", "max_bad_share_after": "max_bad_share_min_samples"},
    "DeepSpeedEngineConfig": {"whole_below": "persistence_threshold"},
    "DvaeConfig": {"says": "target_tokens"},
    "DinoHeadConfig": {"init": "weight_init"},
    "EvalConfig": {"side": "job"},
    "EvalJobConfig": {"on": "cluster"},
    "HintConfig": {"of": "annotation"},
    "MultiViewSetConfig": {"most": "max_objects"},
    "MuonConfig": {"adamw": "adamw_patterns"},
    "NerfConfig": {**_FOURIER, **_CHUNKED},
    "ObjectProbeConfig": {"window": "context_frames"},
    "ObjectSetConfig": {"most": "max_objects"},
    "OptimConfig": {
        "max_skipped": "max_consecutive_skips",
        "half_life_from": "half_life_start",
        "muon": "kind=muon",
    },
    "PublishedConfig": {"most": "max_objects"},
    "RayBroadcastConfig": {**_RAY_FOURIER, **_CHUNKED},
    "RayEmbeddingConfig": _RAY_FOURIER,
    "RayPointsConfig": _FOURIER,
    "SceneProbeTaskConfig": {"shown": "num_context_views"},
    "SetTaskConfig": {"known_as": "benchmark_name"},
    "SlotAttentionConfig": {"init": "slot_init"},
    "SlotCollapseConfig": {
        "after": "start_fraction",
        "used": "min_slots_used",
        "sharp": "min_sharpness",
        "fixed": "max_fixity",
    },
    "SlotMixerConfig": {"mlp_times": "mlp_ratio", **_RAY_FOURIER, **_CHUNKED},
    "TextConfig": {"init": "init_from"},
    "TimedTowerConfig": {"first_turns": "first_iterations"},
    "TransformerConfig": {"sharp": "scale_by_sqrt_d", "mlp_times": "mlp_ratio"},
    "TransportConfig": {"takes": "slot_marginal"},
    "VideoMasksTaskConfig": {"window": "context_frames", "drawn": "generate_frames"},
    "VideoSetConfig": {"most": "max_objects", "larger": "size_scale"},
    "ViewEncoderConfig": {**_RAY_FOURIER, "embedded": "pos_embed_size", "halvings": "num_downsample"},
    "ViewMasksTaskConfig": {"shown": "num_context_views", "window": "context_frames"},
    "ViewsConfig": {"shown": "context"},
    "VisionConfig": {"init": "init_from"},
    "VitConfig": {"init": "weight_init"},
    "VitFeaturesConfig": {
        "native": "pretrain_grid_size",
        "class_place": "class_pos_embed",
        "shrink": "input_scale",
    },
}

# Values that keys had before they existed, where the present default is another one. A stored recipe that lacks the key
# gets this value, so that a run continues as it began.
FORMER_DEFAULTS: Mapping[str, Mapping[str, Any]] = {"DataConfig": {"decode": "exact"}}

# Parameters of slot models that had other names before checkpoint format 3: a pattern for the prefix of the name, and
# {old: present}.
RENAMED_PARAMETERS: tuple[tuple[str, Mapping[str, str]], ...] = (
    (r"^model\.", {"begin": "bos", "places": "pos_embed"}),
    (r"\.encoder\.", {"root": "stem", "places": "point_embed"}),
    (
        r"\.encoder\.blocks\.\d+\.",
        {"first": "conv1", "second": "conv2", "across": "downsample", "across_norm": "downsample_norm"},
    ),
    (r"\.grouping\.(?:.+\.)?", {"learned": "initial_slots"}),
    (r"\.grouping\.", {"to_grid": "grid_proj", "through": "grid_enc"}),
    (r"\.blocks\.\d+\.", {"among": "self_attention", "norm_among": "norm_self_attention"}),
    (r"\.rounds\.\d+\.", {"norm_taken": "norm_update"}),
    (r"\.transport\.", {"gives": "input_marginal", "takes": "slot_marginal"}),
    (r"\.hint\.", {"tell": "mlp", "see": "mask_encoder"}),
    (
        r"\.decoder\.",
        {
            "places": "pos_embed",
            "take": "slot_proj",
            "first": "input_proj",
            "draw": "render_mlp",
            "state": "ray_proj",
        },
    ),
    (
        r"\.decoder\.(?:objects|ground|static)\.",
        {"place": "position", "seen": "density_mlp", "tinted": "colour_mlp"},
    ),
)
_SUBSTITUTIONS = tuple(
    (re.compile(rf"({before}){old}(?=[./]|$)"), rf"\g<1>{new}")
    for before, names in RENAMED_PARAMETERS
    for old, new in names.items()
)
_SLOT_METHODS = (
    "slots", "set_prediction", "slate", "video_slots", "video_slate", "slot_contrast", "novel_views",
)  # fmt: skip
_PATTERN_KEYS = ("match", "freeze", "allow_missing", "allow_unused", "adamw_patterns")

# Keys of the `optim` block that contained the keys of another optimizer; these are now keys of the block itself, with
# its `kind` set.
_NESTED_KINDS = {"muon": "muon"}


def new_name(model: type[BaseModel], key: str) -> str | None:
    """Return the present name of a renamed key of a configuration class or of one it derives from, or None; `KEY=VALUE` for a value of KEY."""
    names = (RENAMED.get(cls.__name__, {}).get(key) for cls in model.__mro__)
    return next((name for name in names if name is not None and name.partition("=")[0] in model.model_fields), None)


def parameter_name(name: str, method: object) -> str:
    """Return the present name of a parameter, or of its optimizer state, in a run of `objective.kind=method`."""
    if method in _SLOT_METHODS:
        for pattern, replacement in _SUBSTITUTIONS:
            name = pattern.sub(replacement, name)
    return name


def with_new_names(shape: Any, tree: Any) -> Any:
    """Return a stored recipe, or a block of one, with the present names of its keys; unknown keys stay as they are.

    Args:
        shape: the configuration class, or another shape of `config_keys.shape_of`.
    """
    if isinstance(tree, list | tuple):
        item_shape = getattr(shape, "item_shape", None)
        return tree if item_shape is None else [with_new_names(item_shape, block) for block in tree]
    if not isinstance(tree, Mapping) or shape is None:
        return tree
    if isinstance(objective := tree.get("objective"), Mapping) and objective.get("kind") in _SLOT_METHODS:
        tree = _with_parameter_names(tree, objective["kind"])
    if isinstance(shape, RegistryBlock):
        if shape.from_registry.registry is OPTIMIZERS:
            tree = _with_kind(tree)
        model = shape.from_registry.find_model(tree)
    else:
        model = shape
    if isinstance(model, type) and issubclass(model, BaseModel):
        fields = model.model_fields
        tree = {key if key in fields else new_name(model, key) or key: value for key, value in tree.items()}
        tree = {**FORMER_DEFAULTS.get(model.__name__, {}), **tree}
    return {key: with_new_names(child_shape(shape, key, tree), value) for key, value in tree.items()}


def _with_kind(block: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return an `optim` block without the blocks of other kinds; one that is set gives the block its kind and its keys."""
    flat = {key: value for key, value in block.items() if key not in _NESTED_KINDS}
    for key, kind in _NESTED_KINDS.items():
        if block.get(key) is not None:
            flat |= {"kind": kind, **block[key]}
    return flat


def _with_parameter_names(tree: Any, method: str, key: str = "") -> Any:
    """Return a recipe whose lists of parameter names and patterns have the present names."""
    if isinstance(tree, Mapping):
        return {name: _with_parameter_names(value, method, str(name)) for name, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_with_parameter_names(item, method, key) for item in tree]
    return parameter_name(tree, method) if isinstance(tree, str) and key in _PATTERN_KEYS else tree
