"""Muon together with AdamW: their parameters, the written-out update, every engine, resume."""

import pytest
import torch

from sparo_train.core.config import resolve
from sparo_train.core.contracts import Progress
from sparo_train.core.errors import ConfigError
from sparo_train.core.recipe.layers import override
from sparo_train.engine.muon import CombinedOptimizer, MuonConfig
from sparo_train.engine.optim import build_optimizer, set_rates
from sparo_train.objectives.clip import ClipObjective
from sparo_train.objectives.clip_config import ClipObjectiveConfig
from sparo_train.train.build import build_objective
from sparo_train.train.run_config import RunConfig
from tests.helpers.ranks import run_ranks
from tests.parity.test_accumulate import DDP, FSDP2, ZERO_2, model_after, trained, two_tree
from tests.parity.test_clip import tiny
from tests.parity.test_slots_bf16 import trees


def _objective():
    return ClipObjective(ClipObjectiveConfig(model=tiny("sparo").config))


def _orthogonal(matrix):
    """Compute five Newton-Schulz steps in double precision."""
    x = matrix.double() / matrix.double().norm()
    x = x.T if len(x) > x.shape[1] else x
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
    return x.T if len(matrix) > matrix.shape[1] else x


def test_muon_updates_matrices_and_adamw_the_rest():
    objective = _objective()
    optimizer = build_optimizer(MuonConfig(lr=1e-2, weight_decay=0.1), objective)
    assert isinstance(optimizer, CombinedOptimizer)
    names = {id(p): name for name, p in objective.named_parameters()}
    adamw, muon = ({names[id(p)] for g in o.param_groups for p in g["params"]} for o in optimizer.inner)
    assert adamw | muon == set(names.values()) and not adamw & muon
    assert "model.visual.transformer.resblocks.0.mlp.c_fc.weight" in muon and "model.visual.sparo.proj.weight" in muon
    for stays in ("visual.sparo.q_emb", "visual.sparo.k.weight", "text.token_embedding.weight", "visual.conv1.weight",
                  "text.positional_embedding", "visual.class_embedding", "logit_scale", "visual.ln_post.weight"):  # fmt: skip
        assert f"model.{stays}" in adamw, stays
    set_rates(optimizer, MuonConfig(lr=2e-2), Progress(0, 10, 0))
    before = {name: p.detach().clone() for name, p in objective.named_parameters()}
    torch.manual_seed(0)
    for p in objective.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    for name, p in objective.named_parameters():
        rate = 0.2 * max(p.shape) ** 0.5 * 2e-2 if name in muon else 2e-2
        decay = 2e-2 * 0.2 if p.ndim > 1 else 0.0  # decoupled; `set_rates` has set the rate of the second config
        moved = before[name].double() * (1 - decay) - p.detach().double()
        # in the first step, Nesterov's momentum equals the gradient up to its length
        expected = _orthogonal(p.grad) * rate if name in muon else p.grad.double().sign() * rate
        assert float((moved - expected).norm()) < 0.03 * float(expected.norm()), name


@pytest.mark.parametrize("kind", ["ep", "fdt", "attpool"])
def test_parameters_that_a_readout_lists_stay_with_adamw(kind):
    objective = ClipObjective(ClipObjectiveConfig(model=tiny(kind).config))
    listed = {name for name in objective.param_groups().adamw_only if name in dict(objective.named_parameters())}
    assert listed
    # without patterns: runs record them, and a plug-in's readout does not occur in them
    optimizer = build_optimizer(MuonConfig(adamw_patterns=()), objective)
    names = {id(p): name for name, p in objective.named_parameters()}
    muon = {names[id(p)] for group in optimizer.inner[1].param_groups for p in group["params"]}
    assert muon and not muon & listed


def test_muon_updates_only_linear_maps_of_slot_models(shards, tmp_path):
    for name, tree in trees(shards, tmp_path).items():
        objective = build_objective(resolve(RunConfig, tree, name))
        names = {id(p): n for n, p in objective.named_parameters()}
        optimizer = build_optimizer(MuonConfig(), objective)
        maps = {f"{n}.weight" for n, m in objective.named_modules() if isinstance(m, torch.nn.Linear)}
        muon = {names[id(p)] for group in optimizer.inner[1].param_groups for p in group["params"]}
        # The gates of a GRU are three matrices in one, like attention's in_proj_weight. torch's Muon usually gets both.
        assert not [n for n in muon - maps if not n.endswith(("weight_ih", "weight_hh"))], name
        assert any("initial_slots" in n for n in names.values() if n not in muon) or "learned" not in str(tree), name


@pytest.mark.long
@pytest.mark.parametrize(("engine", "apart"), [(DDP, 0.06), (FSDP2, 0.15)], ids=["ddp", "fsdp2"])
def test_ranks_end_near_one_process_and_bit_equal_after_a_restart(shards, tmp_path, engine, apart):
    """Torch computes an update in 16 bits, and sums over shards are rounded again, so engines agree up to a fraction of a step."""
    tree = override(two_tree(shards, tmp_path), ["optim={kind: muon, lr: 1e-3}"])
    run_ranks(1, trained, tree, {"kind": "local", "device": "cpu", "precision": "fp32"}, 12, tmp_path / "alone")
    run_ranks(2, trained, tree, engine, 3, tmp_path / "straight")
    run_ranks(2, trained, tree, engine, 3, tmp_path / "again", {3: engine})
    begun = build_objective(resolve(RunConfig, tree, "x")).state_dict()
    alone, straight, again = (model_after(tmp_path / name) for name in ("alone", "straight", "again"))
    for name, value in straight.items():
        assert torch.equal(value, again[name]), name
        other, moved = (float((alone[name] - t).norm()) for t in (value, begun[name]))
        assert other < apart * moved or torch.allclose(value, alone[name], rtol=1e-4, atol=2e-5), (name, other / moved)


def _refused(ranks, tree):
    try:
        trained(ranks, tree, ZERO_2, 6, tree["out"])
    except ConfigError as error:
        return str(error)


def test_impossible_options_are_refused(shards, tmp_path):
    tree = override(two_tree(shards, tmp_path), ["optim={kind: muon, lr: 1e-3}"])
    for said in run_ranks(2, _refused, tree):
        assert said.startswith("engine.kind=deepspeed: cannot step optim.kind=muon")
    with pytest.raises(ConfigError, match=r"optim\.kind=muon: Muon trains matrices only"):
        build_optimizer(MuonConfig(adamw_patterns=("*",)), _objective())
