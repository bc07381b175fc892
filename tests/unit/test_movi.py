"""MOVi's records as TFDS writes them: everything they contain, in every variant, and errors that name a damaged field."""

from pathlib import Path

import numpy as np
import pytest

from evals.sets.objects import object_annotations
from sparo_data.episodes import episode_fields
from sparo_data.official import clips
from sparo_data.official.formats import convert_published, find_source_files
from sparo_data.official.published import PublishedConfig
from sparo_data.official.videos import movi_videos, resize_video
from sparo_data.writer import encode_image
from sparo_train.core.errors import ConfigError, DataError
from sparo_train.data.decode.tfrecord import parse_example, records
from sparo_train.data.sources.base import open_source
from sparo_train.data.sources.shards import ShardsConfig
from sparo_train.data.video.episode import Episode
from tests.unit.test_tfrecord import tfrecords

MOVI = (
    Path(__file__).parents[1] / "data/movi_tiny-train.tfrecord-00000-of-00001"
)  # by TFDS 4.9's own writer, with MOVi-A's features


def ramp(*shape, step=1, mod=65536):
    return (np.arange(np.prod(shape)) * step % mod).reshape(shape)


def test_movi_as_tfds_writes_it(tmp_path):
    full, less = movi_videos(MOVI)
    e = Episode(episode_fields(full))
    assert full.key == "17" and less.key == "18_b" and len(e) == 4
    for t in range(4):
        assert np.array_equal(e.image(t), ramp(4, 8, 12, 3, step=7, mod=256)[t])
        assert np.array_equal(e.labels(t), ramp(4, 8, 12, mod=3)[t])
        assert np.allclose(e.flow(t), ramp(4, 8, 12, 2, step=83)[t] / 65535 * 8 - 3, atol=1e-6)
        assert np.allclose(e.flow(t, forward=True), ramp(4, 8, 12, 2, step=91)[t] / 65535 * 8 - 4, atol=1e-6)
        assert np.allclose(e.depth(t), ramp(4, 8, 12, step=101)[t] / 65535 * 10 + 2, atol=1e-5)
    assert np.allclose(e.boxes[:, 0], [[0, 0.25, 0.5, 0.5 + 0.0625 * t] for t in range(4)])
    assert np.allclose(e.boxes[:, 1], [[0] * 4, [0.125, 0.25, 0.5, 0.5625], [0] * 4, [0.125, 0.25, 0.5, 0.6875]])
    one, two = e.metadata["objects"]
    assert [one[k] for k in ("shape", "size", "color", "material", "mass")] == ["cube", "large", "red", "metal", 1.5]
    assert (
        two["positions"][1] == [1.375, 1.5, 1.625]
        and two["visibility"] == [0, 2, 4, 6]
        and "size" not in less.metadata["objects"][0]
    )
    assert (
        e.metadata["camera"]["fov"] == pytest.approx(np.degrees(0.85)) and len(e.metadata["camera"]["positions"]) == 4
    )
    config = PublishedConfig(source="movi", videos=True, test=1)
    assert convert_published(find_source_files(MOVI, "movi"), tmp_path / "m", config)[:2] == (1, 1)
    _, fields = open_source("m", ShardsConfig(shards=str(tmp_path / "m/train"))).storages[0].read(0)
    assert Episode(fields).metadata["video"] == "18/b" and (tmp_path / "m/clips/test/nshards.txt").exists()
    with pytest.raises(
        ConfigError, match="--videos: applies to --as movi or npy or davis or youtube_vis, but coco has no videos"
    ):
        convert_published([MOVI], tmp_path / "n", PublishedConfig(source="coco", videos=True))
    with pytest.raises(ConfigError, match="do not apply to videos"):
        convert_published([MOVI], tmp_path / "n", PublishedConfig(source="movi", videos=True, crop="clevr"))
    with pytest.raises(DataError, match="contains no video"):
        convert_published(
            [tfrecords(tmp_path / "e.tfrecord", [])],
            tmp_path / "o",
            PublishedConfig(source="movi", videos=True, files=("e.tfrecord",)),
        )
    with pytest.raises(DataError, match="12 x 8 pixels have optical flow, which cannot be resized"):
        resize_video(full, 4)


def test_movi_b_has_hues_and_eleven_shapes_and_c_has_assets():
    b, c = (video.metadata["objects"] for video in movi_videos(MOVI.with_name(MOVI.name.replace("tiny", "tiny_bc"))))
    assert [(one["shape"], one["material"], one["rgb"]) for one in b] == [
        ("sponge", "rubber", [0.0, 0.03125, 0.0625]),
        ("suzanne", "metal", [0.0, 0.03125, 0.0625]),
    ]
    assert not {"size", "color", "scale"} & b[0].keys()
    assert [(one["category"], one["asset_id"], one["scale"]) for one in c] == [
        ("Shoe", "Shoe_of_Someone", 1.5),
        ("Toys", "Caf\u00e9_Mug", 0.75),
    ]
    told = []
    for video in movi_videos(MOVI.with_name(MOVI.name.replace("tiny", "tiny_bc"))):
        told.append(object_annotations(Episode(episode_fields(video)), 2, "it"))
    assert told[0]["words"].keys() == {"shape", "material"} and np.shape(told[0]["numbers"]["color"]) == (2, 2, 3)
    assert told[1]["words"] == {"category": ["Shoe", "Toys"]} and told[1]["numbers"]["size"] == [[[1.5], [0.75]]] * 2


def test_an_unnamed_class_is_called_by_its_number(monkeypatch):
    found = parse_example(next(iter(records(MOVI))), "it")
    monkeypatch.setattr(
        clips, "parse_example", lambda data, where: {**found, "instances/shape_label": np.array([2, 11], np.int64)}
    )
    assert [one["shape"] for one in next(movi_videos(MOVI)).metadata["objects"]] == ["sphere", "11"]


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("instances/shape_label", np.zeros(2, np.float32), "shape_label has values that are not whole numbers"),
        ("instances/color_label", np.zeros(5, np.int64), "color_label has 5 values for 2 objects"),
        ("instances/mass", np.full(2, np.nan, np.float32), "mass has values that are not numbers"),
        ("instances/velocities", np.full(24, np.inf, np.float32), "velocities has values that are not numbers"),
        ("instances/bboxes/ragged_row_lengths_0", np.array([7, -1]), "do not match"),
        ("instances/bboxes/ragged_row_lengths_0", np.array([4.0, 2.0], np.float32), "row_lengths_0 has values that are not whole"),
        ("instances/bbox_frames/ragged_flat_values", np.full(6, 0.5, np.float32), "bbox_frames.*not whole numbers"),
        ("instances/bboxes/ragged_flat_values", np.full(24, np.nan, np.float32), "bboxes.*not numbers"),
        ("backward_flow", np.full(768, np.nan, np.float32), "backward_flow has values that are not whole numbers"),
        ("backward_flow", np.full(768, 70_000), "backward_flow does not have two 16-bit values"),
        ("metadata/backward_flow_range", np.array([np.nan, 1], np.float32), "backward_flow_range has values that are not numbers"),
        ("metadata/depth_range", np.array([3, 1], np.float32), "depth_range: expected two ascending numbers, got 3, 1"),
        ("metadata/depth_range", np.array([1, 2, 3], np.float32), "depth_range: expected two ascending numbers, got 1, 2, 3"),
        ("metadata/depth_range", np.zeros(2, np.float32), "depth_range: expected two ascending numbers, got 0, 0"),
        ("camera/positions", np.zeros(9, np.float32), "camera/positions: expected 12 values.*, got 9"),
        ("camera/field_of_view", np.ones(2, np.float32), "camera/field_of_view: expected one value, got 2"),
        ("camera/quaternions", np.zeros(16, np.float32), "a quaternion of zeros describes no rotation"),
        ("instances/quaternions", np.zeros(32, np.float32), "a quaternion of zeros describes no rotation"),
        ("instances/positions", np.zeros(13, np.float32), "instances/positions: expected three values for each object in .* frames, got 13"),
        ("depth", [encode_image(np.full((12, 16), 200, np.uint8))] * 4, "depth: expected 16 bits a pixel, got 8"),
        ("camera/positions", np.full(12, np.nan, np.float32), "camera/positions has values that are not numbers"),
    ],
)  # fmt: skip
def test_invalid_numbers_in_movi_are_reported_by_name(monkeypatch, name, value, told):
    found = parse_example(next(iter(records(MOVI))), "it")
    assert name in found
    monkeypatch.setattr(clips, "parse_example", lambda data, where: {**found, name: value})
    with pytest.raises(DataError, match=f"record 0.*{told}"):
        list(movi_videos(MOVI))
