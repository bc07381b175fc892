"""Every readout on two ranks, with CLIP and DINO, has the gradients of one process, whatever the towers share."""

import pytest
import torch

from sparo_train.core.config import resolve
from sparo_train.core.contracts import Progress
from sparo_train.core.errors import ConfigError
from sparo_train.core.recipe.layers import override
from sparo_train.train.build import build_engine, build_objective, build_pipeline
from sparo_train.train.run_config import RunConfig
from tests.helpers.ranks import run_ranks
from tests.helpers.recipes import dino_recipe, tiny_recipe
from tests.parity.test_accumulate import (
    DDP,
    FSDP2,
    ZERO_1,
    ZERO_2,
    ZERO_3,
    all_gradients,
    assert_close,
    engine_block,
    model_after,
    trained,
    two_tree,
)
from tests.parity.test_clip import READOUTS


def _trees(shards, out):
    """Return a tiny recipe of each readout, by method and name."""
    found = {}
    for name, readout in READOUTS.items():
        if name in ("token", "gap-patches", "map-image", "sparo-keep"):  # they have no module of a new kind
            continue
        clip = tiny_recipe(shards, out, batch_size=8)
        clip["objective"]["model"] = {**clip["objective"]["model"], "embed_dim": 24, "readout": readout}
        if name == "flair":
            clip["objective"]["model"]["init_logit_bias"] = -4.0
            clip["objective"]["loss"] = {"kind": "sigmoid"}
        found["clip", name] = clip
        if name in (
            "gap",
            "coca",
            "map",
            "attpool",
            "fdt",
        ):  # one example for each way in which a backbone contains a readout
            dino = dino_recipe(shards, out, batch_size=8)
            dino["objective"]["model"]["readout"] = readout
            found["dino", name] = dino
    for tree in found.values():
        tree["data"] = {**tree["data"], "workers": 0, "streams": 8}
    return found


def _all(ranks, trees, engine, size):
    return {key: all_gradients(ranks, tree, engine, [size])[0] for key, tree in trees.items()}


@pytest.mark.long
def test_gradients_of_every_readout_are_those_of_one_process(shards, tmp_path):
    trees = _trees(shards, tmp_path)
    (whole,) = run_ranks(1, _all, trees, engine_block("local"), 8)
    unlike = {
        k: trees[k]
        for k in [("clip", "fdt"), ("clip", "flair"), ("clip", "sparo-weighted"), ("clip", "coca"), ("dino", "coca")]
    }
    for engine, size, chosen in ((DDP, 2, trees), (FSDP2, 4, unlike)):
        for by_key in run_ranks(2, _all, chosen, engine, size):
            for key, found in by_key.items():
                assert found.keys() == whole[key].keys(), key
                assert_close(found, whole[key], 1e-9)
    for kind, name, shared in (("clip", "fdt", "fdt.space_dict"), ("clip", "sparo-weighted", "sparo.q_emb")):
        assert [n for n in whole[kind, name] if n.endswith(shared)] == [f"model.visual.{shared}"]


@pytest.mark.long
def test_a_codebook_of_both_towers_goes_through_all_engines(shards, tmp_path):
    tree = override(
        two_tree(shards, tmp_path), ["objective.model.readout={kind: fdt, codes: 40, width: 12, temperature: 0.3}"]
    )
    run_ranks(2, trained, tree, DDP, 6, tmp_path / "straight")
    run_ranks(2, trained, tree, ZERO_1, 6, tmp_path / "changing", {1: FSDP2, 2: ZERO_3, 3: DDP, 4: ZERO_2, 5: FSDP2})
    straight, changing = model_after(tmp_path / "straight"), model_after(tmp_path / "changing")
    for name, value in straight.items():
        assert torch.allclose(value, changing[name], rtol=1e-4, atol=2e-5), name
    assert torch.equal(changing["model.visual.fdt.space_dict"], changing["model.text.fdt.space_dict"])


def _averaged(ranks, trees, engines, out):
    for (_, name), tree in trees.items():
        for kind, engine in engines.items():
            trained(ranks, override(tree, ["objective.ema={decay: 0.9}"]), engine, 4, out / kind / name)


@pytest.mark.long
def test_an_average_follows_what_is_sharded_and_what_is_not(shards, tmp_path):
    trees = _trees(shards, tmp_path)
    trees = {k: trees[k] for k in trees if k in (("clip", "flair"), ("clip", "fdt"))}
    engines = {
        "ddp": DDP,
        "fsdp2": FSDP2,
        "zero": ZERO_2,
        "zero3": ZERO_3,
        "cut": {**ZERO_3, "persistence_threshold": 0},
    }
    run_ranks(2, _averaged, trees, engines, tmp_path)
    for _, name in trees:
        one, *others = (model_after(tmp_path / engine / name) for engine in engines)
        assert any(n.startswith("average.") and not torch.equal(t, one["model" + n[7:]]) for n, t in one.items()), name
        for n, t in one.items():
            # The gradient of a key's bias is rounding only, which Adam turns into a direction.
            near = 2e-3 if n.endswith("in_proj_bias") else 2e-5
            assert all(torch.allclose(t, other[n], rtol=1e-4, atol=near) for other in others), (name, n)


def _with_a_spare(ranks, tree):
    config = resolve(RunConfig, {**tree, "engine": DDP}, "x")
    objective, running = build_objective(config), build_engine(config.engine, config.optim, ranks)
    objective.model.visual.spare = torch.nn.Parameter(torch.zeros(3))
    running.prepare(objective)
    try:
        running.forward(next(build_pipeline(config, ranks.world).start()).batch, Progress(0, 6, 0), last=True)
    except ConfigError as error:
        return str(error)


def test_ddp_names_parameters_without_a_gradient(shards, tmp_path):
    for said in run_ranks(2, _with_a_spare, two_tree(shards, tmp_path)):
        assert said.startswith("engine.kind=ddp: the loss does not depend on model.visual.spare")
