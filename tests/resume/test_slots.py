"""Slot models: killed and resumed bit-identically, and on two ranks; then scored by their masks."""

import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing import event_accumulator

from evals.encoders.loading import run_weights
from launch.commands.train import train
from sparo_data.synthetic.object_scenes import ObjectSetConfig, render_objects
from sparo_data.synthetic.tetrominoes import TetrominoesConfig, make_tetrominoes
from sparo_data.writer import encode_image, write_wds_layout
from sparo_train.core.disk import checkpoint_store as store
from sparo_train.core.disk import metrics
from sparo_train.train.build import build_objective
from tests.helpers.processes import sparo, start_sparo
from tests.helpers.recipes import dino_recipe, slots_recipe
from tests.helpers.runs import (
    assert_bit_equal,
    finish,
    goes_on_across_engines,
    kill_behind,
    losses_of,
    run,
    start_ranks,
)
from tests.helpers.samples import jpeg


@pytest.mark.long
def test_kill_minus_nine_loses_nothing_and_two_ranks_agree(shards, tmp_path, write_recipe):
    straight = run(slots_recipe(shards, tmp_path / "straight"))
    assert train(straight).reason == "finished"
    recipe = write_recipe(slots_recipe(shards, tmp_path / "killed"))
    folder = tmp_path / "killed/slots"
    kill_behind(start_sparo("train", str(recipe)), folder, 5)
    done = sparo("train", str(recipe))
    assert done.returncode == 0, done.stderr
    assert_bit_equal(folder, straight.folder)
    assert {"mse", "slots_used", "mask_sharpness"} <= metrics.read(folder / "metrics.jsonl", "train")[-1].keys()
    recipe = write_recipe(slots_recipe(shards, tmp_path / "two", micro_batch_size=2))
    assert goes_on_across_engines(recipe, tmp_path / "two/slots") == pytest.approx(losses_of(straight.folder), rel=1e-4)


@pytest.mark.long
def test_masks_are_scored_while_training_and_afterwards(tmp_path, write_recipe):
    make_tetrominoes(tmp_path / "t", TetrominoesConfig(train=64, test=12))
    tasks = {"masks": {"task": "masks", "root": str(tmp_path / "t/masks")}}
    tree = slots_recipe(tmp_path / "t/train", tmp_path / "runs", eval={"tasks": tasks}, steps=4)
    tree["log"] = {**tree["log"], "tensorboard": True}
    done = sparo("train", str(write_recipe(tree)), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "masks fg_ari" in done.stderr and "could not be drawn" not in done.stderr
    run_folder = str(tmp_path / "runs/slots")
    with Image.open(tmp_path / "runs/slots/pictures/step-00000004.png") as sheet:
        assert sheet.size == (7 * 100 + 4, 6 * 100 + 18)
    (events,) = (tmp_path / "runs/slots/tensorboard/pictures").iterdir()
    found = event_accumulator.EventAccumulator(str(events)).Reload().Images("masks")
    assert [image.step for image in found] == [4] and (found[0].width, found[0].height) == sheet.size
    done = sparo("eval", run_folder, "--features", str(tmp_path / "store"), "--json", "m.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (result,) = json.loads((tmp_path / "m.json").read_text())["results"].values()
    assert (
        result["n"] == 12
        and result["headline"] == "fg_ari"
        and {"ari", "miou", "mbo_i", "fg_ari_savi"} <= result["metrics"].keys()
    )
    assert result["options"]["mask_size"] == 16 and result["options"]["resampling"] == "nearest"
    again = sparo("eval", run_folder, "--features", "none", "--json", "n.json", cwd=tmp_path)
    (other,) = json.loads((tmp_path / "n.json").read_text())["results"].values()
    assert again.returncode == 0 and other["metrics"] == result["metrics"]

    pictures_are_drawn(run_folder, tasks, tmp_path)
    bad_masks_are_refused_and_classes_scored(run_folder, tmp_path)


def best_and_worst_are_drawn(run_folder, tmp_path):
    line = ["--task", "masks", "--images", "3", "--tile", "32"]
    done = sparo("slots", "panels", run_folder, *line, "--uncertain", "--out", "u.png", cwd=tmp_path)
    with Image.open(tmp_path / "u.png") as sheet:
        assert done.returncode == 0 and sheet.size == (8 * 36 + 4, 3 * 36 + 18), done.stderr
    worse = tmp_path / "worse"
    shutil.copytree(run_folder, worse)
    lines = (worse / "evals/results.jsonl").read_text().splitlines()
    changed = json.loads(lines[-1])
    changed["metrics"]["fg_ari"] = changed["metrics"]["fg_ari"] - 0.5
    (worse / "evals/results.jsonl").write_text("\n".join([*lines[:-1], json.dumps(changed)]) + "\n")
    done = sparo("slots", "panels", str(worse), run_folder, *line, "--out", "b.png", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    best, worst = done.stdout.splitlines()[:2]
    assert best.startswith(f"best of 2 runs: {run_folder} (fg_ari") and worst.startswith(
        f"worst of 2 runs: {worse} (fg_ari"
    )
    with Image.open(tmp_path / "b.png") as sheet:  # image, true masks, best, worst
        assert sheet.size == (4 * 36 + 4, 3 * 36 + 18)
    (worse / "evals/results.jsonl").unlink()
    for words, told in (
        ((run_folder, str(worse), *line, "--out", "b.png"), "worse"),
        (
            (run_folder, run_folder, "--image", "own.jpg", "--out", "b.png"),
            "with several checkpoints, give --task, set --out to a .png file",
        ),
        (
            (run_folder, run_folder, *line, "--out", "b"),
            "with several checkpoints, give --task, set --out to a .png file",
        ),
        ((run_folder, *line, "--uncertain", "--out", "page"), "--uncertain: works only with images (not videos)"),
    ):
        done = sparo("slots", "panels", *words, cwd=tmp_path)
        assert done.returncode == 2 and told in done.stderr and "Traceback" not in done.stderr, done.stderr
    shutil.rmtree(worse)


def pictures_are_drawn(run_folder, tasks, tmp_path):
    done = sparo("slots", "show", run_folder, "--task", "masks", "--images", "6", "--out", "pictures", cwd=tmp_path)
    assert done.returncode == 0 and (tmp_path / "pictures/report.html").stat().st_size > 10_000, done.stderr
    done = sparo("slots", "panels", run_folder, "--task", "masks", "--images", "3", "--tile", "32", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    with Image.open(tmp_path / "panels.png") as sheet:  # image, true masks, masks, decoded, three slots; three rows
        assert sheet.size == (7 * 36 + 4, 3 * 36 + 18)
        colours = {tuple(c) for c in np.asarray(sheet)[18:50, 40:72].reshape(-1, 3).tolist()}
        assert len(colours) == 4 and (110, 110, 110) in colours  # three pieces on grey
    best_and_worst_are_drawn(run_folder, tmp_path)
    (tmp_path / "own.jpg").write_bytes(jpeg(1))
    (tmp_path / "other.yaml").write_text(json.dumps({"tasks": {"elsewhere": tasks["masks"]}}))
    others = ("--image", "own.jpg", "--data", "other.yaml", "--task", "elsewhere", "--images", "1")
    done = sparo("slots", "panels", run_folder, *others, "--out", "own.png", "--tile", "32", cwd=tmp_path)
    with Image.open(tmp_path / "own.png") as sheet:
        assert done.returncode == 0 and sheet.size == (7 * 36 + 4, 2 * 36 + 18)
    for line, told in (
        ([], "Name a task"),
        (["--task", "nosuch"], "nosuch"),
        (["--image", "no.jpg"], "no.jpg"),
        (["--out", "a.bmp"], "a .png file"),
        (["--task", "masks", "--out", "a.gif"], "only tasks with videos can be animated"),
        (["--image", "own.jpg", "--out", "page"], "can only show a task (--task)"),
    ):
        done = sparo("slots", "panels", run_folder, *line, cwd=tmp_path)
        assert done.returncode == 2 and told in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert not (tmp_path / "page").exists()  # a refused command leaves no files
    done = sparo("slots", "panels", "pixels:8", "--image", "own.jpg", cwd=tmp_path)
    assert done.returncode == 2 and "has no reconstructions to draw" in done.stderr
    (tmp_path / "clip.yaml").write_text(json.dumps({"tasks": tasks}))
    done = sparo("eval", "pixels:8", "--data", "clip.yaml", cwd=tmp_path)
    assert done.returncode == 2 and "Use an object-centric model" in done.stderr
    for split, n in (("train", 24), ("test", 8)):
        rows = [(f"{i}", {"jpg": jpeg(i % 4), "cls": str(i % 4).encode()}) for i in range(n)]
        write_wds_layout(tmp_path / "near", rows, classnames=list("abcd"), split=split)
    near = {"knn": {"task": "knn", "k": [5], **{split: str(tmp_path / "near" / split) for split in ("train", "test")}}}
    (tmp_path / "near.yaml").write_text(json.dumps({"tasks": near}))
    done = sparo("eval", run_folder, "--data", "near.yaml", "--slots", "0,2", "--features", "none", cwd=tmp_path)
    assert done.returncode == 0 and "acc1_k5" in done.stdout, done.stderr  # their slots are encodings like others


def bad_masks_are_refused_and_classes_scored(run_folder, tmp_path):
    blank = encode_image(np.zeros((36, 40), np.uint8))
    sets = {
        "blank": ({"mask.png": blank}, "no image has an object"),
        "torn": ({"mask.png": blank[:40]}, ".mask.png: cannot be read"),
        "none": ({}, "has no .mask.png member"),
        "other": (
            {"mask.png": encode_image(np.zeros((16, 16), np.uint8))},
            ".mask.png has 16 x 16 pixels, but its image 40 x 36",
        ),
    }
    sets["class"] = (
        {
            "mask.png": encode_image(np.zeros((36, 40), np.uint8)),
            "semantic.png": encode_image(np.zeros((16, 16), np.uint8)),
        },
        ".semantic.png has (16, 16) pixels",
    )
    for name, (fields, told) in sets.items():
        write_wds_layout(tmp_path / name, [("0", {"jpg": jpeg(0), **fields})])
        (tmp_path / "other.yaml").write_text(
            json.dumps({"tasks": {"masks": {"task": "masks", "root": str(tmp_path / name)}}})
        )
        done = sparo("eval", run_folder, "--data", "other.yaml", "--features", "none", cwd=tmp_path)
        assert done.returncode == 2 and told in done.stderr and "Traceback" not in done.stderr, (name, done.stderr)
    two = np.zeros((36, 40), np.uint8)
    two[:10], two[10:20, :20], two[30:] = 1, 2, 255
    semantic = {
        "mask.png": encode_image(two),
        "semantic.png": encode_image(np.where((two > 0) & (two < 255), 7, two).astype(np.uint8)),
    }
    write_wds_layout(tmp_path / "classes", [("0", {"jpg": jpeg(0), **semantic})])
    tree = {"tasks": {"c": {"task": "masks", "root": str(tmp_path / "classes"), "headline": "mbo_c"}}}
    (tmp_path / "classes.yaml").write_text(json.dumps(tree))
    done = sparo("eval", run_folder, "--data", "classes.yaml", "--features", "none", "--json", "c.json", cwd=tmp_path)
    (result,) = json.loads((tmp_path / "c.json").read_text())["results"].values()
    assert done.returncode == 0 and result["options"]["ignore"] == 255 and 0 < result["metrics"]["mbo_c"] <= 1
    tree["tasks"]["c"]["root"] = str(tmp_path / "t/masks")
    (tmp_path / "classes.yaml").write_text(json.dumps(tree))
    done = sparo("eval", run_folder, "--data", "classes.yaml", "--features", "none", cwd=tmp_path)
    assert done.returncode == 2 and "no image has a .semantic.png" in done.stderr, done.stderr


@pytest.mark.long
def test_features_of_a_dino_run_are_grouped_and_reconstructed(shards, tmp_path, write_recipe):
    dino = train(run(dino_recipe(shards, tmp_path / "dino", steps=3)))
    assert dino.reason == "finished"
    make_tetrominoes(tmp_path / "t", TetrominoesConfig(train=32, test=6))
    tree = slots_recipe(tmp_path / "t/train", tmp_path / "runs")
    model = {k: v for k, v in tree["objective"]["model"].items() if k != "frame"}
    encoder = {"kind": "frozen", "checkpoint": str(tmp_path / "dino/dino"), "width": 32, "patch": 8}
    encoder["cache"] = str(tmp_path / "kept")
    tree["data"] |= {"crop_scale": [1.0, 1.0], "hflip": 0.0}
    drawn = {"decoder": {"kind": "patch", "hidden": [16]}, "target": "features", "image_size": 32}
    tree["objective"]["model"] = {
        **model,
        "encoder": encoder,
        **drawn,
        "grouping": {"preset": "oclf", "slots": 3, "width": 16},
    }
    straight = run({**tree, "out": str(tmp_path / "straight")})
    assert train(straight).reason == "finished"
    recipe, folder = write_recipe(tree), tmp_path / "runs/slots"
    kill_behind(start_sparo("train", str(recipe)), folder, 5)
    done = sparo("train", str(recipe))
    assert done.returncode == 0 and "cannot be counted" not in done.stderr, done.stderr
    assert_bit_equal(folder, straight.folder)
    recipe = write_recipe({**tree, "out": str(tmp_path / "two"), "micro_batch_size": 2})
    assert goes_on_across_engines(recipe, tmp_path / "two/slots") == pytest.approx(losses_of(straight.folder), rel=1e-4)
    assert len(list((tmp_path / "kept").rglob("*.npy"))) == 32
    done = sparo("train", str(recipe), "data.hflip=0.5", "name=refused")
    assert done.returncode == 2 and "encoder.cache: random crops and flips give a different image" in done.stderr, (
        done.stderr
    )
    objectives = [build_objective(run({**tree, "seed": seed})) for seed in (1, 2)]
    first, second = (o.model.tower.project[0].weight for o in objectives)
    assert not torch.equal(first, second)  # the frozen run's seed does not affect this run
    before, after = (
        run_weights(store.CheckpointStore(f / "checkpoints").latest()) for f in (tmp_path / "dino/dino", folder)
    )
    frozen = {n.split("tower.encoder.model.")[1]: t for n, t in after.items() if "tower.encoder.model." in n}
    assert frozen and all(torch.equal(before[f"teacher.backbone.{n}"], t) for n, t in frozen.items())
    (tmp_path / "m.yaml").write_text(json.dumps({"tasks": {"m": {"task": "masks", "root": str(tmp_path / "t/masks")}}}))
    done = sparo("eval", str(folder), "--data", "m.yaml", "--features", "none", "--json", "m.json", cwd=tmp_path)
    (result,) = json.loads((tmp_path / "m.json").read_text())["results"].values()
    assert done.returncode == 0 and result["n"] == 6 and result["options"]["mask_size"] == 32
    (tmp_path / "dino/dino").rename(tmp_path / "dino/gone")
    done = sparo("eval", str(folder), "--data", "m.yaml", "--features", "none", cwd=tmp_path)
    assert done.returncode == 2 and str(tmp_path / "dino/dino") in done.stderr and "Traceback" not in done.stderr


@pytest.mark.long
def test_slate_reconstructs_tokens_resumes_and_is_scored(tmp_path, write_recipe):
    make_tetrominoes(tmp_path / "t", TetrominoesConfig(train=64, test=6))
    tasks = {
        name: {"task": task, "root": str(tmp_path / "t/masks")}
        for name, task in (("m", "masks"), ("d", "reconstruction"))
    }
    tree = slots_recipe(tmp_path / "t/train", tmp_path / "runs", eval={"tasks": tasks})
    tree["objective"] = {
        "kind": "slate",
        "model": {
            "image_size": 16,
            "encoder": {"kind": "tokens", "width": 16},
            "features": 16,
            "grouping": {"preset": "slate", "slots": 3, "width": 16},
            "dvae": {"vocab": 12, "channels": 8, "tau_steps": 8},
            "decoder": {"width": 16, "blocks": 2, "heads": 2},
        },
    }
    tree["optim"] = {**tree["optim"], "groups": [{"match": ["model.dvae.*"], "lr_factor": 3.0, "schedule": "constant"}]}
    straight = run({**tree, "out": str(tmp_path / "straight")})
    assert train(straight).reason == "finished"
    recipe, folder = write_recipe(tree), tmp_path / "runs/slots"
    kill_behind(start_sparo("train", str(recipe)), folder, 5)
    done = sparo("train", str(recipe))
    assert done.returncode == 0 and "d psnr" in done.stderr and " dB" in done.stderr, done.stderr
    assert_bit_equal(folder, straight.folder)
    assert {"cross_entropy", "tau", "slots_used"} <= metrics.read(folder / "metrics.jsonl", "train")[-1].keys()
    # Each rank draws tokens from its own generator, so two ranks are compared with two.
    recipe = write_recipe({**tree, "out": str(tmp_path / "two"), "micro_batch_size": 2})
    found = goes_on_across_engines(recipe, tmp_path / "two/slots")
    whole = write_recipe({**tree, "out": str(tmp_path / "whole"), "micro_batch_size": 2})
    engine = "engine={kind: ddp, device: cpu, precision: fp32, timeout: 60}"
    assert [code for code, _ in finish(start_ranks(2, "train", whole, engine))] == [0, 0]
    assert found == pytest.approx(losses_of(tmp_path / "whole/slots"), rel=1e-4)

    done = sparo("eval", str(folder), "--features", "none", "--json", "s.json", cwd=tmp_path)
    results = json.loads((tmp_path / "s.json").read_text())["results"]
    assert done.returncode == 0 and " dB" in done.stdout, done.stderr
    by_headline = {r["headline"]: r for r in results.values()}
    assert by_headline["fg_ari"]["n"] == 6 and "attention" in by_headline["fg_ari"]["options"]["masks"]
    assert by_headline["psnr"]["options"]["drawn"] == "pixels" and 0 < by_headline["psnr"]["metrics"]["mse"] < 1
    line = ["slots", "panels", str(folder), "--task", "m", "--images", "2", "--tile", "32", "--out", "page"]
    done = sparo(*line, cwd=tmp_path)
    with Image.open(tmp_path / "page/image-1.png") as sheet:  # image, true masks, masks, decoded, three slots
        assert done.returncode == 0 and sheet.size == (7 * 36 + 4, 36 + 18), done.stderr
    page = (tmp_path / "page/report.html").read_text()
    assert page.count("<img") == 2 and "fg_ari" in page


@pytest.mark.long
def test_sets_of_objects_are_learned_resumed_and_scored(tmp_path, write_recipe):
    render_objects(tmp_path / "c", ObjectSetConfig(train=64, test=12, size=16, max_objects=3), processes=1)
    tasks = {"objects": {"task": "objects", "root": str(tmp_path / "c/masks")}}
    tree = slots_recipe(tmp_path / "c/train", tmp_path / "runs", eval={"tasks": tasks})
    tree["data"] |= {"crop_scale": [1.0, 1.0], "hflip": 0.0}
    model = {k: v for k, v in tree["objective"]["model"].items() if k not in ("frame", "decoder")}
    model["grouping"] = {"preset": "sa_me", "slots": 3, "width": 16, "slot_init": "same"}
    tree["objective"] = {"kind": "set_prediction", "model": model}
    straight = run({**tree, "out": str(tmp_path / "straight")})
    assert train(straight).reason == "finished"
    recipe, folder = write_recipe(tree), tmp_path / "runs/slots"
    kill_behind(start_sparo("train", str(recipe)), folder, 5)
    done = sparo("train", str(recipe))
    assert done.returncode == 0 and "objects ap_0.5" in done.stderr, done.stderr
    assert_bit_equal(folder, straight.folder)
    assert {"position_error", "attributes_right"} <= metrics.read(folder / "metrics.jsonl", "train")[-1].keys()
    recipe = write_recipe({**tree, "out": str(tmp_path / "two"), "micro_batch_size": 2})
    assert goes_on_across_engines(recipe, tmp_path / "two/slots") == pytest.approx(losses_of(straight.folder), rel=1e-4)

    done = sparo("eval", str(folder), "--features", "none", "--json", "o.json", cwd=tmp_path)
    (result,) = json.loads((tmp_path / "o.json").read_text())["results"].values()
    assert done.returncode == 0 and result["n"] == 12 and result["counts"]["predictions"] == 36
    assert list(result["metrics"]) == ["ap_inf", "ap_1", "ap_0.5", "ap_0.25", "ap_0.125", "ap_0.0625"]
    done = sparo("slots", "show", str(folder), "--task", "objects", "--images", "4", "--out", "pictures", cwd=tmp_path)
    assert done.returncode == 0 and (tmp_path / "pictures/report.html").stat().st_size > 10_000, done.stderr
    empty = {"jpg": jpeg(0), "json": b'{"objects": []}'}
    for fields, told in (
        (empty, "no image has an object"),
        ({"jpg": jpeg(0)}, "has no .json member"),
        ({**empty, "json": b"{"}, "no list `objects`"),
    ):
        write_wds_layout(tmp_path / "other", [("0", fields)])
        (tmp_path / "other.yaml").write_text(
            json.dumps({"tasks": {"o": {"task": "objects", "root": str(tmp_path / "other")}}})
        )
        done = sparo("eval", str(folder), "--data", "other.yaml", "--features", "none", cwd=tmp_path)
        assert done.returncode == 2 and told in done.stderr and "Traceback" not in done.stderr, done.stderr

    refused = {
        "data: images must not be cropped or mirrored": "data.hflip=0.5",
        "needs a mask per slot": f"eval.tasks={{m: {{task: masks, root: {tmp_path}/c/masks}}}}",
    }
    for told, override in refused.items():
        done = sparo("train", str(recipe), override, "name=refused")
        assert done.returncode == 2 and told in done.stderr, done.stderr
    done = sparo(
        "train", str(recipe), "objective.model.grouping.slots=2", "name=crowded", "data.max_bad_share_min_samples=8"
    )
    assert done.returncode == 2 and "3 objects, more than objective.model.grouping.slots=2" in done.stderr, done.stderr
