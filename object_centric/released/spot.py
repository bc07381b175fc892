"""SPOT's `checkpoint.pt.tar` and `.pth` (Kakogeorgiou et al. 2024): its ViT, whose last blocks may have been trained, and its slots."""

from __future__ import annotations

from sparo_train.core.config import Frozen, field, resolve
from sparo_train.core.errors import ConfigError

from ..objectives.slot_tower import SlotTower, SlotTowerConfig
from ..tasks.slot_encoder import GroupingEncoder
from .weight_reader import convert_dinov2_to_timm, grouping, open_weight_file, read_slot_init, vit

NAMES = {
    "norm_inputs": "norm_input",
    "norm_slots": "rounds.0.norm_slots",
    "norm_mlp": "rounds.0.norm_mlp",
    **{f"project_{x}": f"rounds.0.to_{x}" for x in "qkv"},
    "gru": "rounds.0.gru",
    "mlp": "rounds.0.mlp",
}  # SLATE's, on whose code SPOT is based


class SpotFile(Frozen):
    """Options of `spot:FILE`."""

    image_size: int = field(224, "Image side in pixels.", gt=0)
    slots: int = field(7, "Number of slots, K. Only used if slots are initialized at random.", gt=0)
    iterations: int = field(3, "Number of iterations of slot attention.", gt=0)
    heads: int | None = field(None, "Heads of the ViT. Default: its width / 64.", gt=0)
    final_norm: bool = field(False, "Use tokens after the ViT's last norm.")


def from_spot(text: str) -> GroupingEncoder:
    """Read `spot:FILE?final_norm=true&…`, without the decoder: masks are slots' attention to patches (its `_slots` scores)."""
    t, options, unspecified = open_weight_file("spot", text, SpotFile)
    # The second encoder was the teacher of the first, and the decoders reconstruct features, so masks need neither.
    t.drop("second_encoder", "input_proj", "bos_tokens", "slot_proj", "dec", "tf_dec", "mask_token", "pos_embed")
    patch = t["encoder.patch_embed.proj.weight"].shape[-1]
    if options.image_size % patch:
        raise ConfigError(f"{t.label}?image_size={options.image_size}: must be a multiple of the patch size {patch}")
    # DINOv2's checkpoints have a mask token; DINO's and MAE's, as saved by SPOT, do not.
    if "encoder.mask_token" in t:
        convert_dinov2_to_timm(t, "encoder", options.image_size // patch)
    encoder = vit(t, "encoder", options.heads, options.final_norm)
    unspecified.set_inferred("heads", encoder["heads"])
    for theirs, ours in (("layer_norm", "norm"), ("mlp.0", "project.0"), ("mlp.2", "project.2")):
        t.take(f"slot_attn.{theirs}", ours)
    # The file has either learned queries or the parameters of one Gaussian.
    begin = read_slot_init(
        t, unspecified, "slot_attn.slot_mu", "slot_attn.slot_log_sigma", "slot_attn.slots_init.weight"
    )
    width = t["slot_attn.slot_attention.project_q.weight"].shape[0]
    mlp = t["slot_attn.slot_attention.mlp.0.weight"].shape[0]
    grouping(t, "slot_attn.slot_attention", NAMES)
    knobs = {
        "preset": "slate",
        "slots": options.slots,
        "width": width,
        "iterations": options.iterations,
        "mlp_width": mlp,
    }
    config = resolve(
        SlotTowerConfig,
        {
            "image_size": options.image_size,
            "encoder": encoder,
            "features": encoder["width"],
            "grouping": {**knobs, **begin},
        },
        t.label,
    )
    model = SlotTower(config)
    t.into(model)
    made = GroupingEncoder(model, signed=False, label=t.label)
    made.assumed = str(unspecified)
    return made
