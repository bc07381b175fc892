"""Scores of scenes: windows, copies as a lower bound, times and cameras kept apart, and unsuitable models."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from evals.suite.task import IncompatibleTaskError, check_compatible
from evals.tasks.objects.reconstruction import ssim
from evals.tasks.objects.view_scores import ViewedClip, scene_scores, score
from object_centric.objectives.collapse import mask_statistics
from object_centric.pictures.scene_sheets import orbit_poses, scene_sheet, turntable
from object_centric.scenes3d.rays import pixel_rays
from object_centric.tasks.probe_task import SlotProbeTaskConfig
from object_centric.tasks.scene_encoder import SceneEncoder, copy_baselines
from object_centric.tasks.view_task import ViewMasksTaskConfig
from sparo_train.core.errors import ConfigError
from sparo_train.data.video.cameras import look_at
from tests.unit.test_novel_views import GROUPINGS, objective
from tests.unit.test_scene_drawing import DECODERS


def test_longer_episodes_are_scored_in_windows_and_stills_are_refused():
    made = objective("psb")
    encoder, posed = SceneEncoder(made.model, 2, 2, "run"), torch.rand(4, 2, 9, 16, 16)
    last_two = encoder.encode_slots(posed[2:])
    assert torch.allclose(encoder.encode_slots(posed)[3], last_two[1], atol=1e-6)
    seen = []
    encoder.encode_slots = lambda views, window=None: (
        seen.append(window) or type(encoder).encode_slots(encoder, views, window)
    )
    scene_sheet(encoder, posed, np.zeros((4, 2, 16, 16), np.uint8), 1, window=1)
    turntable(encoder, posed, 2, turns=1, window=1)
    assert seen == [1, 1]  # the pictures show what a task with this window scores
    with pytest.raises(ConfigError, match="needs views with cameras, got images"):
        encoder.encode(torch.zeros(1, 3, 16, 16, dtype=torch.uint8))
    recurrent = SceneEncoder(objective("psb", **GROUPINGS["savi"]).model, 2, 2, "run")
    with pytest.raises(ConfigError, match="only a binder"):
        recurrent.encode_slots(posed, 2)
    # With a single camera, the view moves around what is in front of it, instead of rotating on the spot.
    one = pixel_rays(
        torch.from_numpy(look_at((4.0, 0.0, 2.0), (0.0, 0.0, 0.5)))[None].float(), torch.tensor([[20.0, 20, 8, 8]]), 16
    )
    poses = orbit_poses(torch.cat([torch.zeros(1, 3, 16, 16), one.movedim(-1, 1)], 1), 4)
    assert all((-pose[:3, 2] @ (np.array([0, 0, pose[2, 3] - 2]) - pose[:3, 3])) > 2 for pose in poses)
    assert np.ptp(np.stack(poses)[:, 0, 3]) > 6
    views = torch.rand(3, 9, 16, 16)
    views[:, 3:6] = torch.tensor([[0.0, 0, 0], [5, 0, 0], [4, 0, 0]])[:, :, None, None]
    views[:, 6:] = 0.0
    nearest, mean = copy_baselines(views, 2)
    assert torch.allclose(nearest[2], (views[1, :3] - views[2, :3]).square().mean())
    assert torch.allclose(nearest[0], (views[1, :3] - views[0, :3]).square().mean())  # not a copy of itself
    assert torch.allclose(mean[2], (views[:2, :3].mean((0, 2, 3))[:, None, None] - views[2, :3]).square().mean())


def test_tasks_that_a_model_cannot_do_are_refused_before_encoding():
    encoder = SceneEncoder(objective("psb").model, 2, 2, "run")
    recurrent = SceneEncoder(objective("psb", **GROUPINGS["savi"]).model, 2, 2, "run")
    fields = SceneEncoder(objective("nerf").model, 2, 2, "run")
    task = ViewMasksTaskConfig(root="x")
    for change, which, told in (
        ({"context_frames": 2}, recurrent, "t.context_frames=2: applies only to models that process a clip at once"),
        ({"context_frames": 2}, encoder, None),
        ({"headline": "depth_error"}, encoder, "t.headline=depth_error: .* has no depth"),
        ({"headline": "depth_error"}, fields, None),
        ({"views": 2}, encoder, "t.views=2: 2 of them are context views"),
        ({"views": 3}, encoder, None),
    ):
        with pytest.raises(IncompatibleTaskError, match=told) if told else nullcontext():
            check_compatible("t", task.model_copy(update=change), which)
    with pytest.raises(
        IncompatibleTaskError,
        match=r"needs an encoder of images or clips, but run takes views.*Use view_masks or scene_probe",
    ):
        check_compatible("t", SlotProbeTaskConfig(root="x"), encoder)


def test_empty_space_belongs_to_no_slot():
    made = objective("nerf", decoder={**DECODERS["nerf"], "density": "relu"})
    encoder = SceneEncoder(made.model, 2, 2, "run")
    slots, rays = torch.randn(2, 3, 24), torch.zeros(2, 6, 16, 16)
    rays[:, 5] = -1.0
    something = encoder.render(slots, rays)
    for name, parameter in made.model.decoder.named_parameters():
        if "density" in name:
            parameter.data.zero_()
            parameter.data.fill_(-1.0) if name.endswith("bias") else None
    nothing = encoder.render(slots, rays)
    assert nothing.shares.abs().max() == 0 and (nothing.labels == nothing.shares.shape[1]).all()
    assert (something.labels < nothing.shares.shape[1]).any()
    facts = mask_statistics(nothing.shares)
    assert facts["slots_used"] == 0
    half = torch.cat([nothing.shares, F.one_hot(torch.zeros(2, 16, 16).long(), 3).movedim(-1, 1)], 3)
    assert mask_statistics(half)["slots_used"] == 1 and mask_statistics(half)["mask_sharpness"] == 1


def clip(**changes):
    rng = np.random.default_rng(0)
    true = np.zeros((2, 3, 8, 8), int)
    true[:, :, 1:4, 1:4], true[:, :, 5:7, 2:7] = 1, 2
    errors, depth = rng.uniform(0.01, 0.1, (2, 3)), rng.uniform(1, 9, (2, 3, 8, 8))
    return ViewedClip(true, true.copy(), errors, errors, errors, errors, depth, depth.copy())._replace(**changes)


def test_scores_distinguish_time_steps_and_cameras():
    perfect = scene_scores(clip(), 2, 50.0)
    aris = ("image_fg_ari", "video_fg_ari", "camera_fg_ari", "scene_fg_ari", "ari")
    assert all(perfect[name] == 1 for name in aris) and perfect["depth_error"] == 0
    swapped = clip().predicted
    swapped[1] = np.choose(swapped[1], [0, 2, 1])  # slots exchange places at the second time
    found = scene_scores(clip(predicted=swapped), 2, 50.0)
    assert (
        found["image_fg_ari"] == found["camera_fg_ari"] == 1 and max(found["video_fg_ari"], found["scene_fg_ari"]) < 0.5
    )
    swapped = clip().predicted
    swapped[:, 2] = np.choose(swapped[:, 2], [0, 2, 1])  # or from one camera to another
    found = scene_scores(clip(predicted=swapped), 2, 50.0)
    assert (
        found["image_fg_ari"] == found["video_fg_ari"] == 1 and max(found["camera_fg_ari"], found["scene_fg_ari"]) < 0.6
    )
    errors = clip().errors
    assert perfect["psnr_held_out"] == pytest.approx(np.mean(-10 * np.log10(errors[:, 2])))
    assert perfect["psnr_shown"] == pytest.approx(np.mean(-10 * np.log10(errors[:, :2])))
    off = clip(depth=clip().depth * 1.5)
    assert scene_scores(off, 2, 50.0)["depth_error"] == pytest.approx(0.5)
    assert np.isnan(scene_scores(off, 2, 0.5)["depth_error"])  # nothing is that near
    result = score([clip(), clip(true=np.zeros((2, 3, 8, 8), int))], 2, 50.0)
    assert result.n == 2 and result.counts == {"scenes": 2, "empty": 1} and result.metrics["scene_fg_ari"] == 1
    deep = clip().true_depth
    deep[0, 0, 0, 0] = 1000.0  # a pixel of the sky, which is not compared
    low = clip().true_depth + 3
    for ends, beyond in (((0.5, 9.5), 1), ((0.5, float("inf")), 0), ((4.5, 20.0), 2)):
        told = score([clip(true_depth=deep), clip(true_depth=low)], 2, 50.0, ends=ends)
        assert told.counts["scenes_beyond_rays"] == beyond, ends


def test_ssim_is_its_formula_window_by_window():
    rng = np.random.default_rng(0)
    first = rng.uniform(size=(1, 2, 13, 14))
    second = np.clip(first + 0.2 * rng.normal(size=first.shape), 0, 1)
    line = np.exp(-((np.arange(11) - 5.0) ** 2) / 4.5)
    w = np.outer(line, line) / line.sum() ** 2
    values = []
    for c in range(2):
        for i in range(3):
            for j in range(4):
                x, y = (t[0, c, i : i + 11, j : j + 11] for t in (first, second))
                mx, my = (w * x).sum(), (w * y).sum()
                vx, vy, both = (w * (x - mx) ** 2).sum(), (w * (y - my) ** 2).sum(), (w * (x - mx) * (y - my)).sum()
                values.append((2 * mx * my + 1e-4) * (2 * both + 9e-4) / ((mx**2 + my**2 + 1e-4) * (vx + vy + 9e-4)))
    pair = (torch.from_numpy(first), torch.from_numpy(second))
    assert ssim(*pair).item() == pytest.approx(np.mean(values), abs=1e-9)
    assert ssim(pair[0], pair[0]).item() == pytest.approx(1) and ssim(*(t[..., :9] for t in pair)).isnan().all()
