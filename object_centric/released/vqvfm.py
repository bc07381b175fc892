"""`.pth` files of the Genera1Z family (VQ-VFM-OCL and its successors): DINOSAUR on DINOv2, with GELUs and a mean per slot."""

from __future__ import annotations

from sparo_train.core.config import Frozen, field, resolve

from ..objectives.slot_tower import SlotTower, SlotTowerConfig
from ..tasks.slot_encoder import GroupingEncoder
from .weight_reader import Tensors, grouping, open_weight_file, read_slot_init, vit

_NAMES = {
    "norm1kv": "norm_input",
    "norm1q": "rounds.0.norm_slots",
    "norm2": "rounds.0.norm_mlp",
    **{f"proj_{x}": f"rounds.0.to_{x}" for x in "qkv"},
    "rnn": "rounds.0.gru",
}


class VqvfmFile(Frozen):
    """Options of `vqvfm:FILE`."""

    image_size: int = field(256, "Image side in pixels.", gt=0)
    shrink: float = field(0.875, "Resize images to this share of image_size before the ViT.", gt=0, le=1)
    slots: int = field(7, "Number of slots, K, if they are drawn from one Gaussian.", gt=0)
    iterations: int = field(3, "Number of iterations of slot attention.", gt=0)
    heads: int | None = field(None, "Heads of the ViT. Default: its width / 64.", gt=0)
    final_norm: bool = field(True, "Use tokens after the ViT's last norm.")


def from_vqvfm(text: str) -> GroupingEncoder:
    """Read `vqvfm:FILE?image_size=384&…`, without decoders: masks are slots' attention to patches (its `attent`)."""
    t, options, unspecified = open_weight_file("vqvfm", text, VqvfmFile)
    t = Tensors({name.removeprefix("m."): value for name, value in t.tensors.items()}, t.label)
    t.drop("decode", "decode_", "mediat")
    # The prefix differs between the family's models; a ViT is recognized by its patch embedding.
    backbone = next((n.partition(".patch_embed.")[0] for n in t.tensors if ".patch_embed." in n), "encode_backbone.1")
    encoder = vit(t, backbone, options.heads, options.final_norm, options.shrink)
    unspecified.set_inferred("heads", encoder["heads"])
    for theirs, ours in (("0", "norm"), ("1", "project.0"), (_last_layer(t, "encode_project"), "project.2")):
        t.take(f"encode_project.{theirs}", ours)
    # In evaluation, its slots start from their means, whatever deviations were used in training.
    if "initializ.mean" in t and t["initializ.mean"].shape[1] > 1:
        t.tensors["initializ.own"] = t.tensors.pop("initializ.mean")
        t.drop("initializ.logstd")
    begin = {
        "slots": options.slots,
        **read_slot_init(t, unspecified, "initializ.mean", "initializ.logstd", "initializ.own"),
    }
    width, mlp = t["aggregat.proj_q.weight"].shape[0], t["aggregat.ffn.0.weight"].shape[0]
    # Some of them contain dropout, which shifts the numbers of layers.
    last = _last_layer(t, "aggregat.ffn")
    grouping(t, "aggregat", {**_NAMES, "ffn.0": "rounds.0.mlp.0", f"ffn.{last}": "rounds.0.mlp.2"})
    knobs = {"preset": "vqvfm", "width": width, "iterations": options.iterations, "mlp_width": mlp}
    if begin["slot_init"] != "learned":
        knobs |= {"gradient": "all", "straight_through": False}
    config = resolve(
        SlotTowerConfig,
        {
            "image_size": options.image_size,
            "encoder": encoder,
            "features": t.ours["project.2.weight"].shape[0],
            "hidden": t.ours["project.0.weight"].shape[0],
            "activation": "gelu",
            "grouping": {**knobs, **begin},
        },
        t.label,
    )
    model = SlotTower(config)
    t.into(model)
    made = GroupingEncoder(model, signed=False, label=t.label)
    made.assumed = str(unspecified)
    return made


def _last_layer(t: Tensors, prefix: str) -> str:
    """Return the number of the last layer with weights, which is larger by one with dropout in between."""
    numbers = [n.removeprefix(f"{prefix}.").partition(".")[0] for n in t.tensors if n.startswith(f"{prefix}.")]
    return str(max((int(n) for n in numbers if n.isdigit()), default=0))
