"""Weights that are not finite, of another form, or for another image size are refused by every evaluation."""

import pytest
import torch

from object_centric.objectives.set_prediction import SetPrediction, SetPredictionConfig
from object_centric.objectives.slate import Slate, SlateConfig
from object_centric.objectives.slot_autoencoder import SlotAutoencoder, SlotAutoencoderConfig
from object_centric.scenes3d.novel_views import NovelViews, NovelViewsConfig
from object_centric.scenes3d.rays import pixel_rays
from object_centric.tasks import scene_encoder, slot_encoder, video_encoder
from object_centric.video.video_autoencoder import VideoAutoencoder, VideoAutoencoderConfig
from object_centric.video.video_slate import VideoSlate, VideoSlateConfig
from sparo_train.core.config import resolve
from sparo_train.core.errors import CheckpointError
from sparo_train.data.video.cameras import look_at
from sparo_train.models.vit_config import VitConfig
from sparo_train.models.weight_files.description import CONFIG_KEY
from sparo_train.models.weight_files.dino_files import read_dino
from sparo_train.models.weight_files.weights import load_into

SCORED = ("to_q", "to_k", "norm_slots", "norm_tokens")  # parameters that only affect attention scores
CONV = {"channels": [8, 8], "strides": [2, 1], "kernel": 3}
SAYS = {
    "dvae": {"vocab": 20, "channels": 8},
    "decoder": {"width": 12, "blocks": 2, "heads": 2, "dropout": 0.0},
    "features": 12,
}
DRAWS = {"features": 16, "encoder": CONV, "decoder": {"kind": "mlp", "hidden": [16]}}


def slots(preset, **more):
    return {"image_size": 16, "grouping": {"preset": preset, "slots": 3, "width": 16, **more}}


def images_of(encoder, *views):
    pixels = torch.randint(0, 256, (1, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    return [getattr(encoder, view)(pixels) for view in views]


def clips_of(encoder):
    video = torch.randint(0, 256, (1, 2, 4, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    video[:, :, 3] = torch.arange(16, dtype=torch.uint8)[:, None] // 6  # the position of each pixel in the first frame
    video = video if encoder.conditional else video[:, :, :3]
    return [encoder.clips(video), encoder.clip_slots(video)]


def scenes_of(encoder):
    colours = torch.rand(1, 1, 3, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    poses = torch.stack([torch.from_numpy(look_at([4, y, 3], [0, 0, 0])) for y in (-2.0, 0.0, 2.0)]).float()
    rays = pixel_rays(poses, torch.tensor([16.0, 16.0, 8.0, 8.0]).expand(3, 4), 16).movedim(-1, -3)
    return [encoder.scenes(torch.cat([colours, rays.expand(1, 1, -1, -1, -1, -1)], 3), 2)]


def drawing(encoder):
    return images_of(encoder, "encode", "masks", "squared_error")


MASKS = {
    "autoencoder": (SlotAutoencoder, SlotAutoencoderConfig, {**slots("sa"), **DRAWS}, slot_encoder.slot_encoder),
    "cnn": (
        SlotAutoencoder,
        SlotAutoencoderConfig,
        {**slots("videosaur"), **DRAWS, "decoder": {"kind": "cnn", "channels": 8, "num_upsample": 1, "convs": 1}},
        slot_encoder.slot_encoder,
    ),
    "slate": (
        Slate,
        SlateConfig,
        {**slots("slate"), **SAYS, "encoder": {"kind": "tokens", "width": 12}},
        slot_encoder.slate_encoder,
    ),
    "slate_of_features": (
        Slate,
        SlateConfig,
        {**slots("slate"), **SAYS, "encoder": {"kind": "conv", **CONV}},
        slot_encoder.slate_encoder,
    ),
}
CLIPS = {
    "savi": (VideoAutoencoder, VideoAutoencoderConfig, {**slots("savi", slot_init="learned"), **DRAWS, "predictor": {}}, video_encoder.video_encoder),
    "told": (VideoAutoencoder, VideoAutoencoderConfig, {**slots("savi", slot_init="given"), **DRAWS, "hint": {}}, video_encoder.video_encoder),
    "psb": (VideoAutoencoder, VideoAutoencoderConfig, {**slots("psb", iterations=2), **DRAWS}, video_encoder.video_encoder),
    "steve": (VideoSlate, VideoSlateConfig, {**slots("steve"), **SAYS, "encoder": CONV}, video_encoder.video_slate_encoder),
    "psb_of_tokens": (
        VideoSlate,
        VideoSlateConfig,
        {**slots("psb", iterations=2), **SAYS, "encoder": {"kind": "tokens", "width": 12}},
        video_encoder.video_slate_encoder,
    ),
}  # fmt: skip
VIEWS = {
    "nerf": {"kind": "nerf", "bins": 4, "static": True, "sky": True, "shadows": True, "background": True},
    "nerf_relu": {"kind": "nerf", "bins": 4, "sky": True, "density": "relu"},
    "slot_mixer": {"kind": "slot_mixer", "fourier_bands": 3},
}


def cases():
    for name, row in MASKS.items():
        yield name, row, drawing
    listing = (SetPrediction, SetPredictionConfig, {**slots("sa"), "encoder": CONV}, slot_encoder.set_encoder)
    yield "set", listing, lambda encoder: images_of(encoder, "encode", "objects")
    for name, row in CLIPS.items():
        yield name, row, clips_of
    for name, decoder in VIEWS.items():
        tree = {**slots("psb", iterations=2), "encoder": {"channels": 8, "width": 16}, "decoder": decoder}
        yield name, (NovelViews, NovelViewsConfig, tree, scene_encoder.scene_encoder), scenes_of


@pytest.mark.parametrize(("name", "row", "looked_at"), list(cases()), ids=[name for name, *_ in cases()])
def test_a_nan_weight_is_noticed_in_every_output(name, row, looked_at):
    method, config, tree, encoder_of = row
    torch.manual_seed(0)
    objective = method(resolve(config, {"model": tree}, name))
    refuse_silence(encoder_of(objective), looked_at)


def refuse_silence(encoder, looked_at):
    """Put NaN in each module in turn, because a NaN in one place does not show that all are found."""
    sound = looked_at(encoder)
    assert all(table.isfinite().all() for table in sound)
    silent = []
    for name, module in encoder.model.named_modules():
        own = list(module.parameters(recurse=False))
        held = [p.detach().clone() for p in own]
        with torch.no_grad():
            for p in own:
                p.fill_(torch.nan)
        if own and any(
            b.isfinite().all() and not torch.equal(a, b) for a, b in zip(sound, looked_at(encoder), strict=True)
        ):
            silent.append(name)
        with torch.no_grad():
            for p, before in zip(own, held, strict=True):
                p.copy_(before)
    # On a CPU, torch's fused attention treats scores that are NaN as masked. Such weights are refused when they
    # are loaded (tests/parity/test_averaging.py).
    assert all(any(part in name for part in SCORED) for name in silent), silent


def test_a_transposed_matrix_is_refused():
    model = torch.nn.Linear(3, 2)
    load_into(
        model, {"weight": torch.zeros(1, 2, 3), "bias": torch.zeros(2, 1)}, "x.pt"
    )  # a leading dimension of one is accepted
    with pytest.raises(CheckpointError, match=r"x.pt: .*weight: \(3, 2\) in the file, \(2, 3\) in the model"):
        load_into(model, {"weight": torch.zeros(3, 2), "bias": torch.zeros(2)}, "x.pt")


@pytest.mark.parametrize("told", [{"mean": [0.5, 0.5]}, {"std": [0.1, 0.0, 0.1]}, {"mean": None}])
def test_a_backbone_without_mean_and_std_is_refused(told):
    raw = {"teacher": {"cls_token": torch.zeros(1, 1, 8)}}
    described = {"model": VitConfig().model_dump(), "mean": [0.5] * 3, "std": [0.1] * 3}
    assert read_dino({**raw, CONFIG_KEY: described}, "b.pth").normalisation == ((0.5,) * 3, (0.1,) * 3)
    with pytest.raises(CheckpointError, match=r"b\.pth: sparo_config: does not specify mean and std"):
        read_dino({**raw, CONFIG_KEY: {**described, **told}}, "b.pth")
