"""Published scenes of several cameras are converted: folders of transforms.json, and ObSuRF's."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from object_centric.scenes3d.novel_views import check_scene_bounds
from object_centric.scenes3d.rays import Bounds
from sparo_data.official.formats import convert_published
from sparo_data.official.published import PublishedConfig
from sparo_train.core.errors import BadSampleError, ConfigError, DataError
from sparo_train.data.sources.base import open_source
from sparo_train.data.sources.shards import ShardsConfig
from sparo_train.data.video.cameras import look_at
from sparo_train.data.video.views import MultiViewScene


def nerf_folder(root, count=3, side=20, **changes):
    root.mkdir(parents=True)
    frames = []
    for number in range(count):
        picture = np.zeros((side, side + 4, 4), np.uint8)
        picture[:10], picture[..., 0] = 255, 40 * number
        picture[:10, :, 3] = 255
        Image.fromarray(picture).save(root / f"r_{number}.png")
        pose = look_at((4 * np.cos(number), 4 * np.sin(number), 2.0), (0, 0, 0))
        frames.append({"file_path": f"./r_{number}", "transform_matrix": pose.tolist()})
    (root / "transforms.json").write_text(json.dumps({"camera_angle_x": 0.7, "frames": frames, **changes}))


def read_back(folder):
    source = open_source("x", ShardsConfig(shards=(str(folder),)))
    return [MultiViewScene(storage.read(i)[1]) for storage in source.storages for i in range(len(storage))]


def test_folders_of_transforms_become_scenes(tmp_path):
    for name in ("lego", "ship 1", "ship_1", "ship.1"):  # three of these become the same key
        nerf_folder(tmp_path / "in" / name)
    config = PublishedConfig(source="nerf", files=("in",), size=10, test=1, near=2.0, far=7.5)
    written = convert_published([tmp_path / "in"], tmp_path / "out", config)
    assert (written.train, written.test) == (3, 1)
    keys = [
        open_source("x", ShardsConfig(shards=(str(tmp_path / "out/train"),))).storages[0].read(i)[0] for i in range(3)
    ]
    assert keys == ["ship_1", "ship_1-2", "ship_1-3"]
    scene, *_ = read_back(tmp_path / "out/train")
    assert len(scene.views) == 3 and scene.frames == 1 and (scene.metadata["near"], scene.metadata["far"]) == (2.0, 7.5)
    # So a model whose rays end earlier raises an error, instead of learning from what it cannot see.
    with pytest.raises(BadSampleError, match=r"decoder.near=1, decoder.far=5"):
        check_scene_bounds(scene.bounds, Bounds(1.0, 5.0))
    check_scene_bounds(scene.bounds, Bounds(1.0, 9.0))
    for words in ({"near": 2.0}, {"near": 3.0, "far": 2.0}):
        with pytest.raises(ConfigError, match="Give both"):
            convert_published([tmp_path / "in"], tmp_path / "no", PublishedConfig(source="nerf", **words))
    with pytest.raises(ConfigError, match="apply to --as nerf and clevr3d, not to sunds"):
        convert_published([], tmp_path / "no", PublishedConfig(source="sunds", near=1.0, far=2.0))
    picture = scene.views[1].image(0)
    assert (
        picture.shape == (10, 10, 3) and picture[0, 0, 0] in range(35, 46) and picture[9, 9].min() > 250
    )  # beyond it is white
    # Stretched images have two focal lengths.
    fx, fy, cx, cy = scene.lens(0, 10, 10)
    focal = 24 / 2 / np.tan(0.35)
    assert np.allclose([fx, fy, cx, cy], [focal * 10 / 24, focal * 10 / 20, 5, 5])
    assert np.allclose(scene.pose(2, 0), look_at((4 * np.cos(2), 4 * np.sin(2), 2.0), (0, 0, 0)), atol=1e-6)


def test_parts_of_one_scene_are_all_scored_or_none(tmp_path):
    for name in ("chair", "lego"):
        nerf_folder(tmp_path / "in" / name)
        whole = tmp_path / "in" / name / "transforms.json"
        for part in ("train", "val"):
            whole.with_name(f"transforms_{part}.json").write_text(whole.read_text())
        whole.unlink()
    config = PublishedConfig(source="nerf", files=("in",), test=1)
    written = convert_published([tmp_path / "in"], tmp_path / "out", config)
    assert (written.train, written.test) == (2, 2)
    assert {scene.metadata["scene"] for scene in read_back(tmp_path / "out/train")} == {"lego"}


def test_the_current_folder_has_a_name(tmp_path, monkeypatch):
    nerf_folder(tmp_path / "lego")
    monkeypatch.chdir(tmp_path / "lego")
    convert_published([Path()], tmp_path / "out", PublishedConfig(source="nerf", files=(".",)))
    key, fields = open_source("x", ShardsConfig(shards=(str(tmp_path / "out/train"),))).storages[0].read(0)
    assert key == "lego" and MultiViewScene(fields).metadata["dataset"] == "lego"


def test_16_bit_images_and_transparent_palettes_are_converted_exactly(tmp_path):
    nerf_folder(tmp_path / "in")
    Image.fromarray(np.full((20, 24), 40_000, np.uint16)).save(tmp_path / "in/r_0.png")
    hidden = Image.new("P", (24, 20), 1)
    hidden.putpalette([0, 0, 0, 10, 20, 30])
    hidden.save(tmp_path / "in/r_1.png", transparency=1)
    convert_published([tmp_path / "in"], tmp_path / "out", PublishedConfig(source="nerf", files=("in",)))
    (scene,) = read_back(tmp_path / "out/train")
    assert set(scene.views[0].image(0).flat) <= {155, 156} and set(scene.views[1].image(0).flat) == {255}


def test_invalid_folders_are_reported_by_file(tmp_path):
    bad = {
        "empty": {"frames": []},
        "bent": {"k1": 0.1},
        "bent at once": {"camera_model": "OPENCV", "distortion_params": [0.3, 0, 0, 0]},
        "turned": {"near": 5.0, "far": 2.0},
        "half": {"near": 5.0},
        "flat": {"camera_angle_x": 0.0},
        "leaves": {"frames": [{"file_path": "../../etc/passwd", "transform_matrix": np.eye(4).tolist()}]},
        "gone": {"frames": [{"file_path": "no", "transform_matrix": np.eye(4).tolist()}]},
        "singular": {"frames": [{"file_path": "r_0", "transform_matrix": np.zeros((4, 4)).tolist()}]},
        "poseless": {"frames": [{"file_path": "r_0"}]},
        "far": {"frames": [{"file_path": "r_0", "transform_matrix": (np.eye(4) + 1e300 * np.eye(4, k=3)).tolist()}]},
        "one bent": {"frames": [{"file_path": "r_0", "transform_matrix": np.eye(4).tolist(), "k1": 0.3}]},
        "round": {"camera_model": "EQUIRECTANGULAR"},
        "fish": {"is_fisheye": True},
        "nul": {"frames": [{"file_path": "r_0\0", "transform_matrix": np.eye(4).tolist()}]},
        "nameless": {"frames": [{"file_path": "", "transform_matrix": np.eye(4).tolist()}]},
        "beside": {"frames": [{"file_path": ".", "transform_matrix": np.eye(4).tolist()}]},
        "long": {"fl_x": 10**401},
        "wide": {"fl_x": 1e308, "w": 1},
    }
    told = {
        "empty": "no frames",
        "bent": "lens distortion",
        "bent at once": r"distortion \(distortion_params=\[0.3",
        "turned": "expected 0 < near < far, got near=5.0 and far=2.0",
        "half": "expected 0 < near < far, got near=5.0 and far=None",
        "flat": "camera_angle_x",
        "leaves": "points outside the folder of",
        "gone": "frame 0: .*no.png.*without a suffix, .png is assumed",
        "far": "frame 0: a camera is farther from the origin",
        "one bent": r"frame 0: the camera has lens distortion \(k1=0.3\)",
        "round": "camera_model=EQUIRECTANGULAR does not describe a pinhole",
        "fish": "is_fisheye does not describe a pinhole",
        "nul": "is not a path",
        "nameless": "has no file_path",
        "beside": "points outside the folder of",
        "long": "fl_x is not a finite number",
        "wide": "frame 0: a camera's focal length or principal point is not below 1e.15 pixels",
        "singular": "singular",
        "poseless": "4 x 4",
    }
    for name, changes in bad.items():
        nerf_folder(tmp_path / name, **changes)
        with pytest.raises(DataError, match=told[name]):
            convert_published(
                [tmp_path / name], tmp_path / f"{name}_out", PublishedConfig(source="nerf", files=(name,))
            )
    with pytest.raises(ConfigError, match="--max-objects: does not apply to --as nerf, whose scenes have no"):
        convert_published(
            [tmp_path / "gone"], tmp_path / "m", PublishedConfig(source="nerf", files=("gone",), max_objects=3)
        )
    (tmp_path / "none").mkdir()
    with pytest.raises(DataError, match="or its subfolders"):
        convert_published([tmp_path / "none"], tmp_path / "none_out", PublishedConfig(source="nerf", files=("none",)))


def _obsurfs_depth(root, tmp_path, places):
    """A plane at the origin, seen by cameras that look at it: depth along rays in one set, along the axis in the other."""
    (root / "depths").mkdir()
    x, y = np.meshgrid((np.arange(32) + 0.5 - 16) / 35, (np.arange(24) + 0.5 - 12) / 35)
    longer = np.sqrt(1 + x**2 + y**2)
    for planar in (False, True):
        extra = {"shape_file": np.array(["a"] * 3)} if planar else {}
        np.savez(root / "metadata.npz", camera_pos=places, **extra)
        for scene in (0, 1):
            for view in range(3):
                far = np.linalg.norm(places[scene, view]) * (1 if planar else longer)
                levels = np.broadcast_to(far / 40 * 65536, (24, 32)).round().astype(np.uint16).copy()
                levels[0, 0] = 65535  # this far or farther
                Image.fromarray(levels).save(root / f"depths/depths_{scene}_{view}.png")
        config = PublishedConfig(source="clevr3d", scenes=(1, 3), size=None)
        written = convert_published([root], tmp_path / f"deep{planar}", config)
        assert (written.train, written.test) == (1, 0)
        (scene,) = read_back(tmp_path / f"deep{planar}/train")
        found, true = scene.views[1].depth(0), np.linalg.norm(places[1, 1]) * longer
        assert np.allclose(found[1:], true[1:], atol=3e-3) and found[0, 0] > 90
        # An infinite distance belongs to the sky, and not to the bounds of the scene.
        assert scene.bounds[0] == pytest.approx(np.linalg.norm(places[1, :3], axis=1).min(), rel=3e-3)
        assert scene.bounds[1] < 20
        told = config.model_copy(update={"near": 1.0, "far": 30.0})
        convert_published([root], tmp_path / f"told{planar}", told)
        assert read_back(tmp_path / f"told{planar}/train")[0].bounds == (1.0, 30.0)
    for levels, told in (
        (np.zeros((24, 32), np.uint16), "values from 0 to 0"),
        (np.ones((24, 32), np.uint8), "expected one 16-bit value"),
        (np.ones((8, 8), np.uint16), "for each pixel of"),
    ):
        Image.fromarray(levels).save(root / "depths/depths_1_2.png")
        with pytest.raises(DataError, match=rf"depths_1_2\.png: .*{told}"):
            convert_published([root], tmp_path / "bad_depth", config)
    for scenes, told in (((2, 2), "2:2: expected A:B"), ((0, 9), "has 3 scenes, numbered from 0, got scene 8")):
        with pytest.raises((ConfigError, DataError), match=told):
            convert_published([root], tmp_path / "bad_scenes", config.model_copy(update={"scenes": scenes}))
    with pytest.raises(ConfigError, match="--scenes 0:3: applies to --as clevr3d"):
        convert_published([root], tmp_path / "bad_scenes", PublishedConfig(source="nerf", scenes=(0, 3)))


def test_obsurfs_folders_become_scenes(tmp_path):
    rng = np.random.default_rng(0)
    root = tmp_path / "clevr3d"
    (root / "images").mkdir(parents=True)
    (root / "masks").mkdir()
    places = rng.normal(5.0, 1.0, (3, 4, 3))
    np.savez(root / "metadata.npz", camera_pos=places, shape=np.array([[1, 2, 0], [1, 1, 1], [1, 0, 0]]))
    for scene in (0, 1):  # nothing of the third was downloaded
        for view in range(3):
            Image.fromarray(rng.integers(0, 255, (24, 32, 3), dtype=np.uint8)).save(
                root / f"images/img_{scene}_{view}.png"
            )
            Image.fromarray(rng.integers(0, 3, (24, 32), dtype=np.uint8)).save(root / f"masks/masks_{scene}_{view}.png")
    written = convert_published(
        [root], tmp_path / "out", PublishedConfig(source="clevr3d", files=("clevr3d",), max_objects=2)
    )
    assert (written.train, written.test, written.without_objects) == (1, 0, 0)
    (scene,) = read_back(tmp_path / "out/train")
    pose = scene.pose(1, 0)
    assert np.allclose(pose[:3, 3], places[0, 1]) and np.allclose(
        -pose[:3, 2] * np.linalg.norm(places[0, 1]), -places[0, 1]
    )
    assert scene.lens(0, 32, 24)[0] == pytest.approx(35) and scene.views[2].labels(0).max() == 2
    _obsurfs_depth(root, tmp_path, places)
    table = root / "metadata.npz"
    for number, (tables, told) in enumerate(
        (
            ({"shape": np.ones((3, 3))}, "camera_pos"),
            ({"camera_pos": np.full((3, 4, 3), 1e200)}, "camera_pos: expected numbers below"),
            ({"camera_pos": np.full((3, 4, 3), np.nan)}, "camera_pos: expected numbers below"),
            ({"camera_pos": places, "shape": np.ones((2, 3))}, "expected a number for each object of 3 scenes"),
            ({"camera_pos": places, "shape": np.full((3, 3), "cube")}, "expected a number for each object of 3 scenes"),
            ({"camera_pos": places}, "number of objects is unknown. Remove --max-objects"),
        )
    ):
        np.savez(table, **tables)
        with pytest.raises(DataError, match=told):
            convert_published([root], tmp_path / f"bad{number}", PublishedConfig(source="clevr3d", max_objects=2))
    whole = table.read_bytes()
    for cut in (10, len(whole) // 2, len(whole) - 30):
        table.write_bytes(whole[:cut])
        with pytest.raises(DataError, match=r"metadata\.npz"):
            convert_published([root], tmp_path / f"cut{cut}", PublishedConfig(source="clevr3d"))
