"""Recipes of slot models with data for them."""

import pytest

from sparo_data.synthetic.viewed_sets import MultiViewSetConfig, render_multi_view
from sparo_data.writer import write_shards
from tests.helpers.recipes import slots_recipe
from tests.helpers.samples import sample
from tests.resume.test_scenes3d import recipe_of
from tests.resume.test_videos import video_recipe


def object_centric(kind, root):
    """Return a recipe of slots for images, or for rendered videos or posed scenes."""
    if kind != "images":
        pytest.importorskip("pybullet", reason="videos and scenes are rendered with pybullet")
    if kind == "images":
        write_shards(root / "shards", (sample(i) for i in range(96)), 24)
        return slots_recipe(root / "shards", root)
    if kind in ("psb", "savi"):
        return {**video_recipe(root, kind)[0], "out": str(root), "eval": {"tasks": {}}}
    render_multi_view(root / "scenes", MultiViewSetConfig(size=16, frames=4, train=24, test=6, per_shard=12), 2)
    field = {"kind": "nerf", "bins": 8, "near": 1.0, "far": 30.0}
    decoders = {"nerf": field, "nerf_relu": {**field, "density": "relu"}, "slot_mixer": {"kind": "slot_mixer"}}
    return recipe_of(root / "scenes", root, decoders[kind])
