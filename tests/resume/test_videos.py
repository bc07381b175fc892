"""Slot models of videos: two ranks equal one process; resumed, scored and probed."""

import json

import pytest
import torch
from PIL import Image

from evals.encoders.loading import load_encoder
from launch.commands.train import train
from sparo_data.synthetic.video_sets import VideoSetConfig, render_videos
from sparo_data.writer import write_wds_layout
from sparo_train.data.sources.base import open_source
from sparo_train.data.sources.shards import ShardsConfig
from tests.helpers.processes import sparo, start_sparo
from tests.helpers.recipes import slots_recipe
from tests.helpers.runs import assert_bit_equal, goes_on_across_engines, kill_behind, losses_of, run


def video_recipe(tmp_path, kind):
    """Return a recipe of videos that are rendered here, and its two tasks."""
    render_videos(tmp_path / "v", VideoSetConfig(train=24, test=5, frames=6, size=16, per_shard=12, max_objects=2), 1)
    tasks = {
        name: {"task": "video_masks", "root": str(tmp_path / "v/clips"), **more}
        for name, more in (("c", {}), ("f", {"frames": 3, "first_frame": False, "headline": "psnr"}))
    }
    tree = slots_recipe(tmp_path / "v/train", tmp_path / "runs")
    savi = kind == "savi"
    grouping: dict = {"preset": "savi" if savi else "psb", "slots": 3, "width": 16, "iterations": 2}
    model = {k: v for k, v in tree["objective"]["model"].items() if k != "frame"} | {"grouping": grouping}
    if savi:  # like SAVi++: conditioned on the boxes of the first frame, predicts flow and depth
        grouping |= {"slot_init": "given", "qkv_width": 24}
        model |= {"predictor": {"mlp_width": 16}, "hint": {"hidden": 8}, "target": "flow_depth", "transformer": {}}
    objective = "slot_contrast" if kind == "slot_contrast" else "video_slots"
    tree["objective"] = {"kind": objective, "frames": {"count": 3, "stride": [1, 2]}, "model": model}
    tree["data"] = {**tree["data"], "crop_scale": [0.5, 1.0], "hflip": 0.5}
    return tree, tasks


@pytest.mark.long
@pytest.mark.parametrize("kind", ["savi", "slot_contrast"])
def test_two_ranks_train_on_videos_as_one_process_does(tmp_path, write_recipe, kind):
    tree, _ = video_recipe(tmp_path, kind)
    straight = run({**tree, "out": str(tmp_path / "straight")})
    assert train(straight).reason == "finished"
    recipe = write_recipe({**tree, "out": str(tmp_path / "two"), "micro_batch_size": 2})
    assert goes_on_across_engines(recipe, tmp_path / "two/slots") == pytest.approx(losses_of(straight.folder), rel=1e-4)


def test_video_slate_reconstructs_tokens_and_is_probed(tmp_path, write_recipe):
    tree, tasks = video_recipe(tmp_path, "psb")
    small = {"dvae": {"vocab": 16, "channels": 8}, "decoder": {"width": 16, "blocks": 1, "heads": 2}}
    kept = {k: v for k, v in tree["objective"]["model"].items() if k not in ("decoder", "target")}
    tree["objective"] = {"kind": "video_slate", "frames": {"count": 2}, "model": {**kept, **small}}
    probe = {"task": "slot_probe", "root": str(tmp_path / "v/clips"), "frames": 3, "restarts": 2}
    tree |= {"steps": 4, "eval": {"tasks": {"clips": {**tasks["c"], "frames": 3}, "probe": probe}}}
    done = sparo("train", str(write_recipe(tree)))
    assert done.returncode == 0 and "probe position_r2" in done.stderr, done.stderr
    folder = tmp_path / "runs/slots"
    (line,) = [x for x in (folder / "metrics.jsonl").read_text().splitlines() if '"eval"' in x]
    found = json.loads(line)
    assert {"position_r2", "floor_position_r2", "velocity_r2", "color_accuracy", "floor_shape_accuracy"} <= set(
        found["probe"]
    )
    assert "video_fg_ari" in found["clips"] and "psnr" not in found["clips"]
    assert (folder / "pictures/step-00000004.webp").exists()
    # A pixel decoder for frozen slots gives masks to a model that has none.
    start = {"checkpoint": str(folder), "allow_missing": ["model.decoder.*"]}
    start["allow_unused"] = [
        f"model.{n}*" for n in ("dvae.", "decoder.", "embed.", "head.", "project.", "bos", "pos_embed")
    ]
    model = {**kept, "decoder": {"kind": "mlp", "hidden": [16]}}
    drawn = {"kind": "video_slots", "frames": {"count": 2}, "model": model}
    again = {**tree, "name": "drawn", "start_from": start, "freeze": ["model.tower.*"], "objective": drawn}
    again["eval"] = {"tasks": {"clips": {**tasks["c"], "frames": 3}}}
    done = sparo("train", str(write_recipe(again)))
    assert done.returncode == 0 and "clips video_fg_ari" in done.stderr, done.stderr
    before, after = (load_encoder(str(tmp_path / "runs" / n)).model.tower.state_dict() for n in ("slots", "drawn"))
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.long
def test_videos_are_trained_on_resumed_and_scored(tmp_path, write_recipe):
    tree, tasks = video_recipe(tmp_path, "psb")
    tree["eval"] = {"tasks": tasks}
    straight = run({**tree, "out": str(tmp_path / "straight")})
    assert train(straight).reason == "finished"
    recipe, folder = write_recipe(tree), tmp_path / "runs/slots"
    kill_behind(start_sparo("train", str(recipe)), folder, 5)
    done = sparo("train", str(recipe))
    assert done.returncode == 0 and "c video_fg_ari" in done.stderr and " dB" in done.stderr, done.stderr
    assert_bit_equal(folder, straight.folder)
    done = sparo("eval", str(folder), "--features", str(tmp_path / "store"), "--json", "v.json", cwd=tmp_path)
    results = json.loads((tmp_path / "v.json").read_text())["results"]
    whole, first = sorted(results.values(), key=lambda r: -r["options"]["frames"])
    assert done.returncode == 0 and (whole["options"]["frames"], first["options"]["frames"]) == (6, 3), done.stderr
    assert whole["counts"]["clips"] == 5 and whole["options"]["trained_frames"] == 3 and first["headline"] == "psnr"
    assert {"video_fg_ari", "image_fg_ari", "ari", "video_mbo", "video_miou", "psnr"} <= whole["metrics"].keys()
    with (
        Image.open(folder / "pictures/step-00000012.png") as sheet,
        Image.open(folder / "pictures/step-00000012.webp") as moving,
    ):
        assert (
            sheet.size == (7 * 68 + 4, 3 * 6 * 68 + 18)
            and moving.n_frames == 6
            and moving.size == (7 * 68 + 4, 3 * 68 + 18)
        )
    for line, size, frames in (
        (["clips.png"], (7 * 36 + 4, 12 * 36 + 18), 1),
        (["clips.gif"], (7 * 36 + 4, 2 * 36 + 18), 6),
    ):
        done = sparo(
            "slots", "panels", str(folder), "--task", "c", "--images", "2", "--tile", "32", "--out", *line, cwd=tmp_path
        )
        with Image.open(tmp_path / line[0]) as sheet:
            assert done.returncode == 0 and sheet.size == size and getattr(sheet, "n_frames", 1) == frames, done.stderr
    done = sparo("slots", "panels", str(folder), "--task", "c", "--images", "2", "--out", "page", cwd=tmp_path)
    page = (tmp_path / "page/report.html").read_text()
    assert done.returncode == 0 and done.stdout.split()[0] == "page/report.html" and page.count("<img") == 4, (
        done.stderr
    )
    assert "video_fg_ari" in page and 'src="clip-1.webp"' in page
    with Image.open(tmp_path / "page/clip-0.webp") as moving:
        assert moving.n_frames == 6
    (tmp_path / "long.yaml").write_text(json.dumps({"tasks": {"l": {**tasks["c"], "frames": 7}}}))
    done = sparo("eval", str(folder), "--data", "long.yaml", "--features", "none", cwd=tmp_path)
    assert done.returncode == 2 and "has 6 frames, but 7 are scored. Set frames: 6 or less" in done.stderr
    # A task that cannot be scored does not prevent the other scores and the table.
    (storage,) = open_source("v", ShardsConfig(shards=str(tmp_path / "v/clips/test"))).storages
    (first, whole), (second, fields) = (storage.read(number) for number in range(2))
    cut = {name: data for name, data in fields.items() if not name.startswith("005.")}
    write_wds_layout(tmp_path / "cut", [(first, whole), (second, cut)])
    both = {"l": {**tasks["c"], "root": str(tmp_path / "cut")}, "c": tasks["c"]}
    (tmp_path / "both.yaml").write_text(json.dumps({"tasks": both}))
    done = sparo("eval", str(folder), "--data", "both.yaml", "--json", "both.json", cwd=tmp_path)
    assert done.returncode == 2 and "has 5 frames, but 6 are scored" in done.stderr and "video_fg_ari" in done.stdout
    assert [name.rpartition("/")[2] for name in json.loads((tmp_path / "both.json").read_text())["results"]] == ["c"]
    (tmp_path / "c.yaml").write_text(json.dumps({"tasks": {"c": tasks["c"]}}))
    done = sparo("eval", "pixels:8", "--data", "c.yaml", cwd=tmp_path)
    assert done.returncode == 2 and "takes single images. Train with objective.kind=video_slots" in done.stderr
    short = write_recipe(
        {**tree, "name": "short", "objective": {**tree["objective"], "frames": {"count": 7}}, "eval": {}}
    )
    done = sparo("train", str(short))
    assert done.returncode != 0 and "no usable sample" in done.stderr and "shorter than frames.count=7" in done.stderr
