"""videosaur's and SlotContrast's `.ckpt`: DINOSAUR for images, and of video models what they do to a first frame."""

from __future__ import annotations

from sparo_train.core.config import Frozen, resolve, setting
from sparo_train.core.errors import CheckpointError

from ..objectives.slot_tower import SlotTower, SlotTowerConfig
from ..tasks.slot_encoder import GroupingEncoder
from .reading import Tensors, first_slots, grouping, opened, vit

_NAMES = {
    "norm_features": "norm_input",
    "norm_slots": "rounds.0.norm_slots",
    **{f"to_{x}": f"rounds.0.to_{x}" for x in "qkv"},
    "gru": "rounds.0.gru",
}


class VideosaurFile(Frozen):
    image_size: int = setting(224, "pixels per side", gt=0)
    slots: int = setting(7, "K, where slots begin at random", gt=0)
    iterations: int = setting(3, "rounds; of a video's first frame, 3 in the released configs", gt=0)
    heads: int | None = setting(None, "of the ViT; none: its width / 64", gt=0)


def from_videosaur(text: str) -> GroupingEncoder:
    """`videosaur:FILE?slots=11&…`. Decoders, predictors and target encoders are left out: masks are slots' attention to patches."""
    t, options, unsaid = opened("videosaur", text, VideosaurFile)
    t = Tensors({name.replace(".module.", ".", 1): value for name, value in t.held.items()}, t.label)
    t.drop("decoder", "processor.predictor", "target_encoder", "loss_fns")
    whole = "encoder.backbone.model.norm.weight" in t  # torchvision's extractor leaves away what features do not pass
    encoder = vit(t, "encoder.backbone.model", options.heads, final_norm=whole)
    unsaid.came_out("heads", encoder["heads"])
    for theirs, ours in (("0", "norm"), ("1", "project.0"), ("3", "project.2")):
        t.take(f"encoder.output_transform.layers.{theirs}", ours)
    begin = first_slots(t, unsaid, "initializer.mean", "initializer.log_std", "initializer.slots")
    corrector = "processor.corrector"
    width, wide = t[f"{corrector}.to_q.weight"].shape[1], t[f"{corrector}.to_q.weight"].shape[0]
    if width != wide:
        raise CheckpointError(f"{t.label}: queries are {wide} wide and slots {width}; this reader knows equal ones")
    names = dict(_NAMES)
    gated, mlp = f"{corrector}.gru.weight_ih" in t, 0
    if not gated:
        del names["gru"]
    if f"{corrector}.mlp.layers.0.weight" in t:
        mlp = t[f"{corrector}.mlp.layers.1.weight"].shape[0]
        names |= {
            "mlp.layers.0": "rounds.0.norm_mlp",
            "mlp.layers.1": "rounds.0.mlp.0",
            "mlp.layers.3": "rounds.0.mlp.2",
        }
    grouping(t, corrector, names)
    knobs = {
        "preset": "videosaur",
        "slots": options.slots,
        "width": width,
        "iterations": options.iterations,
        "mlp_width": mlp,
        "gru": "torch" if gated else "none",
        **begin,
    }
    config = resolve(
        SlotTowerConfig,
        {
            "image_size": options.image_size,
            "encoder": encoder,
            "features": t.ours["project.2.weight"].shape[0],
            "hidden": t.ours["project.0.weight"].shape[0],
            "grouping": knobs,
        },
        t.label,
    )
    model = SlotTower(config)
    t.into(model)
    made = GroupingEncoder(model, signed=False, label=t.label)
    made.assumed = str(unsaid)
    return made
