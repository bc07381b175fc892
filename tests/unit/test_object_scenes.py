"""Scenes of objects: the rules of CLEVR's generator, patterns that move with objects, rooms, and reproducible bytes."""

import json

import numpy as np
import pytest
from PIL import Image

from evals.tasks.objects.segmentation import image_scores
from sparo_data.synthetic.object_scenes import ROOM_TESTS, ObjectSetConfig, object_scene, render_objects
from sparo_data.synthetic.tetrominoes import TetrominoesConfig, make_tetrominoes
from sparo_data.tracer.render import project
from sparo_data.tracer.solids import PATTERNS, Texture, apply_texture
from sparo_train.core.errors import DataError
from sparo_train.data.sources.base import open_source
from sparo_train.data.sources.shards import ShardsConfig


@pytest.mark.parametrize("kind", ["clevr", "clevrtex"])
def test_objects_do_not_touch_and_none_is_hidden(kind):
    seen = set()
    for number in range(12):
        scene, frame = object_scene(kind, 0, "train", number, 48, max_objects=6)
        graph = scene.graph(frame)
        assert 3 <= len(scene.solids) <= 6 and frame.mask.max() == len(scene.solids)
        for i, (solid, told) in enumerate(zip(scene.solids, graph["objects"], strict=True)):
            assert told["visible"] == (frame.mask == i + 1).sum() >= 3
            assert max(map(abs, told["position"][:2])) <= 3 and told["position"][2] == solid.radius
            column, row = told["pixel"]
            if told["visible"] > 40:  # its centre is one of its pixels, or near them
                assert np.hypot(*(np.argwhere(frame.mask == i + 1) - (row - 0.5, column - 0.5)).T).min() < 3
            seen.add((solid.size, solid.material, solid.shape))
            assert (solid.texture is not None) == (kind == "clevrtex")
            for other in scene.solids[:i]:
                assert np.hypot(solid.x - other.x, solid.y - other.y) > 0.6
                a, b = (project(scene.camera, s.body().centre * (1, 1, 0)) for s in (solid, other))
                assert a[:2] != b[:2]
    assert len(seen) > 8


def test_walls_of_rooms_are_not_objects():
    for test, fits in {"": range(1, 4), "empty_room": [0], "six_objects": [6], "identical_color": range(4, 7)}.items():
        for number in range(4):
            scene, frame = object_scene("rooms", 1, "test", number, 32, test=test)
            assert len(scene.solids) in fits and frame.mask.max() == len(scene.solids) == len(frame.amodal)
            assert len(scene.walls) == 4 and (frame.mask == 0).any()
            assert test != "identical_color" or len({s.color for s in scene.solids}) == 1


def test_segments_of_the_background_have_labels_after_those_of_objects():
    for test in ("", *ROOM_TESTS):
        scene, frame = object_scene("rooms_background", 1, "test", 0, 32, test=test)
        count, sky = len(scene.solids), np.isinf(frame.depth)
        assert frame.mask.min() > 0 and (frame.mask[sky] == count + 2).all() and frame.mask.max() <= count + 6
        assert len(set(np.unique(frame.mask[frame.mask > count]).tolist())) > 1 and (frame.mask == count + 1).any()
        assert [solid["visible"] for solid in scene.graph(frame)["objects"]] == [
            int((frame.mask == i + 1).sum()) for i in range(count)
        ]
        # So the ARI over all pixels compares segments, also in a room without objects.
        merged = np.where(frame.mask > count, count + 1, frame.mask)
        own, blind = (image_scores(frame.mask, predicted)["ari"] for predicted in (frame.mask, merged))
        assert own == 1 and blind < 0.9


def test_patterns_are_functions_of_the_point():
    points = np.random.default_rng(0).uniform(-3, 3, (500, 3)).astype(np.float32)
    base = np.full((500, 3), 0.5, np.float32)
    for pattern in PATTERNS:
        texture = Texture(pattern, (0.0, 1.0, 0.0), seed=3)
        found = apply_texture(texture, points, base)
        assert found.min() >= 0 and found.max() <= 1 and found[:, 1].std() > 0.05
        assert np.array_equal(found[::-1], apply_texture(texture, points[::-1], base))


@pytest.mark.long
def test_sets_are_reproducible_and_can_be_continued(tmp_path):
    config = ObjectSetConfig(kind="rooms", train=5, test=3, size=16, per_shard=2)
    render_objects(tmp_path / "a", config, processes=2)
    whole = {p.relative_to(tmp_path / "a"): p.read_bytes() for p in (tmp_path / "a").rglob("*.tar")}
    assert {str(p.parent) for p in whole} == {"train", "masks/test", *(f"{t}/test" for t in ROOM_TESTS)}
    (tmp_path / "a/train/00001.tar").unlink()
    calls = []
    render_objects(tmp_path / "a", config, processes=1, on_progress=lambda *at: calls.append(at))
    assert {p: (tmp_path / "a" / p).read_bytes() for p in whole} == whole and calls[-1] == (17, 17)
    with pytest.raises(DataError, match="contains a set with other options"):
        render_objects(tmp_path / "a", config.model_copy(update={"size": 32}))
    with pytest.raises(DataError, match=r"contains another set \(objects\.json\)"):
        make_tetrominoes(tmp_path / "a", TetrominoesConfig(train=1, test=1))
    (tmp_path / "a/objects.json").unlink()
    with pytest.raises(DataError, match="contains another set"):
        render_objects(tmp_path / "a", config)
    (part, *_) = open_source("c", ShardsConfig(shards=(str(tmp_path / "a/train"),))).storages
    _, fields = part.read(0)
    assert json.loads(fields["json"])["dataset"] == "rooms"
    with Image.open(tmp_path / "m.png" if (tmp_path / "m.png").write_bytes(fields["mask.png"]) else "") as mask:
        assert mask.size == (16, 16)
