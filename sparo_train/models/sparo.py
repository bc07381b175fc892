"""SPARO, the separate-head attention readout (Vani et al., ECCV 2024; Sec. 3.2 and Appendix A).

Each of L slots is one attention head over the backbone's tokens with a learned query q_l:

    y_l = W K_l H^T softmax(H K_l^T q_l / sqrt(D))                                               (Eq. 1)

with biases on K_l and W as in Appendix A. In this form, the keys are a (B, N, L*D) tensor. The following form computes
the same function exactly, without that tensor:

    w_l = K_l^T q_l / sqrt(D)             d values per slot; the key bias adds a constant over positions, which softmax
    cancels a_l = softmax_n(x_n . w_l)
    p_l = sum_n a_ln x_n                  pool the tokens first …
    y_l = W (V_l p_l + b_l) + b_W         … then project, because the a_ln sum to one

V_l is K_l unless `share_kv=False`. `plain()` keeps the form of Appendix A. It is the oracle of the tests and the
baseline of benchmarks/readout.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import model_validator
from torch import Tensor, nn

from ..core.config import field
from .readout import LEARNED, Placement, ReadOutPair, Representation, Slots, TwinReadOut, Weighting
from .separate_heads import SeparateHeads, optional_attention


class SparoReadOut(TwinReadOut):
    """SPARO on every tower with the same number of slots L and the same slot width V (Sec. 3.3, 3.4).

    Choices that the paper leaves open for DINO are keys, whose defaults are those of CLIP+SPARO.
    """

    kind: Literal["sparo"] = field("sparo", "Kind of the readout: an entry of sparo.readouts.")
    inference_note: ClassVar[str] = "class token attended and slots unweighted, which shapes do not show"
    cross_attention: ClassVar[str] = "separate_head"  # name in Table 6
    slots: int = field(64, "Number of slots (L). Each slot is a concept that is attended to separately.", gt=0)
    slot_width: int = field(64, "Width of a slot, V.", gt=0)
    head_width: int = field(64, "Width of keys and queries, D.", gt=0)
    text_head_width: int | None = field(
        None,
        "Width of keys and queries in the text tower, if it differs from head_width. In weight files of sparo-clip, "
        "this width is the text tower's width divided by the tower's number of heads. Default: head_width.",
        gt=0,
        examples=[64],
    )
    grp_size: int = field(
        1,
        "Number of slots that share one key projection (Appendix A of the SPARO paper). Must be a divisor of `slots`.",
        gt=0,
    )
    share_kv: bool = field(True, "Use keys as values, as in the paper.")
    replace_last_block: bool = field(True, "Replace the last Transformer block by the readout, as in the SPARO paper.")
    norm_first: bool = field(
        True,
        "Apply the tower's last norm to all tokens before the readout. false: the readout reads the output of the blocks without this norm.",
    )
    attend_cls: bool = field(True, "Let slots attend to the image's class token, too.")
    normalize: bool | None = field(
        None,
        "Scale every slot to the same norm (Eq. 2 of the SPARO paper). Default (null): yes for CLIP, no for DINO.",
        examples=[False],
    )
    weighting: Weighting = field(
        "const",
        "Weights of slots within an encoding: const (as in the paper), norm (the slots' own norms), softmax or "
        "sqrtsoftmax (learned).",
    )
    representation: Representation = field(
        "cont",
        "Representation of a slot: cont (values scaled to norm one), sem (softmax of the values, scaled "
        "to norm one), sqrtsem (square root of the softmax of the values).",
    )
    share_queries: bool = field(False, "Use the same queries in both towers.")

    @model_validator(mode="after")
    def _groups(self) -> SparoReadOut:
        if self.slots % self.grp_size:
            raise ValueError(f"readout.grp_size={self.grp_size} does not divide readout.slots={self.slots}")
        # After a softmax over a slot, no norm could weigh it.
        if self.weighting == "norm" and self.representation == "sem":
            raise ValueError(
                "readout.representation=sem does not support weighting=norm. Use sqrtsem, or another weighting."
            )
        if self.share_queries and self.text_head_width not in (None, self.head_width):
            raise ValueError(
                f"readout.share_queries: both towers need the same head width, got {self.head_width} and {self.text_head_width}. Remove text_head_width."
            )
        if self.normalize is not None:
            self._check_norm(self.normalize)
        return self

    def _check_norm(self, normalize: bool) -> None:
        if not normalize and (self.weighting, self.representation) != ("const", "cont"):
            raise ValueError(
                "readout.weighting and readout.representation apply to normalized slots only. Remove them, or set readout.normalize=true."
            )

    @property
    def placement(self) -> Placement:
        return Placement(
            int(self.replace_last_block),
            "tokens" if self.norm_first else "nothing",
            self.attend_cls,
            bool(self.normalize),
            self.weighting,
            self.representation,
            shared=self.share_queries,
        )

    def resolve_defaults(self, normalize: bool) -> Self:
        if self.normalize is not None:
            return self
        self._check_norm(normalize)
        # Ask the method only if the config does not answer: a config that was written out does.
        return self.model_copy(update={"normalize": normalize})

    def shape(self, embed_dim: int) -> tuple[int, int]:
        return self.slots, self.slot_width

    def build(self, image_dim: int | None, text_dim: int | None, embed_dim: int) -> ReadOutPair:
        """Return two modules with nothing in common (the paper's towers share nothing), except with `share_queries`."""
        image, text = (
            None if dim is None else self.model_copy(update={"head_width": head_width}).module(dim, embed_dim)
            for dim, head_width in ((image_dim, self.head_width), (text_dim, self.text_head_width or self.head_width))
        )
        pair = ReadOutPair(image, text)
        if self.share_queries and isinstance(pair.image, Sparo) and isinstance(pair.text, Sparo):
            # One tensor under two names, with gradients from both towers.
            pair.text.q_emb = pair.image.q_emb
        return pair

    def module(self, dim: int, embed_dim: int) -> Sparo:
        # The logit of a slot's weight is one more value from the same projection.
        width = self.slot_width + (self.weighting in LEARNED)
        return Sparo(dim, self.slots, width, self.head_width, self.grp_size, self.share_kv)

    @classmethod
    def infer(cls, weights: Mapping[str, Tensor], replaced: int) -> dict[str, Any]:
        _, heads, group, _, head_width = weights["q_emb"].shape
        return {
            "slots": heads * group,
            "grp_size": group,
            "head_width": head_width,
            "slot_width": len(weights["proj.weight"]),
            "share_kv": "v.weight" not in weights,
            "replace_last_block": bool(replaced),
        }


class Sparo(SeparateHeads):
    """Separate-head attention readout.

    Parameters are those of `SeparateHeads`, `proj.weight` (V, D) and `proj.bias`, as in the sparo-clip repository.

    Args:
        dim: d, width of the tokens.
        slots: L, number of concepts that are attended separately.
        slot_width: V, values per slot.
        head_width: D, width of keys and queries (64 in the paper).
        grp_size: slots that share one K_l (Appendix A).
        share_kv: values are the keys (as in the paper); otherwise V_l has its own parameters.
    """

    def __init__(
        self, dim: int, slots: int, slot_width: int, head_width: int = 64, grp_size: int = 1, share_kv: bool = True
    ):
        super().__init__(dim, slots, head_width, grp_size, share_kv)
        self.width = slot_width
        self.proj = nn.Linear(head_width, slot_width)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the heads; W as in torch's default, its bias zero (Appendix A)."""
        self.reset_heads()
        self.proj.reset_parameters()
        nn.init.zeros_(self.proj.bias)

    def forward(self, tokens: Tensor, keep: Tensor | None = None, *, need_attention: bool = False) -> Slots:
        """Read L slots from tokens.

        Args:
            tokens: (B, N, d), any float dtype; autocast applies.
            keep: (B, N) bool, True for positions that may be attended (text: up to and including EOS); None: all. Every
                row needs at least one True.
            need_attention: also return the attention maps.

        Returns:
            Slots with `values` (B, L, V), not normalised, and `attention` (B, L, N) in fp32 or None.
        """
        # Pass the projection in: after the pool it is a product over slots, before it one over all tokens.
        values, attention = self.attend(tokens, keep, self.proj)
        return Slots(values, optional_attention(attention, need_attention))

    def plain(self, tokens: Tensor, keep: Tensor | None = None) -> Slots:
        """Compute the same result as written in Appendix A; slower."""
        read, attention = self.attend_plain(tokens, keep)
        return Slots(self.proj(read), attention)
