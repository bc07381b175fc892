"""Encoder of the posed views of one time: convolutions per view, then a Transformer over all of them (Sajjadi et al. 2022).

slsr: PSB's sizes (Singh et al. 2024, Tables 6 to 8). osrt: OSRT's (its Appendix A.4, and stelzner/osrt). srt:
stelzner/srt, with a learned embedding of every position of a view, and one each for the first view and all others.
"""

from __future__ import annotations

from typing import Any, Literal, Self

import torch
from pydantic import model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from sparo_train.core.config import Frozen, field
from sparo_train.core.errors import did_you_mean
from sparo_train.models.precision import in_fp32

from ..encoders.transformer import TransformerConfig
from .rays import RayPointsConfig, ray_fourier_features

PRESETS: dict[str, dict[str, Any]] = {
    "slsr": {"layers": "residual", "channels": 192, "width": 192, "num_downsample": 1, "transformer": {"preset": "slsr"}},
    "osrt": {
        "layers": "plain", "channels": 96, "width": 768, "num_downsample": 3, "fourier_bands": 15, "fourier_start": -5, "transformer": {"preset": "osrt"}
    },
    "srt": {
        "layers": "plain", "channels": 96, "width": 768, "num_downsample": 4, "fourier_bands": 15, "fourier_start": -5, "pos_embed_size": 16,
        "transformer": {"preset": "srt"}
    },
}  # fmt: skip


class ViewEncoderConfig(Frozen):
    """Options in which published scene models differ, and presets of them."""

    preset: str = field(
        "slsr", "Named set of options. Options that the recipe sets explicitly take precedence.", examples=["osrt"]
    )
    layers: Literal["residual", "plain"] = field(
        "residual",
        "Layers of a downsampling stage. residual: two blocks with norms, then a convolution of stride 2 (PSB). "
        "plain: two 3x3 convolutions (SRT).",
    )
    channels: int = field(
        192,
        "Channels of the convolutions. With layers=plain: channels of the first stage; the number doubles with each further stage.",
        gt=0,
    )
    num_downsample: int = field(1, "Number of stages that halve the height and width.", ge=0, le=8)
    width: int = field(192, "Feature width.", gt=0)
    fourier_bands: int = field(
        0,
        "Number of octaves in the Fourier features of a ray's origin and direction. These features replace origin "
        "and direction as input. 0: use origin and direction themselves.",
        ge=0,
        le=30,
    )
    fourier_start: int = field(
        0,
        "First octave of the Fourier features of ray origins. Use a negative value for large scenes, because "
        "origins are in world units.",
        ge=-20,
        le=20,
    )
    pos_embed_size: int | None = field(
        None,
        "Side length of the learned position-embedding grid. It must be at least the side length of a view's "
        "feature grid. As in SRT, each feature gets the embedding of its position, and a second embedding that "
        "distinguishes the first view from the others. Default: no embeddings.",
        gt=0,
        le=4096,
        examples=[16],
    )
    points: RayPointsConfig | None = field(
        None,
        "Points along the ray through a feature's center. An MLP embeds them, and the result is added to the "
        "feature. The convolutions before it get colours only, no rays (PETR). Default: none.",
        examples=[{"near": 4.0, "far": 16.0}],
    )
    transformer: TransformerConfig | None = field(
        None,
        "Transformer that combines the features of all views, per time step. Default: none.",
        examples=[{"preset": "slsr"}],
    )

    @model_validator(mode="before")
    @classmethod
    def _apply_preset(cls, data: Any) -> Any:
        if not isinstance(data, dict) or not isinstance(data.get("preset", "slsr"), str):
            return data
        if data.get("preset") == "srt" and cls.model_fields.keys() - data.keys() == {"pos_embed_size"}:
            # Stored recipes have the key names of their time, when OSRT's sizes had this name.
            inner = data.get("transformer")
            data = {**data, "preset": "osrt"}
            if isinstance(inner, dict) and inner.get("preset") == "srt":
                data["transformer"] = {**inner, "preset": "osrt"}
        name = data.get("preset", "slsr")
        if name not in PRESETS:
            raise ValueError(f"preset={name}: {did_you_mean(name, PRESETS)}")
        preset_values, overrides = dict(PRESETS[name]), data.get("transformer", {})
        if isinstance(overrides, dict):
            # Merge with the preset's own Transformer, so that single keys can be changed.
            preset_values["transformer"] = {**preset_values["transformer"], **overrides}
            data = {knob: value for knob, value in data.items() if knob != "transformer"}
        return {**preset_values, **data}

    @model_validator(mode="after")
    def _check_options(self) -> Self:
        if self.points is not None and self.fourier_bands:
            raise ValueError(
                f"fourier_bands={self.fourier_bands}: cannot be combined with the key `points`, because rays are embedded by only "
                "one of the two. Remove fourier_bands or points."
            )
        if self.transformer is not None:
            self.transformer.refuse_width(self.width, "transformer")
        return self

    def refuse_side(self, image_size: int) -> None:
        """Raise `ValueError` if a view has more features per side than embeddings."""
        if self.pos_embed_size is not None and self.side(image_size) > self.pos_embed_size:
            raise ValueError(
                f"encoder.pos_embed_size={self.pos_embed_size}: image_size={image_size} has {self.side(image_size)} "
                "features per side. Set pos_embed_size to at least the number of features per side."
            )

    def side(self, image_size: int) -> int:
        """Return the number of features per side of a view."""
        for _ in range(self.num_downsample):
            image_size = -(-image_size // 2)
        return image_size

    @property
    def in_channels(self) -> int:
        """Return the number of planes of a view: colours and ray embeddings."""
        return 3 if self.points is not None else 3 + (12 * self.fourier_bands or 6)

    def cost(self, image_size: int) -> int:
        """Return the number of values that a view's layers write."""
        total = 0
        for number in range(self.num_downsample + 1):
            wide = self.channels * 2**number if self.layers == "plain" else 4 * self.channels
            total += wide * self.side(image_size) ** 2 * 4 ** (self.num_downsample - number)
        return total

    def build(self) -> nn.Module:
        """Return the encoder of posed views (n, V, 9, S, S) to (n, V * s * s, width)."""
        return ViewEncoder(self)


class ViewEncoder(nn.Module):
    """Encoder of posed views (n, V, 9, S, S), with colours in 0..1 and origin and direction of every pixel's ray, to features (n, V * s * s, width)."""

    adamw_only_parameters = ("views",)

    def __init__(self, config: ViewEncoderConfig):
        super().__init__()
        self.config, c = config, config
        blocks: list[nn.Module] = []
        if c.layers == "residual":
            self.stem = nn.Conv2d(c.in_channels, c.channels, 5, padding=2)
            blocks.append(nn.GroupNorm(1, c.channels))
            for number in range(c.num_downsample + 1):
                blocks += [_Residual(c.channels), _Residual(c.channels)]
                if number < c.num_downsample:
                    blocks += [nn.GroupNorm(1, c.channels), nn.Conv2d(c.channels, c.channels, 5, 2, 2)]
            wide = c.channels
        else:
            wide = c.channels
            self.stem = nn.Conv2d(c.in_channels, wide, 3, padding=1, bias=False)
            for number in range(c.num_downsample):
                before = [] if number == 0 else [nn.Conv2d(wide, wide, 3, padding=1, bias=False)]
                after = nn.Conv2d(wide, 2 * wide, 3, 2, 1, bias=False)
                blocks += [layer for conv in (*before, after) for layer in (conv, nn.ReLU())]
                wide *= 2
            blocks.insert(0, nn.ReLU())
        self.blocks = nn.Sequential(*blocks)
        self.project = nn.Identity() if c.layers == "residual" and wide == c.width else nn.Linear(wide, c.width)
        if c.pos_embed_size is not None:
            # SRT's initialization; a standard deviation of 1, stelzner/srt's default, would drown the features.
            self.cells = nn.Parameter(torch.randn(c.pos_embed_size, c.pos_embed_size, c.width) * c.width**-0.5)
            self.views = nn.Parameter(torch.randn(2, c.width) * c.width**-0.5)
        self.point_embed = None
        if c.points is not None:
            hidden = nn.Linear(c.points.width, 2 * c.width)
            self.point_embed = nn.Sequential(hidden, nn.ReLU(), nn.Linear(2 * c.width, c.width))
        self.transformer = None if c.transformer is None else c.transformer.build(c.width)

    def forward(self, posed: Tensor) -> Tensor:
        c, views = self.config, posed.shape[1]
        x = posed.flatten(0, 1)
        rays = x[:, 3:]
        # In bf16, positions of rays ten units away would have steps of 1/16.
        with torch.autocast(x.device.type, enabled=False):
            if c.points is not None:
                # Centred, because colours in 0..1 are mostly a constant for the first convolution.
                x = 2 * x[:, :3] - 1
            elif c.fourier_bands:
                origins, directions = x[:, 3:].movedim(1, -1).split(3, -1)
                ray_features = ray_fourier_features(origins, directions, c.fourier_bands, c.fourier_start)
                x = torch.cat([x[:, :3], ray_features.movedim(-1, 1)], dim=1)
            # Cast to the weights' dtype after the first layer, because a GroupNorm with 16-bit weights takes no wider
            # input.
            x = in_fp32(self.stem, x).to(self.stem.weight.dtype)
        x = self.blocks(x)
        features = self.project(x.flatten(2).transpose(1, 2))
        if self.point_embed is not None:
            features = features + self.embed_points(rays, x.shape[-1])
        if c.pos_embed_size is not None:
            features = (features.unflatten(0, (-1, views)) + self.embedding(x.shape[-1], views)).flatten(0, 1)
        # Concatenate the views of a time; cameras have no order for the Transformer.
        tokens = features.unflatten(0, (-1, views)).flatten(1, 2)
        return tokens if self.transformer is None else self.transformer(tokens)

    def embedding(self, side: int, views: int) -> Tensor:
        """Return (V, side * side, width): embeddings of the position, and of being the first view or another."""
        cells = self.cells[:side, :side].flatten(0, 1)
        which = self.views[[0, *[1] * (views - 1)]]
        return cells + which[:, None]

    def embed_points(self, rays: Tensor, side: int) -> Tensor:
        """Return embeddings of rays (n, 6, S, S) at each feature's position (n, side * side, width)."""
        assert self.point_embed is not None and self.config.points is not None
        with torch.autocast(rays.device.type, enabled=False):
            origins, directions = F.adaptive_avg_pool2d(rays, side).flatten(2).transpose(1, 2).split(3, -1)
            point_features = self.config.points.embed(origins, F.normalize(directions, dim=-1))
        return self.point_embed(point_features)


class _Residual(nn.Module):
    """Residual block (n, C, h, w): a norm and two convolutions of 5 pixels."""

    def __init__(self, wide: int):
        super().__init__()
        self.norm = nn.GroupNorm(1, wide)
        self.conv1, self.conv2 = (nn.Conv2d(wide, wide, 5, padding=2) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv2(F.relu(self.conv1(self.norm(x))))
