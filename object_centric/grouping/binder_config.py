"""What tells a parallel binder (PSB) from slots that take turns."""

from __future__ import annotations

from typing import Literal

from sparo_train.core.config import Frozen, field


class BinderConfig(Frozen):
    """Blocks of inverted attention to tokens, attention across time, attention among slots, and a perceptron (Singh et al. 2024)."""

    heads: int = field(
        4, "of the attentions across time and among slots (those to tokens: heads of the grouping)", gt=0
    )
    causal: bool = field(True, "a time looks at itself and at earlier ones; false: at all of them")
    context_frames: int | None = field(
        None,
        "of causal blocks: a time looks at so many of the last ones, itself among them; null: at all of them",
        gt=0,
        examples=[6],
    )
    softmax_scope: Literal["time", "clip"] = field(
        "time",
        "who shares a token: slots of each time among them (the code), or of all times (as D.1.2 can be read); "
        "then a later time takes from an earlier one's share, causal or not",
    )
    inverted: bool = field(
        True, "slots compete for tokens; false: each chooses among all tokens that it sees, an ablation of the paper"
    )
    interaction: Literal["decoupled", "joint"] = field(
        "decoupled",
        "slots look at themselves across time, then at others of their time; joint: at all slots of all times at once",
    )
    temporal_decay: bool = field(
        False,
        "a frame's shares are weighed by how far it is, behind the softmax: of one head a bias before it changes nothing (ours, not the paper's)",
    )
    max_time_distance: int = field(
        1024, "times whose distances are told apart: half the period of the slowest octave", gt=0
    )
    fourier_bands: int = field(
        8, "sines and cosines of a distance in time, each of half the last one's period", gt=0, le=30
    )
    distance_width: int = field(128, "hidden units of what makes attentions' biases of a distance", gt=0)


class PooledConfig(Frozen):
    """A Transformer over all tokens of a clip, whose output is pooled to slots (Singh et al. 2024, B.5): a baseline without slots' own turns."""

    blocks: int = field(3, "of the Transformer", gt=0, le=100)
    heads: int = field(4, "of its attention", gt=0)
