"""CLIP's two towers on open_clip's own blocks, with open_clip's pooling or a readout, and freezing of their parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from open_clip.transformer import TextTransformer, VisionTransformer
from torch import Tensor, nn
from torch.nn import functional as F

from ..core.errors import ConfigError
from .clip_config import Freeze
from .precision import interpolate_positions, patchify
from .readout import NoReadOut, ReadOut, ReadOutConfig, Slots, project_tokens, read_slots

_STEM = ("conv1", "class_embedding", "positional_embedding", "token_embedding", "ln_pre")
_BEHIND = ("norm", "fc_norm")  # modules of timm's trunks after the blocks; everything else comes before them


def freeze(tower: nn.Module, blocks: int, how: Freeze) -> None:
    """Freeze the whole tower, its blocks and everything before them, or the first blocks."""
    if how is True:
        tower.requires_grad_(False)
    elif how is not False:
        # "blocks" means all of them, so that recipes need no number.
        count = blocks if how == "blocks" else int(how)
        for name, p in tower.named_parameters():
            # Never unfreeze, because the other tower may freeze what both share.
            if layer_index(name, blocks) <= count:
                p.requires_grad_(False)


def layer_index(name: str, blocks: int) -> int:
    """Return the layer of a tower's parameter: 0 before the blocks, n + 1 in block n, the last one after them (norm, readout, projection)."""
    first, _, rest = name.partition(".")
    if first == "transformer":
        return 1 + int(rest.split(".")[1])
    if first == "trunk":
        part, _, rest = rest.partition(".")
        return 1 + int(rest.split(".")[0]) if part == "blocks" else blocks + 1 if part in _BEHIND else 0
    return 0 if first in _STEM else blocks + 1


def lock(tower: nn.Module, groups: Sequence[Sequence[nn.Module | nn.Parameter]], unlocked: int) -> None:
    """Freeze all but the last groups, as in open_clip."""
    tower.requires_grad_(False)
    for group in groups[max(0, len(groups) - unlocked) :]:
        for part in group:
            part.requires_grad_(True)


class VisionTower(VisionTransformer):
    """open_clip's ViT with its own pooling or a readout.

    The patch convolution is computed as a matrix product (stride = kernel size): same parameters, same function. The
    convolution's weight gradient alone takes a tenth of a ViT-B/32 step on a CPU. The patches to keep (patch dropout,
    Li et al. 2023, FLIP) may be passed in, so that they depend on the sample only.

    Args:
        readout: the recipe's block.
        embed_dim: width of the projection, if there is one.
        layers: blocks of the backbone, including those that the readout replaces.
        module: the readout; None: built here.
        kwargs: passed to open_clip.
    """

    prefix, has_cls = 1, True  # tokens before the patches, and whether the first of them is a class token

    def __init__(
        self, readout: ReadOutConfig, embed_dim: int, layers: int, module: ReadOut | None = None, **kwargs: Any
    ):
        place = readout.placement
        # Blocks that a readout replaces are not created, because they would be parameters without a gradient. Width 1
        # without a projection: the parent creates one, which is deleted below.
        super().__init__(layers=layers - place.replaced, output_dim=embed_dim if place.projected else 1, **kwargs)
        if not place.projected:
            self.proj = None
        if place.norm == "nothing":  # it would be a parameter without a gradient
            self.ln_post = nn.Identity()  # type: ignore[assignment]
        # The kind names its modules, so that state dicts of different readouts never mix.
        self.place, self.read_by = place, None if isinstance(readout, NoReadOut) else readout.kind
        if self.read_by is not None:
            self.add_module(self.read_by, module or readout.build(kwargs["width"], None, embed_dim).image)
            slots, width = readout.shape(embed_dim)
            self.output_dim = slots * width

    @property
    def resblocks(self) -> nn.ModuleList:
        """Return its transformer blocks."""
        return self.transformer.resblocks

    def hidden(self, x: Tensor, patches: Tensor | None = None) -> Tensor:
        """Return the tokens after the last block, before any norm, (B, 1 + H*W/p^2, d), CLS first, for pixels (B, 3, H, W)."""
        return self.transformer(self._embeds(x, patches))

    def forward(
        self, x: Tensor | None, patches: Tensor | None = None, hidden: Tensor | None = None, local: bool = False
    ) -> Tensor:
        """Encode pixels (B, 3, H, W) to (B, output_dim).

        Args:
            x: pixels.
            patches: (B, K) int64, the patches to keep instead of random ones.
            hidden: output of `hidden` for these images, in place of the pixels.
            local: return class token and patches instead, each normed and projected, (B, 1 + N, embed_dim).
        """
        if hidden is None:
            assert x is not None
            hidden = self.hidden(x, patches)
        if local:
            return project_tokens(self.ln_post(hidden), self.proj, self.prefix)
        pooled, _ = self._pool(hidden)
        # Applied here, not in the readout, because the projection belongs to the tower and has open_clip's name.
        return pooled if self.proj is None else pooled @ self.proj

    def slots(self, image: Tensor, need_attention: bool = False, patches: Tensor | None = None) -> Slots:
        """Return the slots of images (B, 3, H, W), normalized and not projected, with attention (B, L, 1 + N), CLS first.

        N is the number of patches: all, or those that are kept, `patches` (B, N) int64.
        """
        return self._read(self.hidden(image, patches), need_attention)

    def tokens(self, image: Tensor) -> Tensor:
        """Return all tokens of images (B, 3, H, W) after the last block and its norm, (B, 1 + H*W/p^2, d), CLS first."""
        return self.ln_post(self.hidden(image))

    def _pool(self, x: Tensor) -> tuple[Tensor, Tensor]:
        # Use open_clip's own pooling unchanged, so that its released models give bit-identical results.
        return super()._pool(x) if self.read_by is None else (self._read(x, False).flat(), x[:, 1:])

    def _read(self, x: Tensor, need_attention: bool) -> Slots:
        return read_slots(_readout(self), self.place, self.ln_post, x, None, need_attention)

    def _embeds(self, x: Tensor, patches: Tensor | None = None) -> Tensor:
        pixels = patchify(x, self.conv1.kernel_size[0])
        rows, columns = (side // self.conv1.kernel_size[0] for side in x.shape[-2:])
        where = interpolate_positions(self.positional_embedding[1:], rows, columns)
        if patches is not None:
            pixels = pixels.gather(1, patches[..., None].expand(-1, -1, pixels.shape[2]))
            # A kept patch keeps its position embedding.
            where = where[patches]
        x = F.linear(pixels, self.conv1.weight.flatten(1), self.conv1.bias)
        # Add the position to the class token once per model instead of once per image.
        start = (self.class_embedding.to(x.dtype) + self.positional_embedding[0].to(x.dtype)).expand(x.shape[0], 1, -1)
        x = torch.cat([start, x + where.to(x.dtype)], dim=1)
        # Patches were already dropped by the data, so the tower must not drop again.
        return self.ln_pre(x if patches is not None else self.patch_dropout(x))

    def lock(self, unlocked_groups: int = 0, freeze_bn_stats: bool = False, *more: Any, **named: Any) -> None:
        """Freeze all but the last `unlocked_groups` groups; a readout with `ln_post` (and a projection) is the last group."""
        if self.read_by is None:
            super().lock(unlocked_groups, freeze_bn_stats, *more, **named)
            return
        # open_clip's groups, so that its `--lock-image-unlocked-groups` counts alike.
        stem = [self.conv1, self.class_embedding, self.positional_embedding, self.ln_pre]
        last = [self.ln_post, _readout(self), *([] if self.proj is None else [self.proj])]
        lock(self, [stem, *([b] for b in self.transformer.resblocks), last], unlocked_groups)


class TextTower(TextTransformer):
    """open_clip's text transformer with its own pooling, or with a readout over the tokens up to and including EOS.

    It accepts batches that are cut to their longest caption: under the causal mask, a position never sees later ones,
    so cutting after the last EOS changes no result. Arguments are those of `VisionTower`; a readout may leave texts to
    EOS.
    """

    def __init__(
        self, readout: ReadOutConfig, embed_dim: int, layers: int, module: ReadOut | None = None, **kwargs: Any
    ):
        place = readout.placement
        pooling: dict[str, Any] = {"output_dim": embed_dim}
        if place.text:
            # open_clip then pools nothing and returns all tokens.
            pooling = {"pool_type": "none"} | (
                pooling if place.projected else {"output_dim": None, "proj_type": "none"}
            )
        super().__init__(layers=layers - place.replaced, **kwargs, **pooling)
        # A text has no class token to exclude.
        self.place, self.read_by = place._replace(attend_cls=True), readout.kind if place.text else None
        if self.read_by is not None:
            self.add_module(self.read_by, module or readout.build(None, kwargs["width"], embed_dim).text)
            if place.norm == "nothing":
                self.ln_final = nn.Identity()  # type: ignore[assignment]
            slots, width = readout.shape(embed_dim)
            self.output_dim = slots * width

    @property
    def resblocks(self) -> nn.ModuleList:
        """Return its transformer blocks."""
        return self.transformer.resblocks

    def hidden(self, text: Tensor) -> Tensor:
        """Return the tokens after the last block, before any norm, (B, T, d), for token ids (B, T)."""
        x, mask = self._embeds(text)
        return self.transformer(x, attn_mask=mask)

    def slots(self, text: Tensor, need_attention: bool = False, hidden: Tensor | None = None) -> Slots:
        """Return the slots of token ids (B, T), normalized, with attention (B, L, T), which is zero after EOS."""
        x = self.hidden(text) if hidden is None else hidden
        return read_slots(_readout(self), self.place, self.ln_final, x, up_to_eos(text), need_attention)

    def forward(self, text: Tensor, hidden: Tensor | None = None) -> Tensor:
        """Encode token ids (B, T) to (B, output_dim); `hidden` is the output of `hidden` for them."""
        if self.read_by is not None:
            pooled = self.slots(text, hidden=hidden).flat()
            return pooled @ self.text_projection if self.place.projected else pooled  # type: ignore[operator]
        if hidden is None:
            return super().forward(text)  # type: ignore[return-value]
        # EOS has the largest id. Only its row goes through the norm, because other rows are not used.
        ends = self.ln_final(hidden[torch.arange(text.shape[0], device=text.device), text.argmax(dim=-1)])
        return ends @ self.text_projection  # type: ignore[operator]

    def forward_intermediates(self, text: Tensor, *args: Any, **kwargs: Any) -> dict[str, Any]:
        out = super().forward_intermediates(text, *args, **kwargs)
        if self.read_by is not None and "text_features" in out:  # without a pool, these are all tokens
            out["text_features"] = self.forward(text)
        return out

    def _embeds(self, text: Tensor) -> tuple[Tensor, Tensor | None]:
        x, mask = super()._embeds(text)
        # Cut the causal mask to the longest caption, too.
        return x, None if mask is None else mask[: x.shape[1], : x.shape[1]]

    def lock(self, unlocked_layers: int = 0, freeze_layer_norm: bool = True, *more: Any, **named: Any) -> None:
        if self.read_by is None:
            super().lock(unlocked_layers, freeze_layer_norm, *more, **named)  # open_clip >= 4 has further arguments
            return
        stem = [self.token_embedding, self.positional_embedding]
        last = [self.ln_final, _readout(self), *([self.text_projection] if self.place.projected else [])]
        groups = [stem, *([b] for b in self.transformer.resblocks), last]
        lock(self, groups, unlocked_layers)


def _readout(tower: VisionTower | TextTower) -> nn.Module:
    """Return the tower's readout, whose module is named after its registry entry."""
    if tower.read_by is None:
        raise ConfigError(
            "slots: this model has its own pooling and no slots. Use a readout (objective.model.readout.kind)."
        )
    return tower.get_submodule(tower.read_by)


def up_to_eos(text: Tensor) -> Tensor:
    """Return (B, T) bool, True up to and including EOS, which has the largest id of CLIP's vocabulary."""
    positions = torch.arange(text.shape[1], device=text.device)
    return positions[None, :] <= text.argmax(dim=-1, keepdim=True)
