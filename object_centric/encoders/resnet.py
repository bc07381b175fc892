"""The ResNet-34 of SAVi and ISA for small pictures: GroupNorm, a root of stride one without pooling (Kipf et al. 2022, Appendix)."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from sparo_train.core.config import Frozen, field

from .convnet import same_padded

_BLOCKS = (3, 4, 6, 3)


class ResNet34Config(Frozen):
    """An eighth of the image's side, 512 wide."""

    kind: Literal["resnet34"] = field("resnet34", "a row of sparo.slot_encoders")
    root_width: int = field(64, "channels of the root and the first stage; each stage has twice the last one's", gt=0)
    groups: int = field(32, "of every GroupNorm", gt=0)

    @model_validator(mode="after")
    def _check_groups(self) -> Self:
        if self.root_width % self.groups:
            raise ValueError(f"groups={self.groups}: does not divide root_width={self.root_width}")
        return self

    @property
    def width(self) -> int:
        """Of the features."""
        return self.root_width * 8

    def side(self, image_size: int) -> int:
        """Features per side."""
        # Odd sides round up at each stage, as SAME padding leaves them.
        for _ in range(3):
            image_size = -(-image_size // 2)
        return image_size

    def cost(self, image_size: int) -> int:
        """Numbers that the layers write for an image."""
        per_stage = [2 * n * (self.root_width << i) * (image_size >> i) ** 2 for i, n in enumerate(_BLOCKS)]
        return sum(per_stage)

    def build(self) -> nn.Module:
        return ResNet34(self)


class ResNet34(nn.Module):
    """Images (b, 3, S, S) to features (b, S/8, S/8, C), channels last. What follows the root has no ReLU, as in the official code."""

    def __init__(self, config: ResNet34Config):
        super().__init__()
        wide = config.root_width
        self.root = nn.Conv2d(3, wide, 3, bias=False)
        self.norm = nn.GroupNorm(config.groups, wide, eps=1e-6)
        blocks: list[nn.Module] = []
        for stage, count in enumerate(_BLOCKS):
            for number in range(count):
                out = config.root_width << stage
                blocks.append(_Block(wide, out, 2 if stage and not number else 1, config.groups))
                wide = out
        self.blocks = nn.Sequential(*blocks)

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(self.norm(self.root(same_padded(x, 3, 1)))).permute(0, 2, 3, 1)


class _Block(nn.Module):
    def __init__(self, wide: int, out: int, stride: int, groups: int):
        super().__init__()
        self.stride = stride
        self.first, self.second = nn.Conv2d(wide, out, 3, stride, bias=False), nn.Conv2d(out, out, 3, bias=False)
        self.norms = nn.ModuleList(nn.GroupNorm(groups, out, eps=1e-6) for _ in range(2))
        nn.init.zeros_(self.norms[1].weight)  # type: ignore[arg-type]  a block begins as what it is added to
        self.across = self.across_norm = None
        if stride != 1 or wide != out:
            self.across, self.across_norm = (
                nn.Conv2d(wide, out, 1, stride, bias=False),
                nn.GroupNorm(groups, out, eps=1e-6),
            )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norms[0](self.first(same_padded(x, 3, self.stride))))
        y = self.norms[1](self.second(same_padded(y, 3, 1)))
        shortcut = x if self.across is None or self.across_norm is None else self.across_norm(self.across(x))
        return F.relu(shortcut + y)
