"""Configuration of DINO's objective."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import model_validator

from ..core.config import Frozen, between, field
from ..data.examples.multi_crop import CropsConfig
from ..models.dino_head import DinoHeadConfig
from ..models.vit_config import IMAGENET_MEAN, IMAGENET_STD, VitConfig
from .method import RecipeBlocks, refuse_pair_keys


class CollapseConfig(Frozen):
    """Thresholds for a collapse of representations, and what happens then. Entropy and KL are shares of log(out_dim)."""

    entropy: Annotated[tuple[float, float], between(0, 1, rising=True)] = field(
        (0.005, 0.999), "Warn if the teacher's entropy, as a share of its maximum, is outside of this range."
    )
    kl: float = field(
        0.001,
        "Warn if the KL divergence of the student from the teacher, as a share of log(head.out_dim), is below this.",
        ge=0,
    )
    rankme: float = field(
        1.5, "Warn if the effective rank of the encodings (RankMe) is below this after the first 5 % of the run.", ge=1
    )
    action: Literal["warn", "stop"] = field(
        "warn", "warn: log a warning once. stop: end the run with exit code 4, without another checkpoint."
    )


class IbotConfig(Frozen):
    """iBOT's loss (Zhou et al. 2022) on masked patches of one global crop of each image, as in DINOv2."""

    weight: float = field(1.0, "Weight of the loss.", gt=0)
    mask_ratio: Annotated[tuple[float, float], between(0, 1, rising=True)] = field(
        (0.1, 0.5), "Smallest and largest share of a crop's patches that are masked."
    )
    separate_head: bool | None = field(
        None,
        "Use a second head for patches. Default: only if encodings and patches have different widths.",
        examples=[True],
    )


class GramConfig(Frozen):
    """DINOv3's Gram anchoring (Siméoni et al. 2025): similarities between patches of the student stay close to those of an earlier teacher."""

    weight: float = field(2.0, "Weight of the loss.", gt=0)
    crop_size: int | None = field(
        None,
        "Side in pixels of the global crops that the copy of the teacher receives (without changes of colour). If "
        "this side is larger than objective.model.image_size, the teacher's patch features are resized (bicubic) to "
        "the student's grid. Default: objective.model.image_size.",
        gt=0,
        le=16384,
        examples=[448],
    )
    first_step: int = field(
        0,
        "Number of steps before this loss starts. The loss compares the student with a copy of the teacher, made "
        "after these steps. 0: the loss starts at once, and the copy has the weights of start_from.",
        ge=0,
    )
    update_steps: int | None = field(
        None,
        "After first_step: interval, in steps, at which a new copy of the teacher replaces the previous copy. "
        "Default: the first copy is kept.",
        gt=0,
        examples=[10000],
    )
    max_updates: int | None = field(
        None,
        "With update_steps: maximum number of times that the copy of the teacher is replaced. Default: no limit.",
        gt=0,
        examples=[3],
    )

    @model_validator(mode="after")
    def _check_updates(self) -> GramConfig:
        if self.max_updates is not None and self.update_steps is None:
            raise ValueError(f"max_updates={self.max_updates}: needs update_steps. Set it, or remove max_updates.")
        return self

    def copies_after(self, step: int) -> bool:
        """Return whether the teacher is copied after step number `step` (from 0)."""
        since = step + 1 - self.first_step
        if since <= 0 or self.update_steps is None:
            return since == 0
        updates, rest = divmod(since, self.update_steps)
        return rest == 0 and (self.max_updates is None or updates <= self.max_updates)


class DinoObjectiveConfig(Frozen):
    """Options of `main_dino.py` under their names; an epoch has `samples_per_epoch` (or the data's size) / batch size steps, rounded down."""

    kind: Literal["dino"] = field("dino", "Training method: an entry of sparo.methods.")
    model: VitConfig = field(VitConfig(), "Backbone of student and teacher.")
    head: DinoHeadConfig = field(DinoHeadConfig(), "Projection head on which the loss is computed.")
    crops: CropsConfig = field(CropsConfig(), "Augmented views of an image.")
    mean: Annotated[tuple[float, ...], between(-10, 10)] = field(
        IMAGENET_MEAN, "Mean per colour channel (red, green, blue) or per band. It is subtracted from pixels in 0..1."
    )
    std: Annotated[tuple[float, ...], between(1e-6, 100)] = field(
        IMAGENET_STD,
        "Standard deviation of red, green and blue, or of each band. Pixel values in 0..1 are divided by it.",
    )
    momentum_teacher: float = field(
        0.996, "Initial momentum of the teacher's moving average. A cosine raises it to 1.", ge=0, le=1
    )
    center_momentum: float = field(0.9, "Momentum of the center of the teacher's outputs.", ge=0, le=1)
    student_temp: float = field(0.1, "Temperature of the student's softmax.", gt=0)
    teacher_temp: float = field(0.04, "Temperature of the teacher's softmax after the temperature warm-up.", gt=0)
    warmup_teacher_temp: float = field(
        0.04, "Temperature of the teacher's softmax at the start of the temperature warm-up.", gt=0
    )
    warmup_teacher_temp_epochs: int = field(0, "Epochs of linear warm-up of the teacher's temperature.", ge=0)
    freeze_last_layer: int = field(1, "Epochs at the start in which the prototypes are not updated.", ge=0)
    centering: Literal["mean", "sinkhorn_knopp"] = field(
        "mean",
        "How the teacher's outputs are kept from collapsing. mean: subtract their moving mean; sinkhorn_knopp: "
        "normalise them so that all prototypes have the same share of the global batch.",
    )
    ibot: IbotConfig | None = field(None, "Loss on masked patches. Default: none.")
    koleo: float = field(
        0.0, "Weight of the KoLeo loss, which spreads the encodings of a batch. DINOv2 uses 0.1.", ge=0
    )
    gram: GramConfig | None = field(
        None,
        "Gram anchoring (DINOv3): keep the student's patch-to-patch similarities close to those of an earlier copy of the teacher. Default: none.",
    )
    decay_queries: bool = field(True, "Apply weight decay to SPARO's queries.")
    clip_queries: bool = field(True, "With optim.clip_per=tensor, also clip the gradients of SPARO's queries.")
    collapse: CollapseConfig = field(CollapseConfig(), "When representations count as collapsed.")

    @model_validator(mode="after")
    def _crops(self) -> DinoObjectiveConfig:
        if self.crops.tile is not None and self.crops.tile < self.model.image_size:
            raise ValueError(
                f"crops.tile={self.crops.tile}: is smaller than model.image_size={self.model.image_size}, so all crops would be enlarged. "
                "Raise crops.tile."
            )
        vit = self.model.timm_model_name is None
        if vit and self.crops.local_crops_number and self.crops.local_size < self.model.patch_size:
            raise ValueError(
                f"crops.local_size={self.crops.local_size} is below model.patch_size={self.model.patch_size}"
            )
        if not vit:
            if key := "ibot" if self.ibot is not None else "gram" if self.gram is not None else None:
                raise ValueError(
                    f"{key}: needs the patches of sparo's own ViT. Remove this key, or remove model.timm_model_name."
                )
            if self.crops.local_crops_number and self.model.timm_model_name:
                from ..models.timm_backbone import backbone_facts  # builds the model, which other configs do not need

                try:
                    backbone_facts(self.model.timm_model_name, self.model.image_size, self.crops.local_size)
                except ValueError as error:
                    raise ValueError(f"crops.local_size={self.crops.local_size}: {error}") from None
        side = None if self.gram is None else self.gram.crop_size
        if side is not None and (side % self.model.patch_size or side < self.model.image_size):
            raise ValueError(
                f"gram.crop_size={side}: must be a multiple of model.patch_size={self.model.patch_size}, and at least "
                f"model.image_size={self.model.image_size}. Change it."
            )
        self._check_bands()
        if self.ibot and self.ibot.separate_head is False and self.model.out_width != self.model.width:
            raise ValueError(
                f"ibot.separate_head=false: needs encodings and patches of equal width, got {self.model.out_width} and "
                f"{self.model.width}. Remove ibot.separate_head."
            )
        return self

    def _check_bands(self) -> None:
        bands, crops = self.model.bands, self.crops
        for key in ("mean", "std"):
            if len(getattr(self, key)) != bands:
                raise ValueError(f"{key}: expected {bands} numbers (model.bands), got {len(getattr(self, key))}")
        colours = {
            "crops.jitter": any(crops.jitter[2:]), "crops.gray_prob": crops.gray_prob > 0, "crops.stain": crops.stain > 0,
        }  # fmt: skip
        for key, used in colours.items():
            if used and bands != 3:
                raise ValueError(
                    f"{key}: changes colours, which needs three bands, got model.bands={bands}. Set "
                    "crops.jitter=[0.4,0.4,0,0], crops.gray_prob=0 and crops.stain=0."
                )

    @property
    def patch_head(self) -> bool:
        """Return whether masked patches have a separate head."""
        if self.ibot is None:
            return False
        return (
            self.ibot.separate_head if self.ibot.separate_head is not None else self.model.out_width != self.model.width
        )

    @property
    def most_masked(self) -> int:
        """Return the largest number of masked patches of an image; 0 without iBOT."""
        patches = (self.model.image_size // self.model.patch_size) ** 2
        return 0 if self.ibot is None else max(1, round(self.ibot.mask_ratio[1] * patches))


def check_recipe(recipe: RecipeBlocks[DinoObjectiveConfig]) -> None:
    """Raise `ValueError`, beginning with the dotted key, if blocks of a recipe cannot be combined with this objective."""
    if recipe.objective.model.batch_norm and recipe.engine.grad_checkpointing:
        raise ValueError(
            f"engine.grad_checkpointing: would update the batch norms of {recipe.objective.model.timm_model_name} twice per step. Remove it."
        )
    refuse_pair_keys(recipe.data, "objective.crops")
    objective = recipe.objective
    named = 3 if recipe.data.bands is None else len(recipe.data.bands)
    if objective.model.bands != named:
        given = (
            "data.bands is not set, so images have 3 bands"
            if recipe.data.bands is None
            else f"data.bands gives {named} bands"
        )
        remedy = (
            "data.bands" if recipe.data.bands is None else f"objective.model.bands={named}, and a mean and std for each"
        )
        raise ValueError(f"objective.model.bands={objective.model.bands}: {given}. Set {remedy}.")
    if objective.gram is not None and objective.gram.first_step == 0 and recipe.start_from is None:
        raise ValueError(
            "objective.gram.first_step=0: this loss uses a copy of the teacher, and at step 0 that copy would have "
            "random weights. Set start_from (on the command line: init=) to a trained run or backbone, or raise "
            "objective.gram.first_step."
        )
    coupling = {
        "head.use_bn": objective.head.use_bn,
        "koleo": objective.koleo > 0,
        "centering": objective.centering == "sinkhorn_knopp",
        "model.timm_model_name": objective.model.batch_norm,
    }
    for key, couples in coupling.items():
        if couples and recipe.micro_batch_size is not None:
            raise ValueError(
                f"micro_batch_size: objective.{key} couples the samples of a batch, so the batch cannot be split. Remove "
                f"micro_batch_size or objective.{key}."
            )
