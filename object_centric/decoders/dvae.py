"""A discrete VAE: an image to one token per patch and back (Singh et al. 2022, SLATE; after Ramesh et al. 2021)."""

from __future__ import annotations

from typing import Literal, Self

import torch
from pydantic import model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from sparo_train.core.config import Frozen, field
from sparo_train.models.precision import at_least_fp32

PATCH = 4  # pixels per side of a token: the decoder doubles the side twice
_HIDDEN_LAYERS = 6  # layers of the encoder per patch, between its patches and its logits


class DvaeConfig(Frozen):
    """Tokens, and the temperature of their samples in training."""

    vocab: int = field(4096, "Number of tokens in the vocabulary.", gt=1, le=1 << 20)
    channels: int = field(64, "Channels of every layer.", gt=0)
    tau_start: float = field(1.0, "Initial temperature of the Gumbel-softmax.", gt=0)
    tau_end: float = field(0.1, "Final temperature, reached after tau_steps along a cosine.", gt=0)
    tau_steps: int = field(30_000, "Steps in which the temperature falls.", gt=0)
    target_tokens: Literal["other", "same"] = field(
        "other",
        "Tokens that the decoder learns to predict. other: a second, independent sample of the VAE's tokens "
        "(as in the code of SLATE and STEVE). same: the sample from which the image is reconstructed (as in the papers).",
    )
    norm: Literal["group", "none"] = field(
        "group",
        "Norm of hidden layers. group: GroupNorm with one group (SLATE's code). none: no norm, but biases (STEVE's code).",
    )
    hard: bool = field(
        False,
        "Reconstruct the image from one discrete token per patch, but use the gradient of the relaxed sample (straight-through).",
    )

    @model_validator(mode="after")
    def _check_tau(self) -> Self:
        if self.tau_end > self.tau_start:
            raise ValueError(f"tau_end={self.tau_end}: must not exceed tau_start={self.tau_start}")
        return self


class Dvae(nn.Module):
    """VAE. `logits` maps images (b, 3, S, S) to log-probabilities (b, vocab, S/4, S/4), `decode` token weights of that shape to images.

    Both are methods of modules that are called, so that an engine can shard them.
    """

    def __init__(self, config: DvaeConfig):
        super().__init__()
        wide, vocab, norm = config.channels, config.vocab, config.norm == "group"
        self.config = config
        to_logits = nn.Conv2d(wide, vocab, 1)
        self.encoder = nn.Sequential(
            _Block(norm, 3, wide, PATCH, PATCH),
            *(_Block(norm, wide, wide, 1) for _ in range(_HIDDEN_LAYERS)),
            to_logits,
        )
        to_pixels = nn.Conv2d(wide, 3, 1)
        self.decoder = nn.Sequential(
            _Block(norm, vocab, wide, 1), *_upsample(norm, wide), *_upsample(norm, wide), to_pixels
        )
        for last in (to_logits, to_pixels):
            nn.init.xavier_uniform_(last.weight)
            nn.init.zeros_(last.bias)  # type: ignore[arg-type]

    def logits(self, images: Tensor) -> Tensor:
        # In fp32, because these are logarithms of probabilities among thousands of tokens.
        return F.log_softmax(at_least_fp32(self.encoder(images)), dim=1)

    def decode(self, token_probs: Tensor) -> Tensor:
        return at_least_fp32(self.decoder(token_probs))

    def decode_tokens(self, tokens: Tensor) -> Tensor:
        """Decode tokens (b, s, s) to images (b, 3, 4s, 4s)."""
        one_hot = F.one_hot(tokens, self.config.vocab).permute(0, 3, 1, 2)
        return self.decode(one_hot.to(next(self.decoder.parameters()).dtype))


def sample_gumbel(like: Tensor) -> Tensor:
    """Return standard Gumbel noise in the shape of `like`, from torch's stream, which the trainer seeds by step and rank."""
    # An exponential sample may be 0, whose logarithm is not finite.
    return -torch.empty_like(like).exponential_().clamp(min=torch.finfo(like.dtype).tiny).log()


def gumbel_softmax(logits: Tensor, gumbel_noise: Tensor, tau: float, hard: bool) -> Tensor:
    """Return token weights (b, vocab, s, s) of the Gumbel-softmax (Jang et al. 2017) with temperature `tau`.

    Args:
        logits: (b, vocab, s, s).
        gumbel_noise: from `sample_gumbel`.
        tau: temperature.
        hard: one-hot weights, with the gradient of the soft ones.
    """
    probs = F.softmax((logits + gumbel_noise) / tau, dim=1)
    if not hard:
        return probs
    # Forward uses one token, backward the soft weights (straight through).
    one_hot = torch.zeros_like(probs).scatter_(1, probs.argmax(1, keepdim=True), 1.0)
    return one_hot - probs.detach() + probs


class _Block(nn.Module):
    """Convolution, GroupNorm with one group or no norm, ReLU; the convolution has a bias only without a norm."""

    def __init__(self, norm: bool, width: int, out: int, kernel: int, stride: int = 1):
        super().__init__()
        self.conv = nn.Conv2d(width, out, kernel, stride, padding=0 if stride > 1 else kernel // 2, bias=not norm)
        nn.init.kaiming_uniform_(self.conv.weight, nonlinearity="relu")
        if self.conv.bias is not None:
            nn.init.zeros_(self.conv.bias)
        self.norm = nn.GroupNorm(1, out) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x)))


def _upsample(norm: bool, wide: int) -> list[nn.Module]:
    """Return layers from (b, wide, s, s) to (b, wide, 2s, 2s)."""
    return [
        _Block(norm, wide, wide, 3),
        _Block(norm, wide, wide, 1),
        _Block(norm, wide, wide, 1),
        _Block(norm, wide, 4 * wide, 1),
        nn.PixelShuffle(2),
    ]
