"""The contrastive objective of CLIP (Radford et al. 2021), for any readout."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..core.contracts import Batch, CoupledObjective, Footprint, Loss, ParamGroups, Progress
from ..core.ema import Follow
from ..core.errors import ConfigError, DataError
from ..data.examples.image_text import VOCABULARY, ClipTokenizer, ImageTextExamples
from ..data.examples.image_transforms import normalise
from ..data.sources.base import DataConfig
from ..models.clip_model import Clip, unit_norm
from ..models.clip_towers import layer_index
from ..models.readout import ReadOut, readouts
from .clip_config import ClipObjectiveConfig
from .contrastive import contrastive, exchange_ring, peak_bytes, round_for
from .method import Method, RecipeBlocks
from .slot_independence import attention_overlap, slot_dependence


class ClipEmbeddings(NamedTuple):
    """Unit-norm encodings in fp32: image (B, width), text (B, width)."""

    image: Tensor
    text: Tensor


class OverlapEmbeddings(NamedTuple):
    """The same, and the overlap of the slots' attention, averaged over both towers, (B, 1)."""

    image: Tensor
    text: Tensor
    overlap: Tensor


class LocalEmbeddings(NamedTuple):
    """Unit-norm images (B, width), texts (B, width) before normalization, and the projected patches (B, N, width) that texts pool."""

    image: Tensor
    query: Tensor
    local: Tensor


class ClipObjective(CoupledObjective):
    """CLIP's loss, or SigLIP's, between images and texts of the global batch, with logits in fp32.

    `embed` and `loss` are separate because the loss needs the whole global batch, however it is gathered.
    """

    follows: ClassVar[Mapping[str, Follow]] = {"average": Follow("model", "ema_decay")}
    compile_by_default: ClassVar[bool] = True

    mean: Tensor
    std: Tensor

    def __init__(self, config: ClipObjectiveConfig):
        super().__init__()
        self.config = config
        self.model = Clip(config.model)
        # A copy of the model, so that the average starts from the same weights.
        self.average = None if config.ema is None else copy.deepcopy(self.model).requires_grad_(False)
        self.register_buffer("mean", torch.tensor(config.mean).view(3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(config.std).view(3, 1, 1), persistent=False)

    def pixels(self, image: Tensor) -> Tensor:
        """Convert (B, 3, H, W) uint8 to normalised fp32, with the arithmetic of torchvision's ToTensor + Normalize."""
        return normalise(image, self.mean, self.std)

    def preprocess_batch(self, batch: Batch, progress: Progress) -> Batch:
        """Resize images (B, 3, H, W) uint8 to the size of this part of the run, bicubic and antialiased."""
        size = self.config.image_size_at(progress.step / progress.total_steps)
        if "image" not in batch or batch["image"].shape[-1] == size:
            return batch
        # On the device, once per batch, because samples arrive at the largest size in every step.
        image = F.interpolate(batch["image"].float(), (size, size), mode="bicubic", antialias=True, align_corners=False)
        # Back to integers, because batches are uint8 everywhere else, and both ways give the same pixels.
        return {**batch, "image": image.round_().clamp_(0, 255).to(torch.uint8)}

    def embed(self, batch: Batch) -> ClipEmbeddings | LocalEmbeddings | OverlapEmbeddings:
        """Encode `image` (B, 3, H, W) uint8, restricted to `patches` (B, K) int64 if given, and `text` (B, T) int64.

        The batch may contain tokens from the towers' blocks instead: `image_tokens` (B, N, d) in place of the image,
        and `text_tokens` (B, T, d).
        """
        cached_tokens = {
            side: batch[f"{side}_tokens"].float() for side in ("image", "text") if f"{side}_tokens" in batch
        }
        for key in ("image", "text"):
            if key not in batch and not (key == "image" and key in cached_tokens):
                raise DataError(f"objective clip: the batch has no {key!r} (it has {', '.join(batch)})")
        pixels = None if "image" in cached_tokens else self.pixels(batch["image"])
        if self.config.model.readout.conditioned:
            image, local = self.model.encode_local(pixels, batch.get("patches"), cached_tokens.get("image"))
            return LocalEmbeddings(
                image, self.model.encode_text(batch["text"], False, cached_tokens.get("text")), local
            )
        penalty = self.config.independence
        if pixels is not None and penalty is not None and penalty.kind == "attention":
            image = self.model.visual.slots(pixels, True, batch.get("patches"))
            text = self.model.text.slots(batch["text"], True)
            assert image.attention is not None and text.attention is not None
            overlap = (attention_overlap(image.attention) + attention_overlap(text.attention)) / 2
            return OverlapEmbeddings(unit_norm(image.flat()), unit_norm(text.flat()), overlap[:, None])
        return ClipEmbeddings(
            self.model.encode_image(pixels, True, batch.get("patches"), cached_tokens.get("image")),
            self.model.encode_text(batch["text"], True, cached_tokens.get("text")),
        )

    def loss(self, embeddings: tuple[Tensor, ...], own: Sequence[Tensor], progress: Progress) -> Loss:
        """Return the loss of these pairs within the global batch; metrics: accuracy (image to text), logit_scale, logit_bias.

        With a conditioned readout, the loss is the mean of the loss of the encodings and `conditioned_sigmoid` (FLAIR), which
        is also the metric `conditioned_loss`. With `objective.independence`, its loss is added, and is the metric
        `independence_loss`.
        """
        biased = self.model.logit_bias is not None
        bias, pool = own[1] if biased else None, own[1 + biased :]
        # Logits in fp32, because they range over a hundred and differences in the third digit matter.
        with torch.autocast(embeddings[0].device.type, enabled=False):
            image, text, *more = (x.float() if x.itemsize < 4 else x for x in embeddings)
            local = more if self.config.model.readout.conditioned else []
            query, text = text, F.normalize(text, dim=-1) if local else text
            scale = own[0].exp()
            total, correct = contrastive(image, text, scale, bias, self.config.loss)
            metrics = {"accuracy": correct.float().mean(), "logit_scale": scale.detach()}
            if local and bias is not None:
                from .text_conditioned import conditioned_sigmoid  # only FLAIR's readout needs it

                heads = self.config.model.readout.heads
                ring = exchange_ring(self.config.loss)
                conditioned = conditioned_sigmoid(local[0], round_for(ring, query), pool, heads, scale, bias, ring)
                total, metrics["conditioned_loss"] = (total + conditioned) / 2, conditioned.detach()
            if (penalty := self.config.independence) is not None:
                dependence = self._slot_dependence(image, text, more)
                total = total + penalty.weight * dependence
                metrics["independence_loss"] = dependence.detach()
        return Loss(total, metrics if bias is None else {**metrics, "logit_bias": bias.detach()})

    def _slot_dependence(self, image: Tensor, text: Tensor, overlap: Sequence[Tensor]) -> Tensor:
        """Return the dependence of slots that `objective.independence` penalizes, the mean of both towers."""
        penalty, model = self.config.independence, self.config.model
        if penalty is None or penalty.kind == "attention":
            return overlap[0].mean()
        slots = model.readout.shape(model.embed_dim)[0]
        return (slot_dependence(image, slots, penalty.kind) + slot_dependence(text, slots, penalty.kind)) / 2

    def loss_parameters(self) -> Sequence[nn.Parameter]:
        own = [p for p in (self.model.logit_scale, self.model.logit_bias) if p is not None]
        return [*own, *self.model.pool_parameters()]

    @property
    def scored(self) -> Clip:
        """Return the model that is evaluated and exported: the average if there is one."""
        return self.model if self.average is None else self.average

    def refuse_length(self, total_steps: int) -> None:
        # The evaluated model has the final image size, which it must have seen.
        last = (total_steps - 1) / total_steps
        if unreachable_shares := [share for share, _ in self.config.image_sizes if share > last]:
            raise ConfigError(
                f"objective.image_sizes: the size with start {unreachable_shares[0]:g} would never be used: the start of "
                f"the last of the {total_steps} steps is {last:g}. Set a lower start."
            )

    def on_weights_loaded(self) -> None:
        if self.average is not None:
            self.average.load_state_dict(self.model.state_dict())

    def shard_units(self) -> Sequence[nn.Module]:
        towers = [tower for m in (self.model, self.average) if m is not None for tower in (m.visual, m.text)]
        blocks: list[nn.Module] = [block for tower in towers for block in tower.resblocks]
        return blocks if self.average is None else [*blocks, self.average]

    def compile_units(self) -> Sequence[nn.Module]:
        towers = (self.model.visual, self.model.text)
        return [*(block for tower in towers for block in tower.resblocks), *readouts(self.model)]

    def remap_encoder_weights(self, weights: Mapping[str, Tensor], source: nn.Module) -> dict[str, Tensor]:
        """Rename the weights of a CLIP model; positions for images of another size are interpolated as in open_clip."""
        # `after_step` fills it, so it is neither trained nor exchanged.
        fitted = self.model.adapt_to_resolution(weights)
        nets = ("model",) if self.average is None else ("model", "average")
        return {f"{net}.{name}": value for net in nets for name, value in fitted.items()}

    def adapt_to_resolution(self, weights: Mapping[str, Tensor], theirs: Any = None) -> Mapping[str, Tensor]:
        """Return the average if the run has one, because the average was scored."""
        return self.remap_encoder_weights(scored_weights(weights), self.model)

    def param_groups(self) -> ParamGroups:
        default, towers = super().param_groups(), {"visual": self.model.visual, "text": self.model.text}
        # open_clip changed its rule in version 4; older runs must continue with the old one.
        positions = {f"model.{part}.positional_embedding" for part in towers}
        no_decay = {*default.no_decay, *(positions if self.config.decay_policy == "open_clip4" else ())}
        layer_ids = {
            f"model.{part}.{name}": len(tower.resblocks) + 1 - layer_index(name, len(tower.resblocks))
            for part, tower in towers.items()
            for name, _ in tower.named_parameters()
        }
        return replace(default, no_decay=no_decay, layer_ids=layer_ids, norm_groups=towers)

    def footprint(self, batch: int, world_batch: int) -> Footprint:
        m = self.config.model
        sizes = (m.vision.tokens * m.vision.width, m.text.context_length * m.text.width)
        blocks = (len(self.model.visual.resblocks), len(self.model.text.resblocks))
        return Footprint(
            {"image": m.vision.tokens, "text": m.text.context_length},
            # Frozen blocks keep nothing for backward, because it does not reach them.
            [row for *row, still in zip(sizes, blocks, self.config.frozen, strict=True) if not still],  # type: ignore[misc]
            m.width,
            peak_bytes(self.config.loss, batch, world_batch, m.width),
            self._count_written(),
        )

    def _count_written(self) -> int:
        """Return the 16-bit values that a pair writes outside of blocks: embedded tokens and norms around the blocks, and readouts."""
        m = self.config.model
        read = sum(2 * part.slots * width for part, width in self._readouts())
        # In fp32, so two each: embedded patches, the norms before and after the blocks; twenty copies of the encodings.
        return 6 * m.vision.tokens * m.vision.width + 3 * m.text.context_length * m.text.width + read + 20 * m.width

    def _readouts(self) -> list[tuple[ReadOut, int]]:
        """Return the readouts with the width of the tokens that they read."""
        m = self.config.model
        towers = ((self.model.visual, m.vision.width), (self.model.text, m.text.width))
        return [(part, width) for tower, width in towers for part in readouts(tower)]

    def set_grad_checkpointing(self, enable: bool) -> None:
        self.model.set_grad_checkpointing(enable)

    @torch.no_grad()
    def after_step(self, progress: Progress, applied: Tensor) -> None:
        # After the step, as in CLIP's paper. Clamping again after a skipped step changes nothing.
        self.model.logit_scale.clamp_(0, self.config.max_logit_scale)
        super().after_step(progress, applied)

    def ema_decay(self, progress: Progress) -> float:
        """Return the share of itself that the average keeps at this step."""
        assert self.config.ema is not None
        return self.config.ema.decay_at(progress)


def scored_weights(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the CLIP model's own state dict within an objective's: that of the average if there is one."""
    # The average was scored, so the average is exported.
    prefix = "average." if any(name.startswith("average.") for name in weights) else "model."
    return {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}


def _examples(config: ClipObjectiveConfig, data: DataConfig) -> ImageTextExamples:
    model = config.model
    if model.text.vocab_size < VOCABULARY:
        raise ConfigError(
            f"objective.model.text.vocab_size={model.text.vocab_size}: CLIP's tokenizer has {VOCABULARY} ids. Remove the key."
        )
    example_args = (
        data,
        model.vision.image_size,
        model.text.context_length,
        ClipTokenizer(model.text.context_length),
        (model.vision.tokens - 1, model.vision.patches_after_dropout) if model.vision.patch_dropout else None,
    )
    if config.cache is None:
        return ImageTextExamples(*example_args)
    from .token_examples import TokenExamples  # most runs cache no tokens

    return TokenExamples(config.cache, *config.frozen, *example_args)


def _rules(recipe: RecipeBlocks[ClipObjectiveConfig]) -> None:
    for name, source in recipe.data.sources.items():
        if not source.has_captions:
            raise ValueError(
                f"data.sources.{name}.{source.kind}: has no captions. Use `sparo data convert` to write shards with captions."
            )
    if recipe.objective.cache is not None and recipe.objective.frozen[0]:
        for key, value, plain in (
            ("data.crop_scale", recipe.data.crop_scale, (1.0, 1.0)),
            ("data.hflip", recipe.data.hflip, 0.0),
            ("objective.model.vision.patch_dropout", recipe.objective.model.vision.patch_dropout, 0.0),
        ):
            if value != plain:
                raise ValueError(
                    f"{key}={value}: must be {plain} with objective.cache, which stores tokens of center crops without "
                    f"augmentation. Set {key}={plain}."
                )


METHOD = Method(
    ClipObjectiveConfig, ClipObjective, _examples, _rules, exports=("open_clip", "sparo-clip", "transformers", "onnx")
)
