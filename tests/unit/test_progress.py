"""What a person sees of a run's progress: the first step at once, times of all sittings, an estimate soon after."""

import io
import os
import pickle
from pathlib import Path

import pytest
from rich.console import Console

from launch.cli.process import share_cores
from launch.runs.train import exit_if_stopped, train
from launch.views import progress, terminal
from launch.views.progress import ProgressView
from sparo_train.core.config import resolve
from sparo_train.core.errors import StoppedError
from sparo_train.train import run_clock
from sparo_train.train.run import RunConfig
from sparo_train.train.run_clock import RunClock
from sparo_train.train.state import Outcome
from tests.conftest import tiny_recipe


@pytest.fixture
def now(monkeypatch):
    """A clock that stands until it is set."""
    time = [100.0]
    monkeypatch.setattr(run_clock.time, "monotonic", lambda: time[0])
    return time


def test_time_counts_over_sittings_and_the_estimate_is_of_steps_alone(now):
    clock = RunClock(before=1000.0)
    now[0] += 60  # compiling, and waiting for the first batch
    assert clock.elapsed == 1060 and clock.step(5) and not clock.step(6)
    assert clock.left(5, 100) is None
    now[0] += 10
    assert clock.left(10, 100) == pytest.approx(2 * 90)
    now[0] += 500
    clock.pause(500)  # an evaluation
    assert clock.left(10, 100) == pytest.approx(2 * 90) and clock.elapsed == 1570


def test_the_first_step_is_shown_at_once_with_the_time_of_earlier_sittings(now, monkeypatch, tmp_path):
    out = io.StringIO()
    console = Console(file=out, width=200)
    for module in (progress, terminal):
        monkeypatch.setattr(module, "console", console)
    with ProgressView("run", tmp_path / "log.txt") as view:
        view.stands(1, 100, 3600.0, None)
        assert "1/100" in out.getvalue() and "1:00:00 elapsed" in out.getvalue()
        for step in (2, 3):
            now[0] += 20
            view.stands(step, 100, 3600.0 + 20 * step, 20.0 * (100 - step))
        assert "3/100" in out.getvalue() and "0:32:20 left" in out.getvalue()
        view.stands(100, 100, 7200.0, 0.0)
        view.update(100, 100, {"loss": 1.0, "samples_per_second": 10.0, "data_wait": 0.0})
    assert out.getvalue().count("100/100") == 1 and "loss 1.000" in out.getvalue()


def test_a_run_shows_its_first_step_before_its_first_log_and_continues_its_clock(shards, tmp_path, monkeypatch):
    shown, stands = [], ProgressView.stands
    monkeypatch.setattr(
        ProgressView, "stands", lambda self, step, *times: (shown.append((step, times[1])), stands(self, step, *times))
    )
    tree = {**tiny_recipe(shards, tmp_path, steps=4), "stop_after_steps": 2}
    tree["log"] = {**tree.get("log", {}), "every_steps": 50}
    train(resolve(RunConfig, tree, "x"))
    first = list(shown)
    assert first[0][0] == 1 and first[0][1] > 0
    shown.clear()
    train(resolve(RunConfig, {**tree, "stop_after_steps": None}, "x"))
    assert shown[0][0] == 3 and shown[0][1] > first[-1][1]


def test_a_signal_before_the_first_step_names_no_checkpoint():
    with pytest.raises(StoppedError, match="nothing is saved; the same line starts again") as stopped:
        exit_if_stopped(Outcome("SIGTERM", 0, None))
    again = pickle.loads(pickle.dumps(stopped.value))  # as it is sent to other ranks
    assert (again.signal, again.saved, again.exit_code) == ("SIGTERM", False, 75)
    with pytest.raises(StoppedError, match="run the same line again to continue"):
        exit_if_stopped(Outcome("SIGTERM", 2, Path("step-00000002")))


def test_threads_give_up_their_core_unless_the_user_decides(monkeypatch):
    monkeypatch.setattr(os, "environ", {})
    share_cores()
    assert os.environ == {"GOMP_SPINCOUNT": "3000"}
    for own in ({"OMP_WAIT_POLICY": "ACTIVE"}, {"GOMP_SPINCOUNT": "7"}):
        monkeypatch.setattr(os, "environ", dict(own))
        share_cores()
        assert os.environ == own
