"""ViT of DINO (Caron et al. 2021), DINOv2 (Oquab et al. 2023) and DINOv3 (Siméoni et al. 2025), with the CLS token or SPARO."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from open_clip.transformer import QuickGELU
from timm.layers.mlp import Mlp
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from .precision import patchify
from .readout import Slots, read_slots
from .vit_blocks import DropBlock, Rotation, SwiGlu, init_linears, interpolate_positions, rotation
from .vit_config import DROP_RANGE, VitConfig


class Vit(VisionTransformer):
    """Backbone of `config`: normalised pixels (B, C, H, W) to encodings (B, out_width).

    Any H and W are supported (96-pixel crops, larger images): positions are interpolated as in the official code, or
    rotary.

    Args:
        config: the model.
        mask_token: have the parameter that replaces masked patches, as iBOT needs it.
        patch_loss: a loss depends on the normalised patches, so their norm is trained with any readout.
    """

    def __init__(self, config: VitConfig, mask_token: bool = False, patch_loss: bool = False):
        super().__init__(
            img_size=config.image_size,
            patch_size=config.patch_size,
            in_chans=config.bands,
            num_classes=0,
            global_pool="",
            embed_dim=config.width,
            depth=config.blocks,
            num_heads=config.heads,
            mlp_ratio=config.mlp_ratio,
            init_values=config.layer_scale,
            pre_norm=config.pre_norm,
            act_layer=QuickGELU if config.quick_gelu else nn.GELU,
            pos_embed="learn" if config.positions == "learned" else "none",
            norm_layer=functools.partial(nn.LayerNorm, eps=config.norm_eps),
            mlp_layer=Mlp if config.ffn_layer == "mlp" else SwiGlu,  # pyright: ignore[reportArgumentType]
            block_fn=DropBlock,
        )
        self.config, self.patch = config, config.patch_size
        # Initialization of the official code; timm's smaller one changes the first thousand steps.
        nn.init.trunc_normal_(self.cls_token, std=0.02)  # pyright: ignore[reportArgumentType]  timm's is 1e-6
        if config.registers:
            # Almost zero, as in DINOv2; they get no position.
            self.register_tokens = nn.Parameter(torch.empty(1, config.registers, config.width).normal_(std=1e-6))
        if mask_token:
            self.mask_token = nn.Parameter(torch.zeros(1, config.width))
        self.prefix = 1 + config.registers  # tokens before the patches
        self.place = config.readout.placement
        readout = config.readout.build(config.width, None, config.width).image
        self.read_by = config.readout.kind if readout is not None else None
        if readout is not None:
            self.add_module(config.readout.kind, readout)
        if self.place.norm == "nothing" and not patch_loss:
            # Probes of earlier blocks apply this norm, and official files contain it; the loss does not depend on it.
            self.norm.requires_grad_(False)
        # Two paths per block: attention and MLP. The drop probability rises linearly with depth from 0 to `drop_path`, or is uniform.
        first = config.drop_path if config.drop_path_uniform else 0.0
        rates = torch.linspace(first, config.drop_path, config.blocks).repeat_interleave(2)
        # Not part of the state, because official checkpoints do not have it.
        self.register_buffer("drop_rates", rates, persistent=False)
        if config.weight_init == "xavier":
            init_linears(self.blocks, config.weight_init)
        self.checkpointed = False

    def forward(self, x: Tensor, drop: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """Return the encoding: CLS after `norm`, or the flat slots, not normalised.

        Args:
            x: pixels.
            drop: (B, 2 * blocks) int32, uniform below `DROP_RANGE`: a path is dropped if its number is below the rate's
                share of the range; None: nothing is dropped. Integers, because FSDP2 rounds floating-point inputs to 16
                bits.
        """
        if self.read_by is not None:
            # Flat and not normalised, because DINO's head is an MLP over all values (App. C.2).
            return self.slots(x, drop).flat()
        return self.norm(self.hidden(x, drop, cls_only=True))[:, 0]

    def slots(self, x: Tensor, drop: Tensor | None = None, need_attention: bool = False) -> Slots:
        """Return slots (B, L, V) with attention (B, L, N) over all tokens (only patches if `attend_cls` is false); needs a readout."""
        return self._read(self.hidden(x, drop), need_attention)

    def with_patches(self, x: Tensor, drop: Tensor | None = None, masks: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the encoding, and the patches after `norm`, (B, patches, d).

        Args:
            x: pixels.
            drop: see `forward`.
            masks: (B, patches) bool: patches that `mask_token` replaces; None: no patch.
        """
        x = self.hidden(x, drop, masks=masks)
        normed = self.norm(x)
        encoding = normed[:, 0] if self.read_by is None else self._read(x, False).flat()
        return encoding, normed[:, self.prefix :]

    def patches(self, x: Tensor) -> Tensor:
        """Return the patches after `norm`, (B, patches, d), for pixels."""
        return self.norm(self.hidden(x, None))[:, self.prefix :]

    def hidden(self, x: Tensor, drop: Tensor | None, cls_only: bool = False, masks: Tensor | None = None) -> Tensor:
        """Return the tokens after the last block, before any norm, for pixels; with `cls_only` only the first one."""
        rotary, x = self.rotary(x), self.embed(x, masks)
        scales = None
        if drop is not None:
            rates: Tensor = self.drop_rates  # type: ignore[assignment]
            # Scale kept paths up, so that their mean equals the value in evaluation.
            scales = ((drop >= rates * DROP_RANGE) / (1 - rates)).to(x.dtype).unflatten(1, (-1, 2))
        for number, block in enumerate(self.blocks):
            scale = None if scales is None else scales[:, number]
            last = cls_only and number == len(self.blocks) - 1
            # Recomputing without a graph would only cost time.
            if self.checkpointed and torch.is_grad_enabled():
                x = checkpoint(block, x, scale, last, rotary, use_reentrant=False)  # type: ignore[assignment]
            else:
                x = block(x, scale, last, rotary)
        return x

    def intermediate(self, x: Tensor, n: int) -> list[Tensor]:
        """Return all tokens of the last `n` blocks, each after `norm`, like the official `get_intermediate_layers`."""
        return [self.norm(tokens) for tokens in deque(self._outputs(x), maxlen=n)]

    def probe_features(self, x: Tensor, n: int = 4, avgpool: bool = False) -> Tensor:
        """Return the input of the official linear probe: CLS after `norm` of the last `n` blocks, and the mean patch of the last if `avgpool`.

        With a readout, its encoding replaces the last block's CLS (App. C.2, where SPARO's is not normalised): ViT-S
        with L = V = 64 gives 3 * 384 + 4096 = 5,248 values.
        """
        outputs = list(self._outputs(x))
        last = outputs[-1]
        if self.read_by is None:
            parts = [self.norm(tokens[:, :1])[:, 0] for tokens in outputs[-n:]]
        else:
            # A readout that replaces no block still takes the place of the last one here. The blocks are equal in both
            # cases.
            outputs = outputs if self.place.replaced else outputs[:-1]
            parts = [self.norm(tokens[:, :1])[:, 0] for tokens in outputs[max(0, len(outputs) - n + 1) :]]
            parts.append(self._read(last, False).flat())
        if avgpool:
            parts.append(self.norm(last)[:, self.prefix :].mean(dim=1))
        return torch.cat(parts, dim=-1)

    def last_attention(self, x: Tensor) -> Tensor:
        """Return self-attention of the last block, (B, heads, N, N), like the official `get_last_selfattention`."""
        rotary, x = self.rotary(x), self.embed(x)
        for block in self.blocks[:-1]:
            x = block(x, rotary=rotary)
        return self.blocks[-1].attention_map(x, rotary)  # type: ignore[operator]

    def embed(self, x: Tensor, masks: Tensor | None = None) -> Tensor:
        """Return tokens with position embeddings, (B, prefix + patches, d), for pixels: CLS, registers, patches.

        Args:
            x: pixels.
            masks: (B, patches) bool: patches that `mask_token` replaces; None: no patch.
        """
        rows, columns = self._grid(x)
        proj: Any = self.patch_embed.proj
        tokens = F.linear(patchify(x, self.patch), proj.weight.flatten(1), proj.bias)
        if masks is not None:
            tokens = torch.where(masks[..., None], self.mask_token.to(tokens.dtype), tokens)
        start = self.cls_token.expand(x.shape[0], -1, -1).to(tokens.dtype)  # type: ignore[union-attr]
        tokens = torch.cat([start, tokens], dim=1)
        if self.pos_embed is not None:
            tokens = tokens + self.positions(rows, columns).to(tokens.dtype)
        if self.config.registers:
            registers = self.register_tokens.expand(x.shape[0], -1, -1).to(tokens.dtype)
            tokens = torch.cat([tokens[:, :1], registers, tokens[:, 1:]], dim=1)
        return self.norm_pre(tokens)

    def positions(self, rows: int, columns: int) -> Tensor:
        """Return position embeddings of a grid, (1, 1 + rows * columns, d), interpolated as the official code of the model does."""
        return interpolate_positions(
            self.pos_embed,  # type: ignore[arg-type]
            (rows, columns),
            self.config.interpolate_offset,
            self.config.interpolate_antialias,
        )

    def rotary(self, x: Tensor) -> Rotation | None:
        """Return the rotation of the patches of pixels; None with learned positions."""
        if self.config.positions == "learned":
            return None
        return rotation(*self._grid(x), self.config.width // self.config.heads, self.config.rope_base, x.device)

    def _grid(self, x: Tensor) -> tuple[int, int]:
        return x.shape[-2] // self.patch, x.shape[-1] // self.patch

    def _outputs(self, x: Tensor) -> Iterator[Tensor]:
        """Return the tokens after each block, without dropped paths."""
        rotary, x = self.rotary(x), self.embed(x)
        for block in self.blocks:
            x = block(x, rotary=rotary)
            yield x

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.checkpointed = enable

    def _read(self, x: Tensor, need_attention: bool) -> Slots:
        assert self.read_by is not None
        return read_slots(self.get_submodule(self.read_by), self.place, self.norm, x, None, need_attention, self.prefix)
