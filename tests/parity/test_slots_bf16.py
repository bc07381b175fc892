"""Slot methods on two ranks: gradients of DDP and FSDP2 equal one process; FSDP2 with 16-bit weights is as accurate as autocast."""

import pytest
import torch
from torch.nn import functional as F

from sparo_data.synthetic.viewed_sets import MultiViewSetConfig, render_multi_view
from sparo_train.core.config import resolve
from sparo_train.core.contracts import Progress
from sparo_train.core.errors import ConfigError
from sparo_train.train.build import build_engine, build_objective, build_pipeline
from sparo_train.train.run_config import RunConfig
from sparo_train.train.step import gradients
from tests.helpers.ranks import run_ranks
from tests.helpers.recipes import slots_recipe
from tests.parity.test_accumulate import DDP, FSDP2, engine_block
from tests.resume.test_scenes3d import recipe_of
from tests.resume.test_videos import video_recipe

TOKENS = {"dvae": {"vocab": 16, "channels": 8}, "decoder": {"width": 16, "blocks": 1, "heads": 2}}
SCENES = {
    "nerf": {"decoder": {"kind": "nerf", "bins": 4, "near": 1.0, "far": 30.0, "static": True, "sky": True}},
    "shadowed": {"decoder": {"kind": "nerf", "bins": 4, "near": 1.0, "far": 30.0, "sky": True, "shadows": True}},
    "cut": {"decoder": {"kind": "nerf", "bins": 4, "near": 1.0, "far": 30.0, "density": "relu"}},
    "mixer": {"decoder": {"kind": "slot_mixer", "fourier_bands": 4, "blocks": 1, "heads": 2}},
    "pointed": {
        "decoder": {"kind": "broadcast", "fourier_bands": 4, "hidden": [16]},
        "encoder": {"channels": 8, "width": 16, "points": {"near": 1.0, "far": 9.0, "count": 2}},
    },
}


def trees(shards, root):
    """Return a small recipe of each method."""
    found = {"slots": slots_recipe(shards, root)}
    found["slots_cnn"] = slots_recipe(shards, root)
    model = found["slots_cnn"]["objective"]["model"]
    found["slots_cnn"]["objective"]["model"] = {
        **{k: v for k, v in model.items() if k != "frame"},
        "decoder": {"kind": "cnn", "channels": 8},
    }
    kept = {k: v for k, v in model.items() if k not in ("decoder", "frame")}
    found["slate"] = slots_recipe(shards, root)
    said = {**kept, **TOKENS, "encoder": {"kind": "tokens", "width": 16}}
    found["slate"]["objective"] = {"kind": "slate", "model": said}
    for kind in ("savi", "psb", "slot_contrast"):
        found[kind] = video_recipe(root / kind, kind)[0]
    kept = {k: v for k, v in found["psb"]["objective"]["model"].items() if k not in ("decoder", "target")}
    steve = {"kind": "video_slate", "frames": {"count": 2}, "model": {**kept, **TOKENS}}
    found["steve"] = {**found["psb"], "objective": steve}
    render_multi_view(root / "scenes", MultiViewSetConfig(size=16, frames=4, train=24, test=6, per_shard=12), 1)
    found |= {kind: recipe_of(root / "scenes", root, **parts) for kind, parts in SCENES.items()}
    for tree in found.values():
        tree["data"] = {**tree["data"], "workers": 0}
    return found


def computed(ranks, tree, engine, micro_batch_size=4):
    """Return the loss and the gradients of the first batch as one vector."""
    config = resolve(RunConfig, {**tree, "engine": engine}, "x")
    batch = next(build_pipeline(config, ranks.world).start()).batch
    objective, running = build_objective(config), build_engine(config.engine, config.optim, ranks)
    running.prepare(objective)
    loss = gradients(running, objective, batch, Progress(0, 10, 0), micro_batch_size)
    grads = [p.grad for p in objective.parameters() if p.grad is not None]
    whole = [g.full_tensor() if hasattr(g, "full_tensor") else g for g in grads]
    return float(loss.total), torch.cat([g.detach().float().flatten() for g in whole])


def each(ranks, trees):
    low = {"precision": "bf16"}
    engines = (DDP, FSDP2, {**engine_block("fsdp2"), **low}, {**DDP, **low})
    return {name: [computed(ranks, tree, engine) for engine in engines] for name, tree in trees.items()}


def alone(ranks, trees):
    return {name: computed(ranks, tree, engine_block("local"), 8) for name, tree in trees.items()}


def refused(ranks, tree):
    config = resolve(RunConfig, {**tree, "engine": {**FSDP2, "param_dtype": "bf16"}}, "x")
    with pytest.raises(ConfigError) as refusal:
        build_engine(config.engine, config.optim, ranks).prepare(build_objective(config))
    return str(refusal.value)


def test_16_bit_weights_without_autocast_are_refused_if_positions_would_lose_precision(shards, tmp_path):
    told = run_ranks(2, refused, slots_recipe(shards, tmp_path))
    assert [t.partition(" needs fp32 inputs")[0] for t in told] == ["engine.param_dtype=bf16: SlotAutoencoder"] * 2


@pytest.mark.long
def test_ranks_equal_one_process_and_16_bit_weights_are_as_accurate_as_autocast(shards, tmp_path):
    made = trees(shards, tmp_path)
    (whole,), ranks = run_ranks(1, alone, made), run_ranks(2, each, made)
    assert len(made) == 12
    for name, ((_, averaged), (loss, exact), (low, held), (other, cast)) in ranks[0].items():
        assert float((averaged - exact).norm()) < 1e-4 * float(exact.norm()), name
        # Each rank draws tokens from its own generator, so one process draws others.
        if name not in ("slate", "steve"):
            of_all = sum(by_name[name][1][0] for by_name in ranks) / 2
            assert of_all == pytest.approx(whole[name][0], rel=1e-4), name
            assert float((exact - whole[name][1]).norm()) < 1e-4 * float(exact.norm()), name
        assert abs(low - loss) < 3 * abs(other - loss) + 0.01 * abs(loss), name
        near, beside = (1 - F.cosine_similarity(g, exact, dim=0) for g in (held, cast))
        assert near < 3 * beside + 2e-3, (name, float(near), float(beside))
