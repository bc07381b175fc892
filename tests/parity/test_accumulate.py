"""Micro-batches give the gradients of the whole batch."""

import pytest
import torch
from torch import nn

from launch.training import train
from sparo_train.core import metrics
from sparo_train.core.config import override, resolve
from sparo_train.core.contracts import CoupledObjective, Loss, Objective, Progress
from sparo_train.engine.ddp import DdpEngine, DdpEngineConfig
from sparo_train.engine.local import LocalEngine, LocalEngineConfig
from sparo_train.engine.optim import OptimConfig
from sparo_train.objectives.contrastive import contrastive
from sparo_train.train.accumulate import gradients
from sparo_train.train.build import build_objective, build_pipeline
from sparo_train.train.run import RunConfig
from tests.conftest import tiny_recipe
from tests.ranks import run_ranks

PROGRESS = Progress(0, 10, 0)


def prepared(objective):
    engine = LocalEngine(LocalEngineConfig(device="cpu", precision="fp32"), OptimConfig())
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


def trained(ranks, tree, restart_at, micro_batch_size):
    """Parameters after six steps on these ranks, with a new engine taking over at `restart_at`."""
    config = resolve(RunConfig, tree, "x")
    optim = OptimConfig(lr=1e-3, clip_grad_norm=1.0)
    batches = build_pipeline(config, ranks.world).start()
    saved = None
    for step in range(6):
        if step in (0, restart_at):
            objective = build_objective(config)
            engine = DdpEngine(DdpEngineConfig(kind="ddp", device="cpu", precision="fp32"), optim, ranks)
            engine.prepare(objective)
            if saved:
                engine.load_state_dict(saved)
        progress = Progress(step, 6, 12 * step)
        gradients(engine, objective, next(batches).batch, progress, micro_batch_size)
        engine.step(progress)
        saved = {part: {n: t.clone() for n, t in tensors.items()} for part, tensors in engine.state_dict().items()}
    return saved["model"]


@pytest.mark.parametrize(("world_size", "micro_batch_size"), [(4, 3), (3, 2)])
def test_ranks_end_as_one_process_and_bit_equal_after_a_restart(shards, tmp_path, world_size, micro_batch_size):
    tree = tiny_recipe(shards, tmp_path, batch_size=12)
    tree["data"] = {**tree["data"], "workers": 0, "streams": 12}
    (alone,) = run_ranks(1, trained, tree, None, 12)
    straight = run_ranks(world_size, trained, tree, None, micro_batch_size)
    again = run_ranks(world_size, trained, tree, 3, micro_batch_size)
    for name, value in straight[0].items():
        assert all(torch.equal(value, other[name]) for other in (*straight[1:], *again)), name
        assert torch.allclose(value, alone[name], rtol=1e-4, atol=2e-5), name


class Noisy(CoupledObjective):
    """Embeds through dropout, which draws from torch's own generator."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layer, self.drop = nn.Linear(6, 5).double(), nn.Dropout(0.5)
        self.temperature = nn.Parameter(torch.tensor(1.5).double())

    def embed(self, batch):
        return tuple(self.drop(self.layer(batch[key])) for key in ("a", "b"))

    def loss(self, embeddings, progress):
        total, _ = contrastive(*embeddings, self.temperature.exp())
        return Loss(total, {})

    def loss_parameters(self):
        return [self.temperature]


def test_the_second_forward_draws_what_the_first_one_drew():
    g = torch.Generator().manual_seed(0)
    batch = {key: torch.randn(8, 6, generator=g, dtype=torch.float64) for key in "ab"}
    objective = Noisy()
    loss, got = found(objective, batch, 3)
    reference = Noisy()
    torch.manual_seed(7)
    parts = [reference.embed({k: v[i : i + 3] for k, v in batch.items()}) for i in range(0, 8, 3)]
    total = reference.loss(tuple(torch.cat(p) for p in zip(*parts, strict=True)), PROGRESS).total
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
