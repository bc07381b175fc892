"""Losses for slots of videos in addition to reconstruction: contrast over time (SlotContrast), and motion of patches (VideoSAUR)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from sparo_train.core.config import Frozen, field
from sparo_train.core.distributed import Ring


class ContrastConfig(Frozen):
    """Contrast over time: a slot should be nearer to itself in the previous frame than to any other slot (Manasyan et al. 2025)."""

    weight: float = field(0.5, "Weight of the contrastive loss relative to the reconstruction loss.", gt=0)
    temperature: float = field(0.1, "Temperature of the softmax over cosines.", gt=0)
    others: Literal["batch", "video"] = field(
        "batch",
        "Negatives of a slot. batch: slots of all videos in the global batch; video: only slots of the same video.",
    )


class SimilarityConfig(Frozen):
    """Prediction from slots of the similarity of every patch to those of the next frame (Zadaianchuk et al. 2023)."""

    weight: float = field(0.1, "Weight of the similarity loss relative to the feature loss, if both are used.", gt=0)
    temperature: float = field(0.075, "Temperature of the softmax over cosine similarities between patches.", gt=0)
    threshold: float = field(0.0, "Cosines below this count as zero.", ge=-1, lt=1)


def slot_contrast(slots: Tensor, config: ContrastConfig, ring: Ring | None = None) -> Tensor:
    """Return the contrastive loss of slots (b, T, K, D) of this rank's videos, averaged over its slots in all frames but the first.

    It is the cross-entropy of a slot's previous self among the previous slots of all videos, with softmax over cosines.
    The mean over ranks is the loss of the global batch. As in the released code, the "class" is the earlier slot, and
    each later one chooses.
    """
    b, times, k, _ = slots.shape
    exact = torch.promote_types(slots.dtype, torch.float32)
    # Cosines in fp32, because a softmax with temperature 0.1 needs the third digit.
    unit_slots = F.normalize(slots.to(exact), dim=-1).transpose(0, 1)  # (T, b, K, D)
    if config.others == "video":
        logits = unit_slots[1:] @ unit_slots[:-1].transpose(-1, -2) / config.temperature  # (T - 1, b, K, K)
        target_slots = torch.arange(k, device=slots.device).expand(times - 1, b, k)
        return F.cross_entropy(logits.flatten(0, 2), target_slots.flatten())
    ring = ring or Ring()
    # From all ranks, because slots are contrasted with the global batch, however it is split.
    earlier = (
        ring.gather(unit_slots[:-1].transpose(0, 1).contiguous()).transpose(0, 1).flatten(1, 2)
    )  # (T - 1, B * K, D)
    logits = unit_slots[1:].flatten(1, 2) @ earlier.transpose(-1, -2) / config.temperature
    # The slots of this rank come after those of the ranks before it.
    target_slots = (torch.arange(b * k, device=slots.device) + ring.rank * b * k).expand(times - 1, -1)
    return F.cross_entropy(logits.flatten(0, 1), target_slots.flatten())


def patch_similarity(features: Tensor, config: SimilarityConfig) -> Tensor:
    """Return each patch's similarity to those of the next frame, (b, T - 1, N, N), for features (b, T, N, C).

    Rows sum to one. A row in which all values are below `threshold` is uniform, as in videosaur's code.
    """
    unit_features = F.normalize(features.float(), dim=-1)
    cosines = unit_features[:, :-1] @ unit_features[:, 1:].transpose(-1, -2)
    below = cosines < config.threshold
    all_below = below.all(-1, keepdim=True)
    logits = cosines.masked_fill(below & ~all_below, -torch.inf).masked_fill(all_below, 0.0)
    return torch.softmax(logits / config.temperature, -1)


def patch_similarity_loss(logits: Tensor, features: Tensor, config: SimilarityConfig) -> Tensor:
    """Return the cross-entropy of predicted logits (b, T, N, N) with `patch_similarity`, averaged over a video's patches, (b,).

    The last frame has no target.
    """
    # The target has no gradient; otherwise features could become equal, which minimizes the loss.
    target_similarity = patch_similarity(features, config).detach()
    return -(target_similarity * logits[:, :-1].float().log_softmax(-1)).sum(-1).flatten(1).mean(1)
