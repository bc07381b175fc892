"""MESH's Lightning files (Zhang et al. 2023, davzha/MESH), complete image models."""

from __future__ import annotations

import torch
from torch import Tensor

from sparo_train.core.config import Frozen, field, resolve

from ..objectives.slot_autoencoder import SlotModel, SlotModelConfig
from ..tasks.slot_encoder import SlotEncoder
from .spot import NAMES
from .weight_reader import Tensors, open_weight_file


class MeshFile(Frozen):
    """Options of `mesh:FILE`."""

    slots: int = field(11, "Number of slots, K.", gt=0)
    iterations: int = field(3, "Number of iterations of slot attention.", gt=0)
    entropy_steps: int = field(4, "Steps that minimize the transport plan's entropy. 0: none, as in SA-Sinkhorn.", ge=0)
    entropy_rate: float = field(
        8.0, "Step size of the entropy minimization, if the file contains no learned one.", gt=0
    )
    sinkhorn_steps: int = field(5, "Iterations of Sinkhorn's algorithm.", gt=0)


def from_mesh(text: str) -> SlotEncoder:
    """Read `mesh:FILE?slots=6&…`."""
    t, options, unspecified = open_weight_file("mesh", text, MeshFile)
    # Lightning saves the model below `net`.
    t = Tensors({name.removeprefix("net."): value for name, value in t.tensors.items()}, t.label)
    slot, hidden = t["slot_attention.mlp.0.weight"].shape[1], t["slot_attention.mlp.0.weight"].shape[0]
    # Sizes come from the file; options are only those that shapes do not show.
    channels = [t[f"encoder.{i}.weight"].shape[0] for i in (0, 2, 4, 6)]
    features = t["encoder.13.weight"].shape[0]
    if not options.entropy_steps:
        # SA-Sinkhorn has the scalar, too, and never reads it.
        t.drop("slot_attention.lr")
    learned = "slot_attention.lr" in t
    if learned or not options.entropy_steps:
        unspecified.refuse("entropy_rate")
    transport = {
        "steps": options.sinkhorn_steps,
        "entropy_steps": options.entropy_steps,
        "entropy_rate": options.entropy_rate,
        "learn_rate": learned,
        "hidden": hidden,
    }
    # A rate without steps would be refused as an option without effect.
    if not options.entropy_steps:
        transport = {"steps": options.sinkhorn_steps, "entropy_steps": 0, "hidden": hidden}
    last = t["decoder.8.weight"]
    config = resolve(
        SlotModelConfig,
        {
            "image_size": t["encoder.8.grid"].shape[1],
            "encoder": {"kind": "conv", "channels": channels, "strides": [1] * 4, "kernel": 5},
            "features": features,
            "grouping": {
                "preset": "mesh",
                "slots": options.slots,
                "width": slot,
                "iterations": options.iterations,
                "mlp_width": hidden,
                "transport": transport,
            },
            "decoder": {
                "kind": "cnn",
                "channels": t["decoder.2.weight"].shape[1],
                "num_upsample": 0,
                "convs": 3,
                "out_kernel": last.shape[-1],
            },
        },
        t.label,
    )
    # Take everything before building the model, so that only unknown tensors are left.
    _rename(t, learned)
    model = SlotModel(config)
    t.into(model)
    made = SlotEncoder(model, signed=True, label=t.label)
    made.assumed = str(unspecified)
    return made


def _rename(t: Tensors, learned: bool) -> None:
    for number, layer in enumerate((0, 2, 4, 6)):
        t.take(f"encoder.{layer}", f"tower.encoder.layers.{number}")
    place = "encoder.8.dense"
    t.give("tower.position.weight", t[f"{place}.weight"][:, [1, 0, 3, 2]].clone())  # it has y before x
    t.give("tower.position.bias", t[f"{place}.bias"].clone(), "encoder.8")
    for theirs, ours in (("10", "norm"), ("11", "project.0"), ("13", "project.2")):
        t.take(f"encoder.{theirs}", f"tower.{ours}")
    for theirs, ours in (("slots_mu", "mu"), ("slots_log_sigma", "log_sigma")):
        name = f"slot_attention.{theirs}"
        t.give(f"tower.grouping.{ours}", t[name].reshape(-1).clone(), name)
    for theirs, ours in NAMES.items():
        t.take(f"slot_attention.{theirs}", f"tower.grouping.{ours}")
    for theirs, ours in (("mlp_input_marginals", "input_marginal"), ("mlp_slot_marginals", "slot_marginal")):
        made = f"tower.grouping.rounds.0.transport.{ours}"
        t.take(f"slot_attention.{theirs}", made)
        t.give(f"{made}.2.bias", torch.zeros(1))  # it has none, and softmax is invariant to one
    if learned:
        t.give(
            "tower.grouping.rounds.0.transport.rate", t["slot_attention.lr"].reshape(()).clone(), "slot_attention.lr"
        )
    weight, bias = on_signed_grid(t["decoder.1.dense.weight"], t["decoder.1.dense.bias"])
    t.give("decoder.position.weight", weight)
    t.give("decoder.position.bias", bias, "decoder.1")
    for layer in (2, 4, 6, 8):
        # A transposed convolution of stride one is a convolution with the flipped kernel.
        kernel = t[f"decoder.{layer}.weight"].flip(2, 3).transpose(0, 1).contiguous()
        t.give(f"decoder.layers.{layer - 2}.weight", kernel, f"decoder.{layer}.weight")
        t.take(f"decoder.{layer}.bias", f"decoder.layers.{layer - 2}.bias")


def on_signed_grid(weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Convert a layer of (y, x, 1 - y, 1 - x) in 0..1, (D, 4), to the same function of (y, x) in -1..1, (D, 2)."""
    # 1 - y follows from y, so four inputs reduce to two and a bias.
    half = (weight[:, :2] - weight[:, 2:]) / 2
    return half.contiguous(), bias + half.sum(1) + weight[:, 2:].sum(1)
