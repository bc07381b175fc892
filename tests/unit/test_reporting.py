"""Nothing that only reports ends a run, and an error of ours keeps the step."""

import gzip
import json
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import DistBackendError

from evals.suite.suite import Suite
from launch.runs.train import train
from sparo_train.core.config import resolve
from sparo_train.core.disk import metrics
from sparo_train.core.distributed import Ranks
from sparo_train.core.errors import DataError, LostRankError
from sparo_train.core.world import World
from sparo_train.models.readouts.pooling import MeanPool
from sparo_train.train.reporting import Reporter
from sparo_train.train.run import LogConfig, RunConfig
from tests.conftest import eval_sets, tiny_recipe


def test_a_writer_that_fails_is_said_once_and_the_numbers_stay(tmp_path, monkeypatch):
    class Failing:
        def __init__(self, *_):
            pass

        def add(self, numbers, step):
            raise ValueError("no room")

        def close(self):
            raise AssertionError("it was let go of")

    monkeypatch.setattr(metrics, "Tensorboard", Failing)
    said = []
    log = metrics.MetricsLog(tmp_path, say=said.append)
    for step in (1, 2, 3):
        log.write("train", step, {"loss": 1.0})
    log.close()
    assert said == ["log.tensorboard: cannot be written (ValueError: no room); the run goes on without it"]
    assert [r["step"] for r in metrics.read(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    monkeypatch.setattr(metrics, "Tensorboard", lambda *_: 1 / 0)
    said.clear()
    metrics.MetricsLog(tmp_path, say=said.append).close()
    assert len(said) == 1 and "log.tensorboard: cannot be started (ZeroDivisionError" in said[0]


def test_flops_that_cannot_be_counted_are_left_out(tmp_path):
    said = []

    def per_sample(batch):
        raise AssertionError("Expected gradient function to be set\nand more")

    display = SimpleNamespace(say=said.append)
    ranks = Ranks(World(), "gloo", 0.0)
    reporter = Reporter(LogConfig(), None, ranks, None, display, SimpleNamespace(per_sample=per_sample))
    assert reporter._speed({}, 10.0) == {} == reporter._speed({}, 10.0)
    assert len(said) == 1 and "AssertionError: Expected gradient function to be set)" in said[0]


@pytest.mark.parametrize(
    ("error", "ours", "lost"),
    [
        (RuntimeError("shape mismatch in the skip connection of the feature store"), False, False),
        (RuntimeError("The operation timed out in my own code"), False, False),
        (
            RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:561] Connection closed by peer"),
            False,
            True,
        ),
        (RuntimeError("Application timeout caused pair closure"), False, True),
        (DistBackendError("NCCL error"), False, True),
        (RuntimeError("anything at all"), True, True),
    ],
)
def test_a_dead_rank_is_told_by_the_collectives_own_errors(error, ours, lost):
    ranks = Ranks.__new__(Ranks)
    ranks.rank, ranks.size, ranks.timeout = 0, 2, 60.0
    with pytest.raises(LostRankError if lost else RuntimeError) as found, ranks.named("step 3", ours):
        raise error
    assert found.value is error if not lost else found.value.__cause__ is error


def test_an_error_in_an_evaluation_keeps_the_step_and_the_run_goes_on(shards, tmp_path, monkeypatch):
    never = {"every_steps": 0, "every_minutes": 0}
    tree = tiny_recipe(
        shards, tmp_path / "runs", checkpoint=never, eval={"every_steps": 4, "tasks": eval_sets(tmp_path / "sets")}
    )

    def fail(self, *_, **__):
        raise DataError("the set is gone")

    with monkeypatch.context() as patch:
        patch.setattr(Suite, "run", fail)
        with pytest.raises(DataError, match="the set is gone"):
            train(resolve(RunConfig, tree, "x"))
    folder = tmp_path / "runs/tiny"
    assert [p.name for p in (folder / "checkpoints").glob("step-*")] == ["step-00000004"]
    assert "error: the set is gone" in (folder / "log.txt").read_text()
    assert train(resolve(RunConfig, tree, "x")).reason == "finished"
    assert [r["step"] for r in metrics.read(folder / "metrics.jsonl", "eval")] == [4, 8, 12]
    straight = tmp_path / "runs/straight"
    train(
        resolve(
            RunConfig,
            {**tree, "name": "straight", "log": {**tree["log"], "flops": False, "profile": {"wait": 1, "steps": 1}}},
            "x",
        )
    )
    losses = [[(r["step"], r["loss"]) for r in metrics.read(f / "metrics.jsonl", "train")] for f in (folder, straight)]
    assert losses[0] == losses[1]
    assert "tflops" not in metrics.read(straight / "metrics.jsonl", "train")[-1]
    assert json.loads(gzip.decompress((straight / "profile/trace.json.gz").read_bytes()))["traceEvents"]


def test_the_mean_reads_what_may_be_read():
    tokens = torch.randn(2, 5, 3)
    keep = torch.tensor([[True, True, False, False, False], [True] * 5])
    found = MeanPool(3)(tokens, keep, need_attention=True)
    torch.testing.assert_close(found.values[:, 0], torch.stack([tokens[0, :2].mean(0), tokens[1].mean(0)]))
    torch.testing.assert_close(found.attention.sum(-1), torch.ones(2, 1))
    assert found.attention[0, 0, 2:].sum() == 0
    torch.testing.assert_close(MeanPool(3)(tokens).values[:, 0], tokens.mean(1))
