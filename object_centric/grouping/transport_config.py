"""Slots that share tokens by transport in place of a softmax (Zhang et al. 2022; davzha/MESH)."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator

from sparo_train.core.config import Frozen, field


class TransportConfig(Frozen):
    """SA-Sinkhorn by default; `exact` makes it SA-EMD, `entropy_steps` SA-ME."""

    cost: Literal["sqeuclidean", "cdist", "cosine"] = field(
        "sqeuclidean", "of a slot's query and a token's key: squared distance (paper), distance (code), minus cosine"
    )
    cost_scale: float = field(1.0, "what costs are multiplied by, one over the temperature (code: 6 for cosine)", gt=0)
    slot_marginal: Literal["one", "learned"] = field(
        "one", "what a slot takes: as much as every other (paper), or a learned share (code); tokens' is learned"
    )
    hidden: int | None = field(
        None, "hidden units of what scores tokens and slots; default: as wide as they are", gt=0, examples=[64]
    )
    steps: int = field(5, "of Sinkhorn's algorithm", gt=0, le=10_000)
    entropy_steps: int = field(0, "steps to a plan of less entropy; 0: the plan as it is", ge=0, le=1000)
    entropy_rate: float = field(8.0, "length of such a step", gt=0)
    learn_rate: bool = field(False, "the length is learned, from entropy_rate on")
    noise: float = field(
        1e-3, "of entropy_steps: deviation of what is added to costs once per image, to break ties", ge=0
    )
    second_order: bool = field(
        False, "such a step carries a gradient itself (paper's text); false: it is a constant (code)"
    )
    regulariser: float = field(
        0.0, "lambda of Eq. 9: shares move between similar slots alone; learned with second_order", ge=0
    )
    exact: Literal["none", "sum", "straight_through"] = field(
        "none", "the plan of least cost as well (POT): added (Eq. 8), or in place of Sinkhorn's, whose gradient stays"
    )

    @model_validator(mode="after")
    def _check_options(self) -> Self:
        if self.entropy_steps and self.exact != "none":
            raise ValueError(f"exact={self.exact}: goes without entropy_steps (it has {self.entropy_steps})")
        if not self.entropy_steps:
            for knob in ("second_order", "learn_rate", "regulariser"):
                if getattr(self, knob):
                    raise ValueError(f"{knob}: is of entropy_steps, and there are none")
        if self.regulariser and not self.second_order:
            raise ValueError(
                "regulariser: who is similar is learned through steps that carry a gradient; set second_order"
            )
        return self
