"""Further data of videos: objects of the first frame, origins of points, depth; and blocks over slots compared with libraries."""

import colorsys

import numpy as np
import pytest
import torch
from torch import nn

from object_centric.encoders.transformer import TransformerConfig
from object_centric.grouping.slot_attention import SlotAttention
from object_centric.grouping.slot_config import SlotAttentionConfig
from object_centric.tasks.video_encoder import VideoEncoder, VideoSlateEncoder
from object_centric.video.clip_examples import ClipExamples, FrameTransform, flow_colours
from object_centric.video.video_autoencoder import VideoAutoencoder, VideoAutoencoderConfig, target_planes
from object_centric.video.video_slate import VideoSlate, VideoSlateConfig
from object_centric.video.video_tower import Hint, HintConfig, boxes_from_labels
from sparo_data.episodes import episode_fields
from sparo_data.synthetic.video_scenes import episode
from sparo_train.core.config import resolve
from sparo_train.core.contracts import Progress
from sparo_train.core.errors import BadSampleError, ConfigError, DataError
from sparo_train.core.rng import generator
from sparo_train.data.examples.image_transforms import Crop
from sparo_train.data.sources.base import DataConfig, Source
from sparo_train.data.sources.shards import ShardsConfig
from sparo_train.data.video.episode import Episode

SMALL = {"image_size": 16, "encoder": {"channels": [8, 8], "strides": [2, 1], "kernel": 3}, "features": 16}
TOLD = {"preset": "savi", "slots": 5, "width": 16, "slot_init": "given", "qkv_width": 24}


def told(annotation="boxes", target="flow_depth", **more):
    torch.manual_seed(0)
    model = {**SMALL, "decoder": {"kind": "mlp", "hidden": [16]}, "grouping": TOLD, "predictor": {}, "target": target}
    tree = {"model": {**model, "hint": {"annotation": annotation, "hidden": 8}, **more}, "frames": {"count": 3}}
    return VideoAutoencoder(resolve(VideoAutoencoderConfig, tree, "here"))


def example(objective, fields, **data):
    c = objective.config
    data = resolve(DataConfig, {"sources": {"v": {"kind": "shards", "shards": "x"}}, **data}, "data")
    made = ClipExamples(data, c.model, c.frames, target_planes(c.model))
    return made, made.prepare(dict(fields), Source("v", ShardsConfig(shards="x"), []), generator(1, "x"))


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_blocks_equal_torchs_with_the_same_weights(norm):
    torch.manual_seed(0)
    block = TransformerConfig(heads=2, mlp_width=24, norm=norm, ln_eps=1e-5, blocks=1).build(16)[0]  # type: ignore[index]
    layer = nn.TransformerEncoderLayer(16, 2, 24, 0.0, batch_first=True, norm_first=norm == "pre")
    own = block.state_dict()
    layer.load_state_dict(
        {
            "self_attn.in_proj_weight": torch.cat([own[f"to_{n}.weight"] for n in "qkv"]),
            "self_attn.in_proj_bias": torch.cat([own[f"to_{n}.bias"] for n in "qkv"]),
            "self_attn.out_proj.weight": own["out.weight"],
            "self_attn.out_proj.bias": own["out.bias"],
            **{f"linear{i + 1}.{n}": own[f"mlp.{2 * i}.{n}"] for i in (0, 1) for n in ("weight", "bias")},
            **{f"norm{i + 1}.{n}": own[f"norm_{w}.{n}"] for i, w in enumerate(("attention", "mlp")) for n in ("weight", "bias")},
        }
    )  # fmt: skip
    x = torch.randn(3, 5, 16)
    assert torch.allclose(block(x), layer(x), atol=1e-6)


def test_steve_normalizes_before_the_first_block_and_after_the_last():
    torch.manual_seed(0)
    made = TransformerConfig.model_validate({"preset": "steve", "heads": 2, "blocks": 2}).build(8).eval()
    first, second, norm = made  # type: ignore[misc]
    x = torch.randn(2, 3, 8)
    begun = first.norm_attention(x)

    def attended(block, x):
        q, k, v = (layer(x).unflatten(-1, (2, 4)).transpose(1, 2) for layer in (block.to_q, block.to_k, block.to_v))
        return block.out((torch.softmax(q @ k.transpose(2, 3) / 2, -1) @ v).transpose(1, 2).flatten(2))

    y = begun + attended(first, begun)
    y = y + first.mlp(first.norm_mlp(y))
    z = y + attended(second, second.norm_attention(y))
    z = z + second.mlp(second.norm_mlp(z))
    assert torch.allclose(made(x), norm(z), atol=1e-6) and first.mlp[0].out_features == 32 and first.to_q.bias is None
    made.train()
    assert torch.equal(made(x), made(x))  # by default, its code has no dropout
    dropped = TransformerConfig(preset="steve", dropout=0.1).build(8)
    assert not torch.equal(dropped(x), dropped(x))


def test_a_corrector_may_attend_wider_than_its_slots():
    c = SlotAttentionConfig.model_validate({**TOLD, "slot_init": "learned", "kv": "plain"})
    module, folded = SlotAttention(c, 12), SlotAttention(c.model_copy(update={"kv": "folded"}), 12)
    folded.load_state_dict(module.state_dict())
    assert module.rounds[0].gru.weight_ih.shape == (48, 24)  # type: ignore[union-attr]
    x = torch.randn(2, 9, 12)
    assert torch.allclose(module(x).slots, folded(x).slots, atol=1e-6) and module(x).slots.shape == (2, 5, 16)
    more = module(x, num_iterations=3).slots
    by_hand = module(x, None, module(x, None, module(x).slots).slots).slots
    assert torch.allclose(more, by_hand, atol=1e-6)


def test_hints_are_boxes_of_visible_objects():
    labels = torch.zeros(2, 8, 8, dtype=torch.uint8)
    labels[0, 2:5, 1:3], labels[0, 7, 7], labels[1, :, :4] = 1, 3, 2
    boxes = boxes_from_labels(labels, 5) * 8
    assert boxes[0].tolist() == [[0] * 4, [2, 1, 5, 3], [0] * 4, [7, 7, 8, 8], [0] * 4]
    assert boxes[1, 2].tolist() == [0, 0, 8, 4] and boxes[1, [0, 1, 3, 4]].abs().sum() == 0
    torch.manual_seed(0)
    for of in ("boxes", "centres", "masks"):
        hint = Hint(HintConfig(annotation=of, hidden=6), 5, 4, 8)
        slots = hint(labels)
        nothing = torch.stack([slots[0, 0], slots[0, 2], slots[1, 0]])
        # On some CPUs, rows of one product may differ in their last bit.
        assert slots.shape == (2, 5, 4) and torch.allclose(nothing, nothing[:1].expand(3, -1), atol=1e-6)
        assert not torch.equal(slots[0, 1], slots[1, 2])
        moved = labels.clone()
        moved[0, 2:5, 1:3], moved[0, 3, 1], moved[0, 2, 0], moved[0, 4, 3] = (
            0,
            1,
            1,
            1,
        )  # another shape with the same centre
        assert torch.allclose(hint(moved)[0, 1], slots[0, 1]) == (of == "centres")


def test_flow_is_coloured_and_cropped_like_its_frames():
    rng = np.random.default_rng(0)
    flow = rng.normal(0, 1.5, (12, 12, 2)).astype(np.float32)
    colours = flow_colours(flow)
    for y, x in ((0, 0), (5, 7), (11, 3)):
        a, b = flow[y, x]
        hue, length = (np.arctan2(b, a) / np.pi + 1) / 2, min(np.hypot(a, b) * 50 / np.hypot(12, 12), 1)
        assert np.abs(colours[y, x] - 255 * np.array(colorsys.hsv_to_rgb(hue, length, 1))).max() <= 1
    assert (flow_colours(np.zeros((4, 4, 2), np.float32)) == 255).all()
    for cut in (
        FrameTransform(12),
        FrameTransform(24, Crop(0, 0, 12, 12)),
        FrameTransform(6, Crop(2, 4, 6, 6)),
        FrameTransform(6, Crop(0, 0, 12, 6), flip=True),
    ):
        picture = np.zeros((12, 12, 3), np.uint8)
        labels = np.zeros((12, 12), np.uint8)
        picture[4:8, 3:9], labels[4:8, 3:9] = 255, 2
        shown = cut.picture(picture)[..., 0] > 127
        assert (
            shown == (cut.labels(labels) == 2)
        ).mean() > 0.9 and shown.any()  # bicubic interpolation overshoots at corners
        even = np.broadcast_to(np.array([2.0, -3.0], np.float32), (12, 12, 2))
        wide, tall = (cut.size / side for side in ((cut.box.width, cut.box.height) if cut.box else (12, 12)))
        assert np.allclose(cut.flow(even), [2 * tall, 3 * wide if cut.flip else -3 * wide], atol=1e-4)
    tall = np.zeros((16, 12, 2), np.float32)
    tall[4:8] = 1  # an image that is not square is cropped to its centre, and so is its mask
    assert np.array_equal(FrameTransform(12).flow(tall)[..., 0], tall[2:14, :, 0])


def test_clips_crop_targets_and_hints_alike():
    fields, objective = episode_fields(episode("a", 0, "train", 0, 4, 24, 3)), told()
    examples, one = example(objective, fields, crop_scale=[0.5, 0.9], hflip=1.0)
    shapes = {name: (table.shape, str(table.dtype)) for name, table in one.items()}
    assert shapes == {
        "video": ((3, 3, 16, 16), "uint8"),
        "noise": ((5, 16), "float32"),
        "flow": ((3, 3, 16, 16), "uint8"),
        "depth": ((3, 1, 16, 16), "float32"),
        "hint": ((16, 16), "uint8"),
    }
    found = [objective(examples.stack([one, one]), Progress(0, 4, 1)) for _ in (0, 1)]
    assert found[0].total.isfinite() and found[0].total > 0
    found[0].total.backward()
    silent = [n for n, p in objective.named_parameters() if p.grad is None]
    assert not silent, silent
    whole = examples.stack([example(objective, fields, crop_scale=[1.0, 1.0])[1]])
    again = objective.target(whole, objective.model(whole["video"] / 255, whole["noise"], whole["hint"]))
    depths = np.log1p([Episode(fields).depth(t) for t in range(4)])
    assert (
        again.shape == (3, 4, 16, 16)
        and depths.min() - 1e-2 <= again[:, 3].min() <= again[:, 3].max() <= depths.max() + 1e-2
    )
    without = {name: data for name, data in fields.items() if "flow" not in name}
    with pytest.raises(BadSampleError, match="missing flow of a frame"):
        example(objective, without)
    few = told(grouping={**TOLD, "slots": 2})
    with pytest.raises(BadSampleError, match="outside the numbers of the slots"):
        example(few, fields)
    with pytest.raises(DataError, match="the batch has no 'hint'"):
        objective({k: v for k, v in whole.items() if k != "hint"}, Progress(0, 4, 1))


def test_encoders_with_hints_require_a_fourth_plane():
    encoder = VideoEncoder(told(target="pixels").model, False, 3)
    torch.manual_seed(0)
    video = torch.randint(0, 256, (2, 5, 4, 16, 16), dtype=torch.uint8)
    video[:, :, 3] = 0
    video[0, :, 3, 3:9, 3:9], video[1, :, 3, 8:, 8:] = 1, 2
    rows = encoder.clips(video)
    assert encoder.conditional and torch.equal(encoder.clips(video[1:])[0], rows[1])
    other = video.clone()
    other[:, 1:, 3] = 7  # later frames give no hints
    assert torch.equal(encoder.clips(other), rows)
    other[0, 0, 3] = 3
    assert not torch.equal(encoder.clip_slots(other)[0], encoder.clip_slots(video)[0])
    for call in (lambda: encoder.clips(video[:, :, :3]), lambda: encoder.encode(video[:, 0, :3])):
        with pytest.raises(ConfigError, match="slots of this model start from the objects in the first frame"):
            call()
    flow = VideoEncoder(told(target="flow").model, False, 3)
    assert (flow.clips(video)[:, -5:] == -1).all() and flow.decompose_clips(video)[0].slot_images.shape == (
        5,
        5,
        3,
        16,
        16,
    )  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", ["steve", "psb", "tokens"])
def test_video_slate_predicts_tokens_of_every_frame(kind):
    torch.manual_seed(0)
    model = {
        **SMALL,
        "dvae": {"vocab": 12, "channels": 8},
        "decoder": {"width": 16, "blocks": 2, "heads": 2},
        "grouping": {"preset": "psb" if kind == "psb" else "steve", "slots": 3, "width": 16},
        "predictor": None if kind == "psb" else {"preset": "steve"},
    }
    model |= {"encoder": {"kind": "tokens", "width": 16}} if kind == "tokens" else {}
    objective = VideoSlate(resolve(VideoSlateConfig, {"model": model}, "here")).eval()
    batch = {"video": torch.randint(0, 256, (2, 3, 3, 16, 16), dtype=torch.uint8), "noise": torch.randn(2, 3, 16)}
    torch.manual_seed(1)
    found = objective(batch, Progress(0, 4, 1))
    torch.manual_seed(1)
    objective.set_grad_checkpointing(True)
    again = objective(batch, Progress(0, 4, 1))
    found.total.backward()
    assert torch.equal(found.total, again.total) and found.metrics["cross_entropy"] < 12
    silent = {n for n, p in objective.named_parameters() if p.grad is None or not p.grad.abs().sum()}
    assert all(
        "distance" in n or "places" in n or "predictor.0.to" in n or "to_k" in n or "to_q" in n for n in silent
    ), silent
    encoder = VideoSlateEncoder(objective.model, False, 3)
    rows = encoder.clips(batch["video"])
    assert rows.shape == (2, 3 * 256 + 3) and (rows[:, -3:] == -1).all()
    (parts, _) = encoder.decompose_clips(batch["video"])
    assert (
        parts.reconstruction is not None and parts.reconstruction.shape == (3, 3, 16, 16) and parts.slot_images is None
    )
    still = encoder.clip_slots(batch["video"][:, :1])[:, 0]
    assert torch.allclose(encoder.encode(batch["video"][:, 0]), still.flatten(1), atol=1e-6)


def test_target_tokens_may_come_from_the_frozen_vae():
    model = {
        **SMALL,
        "dvae": {"vocab": 50, "channels": 8, "target_tokens": "same"},
        "decoder": {"width": 16, "blocks": 1, "heads": 2},
    }
    model |= {"grouping": {"preset": "steve", "slots": 3, "width": 16}}
    for says, alike in (("same", True), ("other", False)):
        tree = {"model": {**model, "dvae": {**model["dvae"], "target_tokens": says, "hard": True}}}
        torch.manual_seed(0)
        made: VideoSlate = VideoSlate(resolve(VideoSlateConfig, tree, "here"))
        found = made.model(torch.rand(2, 3, 3, 16, 16), torch.randn(2, 3, 16), 0.5)
        drawn = made.model.dvae.decode_tokens(found.tokens.unflatten(1, (4, 4)))
        assert torch.allclose(drawn, found.reconstruction, atol=1e-5) == alike
