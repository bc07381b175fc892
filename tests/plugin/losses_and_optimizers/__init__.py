"""A package that adds a loss to CLIP, an optimizer, and a method derived from CLIP, as docs/guides/extending.md describes."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from sparo_train.core.config import field
from sparo_train.engine.optim import OptimConfig
from sparo_train.objectives.clip import METHOD as CLIP
from sparo_train.objectives.clip import ClipObjective
from sparo_train.objectives.clip_config import ClipObjectiveConfig
from sparo_train.objectives.contrastive import ContrastiveLoss
from sparo_train.objectives.method import Method


class DecoupledLoss(ContrastiveLoss):
    """Decoupled contrastive loss (Yeh et al. 2022, Eq. 6): the denominator does not contain the positive pair."""

    kind: Literal["decoupled"] = field("decoupled", "an entry of sparo.losses")
    weight: float = field(1.0, "factor of the pair's own logit", gt=0)

    def mean_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        positive = logits.gather(1, targets[:, None])
        negatives = logits.scatter(1, targets[:, None], -torch.inf)
        return (negatives.logsumexp(dim=1) - self.weight * positive[:, 0]).mean()


class UnfinishedLoss(ContrastiveLoss):
    """A loss without `mean_loss`, which is refused."""

    kind: Literal["unfinished"] = field("unfinished", "an entry of sparo.losses")


class LionConfig(OptimConfig):
    """Lion (Chen et al. 2023): sign of an average of gradients, decoupled weight decay, one moment."""

    state_names: ClassVar[tuple[str, ...]] = ("exp_avg",)

    kind: Literal["lion"] = field("lion", "an entry of sparo.optimizers")
    betas: tuple[float, float] = field(
        (0.9, 0.99), "decay of the mean that is stepped along, and of the one that is kept"
    )

    def build(self, groups: list[dict[str, Any]]) -> Lion:
        return Lion(groups, {"lr": self.lr, "betas": self.betas})


class Lion(torch.optim.Optimizer):
    """Updates parameters of any kind, including FSDP2's shards, because every operation is elementwise."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            (near, far), lr = group["betas"], group["lr"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                if "exp_avg" not in self.state[p]:
                    self.state[p]["exp_avg"] = torch.zeros_like(p)
                mean = self.state[p]["exp_avg"]
                update = mean.lerp(p.grad, 1 - near).sign_()
                p.mul_(1 - lr * group["weight_decay"]).add_(update, alpha=-lr)
                mean.lerp_(p.grad, 1 - far)


class ScaledClipConfig(ClipObjectiveConfig):
    """CLIP with a factor on its loss."""

    kind: Literal["scaled_clip"] = field("scaled_clip", "an entry of sparo.methods")
    factor: float = field(0.5, "factor of the loss", gt=0)


class ScaledClip(ClipObjective):
    def loss(self, embeddings, own, progress):
        found = super().loss(embeddings, own, progress)
        return found._replace(total=self.config.factor * found.total)


METHOD = Method(ScaledClipConfig, ScaledClip, CLIP.examples, CLIP.rules, exports=("open_clip",))
