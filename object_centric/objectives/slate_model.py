"""SLATE: slots of an image's tokens, from which a Transformer says the tokens again (Singh et al. 2022); STEVE's form for stills, too."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, NamedTuple, Self

import torch
from pydantic import model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from sparo_train.core.config import field
from sparo_train.core.registries import SLOT_ENCODERS
from sparo_train.core.registry import FromRegistry
from sparo_train.models.precision import at_least_fp32

from ..decoders.autoregressive import AutoregressiveConfig, AutoregressiveDecoder
from ..decoders.dvae import PATCH, Dvae, DvaeConfig, gumbel_softmax, sample_gumbel
from ..encoders.tokens import TokensConfig
from .slot_tower import SlotTower, SlotTowerConfig, TowerOutput


class SlateModelConfig(SlotTowerConfig):
    """A discrete VAE, a tower that groups its tokens (`encoder: {kind: tokens}`, SLATE) or features of the image (STEVE), a decoder."""

    embeds_tokens: ClassVar[bool] = True
    encoder: Annotated[Any, FromRegistry(SLOT_ENCODERS, default="tokens")] = field(
        TokensConfig(), "tokens, or from pixels to features: a row of sparo.slot_encoders"
    )
    features: int = field(192, "width of what slots group; a perceptron takes the encoder's to it", gt=0)
    dvae: DvaeConfig = field(DvaeConfig(), "from patches to tokens and back")
    decoder: AutoregressiveConfig = field(AutoregressiveConfig(), "from slots to tokens")

    @model_validator(mode="after")
    def _check_patches(self) -> Self:
        if self.image_size % PATCH:
            raise ValueError(f"image_size={self.image_size}: a token is {PATCH} pixels a side; give a multiple of it")
        if self.encoder.kind == "tokens" and self.encoder.width != self.decoder.width:
            raise ValueError(
                f"encoder.width={self.encoder.width} is not decoder.width={self.decoder.width}: tokens are embedded once for both"
            )
        return self

    @property
    def tokens(self) -> int:
        """In an image."""
        return (self.image_size // PATCH) ** 2


class SlateOutput(NamedTuple):
    """tower_output: of the tower.  tokens: (b, N), those that the decoder is to say.  cross_entropy: (b,), summed over them.
    reconstruction: (b, 3, S, S), the VAE's image.  Of videos b counts frames, and what the tower gives is of videos."""

    tower_output: Any
    tokens: Tensor
    cross_entropy: Tensor
    reconstruction: Tensor


class SlateModel(nn.Module):
    """Images (b, 3, S, S) in 0..1 and standard normal noise (b, *config.noise)."""

    adamw_only_parameters = ("places", "embed.weight")

    def __init__(self, config: SlateModelConfig):
        super().__init__()
        self.config, wide = config, config.decoder.width
        self.dvae = Dvae(config.dvae)
        self.tower = self.build_tower(config)
        self.embed = nn.Embedding(config.dvae.vocab, wide)
        self.begin = nn.Parameter(torch.randn(wide))
        self.places = nn.Parameter(nn.init.trunc_normal_(torch.empty(1 + config.tokens, wide)))
        self.project = nn.Linear(config.grouping.width, wide, bias=False)
        self.decoder = AutoregressiveDecoder(config.decoder)
        self.head = nn.Linear(wide, config.dvae.vocab, bias=False)
        for layer in (self.project, self.head):
            nn.init.xavier_uniform_(layer.weight)

    def build_tower(self, config: Any) -> nn.Module:
        """What makes slots."""
        return SlotTower(config)

    def forward(self, images: Tensor, noise: Tensor, tau: float) -> SlateOutput:
        return self.forward_with_grouping(images, tau, lambda embedded: self._group_slots(images, embedded, noise))

    def forward_with_grouping(self, images: Tensor, tau: float, group: Callable[[Tensor], Any]) -> SlateOutput:
        """`group`: what the tower makes of embedded tokens (b, 1 + N, width), or of the images themselves."""
        logits = self.dvae.logits(images)
        gumbel_noise = sample_gumbel(logits)
        reconstruction = self.dvae.decode(gumbel_softmax(logits, gumbel_noise, tau, self.config.dvae.hard))
        # Tokens are labels: no gradient goes through what was drawn.
        with torch.no_grad():
            gumbel_noise = sample_gumbel(logits) if self.config.dvae.target_tokens == "other" else gumbel_noise
            tokens = (logits + gumbel_noise).argmax(1).flatten(1)
        token_embeddings = self._embed_tokens(tokens)
        tower_output = group(token_embeddings)
        slots = tower_output.slots.flatten(0, -3)  # of every frame
        # The last token is said and never heard: nothing follows it.
        token_logits = self.head(self.decoder(token_embeddings[:, :-1], self.project(slots)))
        token_nll = F.cross_entropy(at_least_fp32(token_logits).flatten(0, 1), tokens.flatten(), reduction="none")
        return SlateOutput(tower_output, tokens, token_nll.view_as(tokens).sum(1), reconstruction)

    def encode_slots(self, images: Tensor, noise: Tensor) -> TowerOutput:
        """Slots alone, of each patch's most probable token."""
        if self.config.encoder.kind != "tokens":
            return self.tower(images, noise)
        return self._group_slots(images, self.argmax_embedding(images), noise)

    def argmax_embedding(self, images: Tensor) -> Tensor:
        """Each patch's most probable token, embedded with its place behind the one that begins: (b, 1 + N, width)."""
        logits = self.dvae.logits(images)
        # The largest of NaNs is some token, whose slots would be scored as if it had been seen.
        is_nan = logits.isnan().flatten(1).any(1)
        return self._embed_tokens(logits.argmax(1).flatten(1)).masked_fill(is_nan[:, None, None], torch.nan)

    def generate(self, slots: Tensor) -> Tensor:
        """Slots (b, K, D) to images (b, 3, S, S), the most probable token after the other; NaN where no token is."""
        side, is_nan = math.isqrt(self.config.tokens), slots.new_zeros(len(slots), dtype=torch.bool)
        projected, past = self.project(slots), None
        # One token at a time with the past's keys kept: what is said next depends on what was said.
        next_embedding, tokens = self.begin.expand(len(slots), 1, -1), []
        for position in range(self.config.tokens):
            hidden, past = self.decoder.decode_next(next_embedding + self.places[position], projected, past)
            logits = self.head(hidden)
            is_nan = is_nan | logits.isnan().flatten(1).any(1)
            token = logits.argmax(-1)
            tokens.append(token)
            next_embedding = self.embed(token)
        images = self.dvae.decode_tokens(torch.cat(tokens, dim=1).unflatten(1, (side, side)))
        return images.masked_fill(is_nan[:, None, None, None], torch.nan)

    def _embed_tokens(self, tokens: Tensor) -> Tensor:
        """Tokens (b, N) behind one that begins, with their places: (b, 1 + N, width)."""
        bos = self.begin.expand(len(tokens), 1, -1)
        # Behind the places: a dropped place would be a token without one.
        token_embeddings = torch.cat([bos, self.embed(tokens)], dim=1) + self.places
        return F.dropout(token_embeddings, self.config.decoder.dropout, self.training)

    def _group_slots(self, images: Tensor, token_embeddings: Tensor, noise: Tensor) -> TowerOutput:
        return self.tower(self._encoder_input(images, token_embeddings), noise)

    def _encoder_input(self, images: Tensor, token_embeddings: Tensor) -> Tensor:
        """What the tower encodes: images, or their embedded tokens (b, s, s, width)."""
        side = math.isqrt(self.config.tokens)
        return images if self.config.encoder.kind != "tokens" else token_embeddings[:, 1:].unflatten(1, (side, side))
