"""Slots over time: compared with a loop over frames, all times at once, cut and continued, and their scores."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from PIL import Image

from evals.feature_store.features import FeatureStore
from evals.sets.view_set import ClipSet
from evals.suite.suite import Suite
from evals.suite.task import IncompatibleTaskError, check_compatible
from evals.tasks.objects.clip_segmentation import MaskedClip, clip_scores, score
from evals.tasks.objects.segmentation import image_scores
from object_centric.encoders.transformer import TransformerConfig
from object_centric.grouping.pooled import PooledTransformer
from object_centric.grouping.slot_config import SlotAttentionConfig
from object_centric.pictures.panels import ClipPanel, clip_sheet
from object_centric.scenes3d.scene_model import PerFrameSlots
from object_centric.tasks.mask_task import MasksTaskConfig, ReconstructionTaskConfig
from object_centric.tasks.probe_task import SlotProbeTaskConfig
from object_centric.tasks.video_encoder import VideoEncoder, VideoSlateEncoder
from object_centric.tasks.video_task import EveryFrame, VideoMasksTaskConfig
from object_centric.tasks.view_task import ViewMasksTaskConfig
from object_centric.video.clip_examples import ClipExamples
from object_centric.video.video_autoencoder import VideoAutoencoder, VideoAutoencoderConfig, VideoModelConfig
from object_centric.video.video_slate import VideoSlate, VideoSlateConfig
from object_centric.video.video_tower import RecurrentSlots
from sparo_data.episodes import episode_fields
from sparo_data.synthetic.video_scenes import episode
from sparo_data.synthetic.video_sets import VideoSetConfig, render_videos
from sparo_train.core.config import resolve
from sparo_train.core.contracts import Progress
from sparo_train.core.errors import BadSampleError, ConfigError, DataError
from sparo_train.core.rng import generator
from sparo_train.data.sources.base import DataConfig, Source
from sparo_train.data.sources.shards import ShardsConfig

SMALL = {"image_size": 16, "encoder": {"channels": [8, 8], "strides": [2, 1], "kernel": 3}, "features": 16}
SAVI = {"preset": "savi", "slots": 3, "width": 16, "slot_init": "learned"}
PSB = {"preset": "psb", "slots": 3, "width": 16, "iterations": 2}
ROWS = {
    "savi": {"grouping": SAVI, "predictor": {}},
    "pre": {"grouping": {**SAVI, "iterations": 2}, "predictor": {"norm": "pre", "blocks": 2}},
    "none": {"grouping": {**SAVI, "preset": "sa", "slot_init": "gaussian"}},
    **{
        name: {"grouping": {**SAVI, "preset": name, "iterations": 2}, "predictor": {}}
        for name in ("tf", "tf_inv", "tf_inv_gru")
    },
    "sa_id": {"grouping": {**SAVI, "preset": "sa_id", "iterations": 2, "straight_through": True}, "predictor": {}},
    "psb": {"grouping": PSB},
}


def objective(row, **more):
    torch.manual_seed(0)
    tree = {
        "model": {**SMALL, "decoder": {"kind": "mlp", "hidden": [16]}, **ROWS[row], **more},
        "frames": {"count": 4},
    }
    return VideoAutoencoder(resolve(VideoAutoencoderConfig, tree, "here"))


def batch(times=4, count=2):
    torch.manual_seed(1)
    return {
        "video": torch.randint(0, 256, (count, times, 3, 16, 16), dtype=torch.uint8),
        "noise": torch.randn(count, 3, 16),
    }


@pytest.mark.parametrize("row", ROWS)
def test_recomputation_changes_nothing_and_every_parameter_learns(row):
    def gradients(checkpointed):
        model = objective(row)
        if checkpointed:
            model.set_grad_checkpointing(True)
        loss = model(batch(), Progress(0, 10, 0)).total
        loss.backward()
        return loss, {name: p.grad for name, p in model.named_parameters()}

    (loss, plain), (again, recomputed) = gradients(False), gradients(True)
    assert loss == again
    assert all(torch.equal(plain[name], recomputed[name]) for name, grad in plain.items() if grad is not None)
    # Equal slots at all times do not depend on distances, and a constant for all logits of a head changes nothing.
    silent = {name for name, grad in plain.items() if grad is None or not grad.abs().max()}
    assert all("predictor" in n or "distance" in n or "to_k" in n or "position" in n for n in silent), silent


def test_slots_over_time_equal_a_plain_loop():
    torch.manual_seed(0)
    config, predictor = SlotAttentionConfig.model_validate(SAVI), TransformerConfig(heads=2, mlp_width=24)
    module, tokens = RecurrentSlots(config, predictor, 8).eval(), torch.randn(2, 5, 9, 8)
    state, slots = None, []
    for t in range(5):
        own = module.step.corrector(tokens[:, t], None, state).slots
        slots.append(own)
        block = module.step.predictor[0]
        # SAVi's block: attention and MLP, each added to its input and normalised afterwards.
        q, k, v = (layer(own) for layer in (block.to_q, block.to_k, block.to_v))
        heads = [
            torch.softmax(a @ b.transpose(1, 2) / 8**0.5, -1) @ c
            for a, b, c in zip(*(x.split(8, -1) for x in (q, k, v)), strict=True)
        ]
        x = block.norm_attention(own + block.out(torch.cat(heads, -1)))
        state = block.norm_mlp(x + block.mlp(x))
    found = module(tokens)
    assert torch.allclose(found.slots, torch.stack(slots, 1), atol=1e-5)
    (first, carried), again = module.run_with_state(tokens[:, :2]), module.run_with_state(tokens)[1]
    second, last = module.run_with_state(tokens[:, 2:], None, carried)
    assert torch.allclose(torch.cat([first.slots, second.slots], 1), found.slots, atol=1e-6) and torch.allclose(
        last, again, atol=1e-6
    )
    assert torch.equal(module(tokens[:, :3]).slots, found.slots[:, :3])  # later frames have no effect


@pytest.mark.parametrize("row", ["savi", "psb"])
def test_clips_of_any_length_are_cut_into_objects_one_by_one(row):
    encoder = VideoEncoder(objective(row).model, False, 4)
    video = batch(7, 3)["video"]
    whole = encoder.clips(video)
    assert whole.shape == (3, 7 * 256 + 7) and torch.equal(encoder.clips(video[1:2]), whole[1:2])
    labels, errors = whole[:, :-7].view(3, 7, 16, 16), whole[:, -7:]
    assert set(labels.unique().tolist()) <= {0.0, 1.0, 2.0}
    with torch.inference_mode():
        found = encoder.model(video[:1, :4] / 255, encoder.noise.expand(1, -1, -1))
    assert torch.equal(labels[0, :4], found.decoded.masks.argmax(1).float())
    assert torch.allclose(
        errors[0, :4], (found.decoded.image - video[0, :4] / 255).square().flatten(1).mean(1), atol=1e-6
    )
    if row == "psb":  # a frame after the training's length sees the last four
        slots = encoder.clip_slots(video)
        late = encoder.clip_slots(video[:, 2:6])
        assert torch.allclose(slots[:, 5], late[:, -1], atol=1e-6) and not torch.allclose(
            slots[:, 5], encoder.clip_slots(video, 7)[:, 5]
        )
    else:
        with pytest.raises(ConfigError, match="context_frames=3: only a binder"):
            encoder.clips(video, 3)
        assert torch.allclose(encoder.clip_slots(video)[:, :4], encoder.clip_slots(video[:, :4]), atol=1e-6)
    still = encoder.masks(video[:, 0])
    assert torch.equal(still.view(3, 16, 16), encoder.clips(video[:, :1])[:, :-1].view(3, 16, 16))


def test_blocks_that_do_not_go_together_are_refused():
    for change, told in (
        ({"grouping": PSB, "predictor": {}}, "predictor, first_iterations: do not apply to a binder"),
        ({"grouping": SAVI, "predictor": {"heads": 3}}, "predictor.heads=3: does not divide 16"),
        (
            {"grouping": {"preset": "isa", "mlp_width": 16, "width": 16}, "frame": {}},
            "positions and scales of slots are supported for images only",
        ),
        ({"grouping": {"preset": "sa_id"}}, "no gradient would reach initial slots and predictor"),
        ({"grouping": {"preset": "sa_me", "width": 16}}, "grouping.transport: applies to images"),
        (
            {"grouping": {"preset": "tf_inv", "width": 16}, "first_iterations": 4},
            "first_iterations: cannot be set with grouping.layers=own",
        ),
        ({"grouping": SAVI, "hint": {}}, "hint, grouping.slot_init=learned: a hint and slot_init=given"),
        (
            {"grouping": {**SAVI, "slot_init": "given"}},
            "hint, grouping.slot_init=given: a hint and slot_init=given",
        ),
        ({"grouping": {**PSB, "slot_init": "given"}, "hint": {}}, "slot_init=given: slots of a binder"),
        ({"grouping": SAVI, "predictor": {"preset": "savy"}}, "preset=savy"),
        ({"grouping": SAVI, "predictor": {"first_norm": "stream"}}, "first_norm=stream: applies to norm=pre"),
        ({"grouping": {**SAVI, "qkv_width": 32, "gru": "none"}}, "qkv_width=32: must equal width=16"),
    ):
        with pytest.raises(ConfigError, match=told):
            resolve(VideoModelConfig, {"image_size": 16, **change}, "here")


def test_all_frames_of_a_clip_have_one_crop():
    video = episode("a", 0, "train", 0, 8, 24, 3)
    fields, source = episode_fields(video), Source("v", ShardsConfig(shards="x"), [])
    sources = {"v": {"kind": "shards", "shards": "x"}}

    def example(seed=0, fields=fields, **data):
        data = resolve(DataConfig, {"sources": sources, **data}, "data")
        config = objective("savi").config
        found = ClipExamples(data, config.model, config.frames).prepare(dict(fields), source, generator(seed, "x"))
        return found["video"], found["noise"]

    pixels, noise = example(crop_scale=[1.0, 1.0])
    assert pixels.shape == (4, 3, 16, 16) and pixels.dtype == np.uint8 and noise.shape == (3, 16)
    assert np.array_equal(pixels, example(crop_scale=[1.0, 1.0])[0]) and not np.array_equal(
        pixels, example(5, crop_scale=[1.0, 1.0])[0]
    )
    still = {name: fields[f"000{name[3:]}"] if name[:3].isdigit() else data for name, data in fields.items()}
    cropped, _ = example(fields=still, crop_scale=[0.3, 0.6], hflip=0.5)
    assert all(np.array_equal(frame, cropped[0]) for frame in cropped)  # one crop and one mirror for all
    with pytest.raises(BadSampleError, match=r"shorter than frames\.count=4"):
        example(fields={name: data for name, data in fields.items() if name[:3] in ("000", "001", "002", "jso")})
    other = episode_fields(episode("a", 0, "train", 0, 1, 32, 3))["000.png"]
    with pytest.raises(BadSampleError, match="frames have unequal sizes"):
        example(fields={**fields, **{f"00{t}.png": other for t in (1, 3, 5)}})


def test_a_slot_that_leaves_its_object_counts_in_videos_and_not_in_images():
    true = np.zeros((3, 6, 6), np.int64)
    true[:, :2], true[:, 4:] = 1, 2
    errors = np.array([0.1, 0.01, 0.001])
    swapped = true.copy()
    swapped[2] = np.array([0, 2, 1])[true[2]]
    kept, left = (clip_scores(MaskedClip(true, masks, errors)) for masks in (true, swapped))
    assert kept["video_fg_ari"] == kept["image_fg_ari"] == kept["video_mbo"] == kept["video_miou"] == 1
    assert left["image_fg_ari"] == left["image_mbo"] == 1 and left["video_fg_ari"] < 0.2 and left["video_miou"] < 0.7
    assert left["video_fg_ari"] == image_scores(true, swapped)["fg_ari"] and kept["psnr"] == pytest.approx(20)
    early = score([MaskedClip(true, swapped, errors)] * 3, first_frame=False)
    assert early.metrics["video_fg_ari"] == pytest.approx(
        image_scores(true[1:], swapped[1:])["fg_ari"]
    ) and early.metrics["psnr"] == pytest.approx(25)
    empty = score([MaskedClip(np.zeros_like(true), true, errors), MaskedClip(true, true, errors * np.nan)])
    assert (empty.n, empty.counts) == (1, {"clips": 2, "empty": 1}) and empty.metrics["video_fg_ari"] == 1
    assert empty.predictions["psnr"].tolist()[0] == pytest.approx(20) and np.isnan(empty.predictions["psnr"][1])


def held_for_backward(module, *given):
    """Return the bytes that a forward saves, and the gradients."""
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.nbytes) or t, lambda t: t):
        found = module(*given).slots
    module.zero_grad()
    found.square().sum().backward()
    return sum(kept), {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", ["pooled", "each"])
def test_recomputation_saves_memory(kind):
    torch.manual_seed(0)
    if kind == "pooled":
        preset = {"preset": "pooled", "slots": 4, "width": 16}
        module, given = PooledTransformer(SlotAttentionConfig.model_validate(preset), 8), (torch.randn(2, 3, 16, 8),)
    else:
        preset = {"preset": "sa", "slots": 3, "width": 16}
        module = PerFrameSlots(SlotAttentionConfig.model_validate(preset), 8)
        given = torch.randn(2, 3, 16, 8), torch.randn(2, 3, 16)
    whole, plain = held_for_backward(module, *given)
    module.checkpointed = True
    less, again = held_for_backward(module, *given)
    assert less < whole / 2 and all(torch.equal(plain[name], again[name]) for name in plain)


def test_stored_features_depend_on_the_training_length(tmp_path):
    """Without a given window, a binder sees as many frames as in training, a number that its weights do not contain."""
    render_videos(tmp_path / "v", VideoSetConfig(train=1, test=4, frames=5, size=16, per_shard=12, max_objects=2), 1)
    model = objective("psb").model
    masks, probe = (
        VideoMasksTaskConfig(root=str(tmp_path / "v/clips")),
        SlotProbeTaskConfig(root=str(tmp_path / "v/clips")),
    )

    def scored(frames, store):
        encoder = VideoEncoder(model, False, frames)
        suite = Suite({"m": masks.model_copy(update={"headline": "psnr"}), "p": probe}, FeatureStore(store))
        return {name: found.metrics for name, found in suite.run(encoder).items()}

    own, shared = [scored(frames, None) for frames in (2, 4)], [scored(f, tmp_path / "store") for f in (2, 4)]
    assert own[0] != own[1] and shared == own


def test_tasks_that_a_model_cannot_do_are_refused_before_encoding():
    recurrent, binder = (VideoEncoder(objective(row).model, False, 4, row) for row in ("savi", "psb"))
    flows = VideoEncoder(objective("savi", target="flow").model, False, 4, "flows")
    model = {**SMALL, "dvae": {"vocab": 12, "channels": 8}, "decoder": {"width": 16, "blocks": 1, "heads": 2}}
    steve = resolve(VideoSlateConfig, {"model": {**model, "grouping": {**SAVI, "preset": "steve"}}}, "here")
    said = VideoSlateEncoder(VideoSlate(steve).model, False, 3, "steve")
    masks, probe = VideoMasksTaskConfig(root="x"), SlotProbeTaskConfig(root="x")
    hinted = VideoEncoder(
        objective("savi", grouping={**SAVI, "slot_init": "given"}, hint={"hidden": 8}).model, False, 4, "hinted"
    )
    for task, encoder, told in (
        (MasksTaskConfig(root="x"), hinted, "t.root: these slots start from the first frame's objects"),
        (MasksTaskConfig(root="x"), recurrent, None),
        (ReconstructionTaskConfig(root="x"), flows, "t.root: this model reconstructs flow"),
        (
            masks.model_copy(update={"context_frames": 3}),
            recurrent,
            "t.context_frames=3: applies only to models that process a clip at once; .* Set context_frames: null",
        ),
        (masks.model_copy(update={"context_frames": 3}), binder, None),
        (probe.model_copy(update={"context_frames": 3}), recurrent, "t.context_frames=3"),
        (masks.model_copy(update={"headline": "psnr"}), recurrent, None),
        (
            masks.model_copy(update={"headline": "psnr"}),
            said,
            "t.headline=psnr: .* generates frames only if asked to. Set generate_frames: true",
        ),
        (masks.model_copy(update={"headline": "psnr", "generate_frames": True}), said, None),
        (
            masks.model_copy(update={"generate_frames": True}),
            recurrent,
            "t.generate_frames=true: applies to models that generate frames",
        ),
        (masks.model_copy(update={"headline": "mse"}), flows, "t.headline=mse: .* Set headline: video_fg_ari"),
        (masks, said, None),
    ):
        with pytest.raises(IncompatibleTaskError, match=told) if told else nullcontext():
            check_compatible("t", task, encoder)


def test_generated_frames_are_scored_if_requested(tmp_path):
    render_videos(tmp_path / "v", VideoSetConfig(train=1, test=2, frames=3, size=16, max_objects=2), 1)
    model = {**SMALL, "dvae": {"vocab": 12, "channels": 8}, "decoder": {"width": 16, "blocks": 1, "heads": 2}}
    steve = resolve(VideoSlateConfig, {"model": {**model, "grouping": {**SAVI, "preset": "steve"}}}, "here")
    said = VideoSlateEncoder(VideoSlate(steve).model, False, 3, "steve")
    task = VideoMasksTaskConfig(root=str(tmp_path / "v/clips"))
    suite = Suite(
        {"plain": task, "drawn": task.model_copy(update={"generate_frames": True})}, FeatureStore(tmp_path / "store")
    )
    found = suite.run(said)
    assert "psnr" not in found["plain"].metrics and found["plain"].metrics.items() <= found["drawn"].metrics.items()
    frames = torch.stack(
        [
            torch.from_numpy(EveryFrame(said.transform)(ClipSet(task.root, None).read(i)[1])).movedim(-1, 1)
            for i in range(2)
        ]
    )
    drawn = [part.reconstruction for part in said.decompose_clips(frames)]
    errors = torch.stack([(d - f / 255).square().flatten(1).mean(1) for d, f in zip(drawn, frames, strict=True)])
    assert found["drawn"].metrics["mse"] == pytest.approx(float(errors.mean()), rel=1e-5)


def test_a_set_of_another_kind_is_refused_at_the_start(tmp_path):
    render_videos(tmp_path / "v", VideoSetConfig(train=1, test=2, frames=3, size=16, max_objects=2), 1)
    root = str(tmp_path / "v/clips")
    for task, told in (
        (VideoMasksTaskConfig(root=root, frames=9), "has 3 frames, but 9 are scored"),
        (MasksTaskConfig(root=root), "missing image"),
        (ViewMasksTaskConfig(root=root, frames=2, views=3), "sample 00000000"),
    ):
        with pytest.raises(DataError, match=told):
            Suite({"t": task}).check()
    with pytest.raises(ValueError, match="first_frame=false: frames=1 leaves no frame to score"):
        VideoMasksTaskConfig(root=root, frames=1, first_frame=False)


def test_pictures_of_clips_use_the_frames_of_their_task(monkeypatch):
    encoder, seen, real = VideoEncoder(objective("psb").model, False, 4), [], VideoEncoder.decompose_clips
    monkeypatch.setattr(
        VideoEncoder, "decompose_clips", lambda self, v, window=None: seen.append(window) or real(self, v, window)
    )
    images = [Image.fromarray(np.zeros((16, 16, 3), np.uint8))] * 5
    clip_sheet(encoder, [ClipPanel(images, None, 2), ClipPanel(images, None)])
    assert seen == [2, None]
