"""Keys of DINO that follow from the images, the initial weights and the machine: recipes with `auto`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any, NamedTuple

from ..models.weight_files.backbone_description import BackboneDescription, describe_backbone
from .method import Choice, Situation

# The small model of configs/dino/_tiny.yaml, which learns on two CPU cores, and the official ones.
_CPU_MODEL = {"width": 128, "depth": 4, "heads": 4, "drop_path": 0.0, "weight_init": "xavier"}
_LARGE = 200_000  # images from which ViT-B is worth its cost
_KEPT = (
    "timm_model_name", "width", "depth", "heads", "mlp_ratio", "registers", "layer_scale", "ffn_layer", "positions", "rope_base", "norm_eps",
    "pre_norm", "quick_gelu", "interpolate_offset", "interpolate_antialias",
)  # fmt: skip


class _Plan(NamedTuple):
    """Sizes on which other choices depend; keys that the recipe sets are taken from it."""

    patch: int
    side: int
    batch: int
    steps: int


def choose(situation: Situation) -> list[Choice]:
    """Return the choices for a recipe of DINO. A choice whose key the recipe sets has no effect, but others follow the recipe's value."""
    start = _start(situation.recipe)
    plan = _plan(situation, start)
    shared = (*_model(situation, start, plan), *_length(situation, start, plan), _precision(situation))
    return [*shared, *_head(situation), *_teacher(situation, plan), *_views(situation, plan)]


def choose_backbone(situation: Situation) -> list[Choice]:
    """Return the choices for a recipe that trains a backbone by distillation."""
    start = _start(situation.recipe)
    plan = _plan(situation, start)
    return [*_model(situation, start, plan), *_length(situation, start, plan), _precision(situation)]


def _start(recipe: Mapping[str, Any]) -> BackboneDescription | None:
    start = recipe.get("start_from")
    place = start.get("checkpoint") if isinstance(start, Mapping) else start
    return (
        describe_backbone(place, _recipe_value(recipe, "objective.model.heads", None))
        if isinstance(place, str)
        else None
    )


def _plan(situation: Situation, start: BackboneDescription | None) -> _Plan:
    recipe, images = situation.recipe, situation.images
    median = situation.survey.sides[2]
    largest = 224 if situation.gpu else 64
    usual = 16 if median >= 96 and situation.gpu else 8 if median >= 48 else 4
    if _recipe_value(recipe, "objective.model.timm_model_name", None) is not None:
        usual = 32  # the stride of most of timm's models
    patch = _recipe_value(recipe, "objective.model.patch_size", start.config.patch_size if start else usual)
    side = _recipe_value(recipe, "objective.model.image_size", max(2, min(median, largest) // patch) * patch)
    most = 256 if situation.gpu else 64
    # At least four batches per epoch, and eight images per batch if there are eight.
    usual_batch = max(min(8, _power_below(images)), min(most, _power_below(images // 4)))
    batch = _recipe_value(recipe, "batch_size", usual_batch)
    low, high = (10_000, 250_000) if situation.gpu else (1_000, 4_000)
    steps = min(max(100 * images // batch, low), high)
    if start is not None:
        steps = steps * 3 // 10
    if (samples := _recipe_value(recipe, "samples", None)) is not None:
        steps = samples // batch
    if (epochs := _recipe_value(recipe, "epochs", None)) is not None:
        steps = int(Decimal(str(epochs)) * images) // batch  # as RunConfig.total_steps
    return _Plan(patch, side, batch, max(1, _recipe_value(recipe, "steps", steps)))


def _model(situation: Situation, start: BackboneDescription | None, plan: _Plan) -> Iterator[Choice]:
    images, machine, survey = f"{situation.images} images", _machine(situation), situation.survey
    size = f"the median image has {survey.sides[2]} pixels"
    timm = _recipe_value(situation.recipe, "objective.model.timm_model_name", start and start.config.timm_model_name)
    if timm is None:
        yield Choice("objective.model.patch_size", plan.patch, "of the initial weights" if start else size)
    yield Choice("objective.model.image_size", plan.side, f"{size}, {machine}")
    bands = _num_bands(situation)
    if bands != 3:
        yield Choice("objective.model.bands", bands, "data.bands")
    if start is not None and start.pixel_range is not None and bands == len(start.mean):
        # Mean and standard deviation of the initial weights belong to this range.
        yield Choice("data.pixel_range", start.pixel_range, "of the initial weights")
    elif survey.low:
        yield Choice("data.pixel_range", [list(pair) for pair in survey.ranges], f"of {survey.images} images")
    elif survey.full_range is not None:
        yield Choice("data.pixel_range", list(survey.full_range), f"the images use {survey.used_bits} bits")
    if start is not None:
        for key in _KEPT if timm is None else _KEPT[:1]:
            if (value := getattr(start.config, key)) != type(start.config).model_fields[key].default:
                yield Choice(f"objective.model.{key}", value, "of the initial weights")
        if bands == len(start.mean):
            yield Choice("objective.mean", list(start.mean), "of the initial weights")
            yield Choice("objective.std", list(start.std), "of the initial weights")
    elif timm is None and _recipe_value(situation.recipe, "objective.model.arch", None) is None:
        if situation.gpu:
            yield Choice("objective.model.arch", "vit_base" if situation.images >= _LARGE else "vit_small", images)
        else:
            yield from (Choice(f"objective.model.{key}", value, machine) for key, value in _CPU_MODEL.items())
    if start is None or bands != len(start.mean):
        yield Choice("objective.mean", list(survey.mean), f"of {survey.images} images")
        yield Choice("objective.std", list(survey.std), f"of {survey.images} images")
    if _recipe_value(situation.recipe, "objective.model.readout.kind", "cls") == "sparo":
        for key in ("slots", "slot_width", "head_width"):
            yield Choice(f"objective.model.readout.{key}", 64 if situation.gpu else 32, machine)
        if timm is not None:
            yield Choice("objective.model.readout.replace_last_block", False, f"{timm} keeps its blocks")


def _num_bands(situation: Situation) -> int:
    return len(_recipe_value(situation.recipe, "data.bands", (1, 2, 3)))


def _head(situation: Situation) -> Iterator[Choice]:
    images, machine = f"{situation.images} images", _machine(situation)
    prototypes = 1024 if situation.images < 10_000 else 8192 if situation.images < 100_000 else 65536
    yield Choice("objective.head.out_dim", prototypes, images)
    if not situation.gpu:
        yield Choice("objective.head.hidden_dim", 256, machine)
        yield Choice("objective.head.bottleneck_dim", 64, machine)


def _length(situation: Situation, start: BackboneDescription | None, plan: _Plan) -> Iterator[Choice]:
    length = f"{plan.steps} steps"
    yield Choice("batch_size", plan.batch, f"{situation.images} images")
    if not any(situation.recipe.get(unit) for unit in ("steps", "epochs", "samples")):
        epochs = round(plan.steps * plan.batch / situation.images, 1)
        # Rounding down must not make the run shorter than one step.
        yield Choice("epochs", max(epochs, -(-plan.batch * 10 // situation.images) / 10), length)
    per_epoch = max(1, situation.images // plan.batch)
    yield Choice("optim.warmup_steps", min(10 * per_epoch, plan.steps // 10), "ten epochs, at most a tenth of the run")
    official = 5e-4 * plan.batch / 256
    if start is not None:
        yield Choice("optim.lr", official / 5, "a fifth of 5e-4 for 256 samples, because of initial weights")
    else:
        yield Choice(
            "optim.lr", official if situation.gpu else 2e-3, "5e-4 for 256 samples" if situation.gpu else "small model"
        )


def _teacher(situation: Situation, plan: _Plan) -> Iterator[Choice]:
    length, per_epoch = f"{plan.steps} steps", max(1, situation.images // plan.batch)
    momentum = 0.98 if plan.steps < 5_000 else 0.99 if plan.steps < 20_000 else 0.996
    yield Choice("objective.momentum_teacher", momentum, length)
    # In a short run, prototypes that stay frozen for an epoch let few of them take all images.
    yield Choice("objective.freeze_last_layer", int(20 * per_epoch <= plan.steps), length)


def _precision(situation: Situation) -> Choice:
    return Choice("engine.precision", "bf16" if situation.gpu else "fp32", _machine(situation))


def _machine(situation: Situation) -> str:
    return "on a GPU" if situation.gpu else "on CPUs"


def _views(situation: Situation, plan: _Plan) -> Iterator[Choice]:
    crops = "objective.crops."
    small = plan.side < 96
    size = f"images of {plan.side} pixels"
    yield Choice(f"{crops}local_size", max(2, round(plan.side * 96 / 224 / plan.patch)) * plan.patch, size)
    yield Choice(f"{crops}local_crops_number", 8 if situation.gpu else 2, _machine(situation))
    yield Choice(f"{crops}global_crops_scale", [0.6, 1.0] if small else [0.4, 1.0], size)
    yield Choice(f"{crops}local_crops_scale", [0.3, 0.7] if small else [0.05, 0.4], size)
    if _num_bands(situation) != 3:
        yield Choice(f"{crops}jitter", [0.4, 0.4, 0.0, 0.0], "bands have no hue")
        yield Choice(f"{crops}gray_prob", 0.0, "bands have no hue")
    elif situation.survey.gray > 0.99:
        yield Choice(f"{crops}jitter", [0.6, 0.6, 0.0, 0.0], "gray images")
        yield Choice(f"{crops}gray_prob", 0.0, "gray images")


def _recipe_value(recipe: Mapping[str, Any], dotted: str, default: Any) -> Any:
    value: Any = recipe
    for key in dotted.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return default if value is None else value


def _power_below(number: int) -> int:
    """Return the largest power of two that is not above the number, at least 1."""
    return 1 << max(0, number.bit_length() - 1)
