"""Averaged weights: the recursion written out, on every engine, resumed, scored and exported; and the mean of checkpoints."""

import open_clip
import pytest
import torch
from safetensors.torch import load_file, save_file

import sparo_train.openclip  # noqa: F401  our read-outs in open_clip
from evals.encoders.loading import load_encoder
from evals.interop.exporting import export_run
from launch.commands.train import train
from sparo_train.core import ema
from sparo_train.core.config import resolve
from sparo_train.core.contracts import Progress
from sparo_train.core.disk import checkpoint_store as store
from sparo_train.core.ema import update_ema
from sparo_train.core.errors import CheckpointError, ConfigError
from sparo_train.core.recipe.layers import override
from sparo_train.models.weight_files.weights import refuse_non_finite
from sparo_train.objectives.clip_config import EmaConfig
from sparo_train.objectives.dino import DinoObjective
from sparo_train.objectives.dino_config import DinoObjectiveConfig
from sparo_train.train.build import build_objective
from sparo_train.train.run_config import RunConfig
from tests.helpers.ranks import run_ranks
from tests.helpers.recipes import tiny_recipe
from tests.parity.test_accumulate import DDP, FSDP2, ZERO_2, ZERO_3, model_after, trained, two_tree


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Train six steps with an average, and keep each checkpoint."""
    from sparo_data.writer import write_shards
    from tests.helpers.samples import sample

    root = tmp_path_factory.mktemp("ema")
    write_shards(root / "shards", (sample(i) for i in range(96)), 24)
    words = ["steps=6", "objective.ema={decay: 0.5}", "checkpoint={every_steps: 1, keep_last: 9}", "optim.lr=0.01"]
    config = resolve(RunConfig, override(tiny_recipe(root / "shards", root), words), "x")
    train(config)
    return config


def _weights(run, step, prefix):
    state = store.read_part(run.folder / f"checkpoints/step-{step:08d}", "model")
    return {n.removeprefix(prefix): t for n, t in state.items() if n.startswith(prefix)}


def test_the_average_is_the_recursion_and_is_what_is_scored_and_exported(run, tmp_path):
    average = build_objective(run).average.state_dict()
    for step in range(6):
        keep = min(0.5, (1 + step) / (10 + step))
        trained_weights = _weights(run, step + 1, "model.")
        average = {name: keep * t + (1 - keep) * trained_weights[name] for name, t in average.items()}
    found = _weights(run, 6, "average.")
    assert found.keys() == average.keys()
    for name, value in average.items():
        torch.testing.assert_close(found[name], value)
    assert not torch.allclose(found["visual.sparo.k.weight"], _weights(run, 6, "model.")["visual.sparo.k.weight"])
    encoder = load_encoder(run.folder)
    assert all(torch.equal(t, found[n]) for n, t in encoder.model.state_dict().items())
    exported = open_clip.create_model(f"local-dir:{export_run(run.folder, tmp_path / 'one', None)}")
    assert all(torch.equal(t, found[n]) for n, t in exported.state_dict().items())
    assert "trained parameters" in (tmp_path / "one/README.md").read_text()


def test_the_mean_of_checkpoints_is_exported(run, tmp_path):
    path = export_run(run.folder, tmp_path / "mean", None, "last:3")
    exported = open_clip.create_model(f"local-dir:{path}").state_dict()
    each = [_weights(run, step, "average.") for step in (4, 5, 6)]
    for name, value in exported.items():
        torch.testing.assert_close(value, sum(weights[name] for weights in each) / 3)
    card = (path / "README.md").read_text()
    assert "the mean of the weights at steps 4, 5, 6" in card and "not scored" in card
    four = run.folder / "checkpoints/step-00000004"
    early = open_clip.create_model(f"local-dir:{export_run(four, tmp_path / 'early', None, 'last:4')}").state_dict()
    name = "visual.sparo.k.weight"
    torch.testing.assert_close(early[name], sum(_weights(run, s, "average.")[name] for s in (1, 2, 3, 4)) / 4)
    with pytest.raises(ConfigError, match=r"--average last:7: .* has only 6 complete checkpoint\(s\)"):
        export_run(run.folder, tmp_path / "no", None, "last:7")
    broken = dict(store.read_part(run.folder / "checkpoints/step-00000005", "model"))
    broken["model.logit_scale"] = torch.tensor(torch.nan)
    with pytest.raises(CheckpointError, match=r"x: model.logit_scale: has values that are not finite"):
        refuse_non_finite(broken, "x")
    # Also refused when it is loaded to be scored, because a model can hide it (tests/hostile/test_weights.py).
    held = load_file(path / "open_clip_model.safetensors")
    held["visual.transformer.resblocks.0.attn.in_proj_weight"][0, 0] = torch.nan
    save_file(held, path / "open_clip_model.safetensors")
    with pytest.raises(CheckpointError, match=r"mean: visual\.\S+in_proj_weight: has values that are not finite"):
        load_encoder(path)
    for wrong in ("5", "last:", "last:0", "first:2"):
        with pytest.raises(ConfigError, match=f"--average {wrong}: expected last:N"):
            export_run(run.folder, tmp_path / "no", None, wrong)


def test_a_run_with_an_average_starts_from_a_checkpoint(run, shards, tmp_path):
    tree = tiny_recipe(shards, tmp_path, steps=3)
    plain = resolve(RunConfig, override(tree, ["name=plain", f"start_from={run.folder}", "optim.lr=1e-30"]), "x")
    train(plain)
    begun, average = store.read_part(plain.folder / "checkpoints/step-00000003", "model"), _weights(run, 6, "average.")
    assert all(torch.allclose(begun[f"model.{n}"], t, rtol=0, atol=1e-20) for n, t in average.items())
    again = ["name=again", f"start_from={plain.folder}", "objective.ema={decay: 0.9}", "optim.lr=1e-30"]
    train(resolve(RunConfig, override(tree, again), "x"))
    state = store.read_part(tmp_path / "again/checkpoints/step-00000003", "model")
    assert all(torch.allclose(state[f"average.{n}"], t, rtol=1e-6, atol=1e-20) for n, t in average.items())


@pytest.mark.long
def test_averages_agree_on_every_engine_and_are_bit_equal_after_a_restart(shards, tmp_path):
    tree = override(two_tree(shards, tmp_path), ["objective.ema={decay: 0.6}"])
    run_ranks(1, trained, tree, {"kind": "local", "device": "cpu", "precision": "fp32"}, 12, tmp_path / "alone")
    alone = model_after(tmp_path / "alone")
    assert any(name.startswith("average.") for name in alone)
    small = {**ZERO_3, "persistence_threshold": 0}
    for number, engine in enumerate((DDP, FSDP2, ZERO_2, ZERO_3, small)):
        straight, again = tmp_path / f"straight{number}", tmp_path / f"again{number}"
        run_ranks(2, trained, tree, engine, 3, straight)
        found = model_after(straight)
        for name, value in alone.items():
            assert torch.allclose(value, found[name], rtol=1e-4, atol=2e-5), (engine, name)
        if engine is not DDP:  # DDP saves the same as the engine of one process
            run_ranks(2, trained, tree, engine, 3, again, {3: engine})
            resumed = model_after(again)
            assert all(torch.equal(found[name], resumed[name]) for name in found), engine


def test_frozen_parameters_do_not_change(monkeypatch):
    # With `applied`, the code takes the path of a GPU, where the host does not read it.
    monkeypatch.setattr(ema, "_host_can_read", lambda applied: applied is None)
    average, model = torch.nn.Linear(5, 4), torch.nn.Linear(5, 4)
    average.load_state_dict(model.state_dict())
    model.weight.requires_grad_(False)
    for step in range(300):
        update_ema(average, model, 0.9999)
        update_ema(average, model, 0.9999, torch.tensor(True))
        assert torch.equal(average.weight, model.weight), step


@pytest.mark.parametrize("applied", [True, False])
def test_device_and_host_decide_alike(applied, monkeypatch):
    torch.manual_seed(0)
    average, twin, model = (torch.nn.Linear(5, 4) for _ in range(3))
    twin.load_state_dict(average.state_dict())
    # A fake device: what the host cannot read takes the path of a GPU.
    monkeypatch.setattr(ema, "_host_can_read", lambda applied: applied is None)
    update_ema(average, model, 0.7, torch.tensor(applied))
    center, mean = torch.randn(1, 6), torch.full((1, 6), torch.nan if not applied else 0.5)
    moved = center.clone()
    ema.update_mean(moved, mean, 0.9, torch.tensor(applied))
    torch.testing.assert_close(moved, 0.9 * center + 0.1 * mean if applied else center, rtol=1e-6, atol=0)
    monkeypatch.undo()
    if applied:
        update_ema(twin, model, 0.7)
    for name, value in average.state_dict().items():
        torch.testing.assert_close(value, twin.state_dict()[name])
    began, branched = Progress(0, 10, 0), Progress(0, 10, 0, steps_before=30)
    assert EmaConfig(decay=0.5, warmup=False).decay_at(began) == 0.5 and EmaConfig().decay_at(began) == 0.1
    assert EmaConfig().decay_at(branched) == 31 / 40


def test_dinos_teacher_keeps_the_statistics_of_its_own_batches(monkeypatch):
    tree = {"model": {"arch": "vit_tiny", "image_size": 32, "patch_size": 16, "depth": 1}, "head": {"use_bn": True}}
    objective = DinoObjective(DinoObjectiveConfig.model_validate(tree))
    theirs, own = (dict(net.named_buffers()) for net in (objective.student, objective.teacher))
    name = next(name for name in own if name.endswith("running_mean"))
    own[name].fill_(1.0)
    theirs[name].fill_(2.0)
    update_ema(objective.teacher, objective.student, 0.5, buffers=False)
    assert own[name].eq(1).all()
    for known in (True, False):
        monkeypatch.setattr(ema, "_host_can_read", lambda applied, known=known: known)
        objective._center_sums[-1] = 1.0  # a row of the teacher, whose mean updates the center
        objective.after_step(Progress(0, 10, 0), torch.tensor(True))
        assert own[name].eq(1).all() and theirs[name].eq(2).all()
