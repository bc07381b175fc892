"""Collapse of slots: logged statistics of masks, and warnings."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from sparo_train.core.config import Frozen, field

_MIN_USED_SHARE = 0.005  # share of an image's pixels below which a slot counts as unused


class SlotCollapseConfig(Frozen):
    """Thresholds of warnings that slots do not divide images among them."""

    start_fraction: float = field(
        0.2, "Share of the training steps that must have passed before a warning can appear.", ge=0, le=1
    )
    min_slots_used: float = field(
        1.5,
        "Warn if the average number of used slots per image is below this. A slot is used if its mask is the "
        "largest at enough pixels (0.5 % of the image).",
        ge=0,
    )
    min_sharpness: float = field(
        0.05,
        "Warn if masks are less sharp than this. 1: one slot per pixel; 0: equal shares of all slots at every "
        "pixel, so that all slots explain everything.",
        ge=0,
        le=1,
    )
    max_fixity: float = field(
        0.8,
        "Warn if the similarity of mask borders across images exceeds this. 0: borders agree by chance only. 1: "
        "they are the same in all images, like a fixed grid.",
        ge=0,
    )

    def check_health(self, metrics: Mapping[str, float], fraction_done: float) -> str | None:
        """Return a message if these averaged metrics show a collapse at this share of the steps, otherwise None."""
        if fraction_done < self.start_fraction:
            return None
        if metrics.get("slots_used", self.min_slots_used) < self.min_slots_used:
            return f"one slot covers almost everything (slots_used {metrics['slots_used']:.2f}). Try another seed, or a lower optim.lr."
        if metrics.get("mask_sharpness", self.min_sharpness) < self.min_sharpness:
            return f"all slots have equal masks (mask_sharpness {metrics['mask_sharpness']:.3f}). Try another seed, or more steps."
        if metrics.get("mask_fixity", 0.0) > self.max_fixity:
            return f"masks hardly depend on the image (mask_fixity {metrics['mask_fixity']:.2f}). Try another seed, or a weaker decoder."
        return None


def mask_statistics(masks: Tensor) -> dict[str, Tensor]:
    """Return `slots_used`, `mask_sharpness` and `mask_fixity` of masks (b, K, s, s), which sum to one over slots.

    Pixels without any slot (in fields whose density is cut off at zero) only count in the last.
    """
    shares = masks.detach().float()
    slots, covered = shares.shape[1], (shares.sum(1) > 0).float()
    # With equal masks, the first slot wins, so identical masks count as one slot instead of none.
    assignment = shares.argmax(1, keepdim=True) == torch.arange(slots, device=shares.device)[:, None, None]
    assignment = assignment & (covered[:, None] > 0)
    # A pixel with a single slot counts as sharp, whatever the number of slots.
    pixel_entropy = -(shares.clamp(min=1e-12).log() * shares).sum(1) * covered
    entropy = pixel_entropy.sum() / covered.sum().clamp(min=1) / math.log(max(slots, 2))
    return {
        "slots_used": (assignment.float().mean((2, 3)) > _MIN_USED_SHARE).float().sum(1).mean(),
        "mask_sharpness": 1 - entropy,
        "mask_fixity": fixity(shares.argmax(1)),
    }


def fixity(labels: Tensor) -> Tensor:
    """Return how similar the borders of masks are across images, whatever the order of slots: 0 by chance, 1 if all are equal.

    Objects are elsewhere in every image; a grid or Voronoi cells, which slots form when they only use positions, are
    not. Zero for a single image.

    Args:
        labels: (b, s, s), the slot of each pixel.
    """
    # Borders instead of slots, because the slot of a position differs between images.
    right, down = labels[:, :, 1:] != labels[:, :, :-1], labels[:, 1:] != labels[:, :-1]
    borders = torch.cat([right.flatten(1), down.flatten(1)], dim=1).float()
    count, often = len(borders), borders.mean()
    if count < 2 or not borders.shape[1]:
        return borders.new_zeros(())
    # Pairs of different images.
    of_pairs = borders.sum(0)
    both = (of_pairs * (of_pairs - 1)).mean() / (count * (count - 1))
    return (both - often**2) / (often - often**2).clamp(min=1e-6)
