"""Configuration of attention by optimal transport (Zhang et al. 2022; davzha/MESH)."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator

from sparo_train.core.config import Frozen, field


class TransportConfig(Frozen):
    """SA-Sinkhorn by default; `exact` makes it SA-EMD, `entropy_steps` SA-ME."""

    cost: Literal["sqeuclidean", "cdist", "cosine"] = field(
        "sqeuclidean",
        "Cost between a slot's query and a token's key. sqeuclidean: squared distance, as in the paper; cdist: "
        "distance, as in the authors' code; cosine: negative cosine.",
    )
    cost_scale: float = field(
        1.0, "Factor that multiplies the costs (inverse temperature). The paper's code uses 6 with cost=cosine.", gt=0
    )
    slot_marginal: Literal["one", "learned"] = field(
        "one",
        "Marginals of slots. one: equal (paper). learned: computed by an MLP (the authors' code). Marginals of tokens are always learned.",
    )
    hidden: int | None = field(
        None,
        "Hidden units of the MLPs that score tokens and slots. Default: the width of their inputs.",
        gt=0,
        examples=[64],
    )
    steps: int = field(5, "Iterations of Sinkhorn's algorithm.", gt=0, le=10_000)
    entropy_steps: int = field(0, "Steps that minimize the plan's entropy. 0: none.", ge=0, le=1000)
    entropy_rate: float = field(8.0, "Step size of the entropy minimization.", gt=0)
    learn_rate: bool = field(False, "Learn the step size, starting from entropy_rate.")
    noise: float = field(
        1e-3,
        "For entropy_steps: standard deviation of the noise that is added to costs once per image to break ties.",
        ge=0,
    )
    second_order: bool = field(
        False,
        "Differentiate through the entropy gradient, as the paper describes. false: treat this gradient as a constant, as the authors' code does.",
    )
    regulariser: float = field(
        0.0,
        "Weight (lambda in Eq. 9 of Zhang et al. 2022) of a penalty for plans that differ from the plan that "
        "the initial costs give. It applies during entropy_steps. Exchanging tokens between similar slots is penalized less; "
        "a network computes how similar slots are. Requires second_order=true, because this network is not trained "
        "otherwise. 0: no penalty.",
        ge=0,
    )
    exact: Literal["none", "sum", "straight_through", "sliced"] = field(
        "none",
        "Combine Sinkhorn's plan with an exact optimal plan. sum: add the exact plan, computed by the "
        "library POT (Zhang et al. 2022, Eq. 8). straight_through: use the exact plan in the forward pass, "
        "with the gradient of Sinkhorn's plan. sliced: add the mean of the optimal plans along each "
        "coordinate, as in the sliced Wasserstein distance; needs no POT. none: Sinkhorn's plan only.",
    )
    regularization: Literal["entropy", "l2"] = field(
        "entropy",
        "Regularization of the plan. entropy: Sinkhorn's algorithm; l2: a plan with exact zeros (Blondel et al. 2018).",
    )
    l2_weight: float = field(1.0, "Weight of regularization=l2. A larger weight gives plans with fewer zeros.", gt=0)

    @model_validator(mode="after")
    def _check_options(self) -> Self:
        if self.entropy_steps and self.exact != "none":
            raise ValueError(
                f"exact={self.exact}: cannot be combined with entropy_steps={self.entropy_steps}. Remove one of them."
            )
        if self.regularization == "l2" and (self.entropy_steps or self.exact != "none"):
            raise ValueError(
                f"regularization=l2: requires entropy_steps=0 and exact=none, got entropy_steps={self.entropy_steps} and "
                f"exact={self.exact}. Remove both keys."
            )
        if not self.entropy_steps:
            for knob in ("second_order", "learn_rate", "regulariser"):
                if getattr(self, knob):
                    raise ValueError(
                        f"{knob}: has no effect, because entropy_steps is 0. Set entropy_steps, or remove this key."
                    )
        if self.regulariser and not self.second_order:
            raise ValueError(
                "regulariser: learning similarities needs gradients through the entropy steps. Set second_order=true."
            )
        return self
