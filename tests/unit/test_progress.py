"""Progress output: the first step at once, times of all starts, an early estimate."""

import io
import json
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console

from launch.cli.process import share_cores
from launch.commands.train import exit_if_stopped, train
from launch.views import progress, terminal
from launch.views.progress import ProgressView
from sparo_train.core.config import resolve
from sparo_train.core.errors import StoppedError
from sparo_train.engine import device_context as cores
from sparo_train.engine import device_context as device
from sparo_train.engine.device_context import Device, DeviceConfig
from sparo_train.train import meter as run_clock
from sparo_train.train.meter import RunClock
from sparo_train.train.run_config import RunConfig
from sparo_train.train.state import Outcome
from tests.helpers.recipes import tiny_recipe


@pytest.fixture
def now(monkeypatch):
    """A clock that only changes when it is set."""
    time = [100.0]
    monkeypatch.setattr(run_clock.time, "monotonic", lambda: time[0])
    return time


def test_elapsed_time_includes_earlier_starts_and_the_estimate_only_steps(now):
    clock = RunClock(before=1000.0)
    now[0] += 60  # compiling, and waiting for the first batch
    assert clock.elapsed == 1060 and clock.step(5) and not clock.step(6)
    assert clock.seconds_left(5, 100) is None
    now[0] += 10
    assert clock.seconds_left(10, 100) == pytest.approx(2 * 90)
    now[0] += 500
    clock.pause(500)  # an evaluation
    assert clock.seconds_left(10, 100) == pytest.approx(2 * 90) and clock.elapsed == 1570


def test_the_first_step_is_shown_at_once_with_the_time_of_earlier_starts(now, monkeypatch, tmp_path):
    out = io.StringIO()
    console = Console(file=out, width=200)
    for module in (progress, terminal):
        monkeypatch.setattr(module, "console", console)
    with ProgressView("run") as view:
        view.show_progress(1, 100, 3600.0, None)
        assert "1/100" in out.getvalue() and "1:00:00 elapsed" in out.getvalue()
        for step in (2, 3):
            now[0] += 20
            view.show_progress(step, 100, 3600.0 + 20 * step, 20.0 * (100 - step))
        assert "3/100" in out.getvalue() and "0:32:20 left" in out.getvalue()
        view.show_progress(100, 100, 7200.0, 0.0)
        view.update(100, 100, {"loss": 1.0, "samples_per_second": 10.0, "data_wait": 0.0})
    assert out.getvalue().count("100/100") == 1 and "loss 1.000" in out.getvalue()


def test_a_run_shows_its_first_step_before_its_first_log_and_continues_its_clock(shards, tmp_path, monkeypatch):
    shown, show_progress = [], ProgressView.show_progress
    monkeypatch.setattr(
        ProgressView,
        "show_progress",
        lambda self, step, *times: (shown.append((step, times[1])), show_progress(self, step, *times)),
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
    with pytest.raises(StoppedError, match=r"nothing was saved\. Run the same command again") as stopped:
        exit_if_stopped(Outcome("SIGTERM", 0, None))
    again = pickle.loads(pickle.dumps(stopped.value))  # as it is sent to other ranks
    assert (again.signal, again.saved, again.exit_code) == ("SIGTERM", False, 75)
    with pytest.raises(StoppedError, match="run the same command again to resume"):
        exit_if_stopped(Outcome("SIGTERM", 2, Path("step-00000002")))


def test_threads_give_up_their_core_unless_the_user_decides(monkeypatch):
    monkeypatch.setattr(os, "environ", {})
    share_cores()
    assert os.environ == {"GOMP_SPINCOUNT": "3000"}
    for own in ({"OMP_WAIT_POLICY": "ACTIVE"}, {"GOMP_SPINCOUNT": "7"}):
        monkeypatch.setattr(os, "environ", dict(own))
        share_cores()
        assert os.environ == own


@pytest.fixture
def two_threads(monkeypatch):
    before = torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("ticks", "threads"),
    [((100, 100), 2), ((160, 100), 1), ((200, 100), 1), ((20, 100), 2), (None, 2)],
    ids=["own work", "half of one more", "both", "idle", "no /proc"],
)
def test_threads_leave_the_cores_that_others_use(two_threads, monkeypatch, ticks, threads):
    # 200 ticks pass on two cores; this process takes 100 of them, or as many as are used.
    busy = ticks and ticks[0]
    counts = iter([(0, 0), (busy, 200)] if ticks else [None, None])
    own = iter([0.0, min(busy or 0, 100) / 200 * 2 * 0.01])
    monkeypatch.setattr(cores, "_ticks", lambda: next(counts))
    monkeypatch.setattr(cores.time, "process_time", lambda: next(own))
    assert cores.fitting_threads(0.01) == threads


def test_a_busy_machine_is_noticed(two_threads):
    loop = [sys.executable, "-c", "while True: pass"]
    others = [subprocess.Popen(loop) for _ in os.sched_getaffinity(0)]
    try:
        time.sleep(0.3)
        assert cores.busy_cores(0.3) > 0.7
    finally:
        for other in others:
            other.kill()


def test_a_run_keeps_its_number_of_threads_unless_the_user_sets_it(two_threads, monkeypatch):
    monkeypatch.setattr(device, "fitting_threads", lambda: 1)
    assert (
        "1 of 2 CPU cores, since other programs use the rest; engine.threads=2"
        in Device(DeviceConfig(device="cpu")).choose_threads()
    )
    assert torch.get_num_threads() == 1
    assert "2 of 2 CPU cores, as in the run that is resumed" in Device(DeviceConfig(device="cpu")).choose_threads(2)
    assert torch.get_num_threads() == 2  # independent of what is free now, so that sums are those of the first start
    one = Device(DeviceConfig(device="cpu", threads=1))
    assert one.choose_threads() == "engine.threads: 1 of 2 CPU cores" and torch.get_num_threads() == 1
    torch.set_num_threads(2)
    for told in ({"OMP_NUM_THREADS": "2"}, {}):
        monkeypatch.setattr(os, "environ", told)
        given = Device(DeviceConfig(device="cpu", threads=None if told else 2))
        assert given.choose_threads(1) == "engine.threads: 2 of 2 CPU cores" and torch.get_num_threads() == 2


def test_a_checkpoint_records_its_number_of_threads(shards, tmp_path):
    config = resolve(RunConfig, tiny_recipe(shards, tmp_path, steps=4), "r")
    train(config)
    meta = json.loads((config.folder / "checkpoints/step-00000004/meta.json").read_text())
    assert meta["threads"] == torch.get_num_threads()
