"""Convolutional encoders of the slot papers: plain stacks with either padding, and the ResNet-34 of SAVi and ISA."""

from __future__ import annotations

from typing import Annotated, Literal, Self

import torch
from pydantic import model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from sparo_train.core.config import Frozen, between, field


class ConvNetConfig(Frozen):
    """Convolutions with one kernel size."""

    kind: Literal["conv"] = field("conv", "Kind of the image encoder: an entry of sparo.slot_encoders.")
    channels: Annotated[tuple[int, ...], between(1, 1 << 16)] = field(
        (64, 64, 64, 64), "Channels of each layer.", min_length=1
    )
    strides: Annotated[tuple[int, ...], between(1, 64)] = field((1, 1, 1, 1), "Stride of each layer.", min_length=1)
    kernel: int = field(5, "Kernel size in pixels.", gt=0, le=64)
    last_relu: bool = field(True, "Apply a ReLU after the last layer, too.")
    padding: Literal["same", "symmetric"] = field(
        "same",
        "same: pad as flax and Keras do; if the padding is odd, the extra pixel is at the right and bottom. symmetric: kernel // 2 on every "
        "side, as in STEVE's code.",
    )

    @model_validator(mode="after")
    def _as_many(self) -> Self:
        if len(self.strides) != len(self.channels):
            raise ValueError(
                f"strides={list(self.strides)}: needs one value per layer, like channels={list(self.channels)}"
            )
        if self.padding == "symmetric" and self.kernel % 2 == 0:
            raise ValueError(f"padding=symmetric: requires an odd kernel, got kernel={self.kernel}. Use padding: same.")
        return self

    @property
    def width(self) -> int:
        """Return the width of the features."""
        return self.channels[-1]

    def cost(self, image_size: int) -> int:
        """Return the number of values that the layers write for an image."""
        total, side = 0, image_size
        for wide, stride in zip(self.channels, self.strides, strict=True):
            side = -(-side // stride)
            total += wide * side**2
        return total

    def build(self) -> nn.Module:
        return ConvNet(self)

    def side(self, image_size: int) -> int:
        """Return the number of features per side."""
        for stride in self.strides:
            image_size = -(-image_size // stride)
        return image_size


class ConvNet(nn.Module):
    """Encoder of images (b, 3, S, S) to features (b, s, s, C), channels last."""

    def __init__(self, config: ConvNetConfig):
        super().__init__()
        self.config = config
        widths = (3, *config.channels)
        self.layers = nn.ModuleList(
            nn.Conv2d(a, b, config.kernel, stride)
            for a, b, stride in zip(widths, config.channels, config.strides, strict=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(self._pad(x, layer.stride[0]))  # type: ignore[union-attr, index, operator]
            if number + 1 < len(self.layers) or self.config.last_relu:
                x = F.relu(x)
        # Channels last, because slots read rows of features.
        return x.permute(0, 2, 3, 1)

    def _pad(self, x: Tensor, stride: int) -> Tensor:
        kernel = self.config.kernel
        return F.pad(x, [kernel // 2] * 4) if self.config.padding == "symmetric" else pad_same(x, kernel, stride)


def pad_same(x: Tensor, kernel: int, stride: int) -> Tensor:
    """Apply SAME padding: an output per `stride` pixels, with the odd pixel of padding at the right and bottom."""
    pads: list[int] = []
    # flax and Keras put the odd pixel last; torch's own padding puts it first.
    for size in (x.shape[-1], x.shape[-2]):
        missing = max((-(-size // stride) - 1) * stride + kernel - size, 0)
        pads += [missing // 2, missing - missing // 2]
    return F.pad(x, pads)


def grid(side: int, like: Tensor | None = None) -> Tensor:
    """Return (side * side, 2) positions y, x in [-1, 1], row by row, on the device of `like` and in its precision, fp32 at least."""
    dtype = torch.float32 if like is None else torch.promote_types(like.dtype, torch.float32)
    # First and last on the edge, as in the papers' code; pixel centres would be half a pixel inside.
    line = torch.linspace(-1, 1, side, device=None if like is None else like.device, dtype=dtype)
    return torch.stack(torch.meshgrid(line, line, indexing="ij"), dim=-1).flatten(0, 1)


_BLOCKS = (3, 4, 6, 3)


class ResNet34Config(Frozen):
    """ResNet-34 whose features have an eighth of the image's side and width 512."""

    kind: Literal["resnet34"] = field("resnet34", "Kind of the image encoder: an entry of sparo.slot_encoders.")
    root_width: int = field(64, "Channels of the stem and the first stage. Each further stage doubles them.", gt=0)
    groups: int = field(32, "Groups of every GroupNorm.", gt=0)

    @model_validator(mode="after")
    def _check_groups(self) -> Self:
        if self.root_width % self.groups:
            raise ValueError(f"groups={self.groups}: does not divide root_width={self.root_width}")
        return self

    @property
    def width(self) -> int:
        """Return the width of the features."""
        return self.root_width * 8

    def side(self, image_size: int) -> int:
        """Return the number of features per side."""
        # Odd sides round up at each stage, as with SAME padding.
        for _ in range(3):
            image_size = -(-image_size // 2)
        return image_size

    def cost(self, image_size: int) -> int:
        """Return the number of values that the layers write for an image."""
        per_stage = [2 * n * (self.root_width << i) * (image_size >> i) ** 2 for i, n in enumerate(_BLOCKS)]
        return sum(per_stage)

    def build(self) -> nn.Module:
        return ResNet34(self)


class ResNet34(nn.Module):
    """Encoder of images (b, 3, S, S) to features (b, S/8, S/8, C), channels last. The root has no ReLU after it, as in the official code."""

    def __init__(self, config: ResNet34Config):
        super().__init__()
        wide = config.root_width
        self.stem = nn.Conv2d(3, wide, 3, bias=False)
        self.norm = nn.GroupNorm(config.groups, wide, eps=1e-6)
        blocks: list[nn.Module] = []
        for stage, count in enumerate(_BLOCKS):
            for number in range(count):
                out = config.root_width << stage
                blocks.append(_Block(wide, out, 2 if stage and not number else 1, config.groups))
                wide = out
        self.blocks = nn.Sequential(*blocks)

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(self.norm(self.stem(pad_same(x, 3, 1)))).permute(0, 2, 3, 1)


class _Block(nn.Module):
    def __init__(self, wide: int, out: int, stride: int, groups: int):
        super().__init__()
        self.stride = stride
        self.conv1, self.conv2 = nn.Conv2d(wide, out, 3, stride, bias=False), nn.Conv2d(out, out, 3, bias=False)
        self.norms = nn.ModuleList(nn.GroupNorm(groups, out, eps=1e-6) for _ in range(2))
        nn.init.zeros_(self.norms[1].weight)  # type: ignore[arg-type]  a block is initialized as the identity
        self.downsample = self.downsample_norm = None
        if stride != 1 or wide != out:
            self.downsample, self.downsample_norm = (
                nn.Conv2d(wide, out, 1, stride, bias=False),
                nn.GroupNorm(groups, out, eps=1e-6),
            )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norms[0](self.conv1(pad_same(x, 3, self.stride))))
        y = self.norms[1](self.conv2(pad_same(y, 3, 1)))
        shortcut = (
            x if self.downsample is None or self.downsample_norm is None else self.downsample_norm(self.downsample(x))
        )
        return F.relu(shortcut + y)
