"""The recipe's `objective` block for CLIP."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from ..core.config import Frozen, between, field, resumable_field
from ..core.contracts import Progress
from ..core.registries import LOSSES
from ..core.registry import FromRegistry
from ..models.clip_config import OPENAI_MEAN, OPENAI_STD, ClipConfig
from .contrastive import ContrastiveLoss, SoftmaxLoss
from .slot_independence import IndependenceConfig

MAX_LOGIT_SCALE = math.log(100)
Share = Annotated[float, Field(ge=0, lt=1)]


class EmaConfig(Frozen):
    """Exponential moving average of the model, which is scored and exported."""

    decay: float = field(0.9999, "Decay of the moving average per step.", ge=0, lt=1)
    warmup: bool = field(
        True, "Start with a smaller decay, (1 + step) / (10 + step), so that the average forgets the initial weights."
    )

    def decay_at(self, progress: Progress) -> float:
        """Return the share of itself that the average keeps at this step."""
        # The average of a branch has long forgotten its random weights, so it is not warmed up again.
        step = progress.steps_before + progress.step
        # Random weights are forgotten within tens of steps instead of 1 / (1 - decay).
        return min(self.decay, (1 + step) / (10 + step)) if self.warmup else self.decay


class CacheConfig(Frozen):
    """Folder that caches the tokens of frozen towers, for every run with the same towers and data."""

    folder: str = resumable_field(
        ...,
        min_length=1,
        description="Cache folder. Entries are found by content. The folder may be deleted at any time.",
        examples=["data/tokens"],
    )
    dtype: Literal["fp16", "fp32"] = field("fp16", "Dtype of cached tokens. fp16 takes half the space.")

    def size_note(self, values: int | None, samples: int) -> str:
        """Return the disk space of samples with this many values each, in words; nothing if the number is unknown."""
        return (
            "" if values is None else f" (about {samples * values * (2 if self.dtype == 'fp16' else 4) / 1e9:.3g} GB)"
        )


def as_cache_block(value: Any) -> Any:
    """Return the block of a folder that is given as a text."""
    return {"folder": value} if isinstance(value, str) else value


class ClipObjectiveConfig(Frozen):
    """CLIP: image and text towers, trained with a contrastive loss (Radford et al. 2021)."""

    kind: Literal["clip"] = field("clip", "Training method: an entry of sparo.methods.")
    loss: Annotated[ContrastiveLoss, FromRegistry(LOSSES, default="softmax")] = field(
        SoftmaxLoss(), "Loss between all images and texts of the global batch: an entry of sparo.losses."
    )
    model: ClipConfig = field(ClipConfig(), "Both towers and their readout.")
    mean: Annotated[tuple[float, float, float], between(-10, 10)] = field(
        OPENAI_MEAN, "Mean per colour channel (red, green, blue). It is subtracted from pixels in 0..1."
    )
    std: Annotated[tuple[float, float, float], between(1e-6, 100)] = field(
        OPENAI_STD, "Standard deviation per colour channel (red, green, blue). Pixels in 0..1 are divided by it."
    )
    # sparo-clip decays every matrix, including position embeddings and SPARO's queries; open_clip >= 4 excludes
    # position embeddings.
    decay_policy: Literal["sparo-clip", "open_clip4"] = field(
        "sparo-clip",
        "Parameters with weight decay. sparo-clip: all with two or more dimensions; open_clip4: the same without position embeddings.",
    )
    ema: EmaConfig | None = field(
        None, "Keep a moving average of the weights, and evaluate and export this average. Default: no average."
    )
    cache: Annotated[CacheConfig | None, BeforeValidator(as_cache_block)] = field(
        None,
        "Store the outputs of frozen Transformer blocks and train on the stored outputs. Value: a folder, or a "
        "mapping with the keys objective.cache.*. Default: no cache.",
        examples=[{"folder": "data/tokens"}],
    )
    image_sizes: tuple[tuple[Share, int], ...] = field(
        (),
        "Image sizes during training, as a list of [start, pixels]. start: share of the run after which this size "
        "begins (0 for the first size). The last size must be model.vision.image_size. Default: "
        "model.vision.image_size during the whole run.",
        strict=False,
        examples=[[[0, 112], [0.8, 224]]],
    )
    independence: IndependenceConfig | None = field(
        None,
        "Auxiliary loss that makes slots independent of each other. Requires a readout with two or more slots, such "
        "as `sparo`, in both towers. Default: none.",
    )
    max_logit_scale: float = field(
        MAX_LOGIT_SCALE,
        "Upper bound of logit_scale, the natural logarithm of the factor by which cosines are multiplied.",
        gt=0,
    )

    @model_validator(mode="after")
    def _bias(self) -> ClipObjectiveConfig:
        bias = self.model.init_logit_bias
        if self.loss.uses_bias and bias is None:
            raise ValueError(
                f"loss.kind={self.loss.kind}: needs model.init_logit_bias. Set it; SigLIP uses model.init_logit_bias=-10 and model.init_logit_scale=2.3026."
            )
        if bias is not None and not self.loss.uses_bias:
            raise ValueError(
                f"model.init_logit_bias: is not used by loss.kind={self.loss.kind}. Remove it, or set loss.kind=sigmoid."
            )
        if self.model.readout.conditioned and self.loss.kind != "sigmoid":
            raise ValueError(
                f"model.readout.kind={self.model.readout.kind}: needs loss.kind=sigmoid. Set it, and model.init_logit_bias=-10."
            )
        if self.cache is not None and not any(self.frozen):
            raise ValueError(
                "cache: needs a tower with frozen blocks. Set model.vision.freeze=blocks or model.text.freeze=blocks."
            )
        readout, slots = self.model.readout, self.model.readout.shape(self.model.embed_dim)[0]
        if self.independence is not None and (slots < 2 or readout.placement.projected or not readout.placement.text):
            raise ValueError(
                f"independence: needs two or more slots in each tower, got model.readout.kind={readout.kind} with "
                f"{slots}. Remove independence, or use readout.kind=sparo."
            )
        if self.independence is not None and self.independence.kind == "attention" and self.cache is not None:
            raise ValueError(
                "independence.kind=attention: cannot be combined with cached tokens. Set independence.kind=hsic, or remove the key `cache`."
            )
        return self

    @model_validator(mode="after")
    def _sizes(self) -> ClipObjectiveConfig:
        if not self.image_sizes:
            return self
        # The run has to end with the size of the model, because that model is evaluated.
        shares, sizes, v = (
            [share for share, _ in self.image_sizes],
            [size for _, size in self.image_sizes],
            self.model.vision,
        )
        if shares[0] or shares != sorted(set(shares)):
            raise ValueError(
                "image_sizes: in the list of [start, pixels], the `start` values must increase, and the first must "
                f"be 0, got {shares}. Correct them."
            )
        if wrong := [size for size in sizes if size < v.patch_size or size % v.patch_size or size > v.image_size]:
            raise ValueError(
                f"image_sizes: each size must be a multiple of patch_size={v.patch_size} and at most "
                f"model.vision.image_size={v.image_size}, got {wrong[0]}"
            )
        if sizes[-1] != v.image_size:
            raise ValueError(
                f"image_sizes: the last size must equal model.vision.image_size={v.image_size}, at which the model is scored, got {sizes[-1]}"
            )
        if v.timm_model_name or v.patch_dropout or (self.cache is not None and self.frozen[0]):
            raise ValueError(
                "image_sizes: cannot be combined with vision.timm_model_name, vision.patch_dropout or cached image tokens"
            )
        return self

    def image_size_at(self, share: float) -> int:
        """Return the image size after this share of the run."""
        return next(
            (size for begin, size in reversed(self.image_sizes) if share >= begin), self.model.vision.image_size
        )

    @property
    def frozen(self) -> tuple[bool, bool]:
        """Return whether all blocks of the image tower, and of the text tower, keep their initial weights."""
        m = self.model
        left = m.readout.placement.replaced
        # Blocks that a readout replaces do not exist, so they need not be frozen.
        vision, text = (
            how is True or how == "blocks" or (how is not False and how == tower.layers - left)
            for tower, how in ((m.vision, m.vision.freeze), (m.text, m.text.freeze))
        )
        return vision, text
