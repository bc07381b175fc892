"""Videos: rendered ones follow physics and cameras, published ones are read completely, clips decode only their own frames."""

import gzip
import io
import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evals.encoders.pixels import MappedPixels
from sparo_data.check import check_storage
from sparo_data.episodes import QuantizedArray, Video, compute_boxes, episode_fields, quantize
from sparo_data.official.formats import convert_published
from sparo_data.official.published import PublishedConfig
from sparo_data.official.videos import resize_video
from sparo_data.synthetic.physics import RigidBody, simulate
from sparo_data.synthetic.video_scenes import KINDS, episode
from sparo_data.synthetic.video_sets import VideoSetConfig, render_videos
from sparo_data.writer import encode_image, write_shard
from sparo_train.core.errors import BadSampleError, DataError
from sparo_train.core.rng import generator
from sparo_train.data.sources.base import open_source
from sparo_train.data.sources.shards import ShardsConfig, open_shards
from sparo_train.data.video.episode import Episode, FramesConfig
from sparo_train.data.video.views import MultiViewScene

MOVI = (
    Path(__file__).parents[1] / "data/movi_tiny-train.tfrecord-00000-of-00001"
)  # by TFDS 4.9's own writer, with MOVi-A's features


def ramp(*shape, step=1, mod=65536):
    return (np.arange(np.prod(shape)) * step % mod).reshape(shape)


def test_bodies_fall_slide_and_collide():
    one = simulate([RigidBody("sphere", 0.5, "metal", (0.0, 0.0, 5.0))], 13)
    fallen = 5.0 - one.positions[:9, 0, 2]
    # g t squared / 2, up to the solver's step size, until it touches the ground.
    assert np.allclose(fallen, 9.81 / 2 * (np.arange(9) / 12) ** 2, rtol=0.05, atol=0.01)
    assert one.positions[:, 0, 2].min() > 0.45
    hit = simulate(
        [
            RigidBody("sphere", 0.5, "metal", (-2.0, 0.0, 0.5), velocity=(6.0, 0.0, 0.0)),
            RigidBody("sphere", 0.5, "metal", (0.0, 0.0, 0.5)),
        ],
        12,
    )
    assert hit.positions[0, 1, 0] == 0 and hit.positions[-1, 1, 0] > 0.3 and hit.velocities[0, 0, 0] == 6
    again = simulate([RigidBody("cube", 0.4, "rubber", (0.1 * i, 0.0, 1.0 + i)) for i in range(4)], 24)
    assert all(
        np.array_equal(a, b)
        for a, b in zip(
            again,
            simulate([RigidBody("cube", 0.4, "rubber", (0.1 * i, 0.0, 1.0 + i)) for i in range(4)], 24),
            strict=True,
        )
    )
    rest = simulate(
        [RigidBody("cube", 0.4, "rubber", (0.0, 0.0, 2.0)), RigidBody("cube", 0.4, "rubber", (3.0, 0.0, 2.0))],
        3,
        resting=1,
    )
    assert abs(rest.positions[0, 0, 2] - 0.4) < 0.02 and rest.positions[0, 1, 2] == 2.0


@pytest.mark.parametrize("kind", KINDS)
def test_flow_points_to_the_same_body(kind):
    video = episode(kind, 3, "train", 0, 6, 96)
    frames, labels = video.frames, video.labels
    flows = {
        name: getattr(video, name).levels / 65535 * (getattr(video, name).high - getattr(video, name).low)
        + getattr(video, name).low
        for name in ("flow", "forward")
    }
    moves = hits = 0
    for name, step in (("flow", -1), ("forward", 1)):
        for t in range(1, 5):
            rows, columns = np.nonzero(labels[t] > 0)
            there = np.stack([rows, columns], 1) + 0.5 + flows[name][t][rows, columns]
            inside = ((there > 0) & (there < 96)).all(1)
            at = np.floor(there[inside]).astype(int)
            same = labels[t + step][at[:, 0], at[:, 1]] == labels[t][rows, columns][inside]
            moves += inside.sum()
            hits += same.sum()
    assert moves > 300 and hits / moves > 0.8  # the others are hidden there, or at an edge
    still = [np.ptp([b[c] for b in video.metadata["camera"]["positions"]]) for c in range(3)]
    assert (max(still) > 0.1) == KINDS[kind].moving
    ground = flows["flow"][2][labels[2] == 0]
    assert (np.abs(ground).max() > 0.05) == KINDS[kind].moving
    first = video.metadata["objects"][0]
    assert (
        len(first["positions"]) == 6
        and len(first["quaternions"][0]) == 4
        and first["visibility"] == (labels == 1).sum((1, 2)).tolist()
    )
    assert ("color" in first) != KINDS[kind].colored and len(video.boxes[0]) == len(video.metadata["objects"])
    assert frames.shape == (6, 96, 96, 3) and (len(video.metadata["objects"]) >= 11) == KINDS[kind].crowd


def test_sets_are_reproducible_and_clips_decode_only_their_frames(tmp_path, monkeypatch):
    config = VideoSetConfig(train=3, test=2, frames=5, size=16, per_shard=2, max_objects=3)
    render_videos(tmp_path / "a", config, processes=1)
    rows = [(f"{i:08d}", episode_fields(episode("a", 0, "train", i, 5, 16, 3))) for i in range(2)]
    write_shard(tmp_path / "b.tar", rows)
    assert (tmp_path / "a/train/00000.tar").read_bytes() == (tmp_path / "b.tar").read_bytes()
    with pytest.raises(DataError, match="max_objects"):
        render_videos(tmp_path / "a", config.model_copy(update={"max_objects": 4}), processes=1)
    source = open_source("v", ShardsConfig(shards=str(tmp_path / "a/train")))
    assert [len(s) for s in source.storages] == [2, 1]
    _, fields = source.storages[1].read(0)
    made, found = episode("a", 0, "train", 2, 5, 16, 3), Episode(fields)
    for t in range(5):
        assert np.array_equal(found.image(t), made.frames[t]) and np.array_equal(found.labels(t), made.labels[t])
        assert np.array_equal(
            np.round((found.depth(t) - made.depth.low) / (made.depth.high - made.depth.low) * 65535),
            made.depth.levels[t],
        )
        for forward, plane in ((False, made.flow), (True, made.forward)):
            exact = plane.levels[t] / 65535 * (plane.high - plane.low) + plane.low
            assert np.abs(found.flow(t, forward) - exact).max() < 1e-5
    assert (
        np.array_equal(found.boxes, compute_boxes(made.labels, len(made.metadata["objects"])))
        and found.metadata["frames"] == 5
    )
    opened = []
    from sparo_train.data.video import episode as module

    decode = module.decode
    monkeypatch.setattr(module, "decode", lambda *given: opened.append(1) or decode(*given))
    clip = Episode(fields)
    assert [clip.image(t).shape for t in (1, 3)] == [(16, 16, 3)] * 2 and len(opened) == 2


@given(
    st.integers(1, 40),
    st.integers(1, 8),
    st.integers(1, 5),
    st.integers(0, 4),
    st.sampled_from(["any", "tiles"]),
    st.integers(0, 99),
)
def test_a_window_lies_in_its_episode_and_depends_on_its_draw_alone(length, frames, low, more, starts, seed):
    config = FramesConfig(count=frames, stride=(low, low + more), starts=starts)
    if config.reach(low) > length:
        with pytest.raises(BadSampleError, match=f"shorter than frames.count={frames}"):
            config.window(length, generator(0, "x"))
        return
    found = config.window(length, generator(seed, "x"))
    assert (
        len(found) == frames
        and found[0] >= 0
        and found[-1] < length
        and found == config.window(length, generator(seed, "x"))
    )
    assert low <= found.step <= low + more or frames == 1
    assert starts == "any" or found[0] % config.reach(found.step) == 0


def test_a_single_stride_is_both_ends_of_the_range():
    config = FramesConfig.model_validate({"count": 3, "stride": 2})
    assert config == FramesConfig(count=3, stride=(2, 2))
    with pytest.raises(ValueError, match="stride"):
        FramesConfig.model_validate({"stride": 0})


def test_windows_reach_every_start_and_stride():
    drawn = {
        (w.start, w.step)
        for w in (FramesConfig(count=3, stride=(1, 2)).window(7, generator(i, "x")) for i in range(400))
    }
    assert drawn == {(s, 1) for s in range(5)} | {(s, 2) for s in range(3)}
    tiles = {w.start for w in (FramesConfig(starts="tiles").window(24, generator(i, "x")) for i in range(200))}
    assert tiles == {0, 6, 12, 18}


def test_resized_videos_keep_the_units_of_their_numbers():
    level = np.arange(2 * 8 * 8, dtype=np.uint16).reshape(2, 8, 8)
    flow = QuantizedArray(np.stack([level, level], -1), -4.0, 4.0)
    video = Video(
        "v",
        np.zeros((2, 8, 8, 3), np.uint8),
        (level % 4).astype(np.uint8),
        None,
        {},
        QuantizedArray(level, 0.0, 9.0),
        flow,
    )
    small = Episode(episode_fields(resize_video(video, 4)))
    whole = Episode(episode_fields(video))
    assert np.array_equal(small.labels(0), whole.labels(0)[1::2, 1::2]) and np.allclose(
        small.flow(1), whole.flow(1)[1::2, 1::2] / 2
    )
    assert np.array_equal(small.depth(0), whole.depth(0)[1::2, 1::2])
    assert quantize(np.zeros((1, 2, 2)))[1:] == (0.0, 1.0)


def test_published_videos_are_read_unchanged(tmp_path):
    video = np.random.default_rng(0).integers(0, 255, (5, 6, 7, 3)).astype(np.uint8)
    masks = (video[..., :1] // 64).astype(np.int64)
    files = {}
    for name, table in (("video", video), ("segmentations", masks)):
        stream = io.BytesIO()
        np.save(stream, table)
        files[name] = stream.getvalue()
    plain = Episode({f"{name}.npy": data for name, data in files.items()})
    packed = Episode({f"{name}.npy.gz": gzip.compress(data) for name, data in files.items()})
    for found in (plain, packed):
        assert (
            len(found) == 5
            and np.array_equal(found.image(3), video[3])
            and np.array_equal(found.labels(2), masks[2, ..., 0])
        )
    order = io.BytesIO()
    np.save(order, np.asfortranarray(video))
    assert np.array_equal(Episode({"video.npy": order.getvalue()}).image(1), video[1])
    write_shard(tmp_path / "a.tar", [("k", {f"{name}.npy": data for name, data in files.items()})])
    convert_published([tmp_path / "a.tar"], tmp_path / "n", PublishedConfig(source="npy", videos=True))
    _, fields = open_source("n", ShardsConfig(shards=str(tmp_path / "n/train"))).storages[0].read(0)
    assert np.array_equal(Episode(fields).image(4), video[4]) and np.array_equal(
        Episode(fields).boxes, compute_boxes(masks[..., 0], 3)
    )


def test_checks_decode_every_plane_and_ask_no_captions_of_what_has_masks(tmp_path):
    good = episode_fields(episode("a", 0, "train", 0, 2, 16, 3))
    other = episode_fields(episode("a", 0, "train", 0, 2, 24, 3))
    rows = [
        ("0", good),
        ("1", {**good, "001.depth.png": b"no"}),
        ("2", {**good, "001.flow.png": other["001.flow.png"]}),
        ("3", {name: data for name, data in good.items() if not name.startswith("001.")}),
        ("4", {**good, "boxes.npy": b"junk"}),
        ("5", {name: data for name, data in good.items() if name != "001.flow.png"}),
    ]
    still = {"png": good["000.png"], "mask.png": good["000.mask.png"], "json": b"{}"}
    write_shard(tmp_path / "v/0.tar", rows)
    write_shard(tmp_path / "m/0.tar", [("0", still), ("1", {**still, "png": b"no"})])
    write_shard(tmp_path / "c/0.tar", [("0", {**still, "txt": b"a cube"}), ("1", still)])
    found = {
        name: check_storage(open_shards([str(tmp_path / name / "0.tar")], False)[0], ShardsConfig(shards="x")).bad
        for name in "vmc"
    }
    assert found == {
        "v": [
            ("1", "bad depth"),
            ("2", "flow of another size than its frame"),
            ("3", "the number of frames in the json differs from that of the video"),
            ("4", "bad boxes.npy"),
            ("5", "missing flow of a frame"),
        ],
        "m": [("1", "bad image")],
        "c": [("1", "missing caption")],
    }


def test_missing_planes_and_wrapped_labels_are_reported():
    fields = dict(episode_fields(episode("a", 0, "train", 0, 3, 16, 3)))
    for plane, told in (("mask.png", "missing mask of a frame"), ("depth.png", "missing depth of a frame")):
        lacking = Episode({name: data for name, data in fields.items() if name != f"001.{plane}"})
        lacking.check(0)
        with pytest.raises(BadSampleError, match=told):
            lacking.check(1)
        first = Episode({name: data for name, data in fields.items() if name != f"000.{plane}"})
        assert first.has(plane.partition(".")[0])
    for number in (-1, 1 << 33):
        masks = np.zeros((2, 4, 4), np.int64)
        masks[0, 0] = number
        held = Episode({"video.npy": npy(np.zeros((2, 4, 4, 3), np.uint8)), "segmentations.npy": npy(masks)})
        with pytest.raises(BadSampleError, match=r"labels must be from 0 to 2\^31 - 1"):
            held.labels(0)
        assert not held.labels(1).any()


def npy(table):
    stream = io.BytesIO()
    np.save(stream, table)
    return stream.getvalue()


def test_frames_of_sixteen_bits_are_mapped_by_the_trainings_key():
    ramp = np.linspace(0, 4095, 16 * 16).reshape(16, 16).astype(np.uint16)
    fields = {f"{t:03d}.png": encode_image(ramp) for t in range(2)}
    assert Episode(fields).image(0).max() == 15 and Episode(fields, pixel_range=(0.0, 4095.0)).image(1).max() == 255
    shown = MappedPixels(16, 16, True, (0.0, 4095.0))(Episode(fields, pixel_range=None).picture(0))
    assert np.array_equal(shown, Episode(fields, pixel_range=(0.0, 4095.0)).image(0))
    views = {f"c{v}.{name}": data for v in range(2) for name, data in fields.items()}
    assert MultiViewScene(views, pixel_range=(0.0, 4095.0)).views[1].image(0).max() == 255


def test_damaged_episodes_are_counted_with_a_reason():
    good = episode_fields(episode("a", 0, "train", 0, 3, 16, 3))
    for change, reason in (
        ({"001.png": None}, "a frame is missing"),
        ({f"00{t}.png": None for t in range(3)}, "missing frames"),
        ({"001.mask.png": None}, "missing mask of a frame"),
        ({"001.mask.png": b"no"}, "bad mask"),
        ({"001.mask.png": good["001.png"]}, "mask is not a two-dimensional array"),
        ({"boxes.npy": None}, "missing boxes.npy"),
        ({"boxes.npy": b"\x93NUMPY"}, "bad boxes.npy"),
        ({"json": b"{"}, "bad json"),
        ({"json": b"[]"}, "bad json"),
        ({"json": json.dumps({"ranges": {"flow": [1]}}).encode()}, "json has no pair of numbers in ranges.flow"),
        (
            {"json": json.dumps({"ranges": {"flow": [math.nan, 1]}}).encode()},
            "json has ranges.flow that are not finite",
        ),
        ({"json": json.dumps({"ranges": {"flow": [0, 10**400]}}).encode()}, "json has ranges.flow that are not finite"),
        ({"boxes.npy": npy(np.full((3, 2, 4), np.nan, np.float32))}, "boxes.npy has numbers that are not finite"),
        ({"001.png": b"no"}, "bad image"),
    ):
        fields = {name: data for name, data in {**good, **change}.items() if data is not None}
        with pytest.raises(BadSampleError, match=reason):
            e = Episode(fields)
            for read in (e.image, e.labels, lambda _, e=e: e.boxes, e.flow):
                read(1)
    with pytest.raises(BadSampleError, match=r"video.npy is not \(T, H, W, 3\)"):
        stream = io.BytesIO()
        np.save(stream, np.zeros((3, 3)))
        Episode({"video.npy": stream.getvalue()})
    evil = io.BytesIO()
    np.save(evil, np.array([{}], object), allow_pickle=True)
    with pytest.raises(BadSampleError, match=r"bad video\.npy"):
        Episode({"video.npy": evil.getvalue()})
