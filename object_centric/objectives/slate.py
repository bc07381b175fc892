"""SLATE (Singh et al. 2022): a discrete VAE, slots over its tokens, and a Transformer that predicts the tokens from the slots."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

import torch
from pydantic import model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from sparo_train.core.config import Frozen, field
from sparo_train.core.contracts import Batch, Footprint, Loss, Objective, ParamGroups, Progress
from sparo_train.core.errors import DataError
from sparo_train.core.registries import SLOT_ENCODERS
from sparo_train.core.registry import FromRegistry
from sparo_train.core.schedules import cosine
from sparo_train.models.precision import at_least_fp32
from sparo_train.objectives.method import Method

from ..decoders.autoregressive import AutoregressiveConfig, AutoregressiveDecoder
from ..decoders.dvae import PATCH, Dvae, DvaeConfig, gumbel_softmax, sample_gumbel
from ..encoders.tokens import TokensConfig
from .collapse import SlotCollapseConfig, mask_statistics
from .slot_autoencoder import refuse_cache_with_augmentation
from .slot_tower import SlotExamples, SlotTower, SlotTowerConfig, TowerOutput


class SlateModelConfig(SlotTowerConfig):
    """A discrete VAE, a tower that groups its tokens (`encoder: {kind: tokens}`, SLATE) or features of the image (STEVE), and a decoder."""

    embeds_tokens: ClassVar[bool] = True
    encoder: Annotated[Any, FromRegistry(SLOT_ENCODERS, default="tokens")] = field(
        TokensConfig(),
        "Input of slot attention: tokens of the discrete VAE, or features of an image encoder. An entry "
        "of sparo.slot_encoders.",
    )
    features: int = field(
        192, "Width of the tokens that are grouped into slots. An MLP maps the encoder's output to this width.", gt=0
    )
    dvae: DvaeConfig = field(DvaeConfig(), "Discrete VAE that maps patches to tokens and back.")
    decoder: AutoregressiveConfig = field(AutoregressiveConfig(), "Transformer that predicts tokens from slots.")

    @model_validator(mode="after")
    def _check_patches(self) -> Self:
        if self.image_size % PATCH:
            raise ValueError(f"image_size={self.image_size}: must be a multiple of {PATCH}, the side of a token")
        if self.encoder.kind == "tokens" and self.encoder.width != self.decoder.width:
            raise ValueError(
                f"encoder.width={self.encoder.width}: must equal decoder.width={self.decoder.width}, because both use the same token embeddings"
            )
        return self

    @property
    def tokens(self) -> int:
        """Return the number of tokens in an image."""
        return (self.image_size // PATCH) ** 2


class SlateOutput(NamedTuple):
    """Output of the model. For videos, b counts frames, except in the tower's output.

    Attributes:
        tower_output: output of the tower.
        tokens: (b, N), targets of the decoder.
        cross_entropy: (b,), summed over tokens.
        reconstruction: (b, 3, S, S), the VAE's image.
    """

    tower_output: Any
    tokens: Tensor
    cross_entropy: Tensor
    reconstruction: Tensor


class SlateModel(nn.Module):
    """Model of images (b, 3, S, S) in 0..1 and standard normal noise (b, *config.noise)."""

    adamw_only_parameters = ("pos_embed", "embed.weight")

    def __init__(self, config: SlateModelConfig):
        super().__init__()
        self.config, wide = config, config.decoder.width
        self.dvae = Dvae(config.dvae)
        self.tower = self.build_tower(config)
        self.embed = nn.Embedding(config.dvae.vocab, wide)
        self.bos = nn.Parameter(torch.randn(wide))
        self.pos_embed = nn.Parameter(nn.init.trunc_normal_(torch.empty(1 + config.tokens, wide)))
        self.project = nn.Linear(config.grouping.width, wide, bias=False)
        self.decoder = AutoregressiveDecoder(config.decoder)
        self.head = nn.Linear(wide, config.dvae.vocab, bias=False)
        for layer in (self.project, self.head):
            nn.init.xavier_uniform_(layer.weight)

    def build_tower(self, config: Any) -> nn.Module:
        """Return the tower."""
        return SlotTower(config)

    def forward(self, images: Tensor, noise: Tensor, tau: float) -> SlateOutput:
        return self.forward_with_grouping(images, tau, lambda embedded: self._group_slots(images, embedded, noise))

    def forward_with_grouping(self, images: Tensor, tau: float, group: Callable[[Tensor], Any]) -> SlateOutput:
        """Run the model; `group` applies the tower to embedded tokens (b, 1 + N, width), or to the images."""
        logits = self.dvae.logits(images)
        gumbel_noise = sample_gumbel(logits)
        reconstruction = self.dvae.decode(gumbel_softmax(logits, gumbel_noise, tau, self.config.dvae.hard))
        # Tokens are labels, so no gradient goes through the samples.
        with torch.no_grad():
            gumbel_noise = sample_gumbel(logits) if self.config.dvae.target_tokens == "other" else gumbel_noise
            tokens = (logits + gumbel_noise).argmax(1).flatten(1)
        token_embeddings = self._embed_tokens(tokens)
        tower_output = group(token_embeddings)
        slots = tower_output.slots.flatten(0, -3)  # for every frame
        # The last token is predicted but never fed back.
        token_logits = self.head(self.decoder(token_embeddings[:, :-1], self.project(slots)))
        token_nll = F.cross_entropy(at_least_fp32(token_logits).flatten(0, 1), tokens.flatten(), reduction="none")
        return SlateOutput(tower_output, tokens, token_nll.view_as(tokens).sum(1), reconstruction)

    def encode_slots(self, images: Tensor, noise: Tensor) -> TowerOutput:
        """Return slots only, from each patch's most probable token."""
        if self.config.encoder.kind != "tokens":
            return self.tower(images, noise)
        return self._group_slots(images, self.argmax_embedding(images), noise)

    def argmax_embedding(self, images: Tensor) -> Tensor:
        """Return each patch's most probable token, embedded with its position, after the beginning token: (b, 1 + N, width)."""
        logits = self.dvae.logits(images)
        # argmax of NaNs is a valid token, whose slots would be scored as if the image had been encoded.
        is_nan = logits.isnan().flatten(1).any(1)
        return self._embed_tokens(logits.argmax(1).flatten(1)).masked_fill(is_nan[:, None, None], torch.nan)

    def generate(self, slots: Tensor) -> Tensor:
        """Generate images (b, 3, S, S) from slots (b, K, D), always with the most probable token; NaN if no token is valid."""
        side, is_nan = math.isqrt(self.config.tokens), slots.new_zeros(len(slots), dtype=torch.bool)
        projected, past = self.project(slots), None
        # One token at a time with a cache of keys, because each token depends on the previous ones.
        next_embedding, tokens = self.bos.expand(len(slots), 1, -1), []
        for position in range(self.config.tokens):
            hidden, past = self.decoder.decode_next(next_embedding + self.pos_embed[position], projected, past)
            logits = self.head(hidden)
            is_nan = is_nan | logits.isnan().flatten(1).any(1)
            token = logits.argmax(-1)
            tokens.append(token)
            next_embedding = self.embed(token)
        images = self.dvae.decode_tokens(torch.cat(tokens, dim=1).unflatten(1, (side, side)))
        return images.masked_fill(is_nan[:, None, None, None], torch.nan)

    def _embed_tokens(self, tokens: Tensor) -> Tensor:
        """Embed tokens (b, N) with their positions after the beginning token: (b, 1 + N, width)."""
        bos = self.bos.expand(len(tokens), 1, -1)
        # After the positions, because dropping a position alone would leave a token without one.
        token_embeddings = torch.cat([bos, self.embed(tokens)], dim=1) + self.pos_embed
        return F.dropout(token_embeddings, self.config.decoder.dropout, self.training)

    def _group_slots(self, images: Tensor, token_embeddings: Tensor, noise: Tensor) -> TowerOutput:
        return self.tower(self._encoder_input(images, token_embeddings), noise)

    def _encoder_input(self, images: Tensor, token_embeddings: Tensor) -> Tensor:
        """Return the tower's input: images, or their embedded tokens (b, s, s, width)."""
        side = math.isqrt(self.config.tokens)
        return images if self.config.encoder.kind != "tokens" else token_embeddings[:, 1:].unflatten(1, (side, side))


class SlateConfig(Frozen):
    """SLATE: slots that condition a Transformer over tokens of a discrete VAE (Singh et al. 2022)."""

    kind: Literal["slate"] = field("slate", "Training method: an entry of sparo.methods.")
    model: SlateModelConfig = field(
        SlateModelConfig(), "The model: discrete VAE, tower (encoder and slot attention) and decoder."
    )
    collapse: SlotCollapseConfig = field(SlotCollapseConfig(), "Thresholds of the warning that slots collapse.")


class Slate(Objective):
    """Objective for batches of `image` (B, 3, S, S) uint8 and `noise` (B, *config.model.noise) fp32, for initial slots.

    The loss is the VAE's squared error plus the decoder's cross-entropy, both summed over an image. Slots pass no
    gradient to the VAE through tokens, so its parameters only learn from the first term.
    """

    exact_inputs = True

    def __init__(self, config: Any):
        super().__init__()
        self.config = config
        self.model = self.build_model(config.model)
        self._fraction_done = 0.0  # share of the steps

    def build_model(self, config: Any) -> SlateModel:
        """Return the model."""
        return SlateModel(config)

    def forward(self, batch: Batch, progress: Progress) -> Loss:
        self.require_keys(batch, "image", "noise")
        images, tau = batch["image"].to(torch.float32) / 255, self.temperature(progress)
        output = self.model(images, batch["noise"], tau)
        return self.compute_loss(images, output, output.tower_output.attention, tau)

    def require_keys(self, batch: Batch, *keys: str) -> None:
        """Raise `DataError` if a batch lacks one of these keys."""
        for key in keys:
            if key not in batch:
                raise DataError(f"objective {self.config.kind}: the batch has no {key!r}, got {', '.join(batch)}")

    def temperature(self, progress: Progress) -> float:
        """Return the temperature of this step's relaxed samples."""
        # Stored for the health check at log steps, which has no step.
        self._fraction_done = progress.step / max(progress.total_steps, 1)
        d = self.config.model.dvae
        return cosine(d.tau_start, d.tau_end, progress.step, d.tau_steps)

    def compute_loss(self, images: Tensor, output: SlateOutput, attention: Tensor, tau: float) -> Loss:
        """Return the error of the VAE on images (b, 3, S, S) and the decoder's cross-entropy; `attention` (n, K, s, s) is of different samples."""
        squared_error = (output.reconstruction - images).square()
        cross_entropy = output.cross_entropy.mean()
        return Loss(
            squared_error.flatten(1).sum(1).mean() + cross_entropy,
            {
                "mse": squared_error.detach().mean(),
                # Per token, so that images of two sizes can be compared.
                "cross_entropy": cross_entropy.detach() / self.config.model.tokens,
                "tau": torch.full((), tau, device=images.device),
                **mask_statistics(_normalize_attention(attention)),
            },
        )

    def remap_encoder_weights(self, weights: Mapping[str, Tensor], source: nn.Module) -> dict[str, Tensor]:
        """Load the tower of a model of another method, whatever its decoder."""
        # Names are equal in all slot models; the loader reports names that this one lacks.
        return {f"model.{name}": value for name, value in weights.items()}

    def check_health(self, facts: Mapping[str, float]) -> str | None:
        return self.config.collapse.check_health(facts, self._fraction_done)

    def shard_units(self) -> Sequence[nn.Module]:
        m = self.model
        return [m.dvae.encoder, m.dvae.decoder, m.tower, *m.decoder.blocks]

    def param_groups(self) -> ParamGroups:
        model = self.model
        return replace(
            super().param_groups(), norm_groups={"dvae": model.dvae, "tower": model.tower, "decoder": model.decoder}
        )

    def footprint(self, batch: int, world_batch: int) -> Footprint:
        m = self.config.model
        # Logits, token weights and outputs of the head have the width of the vocabulary, compared with which everything else
        # is small.
        written = m.tokens * 3 * m.dvae.vocab + m.encoder.cost(m.image_size)
        towers = [(m.tokens * m.decoder.width, m.decoder.blocks)]
        return Footprint({"image": m.tokens}, towers, m.grouping.slots * m.grouping.width, 0, written)


def _normalize_attention(attention: Tensor) -> Tensor:
    """Normalize the weights of each token to a sum of one, which multi-head attention or attention without competition does not have."""
    return attention / attention.sum(1, keepdim=True).clamp(min=1e-12)


def _examples(config: Any, data: Any) -> SlotExamples:
    return SlotExamples(data, config.model)


METHOD = Method(SlateConfig, Slate, _examples, refuse_cache_with_augmentation, loss_keys=("model.dvae",))
