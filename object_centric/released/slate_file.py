"""SLATE's `best_model.pt` and `checkpoint.pt.tar` (Singh et al. 2022), complete: VAE, slots, decoder."""

from __future__ import annotations

from sparo_train.core.config import Frozen, field, resolve

from ..objectives.slate import SlateModel, SlateModelConfig
from ..tasks.slot_encoder import SlateEncoder
from .spot import NAMES
from .weight_reader import Tensors, open_weight_file

_BLOCK = {
    "self_attn_layer_norm": "norm_tokens",
    "encoder_decoder_attn_layer_norm": "norm_slots",
    "ffn_layer_norm": "norm_mlp",
    "ffn": "mlp",
}


class SlateFile(Frozen):
    """Options of `slate:FILE`."""

    slots: int = field(3, "Number of slots, K.", gt=0)
    iterations: int = field(3, "Number of iterations of slot attention.", gt=0)
    heads: int = field(4, "Heads of the decoder.", gt=0)
    slot_heads: int = field(1, "Heads of slot attention.", gt=0)


def from_slate(text: str) -> SlateEncoder:
    """Read `slate:FILE?slots=11&…`."""
    t, options, unspecified = open_weight_file("slate", text, SlateFile)
    vocab, wide = t["out.weight"].shape
    # One position more than patches, for the beginning token.
    side = t.square(t["positional_encoder.pe"].shape[1] - 1, "positional_encoder.pe")
    slot = t["slot_proj.weight"].shape[1]
    config = resolve(
        SlateModelConfig,
        {
            "image_size": 4 * side,
            "encoder": {"kind": "tokens", "width": wide},
            "features": wide,
            "grouping": {
                "preset": "slate",
                "slots": options.slots,
                "width": slot,
                "iterations": options.iterations,
                "heads": options.slot_heads,
                "mlp_width": t["slot_attn.slot_attention.mlp.0.weight"].shape[0],
            },
            "dvae": {"vocab": vocab, "channels": t["dvae.encoder.0.m.weight"].shape[0]},
            "decoder": {"width": wide, "blocks": t.count("tf_dec.blocks"), "heads": options.heads},
        },
        t.label,
    )
    _rename(t, config.decoder.blocks)
    model = SlateModel(config)
    t.into(model)
    made = SlateEncoder(model, signed=False, label=t.label)
    made.assumed = str(unspecified)
    return made


def _rename(t: Tensors, blocks: int) -> None:
    # Numbers are positions in the original modules; pixel shuffles have no weights.
    for part, layers in (("encoder", range(7)), ("decoder", (0, 1, 2, 3, 4, 6, 7, 8, 9))):
        for number in layers:
            theirs = f"dvae.{part}.{number}"
            t.take(f"{theirs}.m.weight", f"{theirs}.conv.weight")
            t.take(f"{theirs}.weight", f"{theirs}.norm.weight")
            t.take(f"{theirs}.bias", f"{theirs}.norm.bias")
    t.take("dvae", "dvae")
    # Their dictionary has the beginning token as its first word.
    table = t["dictionary.dictionary.weight"]
    t.give("bos", table[0].clone())
    t.give("embed.weight", table[1:].clone(), "dictionary")
    t.give("pos_embed", t["positional_encoder.pe"][0].clone(), "positional_encoder")
    for theirs, ours in (("layer_norm", "norm"), ("mlp.0", "project.0"), ("mlp.2", "project.2")):
        t.take(f"slot_attn.{theirs}", f"tower.{ours}")
    for theirs, ours in (("slot_mu", "mu"), ("slot_log_sigma", "log_sigma")):
        name = f"slot_attn.{theirs}"
        t.give(f"tower.grouping.{ours}", t[name].reshape(-1).clone(), name)
    for theirs, ours in NAMES.items():
        t.take(f"slot_attn.slot_attention.{theirs}", f"tower.grouping.{ours}")
    for theirs, ours in (("slot_proj", "project"), ("out", "head"), ("tf_dec.layer_norm", "decoder.norm")):
        t.take(theirs, ours)
    for number in range(blocks):
        theirs, ours = f"tf_dec.blocks.{number}", f"decoder.blocks.{number}"
        t.drop(f"{theirs}.self_attn_mask")
        for name, here in _BLOCK.items():
            t.take(f"{theirs}.{name}", f"{ours}.{here}")
        for name, here in (("self_attn", "to_tokens"), ("encoder_decoder_attn", "to_slots")):
            for x in "qkv":
                t.take(f"{theirs}.{name}.proj_{x}", f"{ours}.{here}.to_{x}")
            t.take(f"{theirs}.{name}.proj_o", f"{ours}.{here}.out")
