"""Code that only reports never ends a run, and our own errors do not lose the step."""

import gzip
import json
import math
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.distributed import DistBackendError

from evals.suite.suite import Suite, TaskError
from evals.tasks.result import Result
from launch.commands.train import train
from sparo_train.core.config import resolve
from sparo_train.core.contracts import LoaderBatch, Loss, Objective, Progress
from sparo_train.core.disk import metrics
from sparo_train.core.distributed import Ranks
from sparo_train.core.errors import ConfigError, DataError, LostRankError
from sparo_train.core.world import StopFlag, World
from sparo_train.engine.local import LocalEngine, LocalEngineConfig
from sparo_train.engine.optim import AdamWConfig
from sparo_train.models.readouts.pooling import MeanPool
from sparo_train.train import reporting
from sparo_train.train.meter import MetricExchange, average_over_ranks
from sparo_train.train.reporting import Evaluation, Reporter
from sparo_train.train.run_config import LogConfig, RunConfig
from sparo_train.train.step import RankSync, _weighted_backward
from tests.helpers.logs import logged
from tests.helpers.ranks import run_ranks
from tests.helpers.recipes import tiny_recipe
from tests.helpers.samples import eval_sets


def _rows(run):
    row = SimpleNamespace(run=run, check=lambda task: None, needs=(), incompatibility=lambda task, encoder: None)
    return SimpleNamespace(get=lambda name: row)


def test_metrics_are_plain_numbers_and_others_are_reported(monkeypatch):
    encoder = SimpleNamespace(offers={"images"}, label="x")
    found = Result("odd", np.int64(3), "acc1", {"acc1": np.float32(0.5)}, 0.1, {"acc1": (np.float32(0.25), 1)})
    found = found._replace(counts={"skipped": np.int64(2)})
    for result, wrong in (
        (found, None),
        (found._replace(headline="acc5"), "acc5"),
        (found._replace(metrics={"acc1": "a"}), "'a'"),
        (found._replace(options={"by": object()}), "not JSON serializable"),
    ):
        monkeypatch.setattr("evals.suite.suite.TASKS", _rows(lambda scoring, task, result=result: result))
        monkeypatch.setattr("evals.suite.task.TASKS", _rows(None))
        suite = Suite({"t": SimpleNamespace(task="odd")})
        if wrong:
            with pytest.raises(TaskError, match=f"t: task=odd failed .*{wrong}"):
                suite.run(encoder)
        else:
            plain = suite.run(encoder)["t"]
            assert json.dumps([plain.metrics, plain.intervals, plain.n]) == '[{"acc1": 0.5}, {"acc1": [0.25, 1.0]}, 3]'
            assert json.dumps(plain.counts) == '{"skipped": 2}'


def _broken_on_rank_0(ranks):
    row = _rows(lambda scoring, task: scoring.ranks.rank0_broadcast(lambda: {}["label"]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("evals.suite.suite.TASKS", row)
        patch.setattr("evals.suite.task.TASKS", row)
        try:
            Suite({"t": SimpleNamespace(task="odd")}).run(SimpleNamespace(offers={"images"}, label="x"), ranks=ranks)
        except TaskError as error:
            return str(error), error.on_all_ranks, error.repeated


def test_an_error_on_rank_0_reaches_all_ranks():
    found = run_ranks(2, _broken_on_rank_0)
    for rank, (said, everywhere, repeated) in enumerate(found):
        assert "t: task=odd failed (KeyError: 'label'; " in said and "test_reporting.py:" in said
        assert everywhere and repeated == (rank > 0)  # so that they save the step together


def test_unusual_metrics_do_not_end_a_run():
    reporter = Reporter(LogConfig(), None, Ranks(World(), "gloo", 0.0), None, None, None)
    with logged() as said:
        for _ in range(2):
            assert reporter._numbers({"a": torch.tensor(2.0), "b": torch.zeros(4), "c": "x"}) == {"a": 2.0}
        assert reporter._numbers({"step": torch.tensor(2.0)}) == {}
    assert "metric 'step' is omitted, because sparo uses this name" in said.pop()
    assert len(said) == 2 and "metric 'b' is omitted, because it is not a single number" in said[0]
    facts = [{"forward_seconds": 1.0, "loss": 1.0, "rare": 5.0}, {"forward_seconds": 1.0, "loss": 3.0}]
    assert average_over_ranks(facts) == {
        "forward_seconds": 1.0,
        "loss": 2.0,
        "rare": 5.0,
        "step_spread": 0.0,
        "slowest_rank": 0,
    }
    sizes = iter((Loss(torch.tensor(1.0), {"rare": torch.tensor(4.0)}), Loss(torch.tensor(2.0), {})))
    engine = SimpleNamespace(forward=lambda *_, **__: next(sizes), backward=lambda *_, **__: None)
    whole = _weighted_backward(engine, [{"x": torch.zeros(3)}, {"x": torch.zeros(1)}], None)
    assert float(whole.total) == 1.25 and float(whole.metrics["rare"]) == 4.0


def _exchanges(ranks):
    exchange, nan = MetricExchange(ranks), float("nan")
    steps = [
        {"loss": 1.0 + ranks.rank},
        {"loss": 2.0, "rare": nan} if ranks.rank == 1 else {"loss": 1.0},
        {"loss": 5.0},
    ]
    return [exchange.gather(own) for own in steps]


def test_ranks_exchange_metrics_that_only_some_of_them_have():
    for first, second, third in run_ranks(3, _exchanges):
        assert first == [{"loss": 1.0}, {"loss": 2.0}, {"loss": 3.0}]
        assert second[0] == second[2] == {"loss": 1.0} and second[1]["loss"] == 2.0 and math.isnan(second[1]["rare"])
        assert third == [{"loss": 5.0}] * 3


def _asks(ranks, folder):
    stop = StopFlag()
    stop.received = "SIGTERM" if ranks.rank == 1 else None
    sync = RankSync(ranks, SimpleNamespace(failed=False), None, 0)
    mark = folder / "rank 0 has asked"
    while ranks.rank == 1 and not mark.exists():
        time.sleep(0.01)
    upcoming = sync.ask(stop, LoaderBatch({}, None, {}, {}), None)
    mark.touch()
    return sync.agree(upcoming, 8)


def test_asking_for_a_stop_does_not_wait_for_other_ranks(tmp_path):
    assert run_ranks(2, _asks, tmp_path) == [("SIGTERM", False)] * 2


def _compares(ranks):
    facts = {"seed": 1, "nested": {"a": [1, 2]}}
    ranks.require_equal(facts, "recipe")
    try:
        ranks.require_equal({**facts, "seed": ranks.rank}, "recipe")
    except ConfigError as error:
        return str(error), ranks.broadcast(ranks.rank + 7), ranks.gather_on_rank0(ranks.rank)


def test_ranks_compare_facts_by_their_hash_and_name_a_difference():
    found = run_ranks(2, _compares)
    assert all("rank 1: differs from rank 0 in its recipe, got seed" in text for text, *_ in found)
    assert [rest for _, *rest in found] == [[7, [0, 1]], [7, None]]


def test_parameters_that_no_gradient_reaches_are_named_once():
    class Half(Objective):
        def __init__(self):
            super().__init__()
            self.used, self.unused = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))

        def forward(self, batch, progress):
            return Loss((self.used * batch["x"]).sum(), {})

    engine = LocalEngine(LocalEngineConfig(device="cpu", precision="fp32"), AdamWConfig(warmup_steps=0))
    engine.prepare(objective := Half())
    reports = []
    for step in range(2):
        progress = Progress(step, 2, 0)
        engine.backward(engine.forward({"x": torch.ones(2)}, progress, last=True).total, last=True)
        reports.append(engine.step(progress).without_gradient)
    assert reports == [("unused",), ()] and torch.equal(objective.unused, torch.ones(2))
    reporter = Reporter(LogConfig(), None, Ranks(World(), "gloo", 0.0), None, None, None)
    with logged() as said:
        for names in reports:
            reporter.without_gradient(names)
    assert said == [
        "1 trainable parameter(s) get no gradient and keep their initial values: unused. Freeze them, or check the loss."
    ]


def test_a_failed_metric_writer_is_reported_once(tmp_path, monkeypatch):
    class Failing:
        def __init__(self, *_):
            pass

        def add(self, numbers, step):
            raise ValueError("no room")

        def close(self):
            raise AssertionError("it was let go of")

    monkeypatch.setattr(metrics, "Tensorboard", Failing)
    with logged() as said:
        log = metrics.MetricsLog(tmp_path)
        for step in (1, 2, 3):
            log.write("train", step, {"loss": 1.0})
        log.close()
    assert said == [
        "log.tensorboard: metrics could not be written (ValueError: no room). The run continues without tensorboard."
    ]
    assert [r["step"] for r in metrics.read(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    monkeypatch.setattr(metrics, "Tensorboard", lambda *_: 1 / 0)
    with logged() as said:
        metrics.MetricsLog(tmp_path).close()
    assert len(said) == 1 and "log.tensorboard: could not be started (ZeroDivisionError" in said[0]


def test_flops_that_cannot_be_counted_are_omitted(tmp_path):
    def per_sample(batch):
        raise AssertionError("Expected gradient function to be set\nand more")

    ranks = Ranks(World(), "gloo", 0.0)
    reporter = Reporter(LogConfig(), None, ranks, None, None, SimpleNamespace(per_sample=per_sample))
    with logged() as said:
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
def test_a_dead_rank_is_recognised_by_errors_of_collectives(error, ours, lost):
    ranks = Ranks.__new__(Ranks)
    ranks.rank, ranks.size, ranks.timeout = 0, 2, 60.0
    with pytest.raises(LostRankError if lost else RuntimeError) as found, ranks.error_context("step 3", ours):
        raise error
    assert found.value is error if not lost else found.value.__cause__ is error


def test_evaluations_take_a_share_of_the_time_at_most(shards, tmp_path, monkeypatch):
    tree = tiny_recipe(
        shards, tmp_path / "runs", eval={"every_steps": 2, "max_share": 0.5, "tasks": eval_sets(tmp_path / "sets")}
    )
    clock = iter(range(10**6))
    monkeypatch.setattr(reporting, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    config = resolve(RunConfig, tree, "x")
    assert train(config).reason == "finished"
    # Each reading of the clock is one second later: an evaluation takes one second, and so does the next decision.
    steps = [r["step"] for r in metrics.read(config.folder / "metrics.jsonl", "eval")]
    assert steps[0] == 2 and steps[-1] == 12
    few = Evaluation(
        lambda *_: {}, config.eval.model_copy(update={"max_share": 0.2}), None, Ranks(World(), "gloo", 0.0), None
    )
    few._durations = [3.0]
    monkeypatch.setattr(reporting.time, "monotonic", lambda: few._started + 20.0)
    assert not few.due(4)  # 6 of 23 seconds
    monkeypatch.setattr(reporting.time, "monotonic", lambda: few._started + 30.0)
    assert few.due(4) and not few.due(5)  # 6 of 33 seconds
    few.scored.add(4)
    assert not few.due(4)


def test_an_error_in_an_evaluation_saves_the_step_and_the_run_resumes(shards, tmp_path, monkeypatch):
    never = {"every_steps": 0, "every_minutes": 0}
    tree = tiny_recipe(
        shards, tmp_path / "runs", checkpoint=never, eval={"every_steps": 4, "tasks": eval_sets(tmp_path / "sets")}
    )

    def fail(self, *_, **__):
        raise DataError("the set is gone")

    def broken(scoring, task):
        return {}["label"]

    for name, target, value, error in (
        ("broken", "evals.suite.suite.TASKS", _rows(broken), TaskError),
        ("tiny", "evals.suite.suite.Suite.run", fail, DataError),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(target, value)
            with pytest.raises(
                error, match=r"the set is gone|failed .KeyError: 'label'; .*test_reporting.py:"
            ) as found:
                train(resolve(RunConfig, {**tree, "name": name}, "x"))
        folder = tmp_path / "runs" / name
        assert [p.name for p in (folder / "checkpoints").glob("step-*")] == ["step-00000004"]
        assert f"error: {found.value}" in (folder / "log.txt").read_text()
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


def test_metrics_are_averaged_over_readable_values():
    tokens = torch.randn(2, 5, 3)
    keep = torch.tensor([[True, True, False, False, False], [True] * 5])
    found = MeanPool(3)(tokens, keep, need_attention=True)
    torch.testing.assert_close(found.values[:, 0], torch.stack([tokens[0, :2].mean(0), tokens[1].mean(0)]))
    torch.testing.assert_close(found.attention.sum(-1), torch.ones(2, 1))
    assert found.attention[0, 0, 2:].sum() == 0
    torch.testing.assert_close(MeanPool(3)(tokens).values[:, 0], tokens.mean(1))
