"""Episodes whose colours Blender renders: its input, errors of Blender, and (slow, bpy in a separate environment) a real frame."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from sparo_data.synthetic.viewed_scenes import multi_view_episode
from sparo_data.synthetic.viewed_sets import MultiViewSetConfig, render_multi_view
from sparo_data.tracer.cycles import Cycles
from sparo_data.tracer.render import Body, Camera, Stage, render
from sparo_data.tracer.solids import SHAPES
from sparo_train.core.errors import ConfigError, DataError
from sparo_train.data.video.cameras import look_at

# Replaces a Python with bpy: draws camera and time as colours, or fails as its name says.
_FAKE = """#!{python}
import json, sys
from pathlib import Path
sys.path[:0] = {path!r}
from PIL import Image
if sys.argv[2] == "-c":
    sys.exit("it has none" if "{how}" == "none" else 0)
job = json.loads(Path(sys.argv[-1]).read_text())
Path({seen!r}).write_text(json.dumps(job))
if "{how}" == "dies":
    sys.exit("out of memory, it says")
for camera, poses in enumerate(job["cameras"]):
    for time in range(len(poses)):
        Image.new("RGB", (job["size"],) * 2, (camera, time, job["samples"])).save(f"{{job['out']}}/{{camera}}_{{time}}.png")
"""


def fake(folder, how="draws"):
    place = folder / how
    place.write_text(_FAKE.format(python=sys.executable, path=sys.path, how=how, seen=str(folder / "job.json")))
    place.chmod(0o755)
    return str(place)


@pytest.mark.parametrize("kind", ["simple", "nature_ego"])
def test_only_colours_come_from_blender(tmp_path, kind):
    ours = multi_view_episode(kind, 0, "train", 3, 16, 2)
    theirs = multi_view_episode(kind, 0, "train", 3, 16, 2, cycles=Cycles(fake(tmp_path), 7))
    for camera, (row, drawn) in enumerate(zip(ours.frames, theirs.frames, strict=True)):
        for time, (own, other) in enumerate(zip(row, drawn, strict=True)):
            assert (other.rgb == (camera, time, 7)).all()
            assert (own.mask == other.mask).all() and (own.depth == other.depth).all()
    assert ours.metadata == theirs.metadata
    job = json.loads((tmp_path / "job.json").read_text())
    assert np.allclose(job["cameras"], ours.poses) and len(job["bodies"]) == 2
    radii = {o["id"]: body["radius"] for o, body in zip(ours.metadata["objects"], job["bodies"][0], strict=False)}
    assert all(radius > 0.2 for radius in radii.values())
    assert (kind == "simple") == (
        len(job["bodies"][0]) == len(ours.metadata["objects"])
    )  # rooms have walls and statues


def test_errors_of_blender_are_reported_and_nothing_is_written(tmp_path):
    config = MultiViewSetConfig(size=16, frames=1, train=1, test=1, samples=4)
    with pytest.raises(ConfigError, match="Give --blender PYTHON"):
        render_multi_view(tmp_path / "set", config)
    with pytest.raises(ConfigError, match=r"cannot be run .*nosuch"):
        render_multi_view(tmp_path / "set", config, blender=str(tmp_path / "nosuch"))
    with pytest.raises(ConfigError, match=r"has no bpy .it has none.. Make a separate environment"):
        render_multi_view(tmp_path / "set", config, blender=fake(tmp_path, "none"))
    with pytest.raises(DataError, match=r"camera 0 at time 0.*exited with status 1: out of memory, it says"):
        render_multi_view(tmp_path / "set", config, processes=1, blender=fake(tmp_path, "dies"))
    assert not list((tmp_path / "set").rglob("*.tar"))
    render_multi_view(tmp_path / "set", config, processes=1, blender=fake(tmp_path))
    assert len(list((tmp_path / "set").rglob("*.tar"))) == 2


def test_a_set_of_an_older_version_is_continued(tmp_path):
    config = MultiViewSetConfig(size=16, frames=1, train=1, test=1)
    render_multi_view(tmp_path / "set", config, processes=1)
    told = tmp_path / "set/scenes3d.json"
    held = json.loads(told.read_text())
    del held["samples"]  # older versions had no such key
    told.write_text(json.dumps(held))
    (tmp_path / "set/train/00000.tar").unlink()
    render_multi_view(tmp_path / "set", config, processes=1)
    assert (tmp_path / "set/train/00000.tar").exists() and json.loads(told.read_text())["samples"] == 0
    told.write_text(json.dumps({**held, "seed": 1}))
    with pytest.raises(DataError, match=r"contains a set with other options .seed: 1 -> 0."):
        render_multi_view(tmp_path / "set", config, processes=1)
    told.write_text(json.dumps({**held, "train": "many"}))
    with pytest.raises(DataError, match="train: 'many' -> 1"):
        render_multi_view(tmp_path / "set", config, processes=1)


@pytest.fixture(scope="session")
def bpy_python(tmp_path_factory):
    """Return SPARO_BLENDER, or create an environment."""
    if told := os.environ.get("SPARO_BLENDER"):
        return told
    place = tmp_path_factory.mktemp("blender")
    subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
    subprocess.run([str(place / "bin/pip"), "install", "-q", "bpy"], check=True)
    return str(place / "bin/python")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("shape", SHAPES)
def test_blender_draws_every_solid_where_our_masks_are(bpy_python, shape):
    turn = (0.8, 0.36, 0.48, 0.0)
    body = Body(shape, (0.9, 0.02, 0.02), False, 0.8, (0.3, -0.2, 0.1), rotation=turn)
    eye, target = (3.0, -5.0, 4.0), (0.0, 0.0, 0.5)
    poses = look_at(eye, target)[None, None]
    stage = Stage(fades=False)
    (drawn,) = Cycles(bpy_python, 16).pictures([[body]], poses, 35.0, 64, stage)[0]
    r, g, b = np.moveaxis(drawn.astype(float), -1, 0)
    red = (r > 1.5 * g) & (r > 1.5 * b)
    mask = render([body], Camera(eye, target, 35.0), 64, 1, stage).mask > 0
    assert (red & mask).sum() > 0.93 * (red | mask).sum()
