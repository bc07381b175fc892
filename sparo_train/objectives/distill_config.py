"""Configuration of distillation from a frozen teacher."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, model_validator

from ..core.config import Frozen, between, field
from ..core.registries import TEACHERS
from ..core.registry import FromRegistry
from ..data.examples.multi_crop import jitter_strength
from ..models.vit_config import IMAGENET_MEAN, IMAGENET_STD, VitConfig
from .clip_config import CacheConfig, as_cache_block
from .method import RecipeBlocks, refuse_pair_keys


def _as_teacher(value: Any) -> Any:
    return {"checkpoint": value} if isinstance(value, str) else value


class StudentCropsConfig(Frozen):
    """The region of the teacher's view that the student sees, and changes of its colours."""

    scale: Annotated[tuple[float, float], between(1e-6, 1, rising=True)] = field(
        (0.5, 1.0),
        "Smallest and largest area of the student's crop, as a share of the teacher's square view.",
    )
    hflip: float = field(0.5, "Probability of a horizontal flip.", ge=0, le=1)
    jitter: Annotated[tuple[float, float, float, float], AfterValidator(jitter_strength)] = field(
        (0.4, 0.4, 0.2, 0.1), "Strength of the colour jitter: brightness, contrast, saturation, hue."
    )
    jitter_prob: float = field(0.0, "Probability of the colour jitter.", ge=0, le=1)
    gray_prob: float = field(0.0, "Probability of converting the crop to grayscale.", ge=0, le=1)


class DistillObjectiveConfig(Frozen):
    """Distillation: a student learns the class token and the patches of a frozen teacher."""

    kind: Literal["distill"] = field("distill", "Training method: an entry of sparo.methods.")
    model: VitConfig = field(VitConfig(), "Backbone of the student.")
    teacher: Annotated[Any, FromRegistry(TEACHERS, default="checkpoint"), BeforeValidator(_as_teacher)] = field(
        ...,
        "The teacher: a checkpoint, or a block whose `kind` is an entry of sparo.teachers.",
        examples=["dinov2_vitb14_pretrain.pth"],
    )
    cache: Annotated[CacheConfig | None, BeforeValidator(as_cache_block)] = field(
        None,
        "Folder in which the teacher's tokens are cached; all runs with the same teacher and images can share it. Default: the teacher runs in every step.",
        examples=["data/tokens"],
    )
    crops: StudentCropsConfig = field(StudentCropsConfig(), "Crops and colours of the student's images.")
    class_weight: float = field(1.0, "Weight of the loss on the teacher's class token.", ge=0)
    patch_weight: float = field(1.0, "Weight of the loss on the teacher's patches.", ge=0)
    mean: Annotated[tuple[float, float, float], between(-10, 10)] = field(
        IMAGENET_MEAN,
        "Mean of red, green and blue. It is subtracted from the student's pixel values, which are in 0..1.",
    )
    std: Annotated[tuple[float, float, float], between(1e-6, 100)] = field(
        IMAGENET_STD,
        "Standard deviation of red, green and blue. The student's pixels, in 0..1, are divided by these values.",
    )

    @model_validator(mode="after")
    def _check_weights(self) -> DistillObjectiveConfig:
        if self.class_weight == self.patch_weight == 0:
            raise ValueError("class_weight and patch_weight are 0, so nothing would be learned. Raise one of them.")
        if self.model.bands != 3:
            raise ValueError(
                f"model.bands={self.model.bands}: must be 3, because this objective decodes images to three channels. Remove model.bands."
            )
        return self


def check_recipe(recipe: RecipeBlocks[DistillObjectiveConfig]) -> None:
    """Raise `ValueError`, beginning with the dotted key, if blocks of a recipe cannot be combined with this objective."""
    model = recipe.objective.model
    if model.batch_norm and (recipe.engine.grad_checkpointing or recipe.micro_batch_size is not None):
        key = "engine.grad_checkpointing" if recipe.engine.grad_checkpointing else "micro_batch_size"
        raise ValueError(
            f"{key}: cannot be used with {model.timm_model_name}, whose batch norms need the whole batch exactly once "
            f"per step. Remove {key}."
        )
    refuse_pair_keys(recipe.data, "objective.crops")
