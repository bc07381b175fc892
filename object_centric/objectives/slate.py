"""Object discovery by saying tokens: a discrete VAE and its tokens' decoder, trained together (Singh et al. 2022)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sparo_train.core.config import Frozen, field
from sparo_train.core.contracts import Batch, Footprint, Loss, Objective, ParamGroups, Progress
from sparo_train.core.errors import DataError
from sparo_train.core.schedules import cosine
from sparo_train.objectives.method import Method

from .collapse import SlotCollapseConfig, mask_statistics
from .slate_model import SlateModel, SlateModelConfig, SlateOutput
from .slot_autoencoder import refuse_cache_with_augmentation
from .slot_examples import SlotExamples


class SlateConfig(Frozen):
    kind: Literal["slate"] = field("slate", "a row of sparo.methods")
    model: SlateModelConfig = field(SlateModelConfig(), "dVAE, tower and decoder")
    collapse: SlotCollapseConfig = field(SlotCollapseConfig(), "when a collapse is warned of")


class Slate(Objective):
    """Batches hold `image` (B, 3, S, S) uint8 and `noise` (B, *config.model.noise) fp32, what slots begin from.

    The loss is the VAE's squared error and the decoder's cross-entropy, both summed over an image. What slots see of tokens has no
    gradient to the VAE, so its parameters learn from the first alone.
    """

    exact_inputs = True

    def __init__(self, config: Any):
        super().__init__()
        self.config = config
        self.model = self.build_model(config.model)
        self._fraction_done = 0.0  # share of the steps

    def build_model(self, config: Any) -> SlateModel:
        """The model."""
        return SlateModel(config)

    def forward(self, batch: Batch, progress: Progress) -> Loss:
        self.require_keys(batch, "image", "noise")
        images, tau = batch["image"].to(torch.float32) / 255, self.temperature(progress)
        output = self.model(images, batch["noise"], tau)
        return self.compute_loss(images, output, output.tower_output.attention, tau)

    def require_keys(self, batch: Batch, *keys: str) -> None:
        """Raise `DataError` where a batch lacks one of these."""
        for key in keys:
            if key not in batch:
                raise DataError(f"objective {self.config.kind}: the batch has no {key!r} (it has {', '.join(batch)})")

    def temperature(self, progress: Progress) -> float:
        """Of this step's relaxed draws."""
        # Kept for the alarm, which is asked at log steps, without a step of its own.
        self._fraction_done = progress.step / max(progress.total_steps, 1)
        d = self.config.model.dvae
        return cosine(d.tau_start, d.tau_end, progress.step, d.tau_steps)

    def compute_loss(self, images: Tensor, output: SlateOutput, attention: Tensor, tau: float) -> Loss:
        """What the VAE drew wrong of images (b, 3, S, S), and the decoder said wrong; `attention` (n, K, s, s), of different samples."""
        squared_error = (output.reconstruction - images).square()
        cross_entropy = output.cross_entropy.mean()
        return Loss(
            squared_error.flatten(1).sum(1).mean() + cross_entropy,
            {
                "mse": squared_error.detach().mean(),
                # Per token, so that images of two sizes can be compared.
                "cross_entropy": cross_entropy.detach() / self.config.model.tokens,
                "tau": torch.tensor(tau, device=images.device),
                **mask_statistics(_normalize_attention(attention)),
            },
        )

    def remap_encoder_weights(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Of a model of another method: a tower to go on with, whatever drew or said its slots."""
        # Names are the same in all slot models; those that this one lacks are told by who loads.
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
        # Logits, shares and what the head says are of the vocabulary's width, beside which all else is narrow.
        written = m.tokens * 3 * m.dvae.vocab + m.encoder.cost(m.image_size)
        towers = [(m.tokens * m.decoder.width, m.decoder.blocks)]
        return Footprint({"image": m.tokens}, towers, m.grouping.slots * m.grouping.width, 0, written)


def _normalize_attention(attention: Tensor) -> Tensor:
    """What slots took of each token, brought to a sum of one: attentions of all heads, or of none that compete, have others."""
    return attention / attention.sum(1, keepdim=True).clamp(min=1e-12)


def _examples(config: Any, data: Any) -> SlotExamples:
    return SlotExamples(data, config.model)


METHOD = Method(SlateConfig, Slate, _examples, refuse_cache_with_augmentation, loss_keys=("model.dvae",))
