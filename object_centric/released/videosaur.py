"""videosaur's and SlotContrast's `.ckpt`: DINOSAUR for images, and their video models with a predictor of the next frame's slots."""

from __future__ import annotations

from typing import Any

from sparo_train.core.config import Frozen, field, resolve
from sparo_train.core.errors import CheckpointError

from ..objectives.slot_tower import SlotTower, SlotTowerConfig
from ..tasks.slot_encoder import GroupingEncoder
from ..tasks.video_encoder import TimedGroupingEncoder, TowerModel
from ..video.video_tower import TimedTowerConfig
from .weight_reader import Tensors, grouping, open_weight_file, read_slot_init, vit

_NAMES = {
    "norm_features": "norm_input",
    "norm_slots": "rounds.0.norm_slots",
    **{f"to_{x}": f"rounds.0.to_{x}" for x in "qkv"},
    "gru": "rounds.0.gru",
}


class VideosaurFile(Frozen):
    """Options of `videosaur:FILE`."""

    image_size: int = field(224, "Image side in pixels.", gt=0)
    slots: int = field(7, "Number of slots, K, if their initialization is random.", gt=0)
    iterations: int = field(3, "Iterations for a video's first frame. Released configurations: 3.", gt=0)
    later: int = field(2, "Iterations for later frames. Released configurations: 2.", gt=0)
    frames: int = field(4, "Number of frames of the training clips, which is recorded in results.", gt=0)
    heads: int | None = field(None, "Heads of the ViT. Default: its width / 64.", gt=0)


def from_videosaur(text: str) -> GroupingEncoder | TimedGroupingEncoder:
    """Read `videosaur:FILE?slots=11&…`, without decoders and target encoders: masks are slots' attention to patches.

    A file with a predictor is a model of videos.
    """
    t, options, unspecified = open_weight_file("videosaur", text, VideosaurFile)
    # Lightning wraps the trained model once more.
    t = Tensors({name.replace(".module.", ".", 1): value for name, value in t.tensors.items()}, t.label)
    t.drop("decoder", "target_encoder", "loss_fns")
    has_final_norm = (
        "encoder.backbone.model.norm.weight" in t
    )  # torchvision's extractor omits what features do not pass through
    encoder = vit(t, "encoder.backbone.model", options.heads, final_norm=has_final_norm)
    unspecified.set_inferred("heads", encoder["heads"])
    for theirs, ours in (("0", "norm"), ("1", "project.0"), ("3", "project.2")):
        t.take(f"encoder.output_transform.layers.{theirs}", ours)
    slot_init = read_slot_init(t, unspecified, "initializer.mean", "initializer.log_std", "initializer.slots")
    corrector = "processor.corrector"
    width, wide = t[f"{corrector}.to_q.weight"].shape[1], t[f"{corrector}.to_q.weight"].shape[0]
    if width != wide:
        raise CheckpointError(
            f"{t.label}: queries have width {wide}, slots {width}; this reader supports equal widths only"
        )
    names = dict(_NAMES)
    gated, mlp = any(name.startswith(f"{corrector}.gru.") for name in t.tensors), 0
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
    predictor = _predictor(t, width)
    if predictor is None:
        unspecified.refuse("later", "frames")
    grouping_options = {
        "preset": "videosaur",
        "slots": options.slots,
        "width": width,
        # A later frame starts from a prediction and needs fewer iterations than the first.
        "iterations": options.later if predictor else options.iterations,
        "mlp_width": mlp,
        "gru": "torch" if gated else "none",
        **slot_init,
    }
    tree: dict[str, Any] = {
        "image_size": options.image_size,
        "encoder": encoder,
        "features": t.ours["project.2.weight"].shape[0],
        "hidden": t.ours["project.0.weight"].shape[0],
        "grouping": grouping_options,
    }
    if predictor is None:
        model = SlotTower(resolve(SlotTowerConfig, tree, t.label))
        t.into(model)
        slot_encoder = GroupingEncoder(model, signed=False, label=t.label)
    else:
        tree |= {"predictor": predictor, "first_iterations": options.iterations}
        tower_model = TowerModel(resolve(TimedTowerConfig, tree, t.label))
        # In video models, one iteration is part of the step from frame to frame.
        corrector_tensors = {
            name.replace("grouping.", "grouping.step.corrector."): value for name, value in t.ours.items()
        }
        t.ours = {
            name.replace("predictor.", "grouping.step.predictor."): value for name, value in corrector_tensors.items()
        }
        t.into(tower_model.tower)
        slot_encoder = TimedGroupingEncoder(tower_model, False, options.frames, t.label)
    slot_encoder.assumed = str(unspecified)
    return slot_encoder


def _predictor(t: Tensors, width: int) -> dict[str, Any] | None:
    """Convert the blocks of `processor.predictor`, as `predictor.0.…`, and return the recipe block that builds them; None without any."""
    theirs = "processor.predictor.blocks"
    count = t.count(theirs)
    if not count:
        return None
    hidden = t[f"{theirs}.0.linear1.weight"].shape[0]
    for number in range(count):
        block, ours = f"{theirs}.{number}", f"predictor.{number}"
        for kind in ("weight", "bias"):
            name = f"{block}.self_attn.qkv.{kind}"
            # One matrix for queries, keys and values, in this order.
            parts = t[name].chunk(3)
            for part, letter in zip(parts, "qkv", strict=True):
                t.give(f"{ours}.to_{letter}.{kind}", part.clone(), name)
        if parts[0].shape[0] != width:
            raise CheckpointError(
                f"{t.label}: its predictor has width {parts[0].shape[0]}, but its slots have width {width}; only equal widths can be read"
            )
        t.take(f"{block}.self_attn.out_proj", f"{ours}.out")
        for name, own in (
            ("linear1", "mlp.0"),
            ("linear2", "mlp.2"),
            ("norm1", "norm_attention"),
            ("norm2", "norm_mlp"),
        ):
            t.take(f"{block}.{name}", f"{ours}.{own}")
    return {"preset": "videosaur", "blocks": count, "mlp_width": hidden}
