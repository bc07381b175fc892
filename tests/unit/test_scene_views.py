"""Cameras, views and rendered scenes: rays through pixels, planes that agree between cameras, errors that name damaged scenes."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from object_centric.scenes3d.novel_views import ViewExamples, ViewsConfig
from object_centric.scenes3d.rays import Bounds, common_point, pixel_rays
from sparo_data.synthetic.viewed_scenes import KINDS, multi_view_episode
from sparo_data.synthetic.viewed_sets import MultiViewSetConfig, _sample
from sparo_data.tracer.render import Body, Camera, Stage, rays, render
from sparo_data.tracer.solids import _INSIDE, _NORMALS, HITS, MONKEY, RING, SHAPES, TUBE
from sparo_train.core.errors import BadSampleError
from sparo_train.core.rng import generator
from sparo_train.data.sources.base import DataConfig, Source
from sparo_train.data.sources.shards import ShardsConfig
from sparo_train.data.video.cameras import convert_pose, cut_lens, look_at, parse_lens, parse_pose
from sparo_train.data.video.episode import FramesConfig
from sparo_train.data.video.views import MultiViewScene, is_scene

SMALL = MultiViewSetConfig(size=24, frames=3, train=1, test=1)


@pytest.fixture(scope="module")
def scene():
    return _sample(SMALL, "train", 0)[1]


coordinates = st.floats(-20, 20)


@settings(max_examples=50, deadline=None)
@given(
    st.tuples(coordinates, coordinates, st.floats(0.5, 20)),
    st.tuples(coordinates, coordinates, st.floats(-20, 0.2)),
    st.floats(0.5, 3),
)
def test_poses_are_rotations_in_one_convention(eye, target, scale):
    if np.hypot(eye[0] - target[0], eye[1] - target[1]) < 1e-2:  # a view straight down has no upper side
        return
    pose = look_at(eye, target)
    assert np.allclose(parse_pose(pose.tolist()), pose, atol=1e-6)
    assert np.allclose(parse_pose(pose[:3].tolist()), pose, atol=1e-6)
    other = convert_pose(pose, "opengl", "opencv")
    assert np.allclose(other[:3, 2], -pose[:3, 2]) and np.allclose(other[:3, 3], pose[:3, 3])
    assert np.allclose(parse_pose(other.tolist(), "opencv"), pose, atol=1e-6)
    larger = pose.copy()
    larger[:3, :3] *= scale
    assert np.allclose(parse_pose(larger), pose, atol=1e-6)
    # OpenCV's z points ahead and y down: a point ahead and below has positive z and y.
    point = np.asarray(target) - [0, 0, 1.0]
    own = np.linalg.inv(other) @ [*point, 1.0]
    assert own[2] > 0 or np.dot(point - eye, np.subtract(target, eye)) <= 0


@pytest.mark.parametrize(
    ("table", "told"),
    [
        (np.zeros((4, 4)), "singular"),
        (np.diag([1.0, 1.0, -1.0, 1.0]), "mirrored"),
        (np.array([[1, 0.5, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1.0]]), "not a rotation"),
        (np.full((4, 4), np.nan), "finite"),
        (np.eye(3), "4 x 4"),
        ([["a"] * 4] * 4, "not a matrix"),
        (None, "4 x 4"),
    ],
)
def test_an_invalid_pose_is_reported_with_the_cause(table, told):
    with pytest.raises(BadSampleError, match=told):
        parse_pose(table if not isinstance(table, np.ndarray) else table.tolist())


def test_intrinsics_agree_in_every_convention():
    wanted = parse_lens({"fov": 50.0}, 40, 30)
    focal = float(wanted[0])
    assert np.allclose(parse_lens({"camera_angle_x": 2 * np.arctan(20 / focal)}, 40, 30), wanted)
    assert np.allclose(parse_lens({"fl_x": 2 * focal, "w": 80, "h": 60, "cx": 40.0, "cy": 30.0}, 40, 30), wanted)
    for told in (
        {},
        {"fov": 180.0},
        {"fov": 0},
        {"fl_x": -3.0},
        {"fl_x": float("nan")},
        {"fov": "wide"},
        {"fov": True},
    ):
        with pytest.raises(BadSampleError, match="camera"):
            parse_lens(told, 40, 30)


@settings(max_examples=40, deadline=None)
@given(st.integers(16, 90), st.integers(16, 90), st.integers(8, 32), st.floats(20, 100))
def test_cropped_intrinsics_match_the_cropped_image(width, height, size, fov):
    """The direction through a point of the cropped image equals that through the same point of the whole image."""
    lens = parse_lens({"fov": fov}, width, height)
    cut = cut_lens(lens, width, height, size)
    short = min(width, height)
    wide, tall = (size if n == short else int(size * n / short) for n in (width, height))
    left, top = round((wide - size) / 2), round((tall - size) / 2)
    for u, v in ((0.5, 0.5), (size / 2, size / 2), (size - 0.5, 1.5)):
        x, y = (u + left) * width / wide, (v + top) * height / tall
        whole = ((x - lens[2]) / lens[0], (y - lens[3]) / lens[1])
        assert np.allclose(((u - cut[2]) / cut[0], (v - cut[3]) / cut[1]), whole, atol=1e-9)


def test_rays_equal_those_of_the_renderer():
    camera = Camera((3.0, -7.0, 4.0), (0.2, 0.1, 0.3), 40.0)
    pose = look_at(camera.eye, camera.target)
    found = pixel_rays(torch.from_numpy(pose), torch.from_numpy(parse_lens({"fov": 40.0}, 12, 12)), 12)
    assert np.allclose(found[..., 3:].reshape(-1, 3), rays(camera, 12), atol=1e-6)
    assert np.allclose(found[..., :3], camera.eye)


def test_points_agree_between_cameras(scene):
    """Points of one view's masks and depths, seen from another camera, are behind nothing and have the same number."""
    views = MultiViewScene(scene)
    assert is_scene(scene) and len(views.views) == 5 and views.frames == 3
    agreed = compared = 0
    for first, second in ((0, 1), (1, 2), (3, 0)):
        pose, other = views.pose(first, 1), views.pose(second, 1)
        lens = views.lens(second, 24, 24)
        told = pixel_rays(torch.from_numpy(pose), torch.from_numpy(views.lens(first, 24, 24)), 24).numpy()
        points = told[..., :3] + views.views[first].depth(1)[..., None] * told[..., 3:]
        labels = views.views[first].labels(1)
        own = (points - other[:3, 3]) @ other[:3, :3]
        columns, rows = (
            np.floor(c * own[..., i] / -own[..., 2] * (1, -1)[i] + lens[2 + i]).astype(int)
            for i, c in enumerate(lens[:2])
        )
        seen = (own[..., 2] < 0) & (columns >= 1) & (columns < 23) & (rows >= 1) & (rows < 23) & (labels > 0)
        depth, there = views.views[second].depth(1), views.views[second].labels(1)
        for row, column, label, far in zip(
            rows[seen], columns[seen], labels[seen], np.linalg.norm(own[seen], axis=-1), strict=True
        ):
            near = depth[row - 1 : row + 2, column - 1 : column + 2]
            if far > near.max() + 0.3:
                continue  # hidden from this camera
            compared += 1
            agreed += label in there[row - 1 : row + 2, column - 1 : column + 2]
    assert compared > 20 and agreed > 0.95 * compared


@pytest.mark.parametrize("kind", KINDS)
def test_episodes_are_a_pure_function_of_their_names(kind):
    first, again, other = (multi_view_episode(kind, 0, "train", index, 16, 2) for index in (1, 1, 2))
    assert np.array_equal(first.frames[0][0].rgb, again.frames[0][0].rgb) and first.metadata == again.metadata
    assert not np.array_equal(first.frames[0][0].rgb, other.frames[0][0].rgb)
    traits = KINDS[kind]
    assert (
        len(first.frames) == traits.cameras and traits.objects[0] <= len(first.metadata["objects"]) <= traits.objects[1]
    )
    for row in first.poses.reshape(-1, 4, 4):
        parse_pose(row.tolist())
    if kind == "nature_ego":  # its cameras are fixed to one body
        eyes = first.poses[:, 0, :3, 3]
        assert np.linalg.norm(eyes - eyes.mean(0), axis=1).max() < 0.6
        ahead = -first.poses[:, :, :3, 2]
        assert (ahead[1] * ahead[4]).sum(-1).max() < -0.9 and np.allclose(
            (ahead[0] * ahead[2]).sum(-1), -0.467, atol=0.02
        )


def test_crowded_scenes_are_placed():
    found = multi_view_episode(
        "simple", 0, "train", 130, 16, 1, max_objects=10
    )  # previously, the search for a free place never ended
    places = np.array([o["positions"][0] for o in found.metadata["objects"]])
    assert (
        len(places) == 10
        and np.linalg.norm(places[:, None] - places[None], axis=2)[~np.eye(10, dtype=bool)].min() > 0.8
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_rays_end_on_a_solids_surface_and_normals_look_back(shape):
    rng = np.random.default_rng(0)
    origins = rng.normal(size=(4000, 3))
    origins = (3 * origins / np.linalg.norm(origins, axis=1, keepdims=True)).astype(np.float32)
    towards = rng.uniform(-0.8, 0.8, (4000, 3)) - origins
    directions = (towards / np.linalg.norm(towards, axis=1, keepdims=True)).astype(np.float32)
    with np.errstate(divide="ignore", invalid="ignore"):
        t, n = HITS[shape](origins, directions)
    hit = np.isfinite(t)
    p, n = (origins + np.where(hit, t, 0)[:, None] * directions)[hit], n[hit]
    assert hit.mean() > 0.2 and (np.sum(n * directions[hit], axis=1) < 1e-2).all()
    assert np.allclose(np.linalg.norm(n, axis=1), 1, atol=2e-2)
    r = np.hypot(p[:, 0], p[:, 1])
    off = {
        "sphere": lambda: np.linalg.norm(p, axis=1) - 1,
        "cube": lambda: np.abs(p).max(1) - 1,
        "cylinder": lambda: np.maximum(r, np.abs(p[:, 2])) - 1,
        "cone": lambda: np.maximum(r - (1 - p[:, 2]) / 2, -1 - p[:, 2]),
        "icosahedron": lambda: (p @ _NORMALS.T).max(1) - _INSIDE,
        "torus": lambda: np.hypot(r - RING, p[:, 2]) - TUBE,
        "monkey": lambda: np.min([np.linalg.norm(p - np.array(c), axis=1) - s for c, s in MONKEY], axis=0),
    }[shape]()
    assert np.abs(off).max() < 2e-3


def test_a_stretched_cube_is_a_wall():
    wall = Body("cube", (0.5, 0.5, 0.5), False, 1.0, (0.0, 3.0, 0.0), stretch=(4.0, 0.1, 1.0))
    frame = render([wall], Camera((0.0, -5.0, 1.0), (0.0, 3.0, 1.0), 60.0), 33, 1, Stage(fades=False))
    assert abs(frame.depth[16, 16] - 7.9) < 1e-3 and frame.mask[16, 16] == 1
    # Half of the image, at a distance of 7.9, is 7.9 * tan(30 degrees); the wall is four units wide to each side.
    assert frame.mask[16].sum() == 2 * int(4 / 7.9 / np.tan(np.radians(30)) * 16.5) + 1


def examples(views=None, frames=None, size=16, bounds=None):
    views = ViewsConfig(**(views or {"context": 3, "held_out": 1, "rays": 20}))
    return ViewExamples(
        DataConfig(sources={"x": {"kind": "shards", "shards": "x.tar"}}),
        size,
        (4, 8),
        views,
        FramesConfig(count=2, **(frames or {})),
        bounds,
    )


SOURCE = Source("s", ShardsConfig(shards=("x",), image_keys=("png",)), [])


def test_views_and_rays_are_drawn_per_sample_with_equal_shares(scene):
    made = examples()
    one, again, other = (made.prepare(scene, SOURCE, generator(0, "visit", i)) for i in (1, 1, 2))
    assert all(np.array_equal(one[name], again[name]) for name in one)
    assert any(not np.array_equal(one[name], other[name]) for name in ("shown_poses", "pixels"))
    assert one["shown"].shape == (2, 3, 3, 16, 16) and one["colours"].shape == (2, 4, 20, 3)
    for row in one["pixels"].reshape(-1, 20):
        assert len(set(row.tolist())) == 20 and row.min() >= 0 and row.max() < 256
    # Drawn views begin with the input views; a drawn pixel has the colour of the input image.
    assert np.array_equal(one["poses"][:, :3], one["shown_poses"])
    flat = one["shown"].transpose(0, 1, 3, 4, 2).reshape(2, 3, 256, 3)
    assert np.array_equal(np.take_along_axis(flat, one["pixels"][:, :3, :, None], 2), one["colours"][:, :3])
    held = examples({"context": 2, "held_out": 3, "targets": "held_out", "rays": 8}).prepare(
        scene, SOURCE, generator(0, "visit", 1)
    )
    assert held["colours"].shape == (2, 3, 8, 3) and held["shown"].shape[1] == 2


def told(scene, **changes):
    facts = json.loads(scene["json"])
    return {**scene, "json": json.dumps({**facts, **changes}).encode()}


def test_unusable_scenes_are_counted_by_cause(scene):
    facts = json.loads(scene["json"])
    cameras = facts["cameras"]

    def poses(table):
        return told(scene, cameras=[{**c, "poses": table} for c in cameras])

    tiny = {name: data for name, data in scene.items() if not name.startswith("c4.")}
    other = _sample(MultiViewSetConfig(size=16, frames=3), "train", 0)[1]
    tiny |= {name: data for name, data in other.items() if name.startswith("c4.")}
    for fields, reason in (
        ({n: d for n, d in scene.items() if not n.startswith("c1.")}, "a view is missing"),
        ({n: d for n, d in scene.items() if not n.startswith("c")}, "missing views"),
        ({n: d for n, d in scene.items() if n != "c2.002.png"}, "different numbers of frames"),
        (tiny, "views have unequal sizes"),
        (told(scene, cameras=cameras[:3]), "json must list one camera"),
        (told(scene, cameras=None), "json must list one camera"),
        (poses([np.zeros((4, 4)).tolist()]), "singular"),
        (poses([]), "either one pose"),
        (poses("north"), "either one pose"),
        (told(scene, cameras=[{"poses": c["poses"]} for c in cameras]), "without fov"),
        (told(scene, convention="blender"), "convention"),
        ({**scene, "json": b"{"}, "bad json"),
        ({**scene, **{f"c{v}.{t:03d}.png": b"no" for v in range(5) for t in range(3)}}, "image"),
    ):
        with pytest.raises(BadSampleError, match=reason):
            examples().prepare(fields, SOURCE, generator(0, "visit", 3))
    for wrong in (
        {"near": 9.0, "far": 1.0},
        {"near": 1.0, "far": None},
        {"near": float("nan"), "far": 2.0},
        {"far": "x"},
    ):
        with pytest.raises(BadSampleError, match="expected 0 < near < far"):
            examples().prepare(told(scene, **wrong), SOURCE, generator(0, "visit", 3))
        with pytest.raises(BadSampleError, match="expected 0 < near < far"):
            MultiViewScene(told(scene, **wrong)).check()
    # Without given distances, they follow from the point at which the cameras look, if there is one.
    unsaid = told(scene, near=None, far=None)
    for ends in (Bounds(0.1, 1.5), Bounds(60.0, 90.0)):
        with pytest.raises(BadSampleError, match=r"the cameras look at a point outside .*decoder.near="):
            examples(bounds=ends).prepare(unsaid, SOURCE, generator(0, "visit", 3))
    examples(bounds=Bounds(1.0, 40.0)).prepare(unsaid, SOURCE, generator(0, "visit", 3))
    outwards = multi_view_episode("nature_ego", 0, "train", 0, 8, 1)
    eyes, ahead = outwards.poses[:, 0, :3, 3], -outwards.poses[:, 0, :3, 2]
    assert not (
        (common_point(eyes, ahead) - eyes) * ahead > 1
    ).all()  # cameras that look away from each other do not determine it
    with pytest.raises(BadSampleError, match="fewer views than"):
        examples({"context": 5, "held_out": 1}).prepare(scene, SOURCE, generator(0, "visit", 3))
    with pytest.raises(BadSampleError, match=r"decoder.near=1, decoder.far=9\)"):
        examples(bounds=Bounds(1.0, 9.0)).prepare(scene, SOURCE, generator(0, "visit", 3))
    for box in (None, ((-6.0, -6.0, 0.0), (6.0, 6.0, 2.0))):
        examples(bounds=Bounds(1.0, 90.0, box)).prepare(scene, SOURCE, generator(0, "visit", 3))
    for unmet in (((600.0, 600.0, 0.0), (601.0, 601.0, 2.0)), ((-6.0, -6.0, 50.0), (6.0, 6.0, 52.0))):
        with pytest.raises(BadSampleError, match=r"no ray of the target views meets the sampled box"):
            examples(bounds=Bounds(1.0, 90.0, unmet)).prepare(scene, SOURCE, generator(0, "visit", 3))
