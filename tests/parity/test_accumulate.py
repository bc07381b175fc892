"""Test that micro-batches give the gradients of the whole batch."""

from itertools import pairwise

import pytest
import torch
from torch import nn

from launch.commands.train import train
from sparo_data.writer import write_shards
from sparo_train.core.config import resolve
from sparo_train.core.contracts import CoupledObjective, Loss, Objective, Progress
from sparo_train.core.disk import checkpoint_store as store
from sparo_train.core.disk import metrics
from sparo_train.core.recipe.layers import override
from sparo_train.engine.local import LocalEngine, LocalEngineConfig
from sparo_train.engine.optim import AdamWConfig
from sparo_train.objectives.contrastive import contrastive
from sparo_train.train.build import build_engine, build_objective, build_pipeline
from sparo_train.train.checkpointing import Saver
from sparo_train.train.run_config import RunConfig
from sparo_train.train.step import gradients
from tests.helpers.ranks import run_ranks
from tests.helpers.recipes import tiny_recipe
from tests.helpers.samples import sample

PROGRESS = Progress(0, 10, 0)


def prepared(objective):
    engine = LocalEngine(LocalEngineConfig(device="cpu", precision="fp32"), AdamWConfig())
    engine.prepare(objective)
    return engine


def found(objective, batch, micro_batch_size):
    engine = prepared(objective)
    torch.manual_seed(7)
    loss = gradients(engine, objective, batch, PROGRESS, micro_batch_size)
    return loss, {name: p.grad.clone() for name, p in objective.named_parameters() if p.grad is not None}


def assert_close(left, right, tolerance):
    assert left.keys() == right.keys()
    for name, gradient in right.items():
        assert float((left[name] - gradient).norm()) <= tolerance * max(float(gradient.norm()), 1e-4), name


@pytest.mark.parametrize("parts", [2, 4, 3])
@pytest.mark.parametrize(
    "changes",
    [[], ["objective.loss.kind=sigmoid", "objective.model.init_logit_bias=-4"], ["objective.loss.exchange=ring"]],
)
def test_cached_accumulation_is_exact_with_augmentation_and_patch_dropout(shards, tmp_path, parts, changes):
    tree = override(tiny_recipe(shards, tmp_path, batch_size=12), changes)
    config = resolve(RunConfig, tree, "x")
    batch = next(build_pipeline(config).start()).batch
    assert batch["patches"].shape == (12, 3)  # three of four patches are kept
    whole, expected = found(build_objective(config).double(), batch, 12)
    loss, got = found(build_objective(config).double(), batch, -(-12 // parts))
    assert "model.logit_scale" in got
    assert_close(got, expected, 1e-12)
    assert loss.metrics.keys() == whole.metrics.keys()
    for name, value in whole.metrics.items():
        assert float(loss.metrics[name]) == pytest.approx(float(value), rel=1e-12)
    single, rounded = found(build_objective(config), batch, -(-12 // parts))
    assert float(single.total) == pytest.approx(float(whole.total), rel=1e-6)
    assert_close({n: g.double() for n, g in rounded.items()}, expected, 2e-6)


def engine_block(kind, **keys):
    return {"kind": kind, "device": "cpu", "precision": "fp32", **keys}


def all_gradients(ranks, tree, engine, micro_batch_sizes):
    """Return the gradients after the first batch in fp64 for each micro-batch size."""
    config = resolve(RunConfig, {**tree, "engine": engine}, "x")
    batch = next(build_pipeline(config, ranks.world).start()).batch
    found = []
    for size in micro_batch_sizes:
        objective = build_objective(config).double()
        running = build_engine(config.engine, config.optim, ranks)
        running.prepare(objective)
        gradients(running, objective, batch, PROGRESS, size)
        named = {n: p.grad for n, p in objective.named_parameters() if p.grad is not None}
        found.append({n: (g.full_tensor() if hasattr(g, "full_tensor") else g).clone() for n, g in named.items()})
    return found


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_gradients_are_those_of_one_process_with_the_whole_batch(shards, tmp_path, kind):
    """Compare world sizes 1, 2, 4 and accumulation 1, 2, 4, with augmentation and patch dropout, including `logit_scale`."""
    tree = tiny_recipe(shards, tmp_path, batch_size=16)
    tree["data"] = {**tree["data"], "workers": 0, "streams": 16}
    ((whole,),) = run_ranks(1, all_gradients, tree, engine_block("local"), [16])
    assert "model.logit_scale" in whole and len(whole) > 40
    for world_size in (1, 2, 4):
        sizes = [16 // world_size // parts for parts in (1, 2, 4)]
        for by_rank in run_ranks(world_size, all_gradients, tree, engine_block(kind), sizes):
            for got in by_rank:
                assert_close(got, whole, 1e-10)


def trained(ranks, tree, engine, micro_batch_size, folder, restart_at=None):
    """Train six steps on these ranks, and save. `restart_at` {step: engine} lets another engine resume from a checkpoint."""
    config = resolve(RunConfig, {**tree, "engine": engine}, "x")
    batches = build_pipeline(config, ranks.world).start()
    keeper = store.CheckpointStore(folder)
    saver = Saver(keeper, ranks)
    takes_over, norms = {0: engine, **(restart_at or {})}, []
    for step in range(6):
        if step in takes_over:
            config, objective = resolve(RunConfig, {**tree, "engine": takes_over[step]}, "x"), build_objective(config)
            engine = build_engine(config.engine, config.optim, ranks)
            engine.prepare(objective)
            if step:
                engine.load(store.open_checkpoint(keeper.folder(step), ("model", "optimizer")))
        progress = Progress(step, 6, 12 * step)
        gradients(engine, objective, next(batches).batch, progress, micro_batch_size)
        report = engine.step(progress)
        norms.append([*map(float, (report.grad_norm, *report.norms.values()))])
        saver.save(step + 1, engine.pieces(), {})
        saver.wait()
    saver.close()
    return norms


def model_after(folder):
    return store.read_part(store.CheckpointStore(folder).latest(), "model")


DDP, FSDP2 = engine_block("ddp"), engine_block("fsdp2")


ZERO_1, ZERO_2, ZERO_3 = (engine_block("deepspeed", stage=stage) for stage in (1, 2, 3))


def two_tree(shards, tmp_path):
    tree = tiny_recipe(shards, tmp_path, batch_size=12, optim={"lr": 1e-3, "clip_grad_norm": 1.0})
    return {**tree, "data": {**tree["data"], "workers": 0, "streams": 12}}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Return gradient norms and the model after six steps in one process."""
    root = tmp_path_factory.mktemp("alone")
    write_shards(root / "shards", (sample(i) for i in range(96)), 24)
    (norms,) = run_ranks(1, trained, two_tree(root / "shards", root), engine_block("local"), 12, root / "run")
    return norms, model_after(root / "run")


@pytest.mark.long
@pytest.mark.parametrize(
    ("world_size", "micro_batch_size", "engine"),
    [
        (4, 3, DDP),
        (3, 2, DDP),
        (2, 6, FSDP2),
        (4, 2, {**FSDP2, "shard_size": 2}),
        (3, 2, {**FSDP2, "reshard_after_forward": False, "cpu_offload": True}),
        (2, 3, ZERO_1),
        (2, 6, ZERO_2),
        (3, 2, {**ZERO_3, "persistence_threshold": 0}),
        (2, 6, ZERO_3),
    ],
)
def test_ranks_end_as_one_process_and_bit_equal_after_a_restart(
    shards, tmp_path, alone, world_size, micro_batch_size, engine
):
    tree, (norms, whole) = two_tree(shards, tmp_path), alone
    for found in run_ranks(world_size, trained, tree, engine, micro_batch_size, tmp_path / "straight"):
        for ours, theirs in zip(found, norms, strict=True):  # after AdamW, a wrong scale would not be visible
            assert ours == pytest.approx(theirs, rel=1e-4)
    run_ranks(world_size, trained, tree, engine, micro_batch_size, tmp_path / "again", {3: engine})
    straight, again = (model_after(tmp_path / name) for name in ("straight", "again"))
    for name, value in straight.items():
        assert torch.equal(value, again[name]), name
        assert torch.allclose(value, whole[name], rtol=1e-4, atol=2e-5), name


@pytest.mark.long
def test_a_run_resumes_with_other_engines(shards, tmp_path):
    tree = two_tree(shards, tmp_path)
    run_ranks(2, trained, tree, DDP, 6, tmp_path / "straight")
    run_ranks(2, trained, tree, ZERO_1, 6, tmp_path / "changing", {1: FSDP2, 2: ZERO_3, 3: DDP, 4: ZERO_2, 5: FSDP2})
    straight, changing = model_after(tmp_path / "straight"), model_after(tmp_path / "changing")
    for name, value in straight.items():
        assert torch.allclose(value, changing[name], rtol=1e-4, atol=2e-5), name


def skips(ranks, tree, engine):
    """Return whether steps were applied, and how much this rank's shards changed in the step in which one rank made the gradient infinite."""
    config = resolve(RunConfig, {**tree, "engine": engine}, "x")
    objective, running = build_objective(config), build_engine(config.engine, config.optim, ranks)
    running.prepare(objective)
    batches, applied, states = build_pipeline(config, ranks.world).start(), [], []
    for step in range(3):
        progress = Progress(step, 6, 12 * step)
        loss = running.forward(next(batches).batch, progress, last=True)
        broken = step == 1 and ranks.rank == 1
        running.backward(loss.total * (float("inf") if broken else 1.0), last=True)
        applied.append(running.step(progress).applied)
        found = {f"{part}/{n}": p.data.clone() for part, held in running.pieces().items() for n, p in held.items()}
        states.append(found)
    same = [all(torch.equal(t, b[n]) for n, t in a.items()) for a, b in pairwise(states)]
    return applied, same


@pytest.mark.parametrize("engine", [DDP, FSDP2, ZERO_2, ZERO_3])
def test_a_gradient_that_is_not_finite_on_one_rank_is_skipped_by_all(shards, tmp_path, engine):
    for applied, same in run_ranks(2, skips, two_tree(shards, tmp_path), engine):
        assert applied == [True, False, True] and same == [True, False]


class Noisy(CoupledObjective):
    """Embeds with dropout, which draws from torch's global generator."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layer, self.drop = nn.Linear(6, 5).double(), nn.Dropout(0.5)
        self.temperature = nn.Parameter(torch.tensor(1.5).double())

    def embed(self, batch):
        return tuple(self.drop(self.layer(batch[key])) for key in ("a", "b"))

    def loss(self, embeddings, own, progress):
        total, _ = contrastive(*embeddings, own[0].exp())
        return Loss(total, {})

    def loss_parameters(self):
        return [self.temperature]


def test_the_second_forward_repeats_the_draws_of_the_first():
    g = torch.Generator().manual_seed(0)
    batch = {key: torch.randn(8, 6, generator=g, dtype=torch.float64) for key in "ab"}
    objective = Noisy()
    loss, got = found(objective, batch, 3)
    reference = Noisy()
    torch.manual_seed(7)
    parts = [reference.embed({k: v[i : i + 3] for k, v in batch.items()}) for i in range(0, 8, 3)]
    total = reference.loss(
        tuple(torch.cat(p) for p in zip(*parts, strict=True)), reference.loss_parameters(), PROGRESS
    ).total
    total.backward()
    assert float(loss.total) == pytest.approx(float(total.detach()), rel=1e-12)
    assert_close(got, {n: p.grad for n, p in reference.named_parameters()}, 1e-12)


class Mean(Objective):
    """A loss that is a mean over samples."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(6, 1).double()

    def forward(self, batch, progress):
        errors = self.layer(batch["a"]).square()
        return Loss(errors.mean(), {"mse": errors.detach().mean()})


def test_uncoupled_objectives_accumulate_by_weight():
    batch = {"a": torch.randn(8, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)}
    whole, expected = found(Mean(), batch, 8)
    loss, got = found(Mean(), batch, 3)
    assert_close(got, expected, 1e-12)
    assert float(loss.total) == pytest.approx(float(whole.total)) == pytest.approx(float(loss.metrics["mse"]))


def test_training_in_micro_batches_gives_the_losses_of_the_whole_batch(shards, tmp_path):
    tree = tiny_recipe(shards, tmp_path, steps=6)
    losses = []
    for name, size in (("whole", None), ("halves", 4)):
        config = resolve(RunConfig, {**tree, "name": name, "micro_batch_size": size}, "x")
        train(config)
        losses.append([r["loss"] for r in metrics.read(config.folder / "metrics.jsonl", "train")])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
