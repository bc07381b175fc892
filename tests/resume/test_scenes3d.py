"""Posed scenes: made, checked, trained on, killed and resumed bit-identically, on two ranks, scored and probed; and published ones are read."""

import io
import json
import shutil

import numpy as np
import pytest
from PIL import Image

from evals.sets.view_set import ViewSet
from launch.commands.train import train
from sparo_data.synthetic.viewed_sets import MultiViewSetConfig, render_multi_view
from sparo_data.writer import write_wds_layout
from sparo_train.core.errors import DataError
from sparo_train.data.sources.base import open_source
from sparo_train.data.sources.shards import ShardsConfig
from tests.helpers.processes import sparo, start_sparo
from tests.helpers.recipes import slots_recipe
from tests.helpers.runs import assert_bit_equal, goes_on_across_engines, kill_behind, losses_of, run
from tests.unit.test_viewed_formats import nerf_folder


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    root = tmp_path_factory.mktemp("scenes") / "s"
    render_multi_view(root, MultiViewSetConfig(size=16, frames=4, train=24, test=6, per_shard=12))
    return root


def recipe_of(root, out, decoder, **model):
    tree = slots_recipe(root / "train", out)
    encoder = {"layers": "plain", "channels": 8, "width": 16, "num_downsample": 2, "transformer": {"blocks": 1}}
    tree["objective"] = {
        "kind": "novel_views",
        "frames": {"count": 2, "stride": [1, 2]},
        "views": {"context": 2, "rays": 12},
        "model": {
            "image_size": 16,
            "encoder": encoder,
            "grouping": {"preset": "psb", "slots": 3, "width": 16, "iterations": 2},
            "decoder": decoder,
            **model,
        },
    }
    tree["data"] = {**tree["data"], "crop_scale": [1.0, 1.0], "hflip": 0.0}
    return tree


@pytest.mark.long
def test_scenes_are_trained_on_resumed_scored_and_probed(scenes, tmp_path, write_recipe):
    tasks = {
        "views": {"task": "view_masks", "root": str(scenes / "scenes"), "frames": 3},
        "probe": {"task": "scene_probe", "root": str(scenes / "scenes"), "frames": 2, "restarts": 2},
    }
    decoder = {"kind": "nerf", "bins": 4, "near": 1.0, "far": 30.0, "static": True, "density": "relu"}
    tree = recipe_of(scenes, tmp_path / "runs", decoder) | {"eval": {"tasks": tasks}}
    straight = run({**tree, "out": str(tmp_path / "straight")})
    assert train(straight).reason == "finished"
    recipe, folder = write_recipe(tree), tmp_path / "runs/slots"
    kill_behind(start_sparo("train", str(recipe)), folder, 5)
    done = sparo("train", str(recipe))
    assert done.returncode == 0 and "views psnr_held_out" in done.stderr and " dB" in done.stderr, done.stderr
    assert "could not be drawn" not in done.stderr
    with Image.open(max((folder / "pictures").iterdir())) as sheet:  # of the first scene, for every evaluation
        assert sheet.width > 5 * 64
    assert_bit_equal(folder, straight.folder)
    done = sparo("eval", str(folder), "--features", str(tmp_path / "store"), "--json", "v.json", cwd=tmp_path)
    results = {r["task"]: r for r in json.loads((tmp_path / "v.json").read_text())["results"].values()}
    views, probe = results["view_masks"], results["scene_probe"]
    assert done.returncode == 0 and views["n"] == 6 and views["options"]["shown"] == 2, done.stderr
    wanted = {
        "psnr_held_out",
        "psnr_nearest",
        "psnr_mean",
        "ssim_held_out",
        "image_fg_ari",
        "video_fg_ari",
        "camera_fg_ari",
        "scene_fg_ari",
        "depth_error",
    }
    assert wanted <= views["metrics"].keys() and 0 < views["metrics"]["depth_error"] < 1
    assert {"position_r2", "floor_position_r2", "color_accuracy"} <= probe["metrics"].keys()
    again = sparo("eval", str(folder), "--features", "none", "--json", "n.json", cwd=tmp_path)
    other = {r["task"]: r for r in json.loads((tmp_path / "n.json").read_text())["results"].values()}
    assert again.returncode == 0 and other["view_masks"]["metrics"] == views["metrics"]
    pictures_are_drawn(folder, tmp_path)
    for changes, told in (
        ({"num_context_views": 5}, "leaves none to score"),
        ({"frames": 9}, "has 4 frames and 5 views, but 9 frames and 5 views"),
    ):
        (tmp_path / "bad.yaml").write_text(json.dumps({"tasks": {"v": {**tasks["views"], **changes}}}))
        done = sparo("eval", str(folder), "--data", "bad.yaml", "--features", "none", cwd=tmp_path)
        assert done.returncode == 2 and told in done.stderr and "Traceback" not in done.stderr, done.stderr
    (tmp_path / "v.yaml").write_text(json.dumps({"tasks": {"v": tasks["views"]}}))
    done = sparo("eval", "pixels:8", "--data", "v.yaml", cwd=tmp_path)
    assert done.returncode == 2 and "takes images without cameras. Train with objective.kind=novel_views" in done.stderr
    knn = {"task": "masks", "root": str(scenes / "scenes")}
    done = sparo("train", str(write_recipe({**tree, "name": "unfit", "eval": {"tasks": {"m": knn}}})))
    assert done.returncode == 2 and "takes views with their cameras. Use view_masks or scene_probe" in done.stderr
    assert not (tmp_path / "runs/unfit/checkpoints").exists()
    scenes_of_others_are_scored(folder, tmp_path)
    recipe = write_recipe(tree)
    done = sparo("train", str(recipe), "data.hflip=0.5", "name=mirrored")
    assert done.returncode == 2 and "a cropped or mirrored view" in done.stderr, done.stderr
    done = sparo("train", str(recipe), "objective.model.decoder.far=3.0", "name=near", "eval.tasks={}")
    assert (
        done.returncode != 0
        and "`near` and `far` in the sample's .json are outside the range of distances in which rays" in done.stderr
        and "no usable sample" in done.stderr
    )


def dead_ends(folder):
    """Check commands that do not apply to a run of scenes, and their messages."""
    return {
        ("slots", "panels", folder, "--task", "views"): "Use `sparo slots views` for scenes",
        ("slots", "show", folder, "--task", "views"): "sparo slots views",
        ("export", folder): "no export layout supports it",
    }


def scenes_of_others_are_scored(folder, cwd):
    """Without masks and depth, there are scores of views and none of objects."""
    for name in ("lego", "ship", "chair"):
        nerf_folder(cwd / "theirs" / name)
    done = sparo("data", "convert", "theirs", "theirs3d", "--as", "nerf", "--size", "16", "--test", "2", cwd=cwd)
    assert done.returncode == 0 and "1 scenes for training, 2 for evaluation" in done.stdout + done.stderr, done.stderr
    (cwd / "o.yaml").write_text(json.dumps({"tasks": {"o": {"task": "view_masks", "root": "theirs3d/scenes"}}}))
    done = sparo("eval", str(folder), "--data", "o.yaml", "--features", "kept", "--json", "o.json", cwd=cwd)
    assert done.returncode == 0, done.stderr
    (result,) = json.loads((cwd / "o.json").read_text())["results"].values()
    assert result["n"] == 2 and {"psnr_held_out", "ssim_held_out"} <= result["metrics"].keys()
    assert not {"scene_fg_ari", "depth_error", "ari"} & result["metrics"].keys()
    told = {words: sparo(*words, cwd=cwd).stderr for words in dead_ends(str(folder))}
    assert all(says in told[words] for words, says in dead_ends(str(folder)).items()), told
    assert sparo("data", "check", "theirs3d/train", cwd=cwd).returncode == 0


def pictures_are_drawn(folder, cwd):
    done = sparo("slots", "views", str(folder), "--task", "views", "--scenes", "2", "--out", "page", cwd=cwd)
    assert done.returncode == 0, done.stderr
    page = (cwd / "page/report.html").read_text()
    assert "psnr_held_out" in page and " dB" in page  # scores of the run's last step
    with Image.open(cwd / "page/scene-0.png") as sheet, Image.open(cwd / "page/turntable-0.webp") as moving:
        assert sheet.width > 5 * 64 and moving.n_frames >= 12
    assert page.count("<img") == 4 and "scene-1.png" in page
    done = sparo("slots", "views", "nothere", "--data", "gone.yaml", "--out", "none", cwd=cwd)
    assert done.returncode == 2 and "nothere" in done.stderr and not (cwd / "none").exists()


@pytest.mark.long
@pytest.mark.parametrize("kind", ["mixer", "broadcast"])
def test_two_ranks_train_on_scenes_as_one_process_does(scenes, tmp_path, write_recipe, kind):
    if kind == "mixer":
        tree = recipe_of(scenes, tmp_path / "runs", {"kind": "slot_mixer", "fourier_bands": 4, "blocks": 1, "heads": 2})
    else:
        grouping = {"preset": "savi", "slots": 3, "width": 16, "slot_init": "learned"}
        decoder = {"kind": "broadcast", "fourier_bands": 4, "hidden": [16], "max_activations": 400}
        tree = recipe_of(scenes, tmp_path / "runs", decoder, grouping=grouping, predictor={"mlp_width": 16})
    straight = run({**tree, "out": str(tmp_path / "straight")})
    assert train(straight).reason == "finished"
    recipe = write_recipe({**tree, "out": str(tmp_path / "two"), "micro_batch_size": 2})
    assert goes_on_across_engines(recipe, tmp_path / "two/slots") == pytest.approx(losses_of(straight.folder), rel=1e-4)


@pytest.mark.long
def test_scenes_are_reproducible_and_checked(scenes, tmp_path):
    line = ["data", "scenes3d", "again", "--size", "16", "--frames", "2", "--train", "2", "--test", "1"]
    assert sparo(*line, cwd=tmp_path).returncode == 0
    first = (tmp_path / "again/train/00000.tar").read_bytes()
    shutil.rmtree(tmp_path / "again")
    assert sparo(*line, cwd=tmp_path).returncode == 0 and (tmp_path / "again/train/00000.tar").read_bytes() == first
    done = sparo("data", "check", "again/train", cwd=tmp_path)
    assert done.returncode == 0 and "caption" not in done.stdout.lower().replace("captions", ""), (
        done.stdout + done.stderr
    )
    done = sparo(*line[:3], "--size", "24", cwd=tmp_path)
    assert done.returncode == 2 and "with other options" in done.stderr


def test_a_plane_of_another_size_is_reported_with_its_sample(scenes, tmp_path):
    shard = next(scenes.rglob("scenes/test/*.tar"))
    (key, fields), *_ = [storage.read(0) for storage in open_source("x", ShardsConfig(shards=(str(shard),))).storages]
    small = Image.fromarray(np.zeros((5, 7), np.uint16))
    small.save(buffer := io.BytesIO(), "PNG")
    write_wds_layout(tmp_path / "odd", [(key, {**fields, "c1.000.depth.png": buffer.getvalue()})])
    with pytest.raises(DataError, match=r"depth plane of \(5, 7\) does not match images of"):
        ViewSet(str(tmp_path / "odd"), None, None).read(0)
