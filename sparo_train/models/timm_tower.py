"""timm's vision transformers as CLIP's image tower: DINO, DINOv2, SigLIP, MAE and all others that timm builds by name.

Weights of the trunk are below `trunk.`, as in open_clip's TimmModel; those of a readout are below its kind, as in our
other towers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple, Self

import timm
import torch
from timm.layers.pos_embed import resample_abs_pos_embed
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..core.errors import did_you_mean
from .readout import NoReadOut, ReadOut, ReadOutConfig, Slots, project_tokens, read_slots

_RESERVED_KWARGS = ("pretrained", "num_classes", "global_pool", "img_size", "pretrained_cfg", "checkpoint_path")


class TimmSizes(NamedTuple):
    """Sizes that a model name implies.

    Attributes:
        tokens: number of tokens that the trunk returns.
        prefix: number of tokens before the patches (class token, registers).
        has_cls: the first token is a class token.
        batch_norm: name of the first layer that normalizes over the batch; empty without one.
    """

    image_size: int
    patch_size: int
    width: int
    layers: int
    head_width: int
    mlp_ratio: float
    tokens: int
    prefix: int
    has_cls: bool
    batch_norm: str = ""


def infer_sizes(name: str, image_size: int | None, kwargs: Mapping[str, Any]) -> TimmSizes:
    """Return the sizes of one of timm's vision transformers, which is built and run without memory.

    Args:
        name: timm's name of the model.
        image_size: None: the size that timm trained it at.
        kwargs: further arguments of `timm.create_model`.

    Raises:
        ValueError: no such model, not a vision transformer, or arguments that it does not take.
    """
    return _sizes(name, image_size, tuple(sorted(kwargs.items())))


@functools.lru_cache(maxsize=64)
def _sizes(name: str, image_size: int | None, kwargs: tuple[tuple[str, Any], ...]) -> TimmSizes:
    # On the meta device, so that a giant model needs no memory.
    with torch.device("meta"):
        trunk = _trunk(name, image_size, dict(kwargs))
        try:
            return _measure(trunk)
        # A readout needs a model that supports all of these calls.
        except (TypeError, ValueError, AttributeError, IndexError, RuntimeError, AssertionError, NameError) as error:
            raise ValueError(
                f"timm_model_name={name}: a readout cannot use this model ({error}). Name a vision transformer with "
                "square images and a square grid of patches."
            ) from None


def _measure(trunk: Any) -> TimmSizes:
    size, block, width = trunk.patch_embed.img_size, trunk.blocks[0], trunk.num_features
    # Count tokens instead of computing their number, because families add registers and class tokens in various ways.
    tokens, prefix = _hidden(trunk, torch.empty(1, 3, *size)).shape[1], trunk.num_prefix_tokens
    side = math.isqrt(tokens - prefix)
    if size[0] != size[1] or side * side != tokens - prefix:
        raise ValueError(f"{tokens - prefix} patches of {size[0]} x {size[1]} pixels")
    trunk.norm(torch.empty(1, tokens, width))
    hidden = getattr(getattr(block.mlp, "fc1", None), "out_features", 4 * width)
    heads, has_cls = block.attn.num_heads, getattr(trunk, "cls_token", None) is not None
    norms = (name for name, module in trunk.named_modules() if isinstance(module, _BatchNorm))
    patch, layers = size[0] // side, len(trunk.blocks)
    return TimmSizes(
        size[0], patch, width, layers, width // heads, hidden / width, tokens, prefix, has_cls, next(norms, "")
    )


def _hidden(trunk: Any, x: Tensor) -> Tensor:
    """Return tokens (B, N, d) after the last block, before any norm."""
    outputs = trunk.forward_intermediates(
        x, indices=1, norm=False, output_fmt="NLC", return_prefix_tokens=True, intermediates_only=True
    )[0]
    # timm returns prefix tokens separately; towers need them first.
    return torch.cat(outputs[::-1], dim=1) if trunk.num_prefix_tokens else outputs


def _trunk(name: str, image_size: int | None, kwargs: Mapping[str, Any]) -> Any:
    if not timm.is_model(name):
        raise ValueError(f"timm_model_name={name}: {did_you_mean(name.split('.')[0], timm.list_models())}")
    if reserved := [key for key in kwargs if key in _RESERVED_KWARGS]:
        raise ValueError(f"timm_model_kwargs: {reserved[0]} is reserved. Use the keys image_size and readout.")
    size = {} if image_size is None else {"img_size": image_size}
    try:
        # Without timm's own pooling and head, because the readout provides both.
        trunk: Any = timm.create_model(name, pretrained=False, num_classes=0, global_pool="", **size, **kwargs)
    except (TypeError, ValueError, AssertionError, RuntimeError) as error:
        raise ValueError(f"timm_model_name={name}: timm cannot build it ({str(error)[:200]})") from None
    return trunk


class TimmTower(nn.Module):
    """timm's vision transformer, read by its class token or by a readout.

    Args:
        readout: the recipe's block.
        embed_dim: width of the projection, if there is one.
        name, image_size, kwargs: see `sizes_of`.
        module: the readout; None: built here.
    """

    def __init__(
        self,
        readout: ReadOutConfig,
        embed_dim: int,
        name: str,
        image_size: int,
        kwargs: Mapping[str, Any],
        module: ReadOut | None = None,
    ):
        super().__init__()
        place = readout.placement
        self.trunk = _trunk(name, image_size, kwargs)
        # Remove the blocks that a readout replaces instead of skipping them: they would be parameters without a
        # gradient, and exports and counts list what exists.
        self.trunk.blocks = self.trunk.blocks[: len(self.trunk.blocks) - place.replaced]
        width, self.prefix, self.image_size = self.trunk.num_features, self.trunk.num_prefix_tokens, image_size
        if place.norm == "nothing":  # it would be a parameter without a gradient
            self.trunk.norm = nn.Identity()
        self.place, self.read_by = place, None if isinstance(readout, NoReadOut) else readout.kind
        if self.read_by is not None:
            self.add_module(self.read_by, module or readout.build(width, None, embed_dim).image)
        self.proj = nn.Parameter(width**-0.5 * torch.randn(width, embed_dim)) if place.projected else None
        slots, slot_width = readout.shape(embed_dim)
        self.output_dim = slots * slot_width

    def train(self, mode: bool = True) -> Self:
        """Keep a trunk that is frozen up to its norm in evaluation mode: dropped paths would disturb it, and cached tokens have none."""
        super().train(mode)
        if not any(p.requires_grad for p in self.trunk.blocks.parameters()):
            self.trunk.eval()
        for module in self.trunk.modules():  # the statistics of frozen layers stay, too
            if isinstance(module, _BatchNorm) and not any(p.requires_grad for p in module.parameters()):
                module.eval()
        return self

    @property
    def resblocks(self) -> nn.ModuleList:
        """Return its transformer blocks, under the name that open_clip's towers use."""
        return self.trunk.blocks

    def hidden(self, x: Tensor, patches: Tensor | None = None) -> Tensor:
        """Return the tokens (B, N, d) after the last block, before any norm, for pixels (B, 3, S, S); `patches` is not supported."""
        assert patches is None  # the recipe is checked for this
        return _hidden(self.trunk, x)

    def forward(
        self, x: Tensor | None, patches: Tensor | None = None, hidden: Tensor | None = None, local: bool = False
    ) -> Tensor:
        """Encode pixels (B, 3, S, S), or their `hidden` tokens, to (B, output_dim); for `local` see `project_tokens`."""
        if hidden is None:
            assert x is not None
            hidden = self.hidden(x, patches)
        if local:
            return project_tokens(self.trunk.norm(hidden), self.proj, self.prefix)
        # Norm the class token only, because the other tokens are not used.
        pooled = self.trunk.norm(hidden[:, :1])[:, 0] if self.read_by is None else self._read(hidden, False).flat()
        return pooled if self.proj is None else pooled @ self.proj

    def slots(self, image: Tensor, need_attention: bool = False, patches: Tensor | None = None) -> Slots:
        """Return the slots of images (B, 3, S, S), normalized and not projected, with attention (B, L, N), prefix tokens first."""
        return self._read(self.hidden(image, patches), need_attention)

    def tokens(self, image: Tensor) -> Tensor:
        """Return all tokens of images (B, 3, S, S) after the last block and its norm, (B, N, d), the class token first."""
        return self.trunk.norm(self.hidden(image))

    def _read(self, x: Tensor, need_attention: bool) -> Slots:
        assert self.read_by is not None
        return read_slots(
            self.get_submodule(self.read_by), self.place, self.trunk.norm, x, None, need_attention, self.prefix
        )

    @property
    def has_cls(self) -> bool:
        """Return whether its first token is a class token."""
        return getattr(self.trunk, "cls_token", None) is not None

    def resize_pos_embed(self, positions: Tensor) -> Tensor:
        """Interpolate position embeddings of a model for another image size, as timm does; those of this size are unchanged."""
        own = getattr(self.trunk, "pos_embed", None)
        if own is None or positions.shape == own.shape or positions.shape[-1] != own.shape[-1]:
            return positions
        # Some models have no positions for their prefix tokens.
        num_prefix = 0 if self.trunk.no_embed_class else self.prefix
        return resample_abs_pos_embed(positions, list(self.trunk.patch_embed.grid_size), num_prefix_tokens=num_prefix)

    def set_grad_checkpointing(self, enable: bool = True, *_more: Any) -> None:
        self.trunk.set_grad_checkpointing(enable)
