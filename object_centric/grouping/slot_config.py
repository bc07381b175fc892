"""Options in which published slot attentions differ, and presets of them.

Seven code bases compute seven different functions under the name of slot attention; with equal weights, the epsilon of
a LayerNorm alone changes slots by 1e-4 to 1e-2. A preset sets several options; options that a recipe names take
precedence.
"""

from __future__ import annotations

import math
from typing import Any, Literal, Self

from pydantic import model_validator

from sparo_train.core.config import Frozen, field
from sparo_train.core.errors import did_you_mean

from .transport_config import TransportConfig


class BinderConfig(Frozen):
    """Blocks of inverted attention to tokens, attention across time, attention among slots, and a perceptron (Singh et al. 2024)."""

    heads: int = field(
        4,
        "Number of heads for attention across time and attention among slots. For attention to tokens, the number is set by `grouping.heads`.",
        gt=0,
    )
    causal: bool = field(True, "Slots attend only to their own and earlier time steps. false: also to later ones.")
    context_frames: int | None = field(
        None,
        "For causal blocks: number of frames to which each frame attends, including itself. The others are the "
        "frames directly before it. Default: itself and all earlier frames.",
        gt=0,
        examples=[6],
    )
    softmax_scope: Literal["time", "clip"] = field(
        "time",
        "Slots that compete for a token. time: the slots of one time step (the authors' code). clip: the slots "
        "of all time steps (a possible reading of the paper's D.1.2).",
    )
    inverted: bool = field(
        True, "Slots compete for tokens, as in PSB. false: softmax over tokens, an ablation in PSB's paper."
    )
    interaction: Literal["decoupled", "joint"] = field(
        "decoupled",
        "decoupled: each slot attends to itself across time, then to slots of its time step. joint: each slot attends to all slots of all time steps.",
    )
    temporal_decay: bool = field(
        False,
        "Multiply the attention to each frame, after the softmax, by a learned weight for the frame's distance in "
        "time. The weight applies after the softmax, because a bias before it would have no effect with heads=1. Our addition, not in the paper.",
    )
    max_time_distance: int = field(
        1024,
        "Largest distance, in time steps, up to which every distance has its own encoding. It is half the period of the encoding's slowest sine.",
        gt=0,
    )
    fourier_bands: int = field(
        8,
        "Number of pairs of a sine and a cosine that encode a distance in time. Each pair has half the period of the one before.",
        gt=0,
        le=30,
    )
    distance_width: int = field(128, "Hidden units of the MLP that maps distances in time to attention biases.", gt=0)


class PooledConfig(Frozen):
    """A Transformer over all tokens of a clip, whose output is pooled to slots (Singh et al. 2024, B.5): a baseline without attention by slots."""

    blocks: int = field(3, "Transformer blocks.", gt=0, le=100)
    heads: int = field(4, "Attention heads.", gt=0)


class IdspnConfig(Frozen):
    """Slots found by gradient descent on their encoding (iDSPN, Zhang et al. 2022): a baseline for set prediction without attention."""

    steps: int = field(20, "Steps of gradient descent.", gt=0, le=1000)
    lr: float = field(1.0, "Step size.", gt=0)
    momentum: float = field(0.9, "Momentum of the gradient descent.", ge=0, lt=1)
    hidden: int = field(512, "Hidden units of the MLPs over tokens and over slots.", gt=0)
    latent: int = field(512, "Width of the two encodings that are compared (image, set of slots).", gt=0)


# Sources: google-research/slot_attention (sa2020), slot-attention-video (savi), singhgautam/slate, steve; OCLF;
# martius-lab/videosaur; invariant_slot_attention (isa); Genera1Z/VQ-VFM-OCL (vqvfm). tf, tf_inv, tf_inv_gru, sa_nogru:
# papers/inverted-attention-transformers.txt; tf_inv_osrt: its B.1, with the norms of Tsai et al. 2020 and Dehghani et
# al. 2023, used for OSRT only. sa_sinkhorn, sa_emd, sa_me: papers/slot-attention-optimal-transport.txt; mesh: its later
# code, davzha/MESH. psb: papers/parallel-spatiotemporal-binder.txt, NVlabs/PSB. mlp_ratio: hidden units of the MLP as a
# multiple of width.
PRESETS: dict[str, dict[str, Any]] = {
    "sa2020": {"ln_eps": 1e-3, "renorm": "entry", "renorm_eps": 1e-8, "gru": "keras", "mlp_width": 128},
    "savi": {"ln_eps": 1e-6, "renorm": "sum", "renorm_eps": 1e-8, "gru": "flax", "mlp_width": 0, "iterations": 1},
    "isa": {"ln_eps": 1e-6, "renorm": "sum", "renorm_eps": 1e-8, "gru": "flax", "mlp_width": 128},
    "slate": {"softmax_over": "slots_heads", "mlp_ratio": 1},
    "steve": {"softmax_over": "slots_heads", "mlp_ratio": 1, "mlp_last": False, "iterations": 2},
    "oclf": {"softmax_over": "slots_heads", "mlp_ratio": 4},
    "videosaur": {"gru_on_normed": True, "mlp_ratio": 4},
    "boqsa": {"renorm": "sum", "renorm_eps": 1.0, "slot_init": "learned", "gradient": "last", "straight_through": True, "mlp_ratio": 4},
    "vqvfm": {"renorm": "sum", "renorm_eps": 1e-5, "slot_init": "learned", "gradient": "last", "straight_through": True, "activation": "gelu", "mlp_ratio": 4},
    "sa": {"mlp_width": 128},
    "sa_nogru": {"gru": "none", "mlp_width": 128},
    "sa_id": {"gradient": "last", "mlp_width": 128},
    "tf": {"softmax_over": "keys", "renorm": "none", "gru": "none", "layers": "own", "mlp_width": 128},
    "tf_inv": {"gru": "none", "layers": "own", "mlp_width": 128},
    "tf_inv_osrt": {"gru": "none", "layers": "own", "mlp_width": 128, "renorm": "layer", "qk_norm": True},
    "tf_inv_gru": {"layers": "own", "mlp_width": 128},
    "sa_sinkhorn": {"transport": {}, "renorm": "none", "mlp_width": 128},
    "sa_emd": {"transport": {"exact": "sum"}, "renorm": "none", "mlp_width": 128},
    "sa_me": {"transport": {"entropy_steps": 4}, "renorm": "none", "mlp_width": 128},
    "sa_l2": {"transport": {"regularization": "l2"}, "renorm": "none", "mlp_width": 128},
    "sa_swd": {"transport": {"exact": "sliced"}, "renorm": "none", "mlp_width": 128},
    "sa_sinkhorn_id": {"transport": {}, "renorm": "none", "mlp_width": 128, "gradient": "last"},
    "sa_emd_id": {"transport": {"exact": "sum"}, "renorm": "none", "mlp_width": 128, "gradient": "last"},
    "sa_me_id": {"transport": {"entropy_steps": 4}, "renorm": "none", "mlp_width": 128, "gradient": "last"},
    "psb": {
        "binder": {}, "softmax_over": "slots_heads", "renorm": "sum", "renorm_eps": 1e-5, "gru": "none", "layers": "own",
        "slot_init": "learned", "activation": "gelu", "mlp_ratio": 4, "out_proj": True,
    },
    "idspn": {"idspn": {}, "gru": "none", "slot_init": "learned"},
    "pooled": {"pooled": {}, "gru": "none", "slot_init": "learned"},
    "mesh": {"transport": {"entropy_steps": 4, "cost": "cdist", "slot_marginal": "learned"}, "renorm": "none", "mlp_width": 128},
}  # fmt: skip


class SlotAttentionConfig(Frozen):
    """Slot attention (Locatello et al. 2020) and its variants."""

    preset: str = field("sa", "Named set of options. Options that the recipe sets explicitly take precedence.")
    slots: int = field(7, "Number of slots, K.", gt=0, le=4096)
    width: int = field(64, "Slot width, D.", gt=0, le=65536)
    qkv_width: int | None = field(
        None, "Width of queries, keys and values over all heads. Default: `width`.", gt=0, examples=[64]
    )
    heads: int = field(1, "Attention heads.", gt=0)
    iterations: int = field(
        3, "Number of iterations. With layers=own: number of layers, each with its own weights.", gt=0, le=1000
    )
    ln_eps: float = field(1e-5, "Epsilon of every LayerNorm.", gt=0)
    softmax_over: Literal["slots", "slots_heads", "keys"] = field(
        "slots",
        "Axis of the softmax. slots: slots compete for each token; slots_heads: slots and heads compete together; "
        "keys: over tokens, as in a Transformer, without competition.",
    )
    renorm: Literal["entry", "sum", "layer", "none"] = field(
        "entry",
        "How the attention A becomes the weights with which tokens are averaged. entry: (A + eps) / sum(A + eps). sum: A / "
        "(sum(A) + eps). none: A itself. layer: A itself, followed by a LayerNorm of the update. Sums are over tokens.",
    )
    renorm_eps: float = field(1e-8, "Value of eps in the formulas of renorm=entry and renorm=sum.", ge=0)
    qk_norm: bool = field(False, "Apply LayerNorms without biases to queries and keys (Dehghani et al. 2023).")
    gru: Literal["torch", "flax", "keras", "none"] = field(
        "torch",
        "Update of a slot. torch, flax, keras: a GRU with the biases and initialization of the named library. none: no GRU; the update is added to the slot.",
    )
    share_gru: bool = field(
        False, "With layers=own: all layers share one GRU, and only their other weights differ (Wu et al. 2023, B.1)."
    )
    gru_on_normed: bool = field(False, "Use the normalized slot as the GRU's state, as in videosaur's code.")
    mlp_width: int = field(0, "Hidden units of the residual MLP after the update. 0: no MLP.", ge=0)
    activation: Literal["relu", "gelu"] = field(
        "relu", "Activation of the residual MLP after each update of the slots (see mlp_width)."
    )
    mlp_last: bool = field(True, "Run the MLP in the last iteration, too.")
    out_proj: bool = field(
        False, "Apply a linear layer to the attended values. The preset savi does so if it has several heads."
    )
    layers: Literal["shared", "own"] = field("shared", "Parameters of iterations: shared, or separate (own).")
    slot_init: Literal["gaussian", "learned", "same", "given"] = field(
        "gaussian",
        "Initial slots. gaussian: drawn from one learned Gaussian; learned: one parameter per slot; same: one learned "
        "vector for all; given: from a hint on a video's first frame.",
    )
    ground: bool = field(
        False,
        "The first slot represents the background and has its own initialization, query and update weights (uORF, Yu et al. 2021).",
    )
    gradient: Literal["all", "last"] = field(
        "all",
        "Iterations that the gradient passes through. all: all iterations. last: only the last one (implicit differentiation, Chang et al. "
        "2022). With gradient=last, initial slots are not trained unless straight_through is set.",
    )
    straight_through: bool = field(
        False,
        "With gradient=last: pass the gradient of the last iteration on to the initial slots, so that they are trained (BO-QSA).",
    )
    kv: Literal["auto", "plain", "folded"] = field(
        "auto",
        "How keys and values are computed. plain: tokens are projected; folded: the projections are applied to slots "
        "instead, with the same result; auto: folded if heads=1, qk_norm=false and transport is not set, otherwise plain.",
    )

    transport: TransportConfig | None = field(
        None,
        "Assign tokens to slots by optimal transport instead of a softmax (presets sa_sinkhorn, sa_emd, sa_me, mesh).",
    )

    binder: BinderConfig | None = field(
        None,
        "Compute the slots of all time steps together in Transformer-like blocks, as in the parallel spatiotemporal binder (preset psb). Default: no binder.",
    )

    idspn: IdspnConfig | None = field(
        None,
        "Instead of slot attention, find slots by gradient descent on the difference between the encoding of the "
        "slot set and the encoding of the image (preset idspn). Default: slot attention.",
    )

    pooled: PooledConfig | None = field(
        None,
        "Instead of slot attention, run a Transformer over the tokens of all time steps, and pool its outputs to slots (preset pooled).",
    )

    @model_validator(mode="before")
    @classmethod
    def _apply_preset(cls, data: Any) -> Any:
        if not isinstance(data, dict) or not isinstance(data.get("preset", "sa"), str):
            return data
        name = data.get("preset", "sa")
        if name not in PRESETS:
            raise ValueError(f"preset={name}: {did_you_mean(name, PRESETS)}")
        # Use the recipe's width, because presets have none.
        preset_values = dict(PRESETS[name])
        if (times := preset_values.pop("mlp_ratio", None)) and isinstance(data.get("width", 64), int):
            preset_values["mlp_width"] = times * data.get("width", 64)
        for part in ("transport", "binder", "pooled", "idspn"):
            inner = data.get(part)
            if isinstance(inner, dict) and part in preset_values:
                preset_values[part] = {**preset_values[part], **inner}
                # Merge with the preset's own block, so that single keys can be changed.
                data = {knob: value for knob, value in data.items() if knob != part}
        return {**preset_values, **data}

    @model_validator(mode="after")
    def _check_options(self) -> Self:
        if self.qkv % self.heads:
            raise ValueError(f"heads={self.heads} does not divide qkv_width={self.qkv}")
        if self.kv == "folded" and self.heads > 1:
            raise ValueError(f"kv=folded: costs more than it saves with heads={self.heads}. Remove kv.")
        if self.qk_norm and (self.kv == "folded" or self.transport is not None):
            raise ValueError(
                "qk_norm: cannot be combined with transport or kv=folded, because both use keys without a norm. "
                "Remove qk_norm, or remove transport and kv=folded."
            )
        if self.softmax_over == "keys" and self.renorm != "none":
            raise ValueError(
                f"renorm={self.renorm}: is not needed with softmax_over=keys, whose weights sum to one already. Set renorm: none."
            )
        if self.qkv != self.width and not self.out_proj and self.gru == "none":
            raise ValueError(
                f"qkv_width={self.qkv}: must equal width={self.width}, because values are added to the slots. To use another qkv_width, set out_proj or a gru."
            )
        if self.ground and (self.slots < 2 or self.pooled is not None or self.slot_init in ("same", "given")):
            raise ValueError(
                "ground: needs two or more slots, slot_init=gaussian or slot_init=learned, and a preset other than "
                f"`pooled`, got slots={self.slots}, slot_init={self.slot_init}. Change them, or remove ground."
            )
        if self.share_gru and (self.layers != "own" or self.gru == "none"):
            raise ValueError(
                f"share_gru: needs layers=own and a GRU, got layers={self.layers} and gru={self.gru}. Remove share_gru, or "
                "use preset tf_inv_gru."
            )
        if self.straight_through and self.gradient == "all":
            raise ValueError("straight_through: applies to gradient=last only. Remove straight_through.")
        if self.slot_init == "same" and not (self.transport and self.transport.entropy_steps and self.transport.noise):
            raise ValueError(
                "slot_init=same: slots that start equal stay equal. Set transport.entropy_steps and transport.noise, which separate them."
            )
        if self.transport is not None and (self.heads, self.softmax_over, self.renorm, self.kv) != (
            1,
            "slots",
            "none",
            "auto",
        ):
            raise ValueError(
                "transport: has one head and no softmax. Remove the keys `heads`, `softmax_over` and `kv`, and set `renorm: none`."
            )
        if self.binder is not None:
            self._check_binder_options(self.binder)
        if self.pooled is not None:
            self._check_pooled_options(self.pooled)
        if self.idspn is not None and (
            self.pooled or self.binder or self.transport or self.gru != "none" or self.mlp_width
        ):
            raise ValueError(
                "idspn: its slots have no attention and no update. Remove pooled, binder, transport, gru and mlp_width."
            )
        if self.gradient == "last" and self.layers == "own":
            why = "only the last iteration gets a gradient, so with layers=own the weights of the others would not be trained"
            raise ValueError(f"gradient=last: {why}. Set layers=shared.")
        return self

    def _check_binder_options(self, binder: BinderConfig) -> None:
        """Raise `ValueError` for options that a binder does not use."""
        # An option without effect must not look as if it had one.
        required = {
            "softmax_over": "slots_heads", "renorm": "sum", "gru": "none", "layers": "own", "mlp_last": True, "out_proj": True,
            "gradient": "all", "kv": "auto", "ground": False, "gru_on_normed": False, "share_gru": False,
            "transport": None, "qkv_width": None, "qk_norm": False,
        }  # fmt: skip
        for knob, value in required.items():
            if getattr(self, knob) != value:
                raise ValueError(f"{knob}={getattr(self, knob)}: must be {value} with a binder. Remove {knob}.")
        if self.width % binder.heads:
            raise ValueError(f"binder.heads={binder.heads}: must divide width={self.width}.")
        if not self.mlp_width:
            raise ValueError(f"mlp_width={self.mlp_width}: must be positive if `binder` is set.")
        if not binder.inverted and (binder.softmax_scope == "clip" or binder.temporal_decay):
            raise ValueError(
                "binder.inverted=false: slots do not compete for a token, so softmax_scope and temporal_decay have no effect. Remove both."
            )
        if binder.context_frames is not None and not binder.causal:
            raise ValueError(
                f"binder.context_frames={binder.context_frames}: limits how many earlier frames are seen, but later "
                "frames are seen, too, because causal=false. Remove binder.context_frames, or remove causal=false."
            )
        if self.slot_init in ("same", "given"):
            raise ValueError(
                f"slot_init={self.slot_init}: slots of a binder are learned or sampled. Use `learned` or `gaussian`."
            )

    def _check_pooled_options(self, pooled: PooledConfig) -> None:
        """Raise `ValueError` if the number of slots is not a square, or heads do not divide the width."""
        if math.isqrt(self.slots) ** 2 != self.slots:
            raise ValueError(
                f"slots={self.slots}: each slot pools one cell of a square grid over the image. Use a square number, such as 16."
            )
        if self.width % pooled.heads:
            raise ValueError(f"pooled.heads={pooled.heads}: does not divide width={self.width}")
        if self.binder is not None or self.transport is not None or self.gru != "none" or self.slot_init != "learned":
            raise ValueError(
                "pooled: slots are computed without slot attention or sampling. Remove binder, transport, gru and slot_init."
            )
        if self.qk_norm or self.renorm != "entry":
            raise ValueError("pooled: does not compute attention. Remove qk_norm and renorm.")

    @property
    def qkv(self) -> int:
        """Return the width of queries, keys and values."""
        return self.qkv_width or self.width

    @property
    def folded(self) -> bool:
        """Return whether tokens stay unprojected."""
        plain = self.heads > 1 or self.transport is not None or self.qk_norm
        return self.kv == "folded" or (self.kv == "auto" and not plain)

    def noise_width(self, tokens: int) -> int:
        """Return the number of standard normal values per slot of an image: its initial state, and one per token if transport breaks ties."""
        return self.width + (tokens if self.transport is not None and self.transport.entropy_steps else 0)
