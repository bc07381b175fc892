"""Recipes with `auto`: values that follow from a folder of images, initial weights and the machine; and `data check` on folders."""

import json
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import yaml
from PIL import Image

from launch.recipes import load_run
from sparo_train.core.errors import ConfigError, DataError
from sparo_train.data.examples.survey import image_facts, survey
from sparo_train.data.sources.base import DataConfig, open_source
from sparo_train.data.sources.detect import source_block, source_config
from tests.helpers.processes import sparo
from tests.helpers.samples import image_folder, jpeg


@pytest.fixture
def images(tmp_path):
    return image_folder(tmp_path / "images", 40)


def chosen(folder, *words):
    return load_run("own_images", [f"data={folder}", *words])


def test_sizes_follow_the_images_and_the_machine(images):
    config = chosen(images, "auto=cpu")
    model = config.objective.model
    # The shorter sides have 50 to 89 pixels.
    assert (model.image_size, model.patch_size, model.width, config.batch_size) == (64, 8, 128, 8)
    assert config.engine.precision == "fp32" and model.readout.slots == 32
    assert config.optim.warmup_steps < config.total_steps(40)
    large = chosen(images, "auto=gpu")
    assert large.objective.model.arch == "vit_small" and large.engine.precision == "bf16"
    assert large.objective.model.readout.slots == 64 and large.objective.crops.local_crops_number == 8
    reasons = {choice.key: choice.reason for choice in config.choices}
    assert reasons["objective.model.width"] == "on CPUs" and "40 images" in reasons["batch_size"]
    assert all(choice.text.startswith(f"auto: {choice.key}=") for choice in config.choices)


def test_given_keys_are_kept_and_others_adapt(images):
    words = ["auto=gpu", "objective.model.image_size=32", "batch_size=16", "steps=50", "objective.model.arch=vit_tiny"]
    config = chosen(images, *words, "objective.model.readout={kind: cls}", "optim.lr=1")
    model = config.objective.model
    assert (model.image_size, config.batch_size, config.steps, config.epochs, model.width) == (32, 16, 50, None, 192)
    assert config.optim.lr == 1 and config.optim.warmup_steps == 5 and config.objective.crops.local_size <= 16
    assert model.readout.kind == "cls"
    assert not {c.key for c in config.choices} & {"batch_size", "epochs", "optim.lr", "objective.model.image_size"}


def write_noise(folder, low, high, dtype, suffix):
    """Write twelve images of one channel, of 50 x 40 pixels; return the values of the last one."""
    folder.mkdir()
    for i in range(12):
        pixels = np.random.default_rng(i).integers(low, high, (40, 50), dtype=dtype)
        Image.fromarray(pixels).save(folder / f"{i}{suffix}")
    return pixels


def test_gray_images_get_no_colour_jitter_and_their_own_statistics(tmp_path):
    folder = tmp_path / "gray"
    write_noise(folder, 60, 80, np.uint8, ".png")
    config = chosen(folder, "auto=cpu")
    assert config.objective.crops.jitter[2:] == (0, 0) and config.objective.crops.gray_prob == 0
    assert config.objective.mean == pytest.approx((0.273,) * 3, abs=0.005)
    source = open_source("x", source_config([str(folder)]))
    found = survey([source], DataConfig(sources={"x": source.config}))
    assert found is not None and found.gray == 1 and found.kinds == {"PNG gray": 12} and found.sides[2] == 40


def test_images_of_12_bits_are_not_read_as_dark_16_bit_ones(tmp_path):
    folder = tmp_path / "camera"
    pixels = write_noise(folder, 0, 4000, np.uint16, ".tif")
    config = chosen(folder, "auto=cpu")
    assert config.data.pixel_range == (0, 4095) and config.objective.mean == pytest.approx((0.49,) * 3, abs=0.01)
    kept = chosen(folder, "auto=cpu", "data.pixel_range=by_type")
    assert kept.data.pixel_range == "by_type" and kept.objective.mean == pytest.approx((0.03,) * 3, abs=0.01)
    done = sparo("data", "check", str(folder))
    assert (
        "images with more than 8 bits use 12 of them only" in done.stdout and "data.pixel_range=[0,4095]" in done.stdout
    )
    # A run's mean and standard deviation belong to its range.
    (tmp_path / "run").mkdir()
    tree = {"objective": kept.objective.model_dump(mode="json"), "data": {"pixel_range": "by_type"}}
    (tmp_path / "run/config.yaml").write_text(yaml.safe_dump(tree))
    assert chosen(folder, "auto=cpu", f"init={tmp_path}/run").data.pixel_range == "by_type"
    Image.fromarray(np.zeros((40, 50), np.uint16)).save(folder / "black.tif")
    Image.fromarray(pixels.astype(np.int32)).save(folder / "wide.tif")
    assert chosen(folder, "auto=cpu").data.pixel_range == (0, 4095)
    Image.fromarray((pixels * 10).astype(np.uint16)).save(folder / "bright.tif")
    assert chosen(folder, "auto=cpu").data.pixel_range == "by_type"


def test_initial_weights_give_the_model(images, tmp_path):
    model = timm.create_model("vit_small_patch14_reg4_dinov2", num_classes=0, img_size=56, depth=2)
    torch.save(model.state_dict(), tmp_path / "dinov2.pth")
    config = chosen(images, "auto=cpu", f"init={tmp_path}/dinov2.pth")
    m = config.objective.model
    assert config.start_from is not None and config.start_from.checkpoint.endswith("dinov2.pth")
    assert (m.width, m.depth, m.heads, m.registers, m.layer_scale, m.patch_size) == (384, 2, 6, 4, 1e-5, 14)
    assert m.image_size == 56 and config.objective.mean == (0.485, 0.456, 0.406)
    named = chosen(images, "auto=cpu", "init=timm:vit_small_patch16_dinov3").objective.model
    assert (named.positions, named.registers, named.norm_eps, named.depth) == ("rope", 4, 1e-5, 12)


def test_missing_inputs_are_reported_with_the_remedy(tmp_path, monkeypatch, images):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"data/images is not a folder\. To train on other images, add data=FOLDER"):
        load_run("own_images")
    with pytest.raises(ConfigError, match=r"data=image: no such file or folder; did you mean 'images'"):
        chosen("image")
    with pytest.raises(
        ConfigError, match=r"auto: objective\.kind=clip has no keys whose values can be chosen from the data"
    ):
        load_run("own_pairs", ["auto=here"])
    with pytest.raises(ConfigError, match=r"auto: expected `off`, `here`, `cpu` or `gpu`, got tpu"):
        chosen(images, "auto=tpu")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"'empty' matches no shard; the folder has no \.tar files"):
        chosen("empty")


def test_too_many_unreadable_images_are_reported_before_the_first_step(images):
    (images / "broken.png").write_bytes(b"no picture")
    with pytest.raises(
        DataError, match=r"data: 1 of 41 images cannot be used \(for example, .*bad image.*max_bad_share=0\.01"
    ):
        chosen(images, "auto=cpu")
    assert chosen(images, "auto=cpu", "data.max_bad_share=0.05").batch_size == 8


def test_data_accepts_any_format(tmp_path, shards, images):
    assert source_block([str(images)]) == {"folder": str(images)}
    assert next(iter(source_block([str(shards)]))) == "shards"
    config = load_run("dino/scenes_tiny", [f"data={shards}", "data.workers=3"])
    assert list(config.data.sources) == ["images"] and config.data.workers == 3


def test_a_launch_chooses_for_the_clusters_gpus(images, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ("--cluster", "slurm", "--gpus-per-node", "1", "--dry-run")
    done = sparo("launch", "train", "own_images", f"data={images}", *words, cwd=tmp_path)
    assert "auto: objective.model.arch=vit_small (40 images)" in done.stderr, done.stderr


def test_a_folder_of_mixed_files_is_checked(tmp_path):
    folder = tmp_path / "mixed"
    (folder / "a").mkdir(parents=True)
    for i, suffix in enumerate(("png", "tif", "jpg", "webp")):
        Image.fromarray(np.random.default_rng(i).integers(0, 255, (30 + i, 40, 3), np.uint8)).save(
            folder / f"a/{i}.{suffix}"
        )
    Image.fromarray(np.random.default_rng(9).integers(0, 65535, (30, 40)).astype(np.uint16)).save(folder / "a/deep.tif")
    blocks = np.kron(np.random.default_rng(7).integers(0, 255, (6, 7, 3)), np.ones((5, 6, 1))).astype(np.uint8)
    (picture := Image.fromarray(blocks)).save(folder / "a/0.png")
    picture.resize((80, 60), Image.Resampling.BICUBIC).save(folder / "a/larger.png")  # similar, not equal
    (folder / "a/broken.jpg").write_bytes(jpeg(1)[:200])
    (folder / "a/notes.doc").write_bytes(b"x")
    done = sparo("data", "check", str(folder), "--json", str(tmp_path / "r.json"), cwd=tmp_path)
    assert done.returncode == 1 and "broken.jpg" in done.stdout
    for text in (
        "2 PNG",
        "1 TIFF 16-bit",
        "height 30 to 60",
        "objective.mean=[",
        "skipped files: 1 .doc",
        "similar images",
    ):
        assert text in done.stdout, (text, done.stdout)
    facts = json.loads(Path(tmp_path / "r.json").read_text())
    assert facts["survey"]["images"] == 6 and facts["duplicates"]["looks"]["copies"] == 1
    assert image_facts(jpeg(3)).kind == "JPEG"
