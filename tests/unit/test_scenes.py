"""The renderer, the scene graph, and captions of scenes."""

import json

import numpy as np
import pytest
from PIL import Image

from evals.sets.wds import WdsSet
from evals.tasks import textonly
from sparo_data.synthetic.scene_sets import KINDS, ScenesConfig, make_pair, render_scenes
from sparo_data.synthetic.scenes import CLASSES, HELD_OUT, OPPOSITE, caption, sample_scene, training_scene
from sparo_data.tracer.render import Body, Camera, project, render
from sparo_train.core.errors import DataError
from sparo_train.core.rng import generator
from sparo_train.data.sources.shards import ShardReader

CONFIG = ScenesConfig(train=24, per_shard=12, per_class=1, retrieval=10, pairs_per_kind=3, size=32)


@pytest.fixture(scope="module")
def rendered(tmp_path_factory):
    root = tmp_path_factory.mktemp("scenes")
    render_scenes(root, CONFIG)
    return root


def test_a_sphere_is_rendered_where_geometry_places_it():
    camera = Camera((0, -8, 4), (0, 0, 0.5), 40)
    body = Body("sphere", (0.5, 0, 0), False, 0.5, (0, 0, 0))
    frame = render([body], camera, 128, 1)
    rows, columns = np.nonzero(frame.mask == 1)
    x, y, depth = project(camera, body.centre)
    centre = ((columns.mean() + 0.5) / 64 - 1, 1 - (rows.mean() + 0.5) / 64)
    assert centre == pytest.approx((x, y), abs=0.02)
    radius = np.tan(np.arcsin(0.5 / np.linalg.norm(body.centre - np.array(camera.eye)))) / np.tan(np.radians(20))
    assert (frame.mask == 1).sum() == pytest.approx(np.pi * (radius * 64) ** 2, rel=0.03)
    assert frame.depth[frame.mask == 1].min() == pytest.approx(
        np.linalg.norm(body.centre - np.array(camera.eye)) - 0.5, abs=0.02
    )
    assert depth > 0


@pytest.mark.parametrize(("shape", "area"), [("cube", 4.0), ("cylinder", 4.0), ("sphere", np.pi)])
def test_shapes_have_their_silhouettes_from_the_front(shape, area):
    camera = Camera((0, -200, 1), (0, 0, 1), 1.2)
    frame = render([Body(shape, (0.5, 0, 0), False, 1.0, (0, 0, 0))], camera, 200, 1)
    pixel = 2 * 200 * np.tan(np.radians(0.6)) / 200
    assert (frame.mask == 1).sum() * pixel**2 == pytest.approx(area, rel=0.02)


def test_hidden_parts_are_amodal_only_and_shadows_fall():
    near = Body("cube", (0.5, 0, 0), False, 0.5, (0, -2, 0))
    far = Body("cube", (0, 0, 0.5), True, 0.5, (0, 0, 0))
    frame = render([near, far], Camera((0, -9, 1.2)), 96)
    assert (frame.mask == 2).sum() < frame.amodal[1].sum()
    assert (frame.amodal[0] == (frame.mask == 1)).all()
    ground = render([], Camera(), 64).rgb.astype(int)
    with_one = render([near], Camera(), 64)
    darker = (with_one.rgb.astype(int).sum(2) < ground.sum(2) - 60) & (with_one.mask == 0)
    assert darker.sum() > 10


def test_masks_depth_and_colours_are_as_documented():
    frame = render([Body("cube", (0.6, 0.03, 0.03), False, 0.7, (0, 0, 0))], Camera(), 48)
    assert frame.rgb.dtype == np.uint8 and frame.mask.max() == 1 and frame.amodal.shape == (1, 48, 48)
    inside = frame.rgb[frame.mask == 1].mean(axis=0)
    assert inside[0] > 2 * inside[1] and np.isinf(frame.depth[0, 0]) == (frame.depth[0, 0] > 1e6)


def test_training_scenes_contain_no_held_out_pair_and_are_reproducible():
    for index in range(150):
        scene, text = training_scene(0, index)
        assert not any((t.color, t.shape) in HELD_OUT for t in scene.objects)
        assert (scene, text) == training_scene(0, index)
        assert not any(f"{color} {shape}" in text for color, shape in HELD_OUT)
    assert training_scene(0, 1) != training_scene(1, 1)


def test_captions_are_true_of_their_scene():
    for index in range(200):
        rng = generator(0, "caption test", index)
        scene = sample_scene(rng, int(rng.integers(1, 5)))
        text = caption(scene, rng)
        for relation in OPPOSITE:
            if f" {relation} " in text:
                left, right = text.split(f" {relation} ")
                pairs = [
                    (a, b)
                    for a, t in enumerate(scene.objects)
                    for b, u in enumerate(scene.objects)
                    if a != b
                    and set(left.split()) <= set(t.phrase().split())
                    and set(right.split()) <= set(u.phrase().split())
                ]
                assert any(relation in scene.relation(a, b) for a, b in pairs)


@pytest.mark.parametrize("kind", KINDS)
def test_false_captions_differ_as_their_kind_requires(kind):
    for index in range(30):
        scene, true, false = make_pair(kind, generator(0, kind, index))
        words = [len(text.replace("in front of", "behind").split()) for text in (true, false)]
        assert true != false and words[0] == words[1]
        if kind.startswith("swap"):
            assert sorted(true.split()) == sorted(false.split())
        assert not any(f"{color} {shape}" in false for color, shape in HELD_OUT)
        for thing in scene.objects:
            assert not thing.held_out


def test_text_only_guessers_are_near_chance_on_pairs():
    pairs = [make_pair(kind, generator(0, kind, i)) for kind in KINDS for i in range(150)]
    corpus = [training_scene(0, i)[1] for i in range(1500)]
    result = textonly.score([p[1] for p in pairs], [p[2] for p in pairs], corpus)
    assert result.n == 1050 and result.value < 0.56, result.metrics


@pytest.mark.long
def test_everything_is_written_as_documented(rendered):
    reader = ShardReader()
    _, fields = reader.read(str(rendered / "train" / "00001.tar"), 3)
    assert set(fields) == {"jpg", "txt", "json", "mask.png"}
    graph = json.loads(fields["json"])
    import io

    mask = np.asarray(Image.open(io.BytesIO(fields["mask.png"])))
    assert mask.shape == (32, 32) and mask.max() <= len(graph["objects"])
    zero, held = (WdsSet(rendered / name, "label") for name in ("zeroshot", "zeroshot_heldout"))
    assert zero.classnames() == held.classnames() == CLASSES
    labels = [label for _, _, label in held]
    assert {tuple(CLASSES[x].split()) for x in labels} == HELD_OUT
    texts = [captions[0] for _, _, captions in WdsSet(rendered / "retrieval", "captions")]
    assert len(set(texts)) == 10
    kinds = [pair.kind for _, _, (pair,) in WdsSet(rendered / "pairs", "pairs")]
    assert len(kinds) == 21 and set(kinds) == set(KINDS)


def test_rendering_is_reproducible_and_refuses_another_config(rendered, tmp_path):
    render_scenes(tmp_path, CONFIG, processes=1)
    for path in sorted(rendered.rglob("*.tar")):
        assert path.read_bytes() == (tmp_path / path.relative_to(rendered)).read_bytes()
    with pytest.raises(DataError, match="size: 32 -> 64"):
        render_scenes(tmp_path, CONFIG.model_copy(update={"size": 64}))
