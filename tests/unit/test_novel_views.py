"""The objective of posed scenes with every decoder and grouping: what is trained, in which precision, and refused combinations."""

import pytest
import torch

from object_centric.scenes3d.novel_views import NovelViews, NovelViewsConfig
from sparo_train.core.config import resolve
from sparo_train.core.contracts import Progress
from sparo_train.core.errors import ConfigError
from tests.unit.test_scene_drawing import DECODERS


def objective(name, grouping=None, **more):
    torch.manual_seed(0)
    model = {
        "image_size": 16,
        "encoder": {
            "channels": 8,
            "width": 24,
            "num_downsample": 2,
            "transformer": {"blocks": 1},
            "points": DECODERS[name].get("points"),
        },
        "grouping": grouping or {"preset": "psb", "slots": 3, "width": 24, "iterations": 2},
        "decoder": DECODERS[name],
        **more,
    }
    return NovelViews(
        resolve(NovelViewsConfig, {"model": model, "views": {"context": 2, "rays": 9}, "frames": {"count": 2}}, "here")
    )


def batch(count=2):
    torch.manual_seed(2)
    poses = torch.eye(4).expand(count, 2, 3, 4, 4).clone()
    poses[..., 2, 3] = 5.0
    poses[:, :, 1, 0, 3] = 1.0
    lenses = torch.tensor([20.0, 20.0, 8.0, 8.0]).expand(count, 2, 3, 4)
    return {
        "shown": torch.randint(0, 256, (count, 2, 2, 3, 16, 16), dtype=torch.uint8),
        "shown_poses": poses[:, :, :2],
        "shown_lenses": lenses[:, :, :2],
        "colours": torch.randint(0, 256, (count, 2, 3, 9, 3), dtype=torch.uint8),
        "poses": poses,
        "lenses": lenses,
        "pixels": torch.randint(0, 256, (count, 2, 3, 9), dtype=torch.int32),
        "offsets": torch.rand(count, 2, 3, 9),
        "noise": torch.randn(count, 3, 24),
    }


GROUPINGS = {
    "savi": {"grouping": {"preset": "savi", "slots": 3, "width": 24, "slot_init": "learned"}, "predictor": {}},
    "each": {"grouping": {"preset": "sa", "slots": 3, "width": 24}, "over_time": False},
    "tf_inv": {
        "grouping": {"preset": "tf_inv", "slots": 3, "width": 24, "slot_init": "learned", "iterations": 2},
        "over_time": False,
    },
}


@pytest.mark.parametrize("name", [*DECODERS, *GROUPINGS])
def test_every_part_learns_and_recomputation_changes_nothing(name):
    def gradients(checkpointed):
        made = objective(name) if name in DECODERS else objective("psb", **GROUPINGS[name])
        made.set_grad_checkpointing(checkpointed)
        loss = made(batch(), Progress(0, 10, 0))
        loss.total.backward()
        return loss, {n: p.grad for n, p in made.named_parameters()}

    (loss, plain), (again, other) = gradients(False), gradients(True)
    assert loss.total == again.total and loss.metrics["mse"] == loss.total
    assert loss.metrics["mse_held_out"] != loss.metrics["mse_shown"]
    assert all(torch.equal(plain[n], other[n]) for n in plain if plain[n] is not None)
    assert all(g is not None for n, g in plain.items() if "distance" not in n)
    assert objective("psb").footprint(2, 2).tokens == {"views": 2 * 2 * 16, "rays": 2 * 3 * 9}


@pytest.mark.parametrize("name", DECODERS)
def test_half_precision_is_close_and_keeps_positions_exact(name):
    made = objective(name)
    with torch.no_grad():
        whole = made(batch(), Progress(0, 10, 0)).total
        with torch.autocast("cpu", torch.bfloat16):
            half = made(batch(), Progress(0, 10, 0)).total
            assert made.rays(batch()).directions.dtype == torch.float32
    assert half.dtype == torch.float32 and abs(half - whole) < 0.02 * whole


def test_slots_of_a_time_step_depend_on_that_time_step_only():
    made, given_ = objective("psb", **GROUPINGS["each"]), batch()
    posed = torch.cat([given_["shown"].float() / 255, torch.randn(2, 2, 2, 6, 16, 16)], 3)
    with torch.no_grad():
        both = made.model.tower(posed, given_["noise"]).slots
        second = made.model.tower(posed[:, 1:], given_["noise"]).slots
    assert torch.allclose(both[:, 1:], second, atol=1e-6)


@pytest.mark.parametrize(
    ("tree", "told"),
    [
        ({"decoder": {"kind": "nerf", "near": 5.0, "far": 4.0}}, "far=4.0"),
        ({"decoder": {"kind": "nerf", "box": [[0, 0, 0], [1, -1, 1]]}}, "the first corner"),
        ({"encoder": {"points": {"near": -1.0}}}, "near=-1.0: is behind"),
        ({"encoder": {"points": {"near": 5.0, "far": 4.0}}}, "far=4.0"),
        ({"encoder": {"preset": "osrt", "points": {}}}, "fourier_bands=15: cannot be combined with the key `points`"),
        ({"encoder": {"preset": "srt"}, "image_size": 512}, "encoder.pos_embed_size=16: image_size=512 has 32"),
        ({"decoder": {"kind": "nerff"}}, "nerf"),
        ({"decoder": {"kind": "slot_mixer", "heads": 5}}, "decoder.heads=5"),
        ({"decoder": {"kind": "slot_mixer", "preset": "ostr"}}, "osrt"),
        ({"encoder": {"preset": "slrs"}}, "slsr"),
        ({"grouping": {"preset": "sa_me"}}, "transport"),
        ({"over_time": False, "predictor": {}}, "predictor"),
        ({"image_size": 8}, "views.rays=128"),
    ],
)
def test_incompatible_parts_are_refused_by_key(tree, told):
    with pytest.raises(ConfigError, match=told):
        resolve(NovelViewsConfig, {"model": tree}, "here")
