"""Initial weights of a run: from a checkpoint of any kind (`start_from`), or from a single tower (`init_from`)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeVar

import timm
import torch
from torch import Tensor, nn

from sparo_train.core.contracts import Objective
from sparo_train.core.disk.checkpoint_store import checkpoint_warnings
from sparo_train.core.errors import CheckpointError, did_you_mean
from sparo_train.models.clip_model import Clip
from sparo_train.models.clip_towers import TextTower, VisionTower
from sparo_train.models.timm_tower import TimmTower
from sparo_train.models.weight_files.state_dicts import read_raw, split_state
from sparo_train.models.weight_files.timm_config import build_on_meta
from sparo_train.models.weight_files.weights import refuse_non_finite
from sparo_train.train.build import build_objective
from sparo_train.train.run_config import StartConfig

from ..encoders.encoder import Encoder
from ..encoders.foreign import BackboneEncoder, timm_state
from ..encoders.loading import load_encoder, read_run, refuse_absent, run_weights
from .tower_names import Normalisation, refuse_other_pixels, refuse_unlike, to_our_names, tower_weights

T = TypeVar("T")

_PREFIXES = ("visual.trunk.", "trunk.", "")


def trunk_weights(state: Mapping[str, Tensor], origin: str) -> dict[str, Tensor]:
    """Return the trunk's weights under our names.

    Raises:
        CheckpointError: the file has no ViT with timm's names.
    """
    prefix = next((p for p in _PREFIXES if f"{p}blocks.0.norm1.weight" in state), None)
    if prefix is None:
        raise CheckpointError(
            f"{origin}: has no ViT whose tensors are named as in timm (such as blocks.0.norm1). To load the tower of a CLIP, remove vision.timm_model_name."
        )
    trunk_state = {
        f"trunk.{name.removeprefix(prefix)}": value for name, value in state.items() if name.startswith(prefix)
    }
    if "trunk.norm.weight" not in trunk_state:  # timm's models with mean pooling have their norm after it
        trunk_state = {name.replace("trunk.fc_norm.", "trunk.norm."): value for name, value in trunk_state.items()}
    return trunk_state


def timm_file(source: str) -> tuple[dict[str, Tensor], Normalisation] | None:
    """Return the weights in `timm:NAME@FILE`, and the normalisation in the file's `config.json` or that of NAME; None for another source.

    Raises:
        CheckpointError: the file cannot be read, or timm has no such name.
    """
    scheme, _, rest = source.partition(":")
    name, at, file = rest.partition("@")
    if scheme != "timm" or not at:
        return None
    if not timm.is_model(name):
        raise CheckpointError(f"{source}: {did_you_mean(name.split('.')[0], timm.list_models())}")
    _, pixels = build_on_meta(name, file, source)
    return timm_state(file, source), Normalisation(pixels["mean"], pixels["std"])


logger = logging.getLogger(__name__)


def refuse_absent_starts(objective: Any, start: StartConfig | None) -> None:
    """Raise `CheckpointError` naming the key if a file or folder of initial weights does not exist."""
    model = getattr(objective, "model", None)
    named = {
        f"objective.model.{key}.init_from": getattr(getattr(model, key, None), "init_from", None)
        for key in ("vision", "text")
    }
    if start is not None:
        named["start_from.checkpoint"] = start.checkpoint
    for key, place in named.items():
        if place is not None:
            try:
                refuse_absent(place)
                scheme, _, rest = place.partition(":")
                # For foreign weights, check files only, because names of the hub need a download.
                if file := {"timm": split_state(rest.partition("@")[2])[0], "hf": rest}.get(scheme):
                    refuse_absent(file)
            except CheckpointError as error:
                raise CheckpointError(f"{key}={place}: {error}") from None


def load_initial_weights(config: Any, start: StartConfig | None, objective: Objective) -> None:
    """Load the weights that a recipe names into an objective that was just built. Call this for runs without checkpoints only.

    Args:
        config: the recipe's `objective` block.
        start: its `start_from` block.
        objective: the objective.

    Raises:
        CheckpointError: a checkpoint cannot be read, or does not match.
    """
    if start is not None and start.optimizer:  # weights are read together with the moments, later
        _refuse_other_branch(start, config.kind, objective)
    elif start is not None:
        _start(start, config.kind, objective)
    model = getattr(objective, "model", None)
    if isinstance(model, Clip):
        for key, tower in (("vision", model.visual), ("text", model.text)):
            if (source := getattr(model.config, key).init_from) is not None:
                _init(f"objective.model.{key}.init_from", source, model, tower, Normalisation.find(objective))
    objective.on_weights_loaded()


def _refuse_other_branch(start: StartConfig, kind: str, objective: Objective) -> None:
    """Raise `CheckpointError` for differences that shapes do not show, because weights and moments are loaded as a whole."""
    origin = f"start_from.checkpoint={start.checkpoint}"
    try:
        theirs, _ = read_run(Path(start.checkpoint))
    except CheckpointError:  # anything but a run is reported where it is read
        return
    if theirs.objective.kind != kind:
        raise CheckpointError(
            f"{origin}: is a run of objective {theirs.objective.kind}, but start_from.optimizer needs a run with the same objective.kind as the new run"
        )
    refuse_other_pixels(origin, Normalisation.find(theirs.objective), Normalisation.find(objective))
    with torch.device("meta"):
        refuse_unlike(origin, build_objective(theirs), objective)
    if start.allow_missing or start.allow_unused:
        raise CheckpointError(
            f"{origin}: optimizer=true loads a run as a whole. Remove allow_missing and allow_unused."
        )
    model = getattr(objective, "model", None)
    for key in ("vision", "text") if isinstance(model, Clip) else ():
        if getattr(model.config, key).init_from is not None:  # pyright: ignore[reportOptionalMemberAccess]
            raise CheckpointError(
                f"objective.model.{key}.init_from: would be overwritten by start_from.optimizer. Remove one of them."
            )


def _start(start: StartConfig, method: str, objective: Objective) -> None:
    weights = _weights(start.checkpoint, method, objective)
    refuse_non_finite(weights, f"start_from.checkpoint={start.checkpoint}")
    own = objective.state_dict()
    # What no encoder has may be missing as a whole only.
    new = [p for p in objective.not_in_encoders if not any(fnmatchcase(name, p) for name in weights)]
    missing = _without_matches([name for name in own if name not in weights], (*start.allow_missing, *new))
    unused = _without_matches([name for name in weights if name not in own], start.allow_unused)
    problems = [f"has no {_shorten(missing)} (patterns in start_from.allow_missing accept that)"] if missing else []
    problems += (
        [f"has {_shorten(unused)}, which the run lacks (patterns in start_from.allow_unused accept that)"]
        if unused
        else []
    )
    # Report shapes together with names, so that all problems are visible at once.
    shared = {name: value for name, value in weights.items() if name in own}
    problems += _shape_mismatches(shared, own)
    # A typo in a pattern would match nothing, without a sign.
    idle = [pattern for pattern in start.allow_missing if not any(fnmatchcase(name, pattern) for name in own)]
    problems += [f"start_from.allow_missing: {', '.join(idle)} matches no tensor of the run"] if idle else []
    problems += [] if shared else ["has no tensor of the run, so everything would start at random"]
    followers = {id(average) for average, _ in objective.ema_pairs()}
    still = [
        name
        for name, p in objective.named_parameters()
        if name not in shared and not p.requires_grad and id(p) not in followers and not _is_constant(p)
    ]
    problems += (
        [f"has no {_shorten(still)}, which is frozen here and would keep its random initialization"] if still else []
    )
    if problems:
        raise CheckpointError(f"start_from.checkpoint={start.checkpoint}: {'; '.join(problems)}")
    objective.load_state_dict(shared, strict=False)
    # Averages and copies are set from their source, even if the checkpoint lacks them.
    fresh = [name for name in own if name not in weights and name.partition(".")[0] not in objective.follows]
    logger.info(
        f"start_from: loaded {len(shared)} tensors from {start.checkpoint}"
        + (f"; not in the checkpoint, so newly initialized: {_shorten(fresh)}" if fresh else "")
    )


def _weights(checkpoint: str, method: str, objective: Objective) -> Mapping[str, Tensor]:
    """Return a checkpoint's weights under the objective's names."""
    (place, part), origin = split_state(checkpoint), f"start_from.checkpoint={checkpoint}"
    path = Path(place)
    if (path / "config.yaml").is_file() or (path / "meta.json").is_file():
        config, step = read_run(path)
        if doubt := checkpoint_warnings(path, step):
            logger.warning(f"start_from: {doubt}")
        # By this method's own names, so that parts outside the encoder (heads, temperatures) are loaded, too.
        if config.objective.kind == method:  # everything: a teacher, a head, a temperature
            refuse_other_pixels(origin, Normalisation.find(config.objective), Normalisation.find(objective))
            # Only names and shapes of the other run are needed, which need no memory.
            weights = run_weights(step)
            with torch.device("meta"):
                refuse_unlike(origin, build_objective(config, weights), objective)
            return _with_origin(origin, lambda: objective.adapt_to_resolution(weights, config.objective))
    file = _with_origin(origin, lambda: objective.weights_of_file(read_raw(path), part)) if path.is_file() else None
    if file is not None:
        pixels = Normalisation(tuple(file.mean), tuple(file.std))
        refuse_other_pixels(origin, pixels, Normalisation.find(objective))
        return file.weights
    encoder = load_encoder(checkpoint)
    source_model = _read_source(encoder)
    state = to_our_names(source_model.state_dict(), origin)
    weights = _with_origin(origin, lambda: objective.remap_encoder_weights(state, source_model))
    refuse_unlike(origin, source_model, objective)
    refuse_other_pixels(origin, Normalisation.find(encoder), Normalisation.find(objective))
    return weights


def _with_origin(origin: str, read: Callable[[], T]) -> T:
    try:
        return read()
    except CheckpointError as error:
        raise CheckpointError(f"{origin}: {error}") from None


def _read_source(encoder: Encoder) -> nn.Module:
    """Return the whole content of a checkpoint, because the scored part of a foreign model may be one of two towers."""
    return encoder.source if isinstance(encoder, BackboneEncoder) else encoder.model


def _init(
    key: str,
    source: str,
    model: Clip,
    tower: VisionTower | TimmTower | TextTower,
    pixels: Normalisation | None,
) -> None:
    part, origin = "text" if isinstance(tower, TextTower) else "visual", f"{key}={source}"
    if isinstance(tower, TimmTower) and (read := timm_file(source)) is not None:
        state, theirs = read
        refuse_other_pixels(origin, theirs, pixels)
        weights = trunk_weights(state, origin)
    else:
        weights = _weights_from_encoder(origin, source, part, tower, pixels)
    # Before positions are interpolated, which would spread one NaN over all of them.
    refuse_non_finite(weights, origin)
    whole = model.adapt_to_resolution({f"{part}.{name}": value for name, value in weights.items()})
    # Interpolated under whole names, which open_clip's resizing expects.
    weights = {name.removeprefix(f"{part}."): value for name, value in whole.items()}
    own = tower.state_dict()
    # A projection of another width and a readout are new, and are to be learned.
    free = ("proj", "text_projection", *([] if tower.read_by is None else [f"{tower.read_by}.*"]))
    missing = _without_matches([name for name in own if name not in weights], free)
    shared = {
        name: t for name, t in weights.items() if name in own and not (name in free and t.shape != own[name].shape)
    }
    if problems := ([f"has no {_shorten(missing)}"] if missing else []) + _shape_mismatches(shared, own):
        raise CheckpointError(
            f"{origin}: {'; '.join(problems)}. Its tower must have the same kind and sizes as the tower of the new run."
        )
    tower.load_state_dict(shared, strict=False)
    fresh, left = ([n for n in a if n not in shared] for a in (own, weights))
    still = [name for name, p in tower.named_parameters() if name in fresh and not p.requires_grad]
    if still:
        raise CheckpointError(
            f"{origin}: has no tensors that match {_shorten(still)} of the new run, and `freeze` would leave the new "
            "run's unmatched tensors at their random initial values. Set freeze=blocks, which trains everything "
            "after the blocks."
        )
    message = f"{key}: loaded {len(shared)} tensors from {source}"
    logger.info(
        message
        + (f"; newly initialized: {_shorten(fresh)}" if fresh else "")
        + (f"; not used: {_shorten(left)}" if left else "")
    )


def _weights_from_encoder(
    origin: str,
    source: str,
    part: str,
    tower: VisionTower | TimmTower | TextTower,
    pixels: Normalisation | None,
) -> dict[str, Tensor]:
    """Return one tower's weights from anything that `sparo eval` loads."""
    try:
        encoder = load_encoder(source)
    except CheckpointError as error:
        hint = ". For a timm model, write timm:NAME@FILE" if isinstance(tower, TimmTower) else ""
        raise CheckpointError(f"{origin}: {error}{hint}") from None
    # Texts have no pixels.
    if part == "visual":
        refuse_other_pixels(origin, Normalisation.find(encoder), pixels)
    source_model = _read_source(encoder)
    state = source_model.state_dict()
    weights = trunk_weights(state, origin) if isinstance(tower, TimmTower) else tower_weights(state, part, origin)
    refuse_unlike(origin, _find_tower(source_model, part), tower)
    return weights


def _find_tower(model: nn.Module, part: str) -> nn.Module:
    """Return the tower in our models and open_clip's, in transformers', or the model itself."""
    names = (part, "vision_model" if part == "visual" else "text_model")
    return next((getattr(model, name) for name in names if isinstance(getattr(model, name, None), nn.Module)), model)


def _without_matches(names: Sequence[str], patterns: Sequence[str]) -> list[str]:
    return [name for name in names if not any(fnmatchcase(name, pattern) for pattern in patterns)]


def _is_constant(p: Tensor) -> bool:
    """Return whether all values of a parameter are equal, so that its initial value is not random."""
    return bool((p == p.flatten()[0]).all())


def _shape_mismatches(weights: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> list[str]:
    wrong = [name for name, t in weights.items() if t.shape != own[name].shape]
    return [f"{n} is {tuple(weights[n].shape)}, but the run's is {tuple(own[n].shape)}" for n in wrong[:3]]


def _shorten(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
