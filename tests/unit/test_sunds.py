"""MultiShapeNet's records: a file that TFDS and sunds wrote (data/make_msn_tiny.py), and damaged ones."""

from pathlib import Path

import numpy as np
import pytest
import torch

from object_centric.scenes3d.rays import pixel_rays
from sparo_data.official import sunds
from sparo_data.official.clips import natural_sort_key
from sparo_data.official.formats import convert_published, find_source_files
from sparo_data.official.published import PublishedConfig
from sparo_data.official.sunds import sunds_scenes
from sparo_data.writer import encode_image
from sparo_train.core.errors import DataError
from sparo_train.data.decode.tfrecord import parse_example, records
from sparo_train.data.sources.base import open_source
from sparo_train.data.sources.shards import ShardsConfig
from sparo_train.data.video.views import MultiViewScene

FILE = Path(__file__).parents[1] / "data/msn_tiny-train.tfrecord-00000-of-00001"
RAYS = np.load(FILE.with_name("msn_tiny_rays.npz"))["rays"]  # (scenes, cameras, 2, H, W, 3), computed by sunds


def test_rays_equal_those_of_sunds():
    scenes = list(sunds_scenes(FILE))
    assert [scene.key for scene in scenes] == ["scene_0", "scene_1"]
    for scene, wanted in zip(scenes, RAYS, strict=True):
        assert len(scene.views) == 3
        for view, ray in zip(scene.views, wanted, strict=True):
            pose, lens = (torch.tensor(np.asarray(table), dtype=torch.float64) for table in (view.pose, view.lens))
            origins, directions = pixel_rays(pose, lens, 8).split(3, -1)
            assert np.allclose(origins, ray[0], atol=1e-5) and np.allclose(directions, ray[1], atol=1e-6)


def test_pictures_masks_and_depth_are_what_was_written(tmp_path):
    ramp = np.arange(64).reshape(8, 8)
    for number, scene in enumerate(sunds_scenes(FILE)):
        for at, view in enumerate(scene.views):
            assert (view.image == (np.arange(192) * (7 + at) % 256).reshape(8, 8, 3)).all()
            instances = (ramp + at) % 4
            assert view.label is not None and (view.label == np.maximum(instances, 1) - 1).all()
            far = (1e10 if number else 0) * (ramp == 5)
            assert view.depth is not None and np.allclose(view.depth, 1.5 + ramp / 8 + far)
    config = PublishedConfig(source="sunds", files=(FILE.name,))
    written = convert_published(find_source_files(FILE, "sunds"), tmp_path / "out", config)
    assert (written.train, written.test, written.without_objects) == (2, 0, 0)
    source = open_source("s", ShardsConfig(shards=(str(tmp_path / "out/train"),)))
    (storage,) = source.storages
    first, second = (MultiViewScene(storage.read(number)[1]) for number in range(2))
    for scene, depth in ((first, 1.5 + ramp / 8), (second, np.where(ramp == 5, 100.0, 1.5 + ramp / 8))):
        scene.check()
        assert (scene.metadata["near"], scene.metadata["far"]) == (
            1.5,
            pytest.approx(9.375),
        )  # the sky has no distance
        assert np.abs(scene.views[2].depth(0) - depth).max() < 2e-3


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("cameras/camera_1/extrinsics/R", None, "extrinsics/R is not 9 finite numbers"),
        ("cameras/camera_1/extrinsics/R", np.zeros(9, np.float32), "camera_1: .*ingular"),
        ("cameras/camera_1/extrinsics/t", np.array([np.nan, 0, 0], np.float32), "extrinsics/t is not 3 finite"),
        ("pose/t", np.zeros(2, np.float32), "pose/t is not 3"),
        ("cameras/camera_1/intrinsics/K", np.zeros(9, np.float32), "fl_x is not above 0"),
        ("cameras/camera_1/intrinsics/type", [b"FISHEYE"], "got FISHEYE"),
        ("cameras/camera_1/intrinsics/distortion/radial", np.ones(3, np.float32), "lens distortion"),
        ("cameras/camera_1/color_image", [b"no"], "is not a readable picture"),
        ("cameras/camera_1/color_image", [], "color_image needs one encoded picture, got 0"),
        ("cameras/camera_1/depth_image", [b"no"], "depth_image cannot be decoded as a PNG"),
        ("cameras/camera_1/depth_image", "color", "four bytes per pixel"),
        ("cameras/camera_1/instance_image", "wide", "a mask or depth image of .* does not match the image of"),
        ("cameras/camera_1/instance_image", "color", "masks are stored as colours"),
        ("cameras", None, "has no feature cameras"),
    ],
)
def test_a_bad_record_is_reported_by_file_number_and_camera(monkeypatch, name, value, told):
    found = parse_example(next(iter(records(FILE))), "it")
    if name == "cameras":
        found = {key: held for key, held in found.items() if not key.startswith("cameras/")}
    elif value is None:
        del found[name]
    elif isinstance(value, str) and value == "color":
        found[name] = found["cameras/camera_1/color_image"]
    elif isinstance(value, str):
        found[name] = [encode_image(np.zeros((8, 9), np.uint8))]
    else:
        found[name] = value
    monkeypatch.setattr(sunds, "parse_example", lambda data, where: found)
    with pytest.raises(DataError, match=f"record 0.*{told}"):
        list(sunds_scenes(FILE))


def test_cameras_are_in_the_order_of_their_numbers_however_long_these_are():
    names = ["camera_10", "camera_9", "camera_010", "camera_" + "7" * 5000, "left", "camera_"]
    assert sorted(names, key=natural_sort_key) == [
        "camera_",
        "camera_9",
        "camera_10",
        "camera_010",
        names[3],
        "left",
    ]


def test_a_folder_of_records_and_a_file_that_breaks_off(tmp_path):
    data = FILE.read_bytes()
    (tmp_path / FILE.name).write_bytes(data)
    assert find_source_files(tmp_path, "sunds") == [tmp_path / FILE.name]
    (tmp_path / FILE.name).write_bytes(data[:-9])
    with pytest.raises(DataError, match="record 1: is truncated"):
        list(sunds_scenes(tmp_path / FILE.name))
