"""Spatial broadcast decoders (Watters et al. 2019): each slot on every point of a grid, with positions, to colour and mask."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple, Self

import torch
from pydantic import model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from sparo_train.core.config import Frozen, between, field
from sparo_train.models.precision import in_fp32


class BroadcastConfig(Frozen):
    """Options of the decoder.

    mlp: an MLP per pixel (Biza et al. 2023, Table 8). cnn: transposed convolutions of stride 2, then convolutions
    (Table 7). patch: an MLP per patch, with learned positions (Seitzer et al. 2023).
    """

    kind: Literal["mlp", "cnn", "patch"] = field(
        "mlp", "Decoder of each broadcast slot: an MLP per pixel, a CNN, or an MLP per patch."
    )
    hidden: Annotated[tuple[int, ...], between(1, 1 << 16)] = field(
        (256,) * 5, "For mlp and patch: hidden units of each layer.", min_length=1
    )
    fourier_bands: int = field(
        0,
        "Number of octaves in the Fourier features that encode positions, in addition to the coordinates. With "
        "Fourier features, edges become sharp earlier in training (Tancik et al. 2020).",
        ge=0,
        le=16,
    )
    channels: int = field(64, "For cnn: number of channels of each layer, equal for all layers.", gt=0)
    num_upsample: int = field(2, "For cnn: number of transposed convolutions, each doubling the side.", ge=0, le=8)
    convs: int = field(2, "For cnn: convolutions after the transposed ones.", ge=0, le=64)
    kernel: int = field(5, "For cnn: kernel size in pixels.", gt=0, le=64)
    upsample_output: bool = field(
        False,
        "For cnn with convs=0: the last transposed convolution outputs colours and the mask logit (PSB's Table 5).",
    )
    padding_mode: Literal["same", "torch"] = field(
        "same",
        "Alignment of transposed convolutions, for cnn. same: as in flax and Keras. torch: torch's usual alignment, "
        "which shifts the output by one pixel (PSB, OCLF).",
    )
    out_kernel: int = field(
        1, "For cnn: kernel size of the last layer, which outputs colours and mask logit.", gt=0, le=63
    )

    weight_init: Literal["torch", "lecun", "kaiming"] = field(
        "torch",
        "Initialization. torch: PyTorch's, which shrinks activations; lecun: flax's (SAVi, ISA); kaiming: keeps the "
        "scale of activations after a ReLU.",
    )
    norm: bool = field(
        False,
        "For cnn: LayerNorm of slots, and GroupNorm with one group after broadcasting (PSB's code).",
    )

    @model_validator(mode="after")
    def _check_kind_options(self) -> Self:
        if self.kind == "patch" and self.fourier_bands:
            raise ValueError(
                f"fourier_bands={self.fourier_bands}: applies to coordinates, but kind=patch learns its positions. Remove it."
            )
        if self.norm and self.kind != "cnn":
            raise ValueError(f"norm: applies to kind=cnn, not {self.kind}. Remove it.")
        if self.upsample_output and (self.kind != "cnn" or self.convs or not self.num_upsample):
            raise ValueError("upsample_output: applies to kind=cnn with num_upsample > 0 and convs=0. Remove it.")
        return self

    def side(self, image_size: int) -> int:
        """Return the side of the grid that slots are put on. Raises `ValueError` if no side leads to the image's size."""
        if self.kind != "cnn":
            return image_size
        if image_size % 2**self.num_upsample:
            raise ValueError(
                f"num_upsample={self.num_upsample}: image_size={image_size} cannot be halved that many times"
            )
        return image_size // 2**self.num_upsample


class DecoderOutput(NamedTuple):
    """Decoded images.

    Attributes:
        image: (b, C, S, S), the sum of `slot_images` (b, K, C, S, S) weighted by `masks`.
        masks: (b, K, S, S), which sum to one over slots.
    """

    image: Tensor
    slot_images: Tensor
    masks: Tensor


class Broadcast(nn.Module):
    """Decoder of slots (b, K, D) on a grid, which is (N, 2) for all, or (b, K, N, 2) in each slot's own frame.

    Args:
        config, width: options and width of slots.
        out: number of colours, or of features per pixel or patch.
    """

    adamw_only_parameters = ("pos_embed",)

    def __init__(self, config: BroadcastConfig, width: int, image_size: int, out: int = 3):
        super().__init__()
        self.config, self.side, self.image_size = config, config.side(image_size), image_size
        c = config
        if c.kind == "patch":
            self.pos_embed = nn.Parameter(0.02 * torch.randn(self.side**2, width))
        else:
            self.position = nn.Linear(2 + 4 * c.fourier_bands, width)
        if c.kind != "cnn":
            widths = (width, *c.hidden)
            layers = [m for a, b in zip(widths, c.hidden, strict=False) for m in (nn.Linear(a, b), nn.ReLU())]
            self.layers = nn.Sequential(*layers, nn.Linear(widths[-1], out + 1))
            # Activations that shrink on the way up make the first masks equal, and slots then share pixels for a long
            # time.
            init_weights(self.layers, c.weight_init)
            return
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.GroupNorm(1, width)]) if c.norm else None
        convs: list[nn.Module] = []
        for number in range(c.num_upsample + c.convs - c.upsample_output):
            wide = width if number == 0 else c.channels
            convs += [
                _Upsample(wide, c.channels, c.kernel, c.padding_mode)
                if number < c.num_upsample
                else nn.Conv2d(wide, c.channels, c.kernel, padding="same"),
                nn.ReLU(),
            ]
        wide = c.channels if convs else width
        last = (
            _Upsample(wide, out + 1, c.kernel, c.padding_mode)
            if c.upsample_output
            else nn.Conv2d(wide, out + 1, c.out_kernel, padding="same")
        )
        self.layers = nn.Sequential(*convs, last)
        init_weights(self.layers, c.weight_init)

    def forward(self, slots: Tensor, grid: Tensor) -> DecoderOutput:
        b, k = slots.shape[:2]
        norms: Any = self.norms if self.config.kind == "cnn" else None
        slots = slots if norms is None else norms[0](slots)
        # Added after the projection, in fp32: bf16 resolves positions to 1/256 only, so neighbours would coincide.
        pos_embed = (
            self.pos_embed
            if self.config.kind == "patch"
            else in_fp32(self.position, fourier_features(grid, self.config.fourier_bands))
        )
        x = slots[:, :, None] + pos_embed  # (b, K, N, D)
        if self.config.kind != "cnn":
            outputs = self.layers(x).unflatten(2, (self.side, self.side)).permute(0, 1, 4, 2, 3)
        else:
            planes = x.flatten(0, 1).unflatten(1, (self.side, self.side)).permute(0, 3, 1, 2)
            planes = planes if norms is None else norms[1](planes)
            outputs = self.layers(planes).unflatten(0, (b, k))
        # Masks are compared over slots at every pixel, and in 16 bits ties are common.
        slot_images, logits = outputs[:, :, :-1], outputs[:, :, -1]
        masks = F.softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), dim=1)
        # Mix before any clamp, so that the scored image is the trained one.
        return DecoderOutput((slot_images * masks[:, :, None]).sum(1), slot_images, masks)


def init_weights(layers: nn.Module, scheme: Literal["torch", "lecun", "kaiming"]) -> None:
    """Initialize the weights of layers and set biases to zero; torch: leave them unchanged."""
    for layer in layers.modules():
        if scheme == "torch" or not isinstance(layer, nn.Linear | nn.Conv2d | nn.ConvTranspose2d):
            continue
        transposed = isinstance(layer, nn.ConvTranspose2d)
        fan_in = (layer.weight[:, 0] if transposed else layer.weight[0]).numel()
        if (
            scheme == "kaiming"
        ):  # in a transposed kernel, a pixel sums every second row and column; flax counts all of them
            fan_in /= 2 * (layer.stride[0] ** 2 if isinstance(layer, nn.ConvTranspose2d) else 1)
        std = fan_in**-0.5 / 0.87962566103423978
        nn.init.trunc_normal_(layer.weight, 0.0, std, -2 * std, 2 * std)
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)


def fourier_features(grid: Tensor, num_bands: int) -> Tensor:
    """Return positions (..., 2) with the sines and cosines of pi, 2 pi, 4 pi, ... times their coordinates: (..., 2 + 4 * num_bands)."""
    if not num_bands:
        return grid
    angles = grid[..., None, :] * (
        torch.pi * 2.0 ** torch.arange(num_bands, device=grid.device, dtype=grid.dtype)[:, None]
    )
    return torch.cat([grid, angles.sin().flatten(-2), angles.cos().flatten(-2)], dim=-1)


class _Upsample(nn.ConvTranspose2d):
    """Transposed convolution of stride 2 that doubles the side.

    It is aligned like SAME in flax and Keras, or like torch's usual idiom (padding 2, output_padding 1 for 5 pixels),
    which is the same filter shifted by one pixel.
    """

    def __init__(self, wide: int, out: int, kernel: int, align: Literal["same", "torch"] = "same"):
        same = max(kernel - 2, 0) // 2
        super().__init__(wide, out, kernel, stride=2, padding=same if align == "same" else (kernel - 1) // 2)
        self.extra_padding = kernel % 2 if align == "torch" else 0

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        upsampled = F.conv_transpose2d(input, self.weight, self.bias, 2, self.padding, self.extra_padding)  # type: ignore[arg-type]
        # An odd kernel leaves one row and column more than twice the side.
        return upsampled[..., : 2 * input.shape[-2], : 2 * input.shape[-1]]
