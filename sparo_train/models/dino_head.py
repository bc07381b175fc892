"""DINO's projection head, and the network of backbone and head."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.nn import functional as F

from ..core.config import Frozen, field
from .global_batch_norm import GlobalBatchNorm
from .timm_backbone import TimmBackbone
from .vit import Vit
from .vit_blocks import init_linears
from .vit_config import VitConfig


class DinoHeadConfig(Frozen):
    """The official head."""

    out_dim: int = field(65536, "Number of prototypes.", gt=1)
    hidden_dim: int = field(2048, "Width of the MLP.", gt=0)
    bottleneck_dim: int = field(
        256, "Width of the MLP's output and of the prototypes with which this output is compared.", gt=0
    )
    nlayers: int = field(3, "Linear layers of the MLP.", ge=1)
    use_bn: bool = field(False, "Use batch normalization in the MLP, over the global batch.")
    norm_last_layer: bool = field(True, "Keep the norm of every prototype at one.")
    weight_init: Literal["official", "xavier"] = field(
        "official", "Initialization of the MLP, with the same options as objective.model.weight_init."
    )


class PrototypeLayer(nn.Module):
    """Linear layer without bias under weight norm: `weight_g * weight_v / |weight_v|`, applied to unit vectors.

    The names are those of `nn.utils.weight_norm`, which official checkpoints have and torch deprecates.
    """

    def __init__(self, in_dim: int, out_dim: int, norm_one: bool):
        super().__init__()
        self.weight_g = nn.Parameter(torch.ones(out_dim, 1), requires_grad=not norm_one)
        self.weight_v = nn.Parameter(nn.Linear(in_dim, out_dim, bias=False).weight.detach())

    # torch's own kernel, as in weight_norm, without its deprecated hooks.
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, torch._weight_norm(self.weight_v, self.weight_g, 0))  # pyright: ignore[reportPrivateImportUsage]


class DinoHead(nn.Module):
    """Head that maps encodings (B, in_dim) to logits (B, out_dim): MLP, unit norm, prototypes."""

    def __init__(self, in_dim: int, config: DinoHeadConfig):
        super().__init__()
        widths = [in_dim, *[config.hidden_dim] * (config.nlayers - 1), config.bottleneck_dim]
        layers: list[nn.Module] = []
        for number, (of, to) in enumerate(itertools.pairwise(widths)):
            layers.append(nn.Linear(of, to))
            nn.init.zeros_(layers[-1].bias)  # type: ignore[arg-type]
            if number < config.nlayers - 1:
                layers += [GlobalBatchNorm(to), nn.GELU()] if config.use_bn else [nn.GELU()]
        self.mlp = layers[0] if len(layers) == 1 else nn.Sequential(*layers)
        init_linears(self.mlp, config.weight_init)
        self.last_layer = PrototypeLayer(config.bottleneck_dim, config.out_dim, config.norm_last_layer)

    def forward(self, x: Tensor) -> Tensor:
        x = self.mlp(x)
        # Prototypes are compared by angle; the official head normalises here, too.
        return self.last_layer(F.normalize(x.to(torch.promote_types(x.dtype, torch.float32)), dim=-1))


class Views(NamedTuple):
    """Outputs for the crops of a batch.

    Attributes:
        logits: (sum of B_i, out_dim), in the order of the crops.
        encodings: (B_0, D) of the first group of crops, the global ones.
        patch_logits: (N, out_dim) of the masked patches, in the order of `masked_rows`; None without masks.
        patches: (B_0, patches, d) of the global crops after the backbone's last norm; None if nothing needs them.
    """

    logits: Tensor
    encodings: Tensor
    patch_logits: Tensor | None = None
    patches: Tensor | None = None


def build_backbone(model: VitConfig, mask_token: bool = False, patch_loss: bool = False) -> Vit | TimmBackbone:
    """Return the backbone of a config; for the other arguments, see `Vit`."""
    return Vit(model, mask_token, patch_loss) if model.timm_model_name is None else TimmBackbone(model)


class DinoNet(nn.Module):
    """A student or a teacher, which runs `backbone` once per resolution and `head` once.

    Args:
        model, head: configs of backbone and head.
        mask_token, patch_loss: see `Vit`.
        patch_head: have a second head, for masked patches.
    """

    def __init__(
        self,
        model: VitConfig,
        head: DinoHeadConfig,
        mask_token: bool = False,
        patch_head: bool = False,
        patch_loss: bool = False,
    ):
        super().__init__()
        self.backbone = build_backbone(model, mask_token, patch_loss)
        self.head = DinoHead(model.out_width, head)
        self.patch_head = DinoHead(model.width, head) if patch_head else None

    def forward(
        self,
        crops: Sequence[Tensor],
        drops: Sequence[Tensor | None],
        masks: Tensor | None = None,
        masked: Tensor | None = None,
        need_patches: bool = False,
    ) -> Views:
        """Return the outputs for crops by resolution, each (B_i, C, H_i, W_i), the global ones first.

        Args:
            crops: pixels.
            drops: see `Vit.forward`.
            masks: (B_0, patches) bool, patches of the global crops that the backbone does not see; None: it sees all.
            masked: (B, M) positions among the patches of all global crops of an image, whose logits are returned.
            need_patches: return the patches of the global crops.
        """
        patches = None
        encodings = []
        for number, (x, drop) in enumerate(zip(crops, drops, strict=True)):
            if number == 0 and (need_patches or masked is not None):
                assert isinstance(self.backbone, Vit)  # losses of patches need this project's
                encoding, patches = self.backbone.with_patches(x, drop, masks)
            else:
                encoding = self.backbone(x, drop)
            encodings.append(encoding)
        # One head over all crops, so that its batch norm covers them together, as published.
        logits = self.head(torch.cat(encodings))
        if patches is None or masked is None:
            return Views(logits, encodings[0], patches=patches)
        of_image = patches.unflatten(0, (-1, len(masked))).transpose(0, 1).flatten(1, 2)
        images, places = masked_rows(masked, of_image.shape[1])
        head = self.head if self.patch_head is None else self.patch_head
        patch_logits = head(of_image[images, places.clamp(max=of_image.shape[1] - 1)])
        return Views(logits, encodings[0], patch_logits, patches)


def masked_rows(masked: Tensor, patches: int) -> tuple[Tensor, Tensor]:
    """Return image and position of each masked patch, both (N,) int64.

    On a CPU only those that exist; on a GPU, where counting them would make the host wait, and without data also those
    that fill a row.

    Args:
        masked: (B, M) positions; `patches` and more fill a row.
        patches: number of patches of an image.
    """
    images = torch.arange(len(masked), device=masked.device)[:, None].expand_as(masked)
    if masked.device.type != "cpu" or isinstance(masked, FakeTensor):
        return images.flatten(), masked.flatten().long()
    valid = masked < patches
    return images[valid], masked[valid].long()
