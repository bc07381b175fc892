"""Reports about jobs: a sweep as one row, progress from the ends of files, failures before Python, plans of launches."""

import json
import time

import pytest
import yaml
from rich.console import Console

from launch.jobs import slurm
from launch.jobs.cluster_files import load_cluster
from launch.jobs.fanout import FanOut
from launch.jobs.local_jobs import _lane_devices
from launch.jobs.records import Records, launch_lock
from launch.jobs.slurm import JobState, SlurmAwayError
from launch.jobs.sweep import expand, record_sweep, sweep_folder
from launch.monitor import status as status_module
from launch.monitor.folders import current_submission, run_folders
from launch.monitor.logs import LogSource, failing_rank, last_error_line, log_files
from launch.monitor.progress import read_progress
from launch.monitor.resubmit import resubmit
from launch.monitor.status import statuses
from launch.monitor.table import status_table
from sparo_train.core.errors import ConfigError
from tests.helpers.processes import sparo
from tests.helpers.recipes import tiny_recipe

CLUSTER = {"kind": "slurm", "nodes": 1, "tasks_per_node": 1, "gpus_per_node": 0, "starter": "srun"}


def submitted(folder, *jobs, **facts):
    """Write a run folder with a submission; return its records."""
    records = Records(folder)
    line = {"jobs": list(jobs), "on": "lab", "cluster": CLUSTER, "folder": str(folder), "arguments": [], **facts}
    records.add("submitted", {"logs": str(records.jobs), **line})
    return records


@pytest.fixture
def queue(monkeypatch):
    """Replace SLURM's answers; returns them by job."""
    states: dict[str, JobState] = {}
    monkeypatch.setattr(status_module.slurm, "states", lambda jobs, accounting=True: states)
    return states


def shown(folders, columns=120):
    console = Console(width=columns, record=True, file=open("/dev/null", "w"))  # noqa: PTH123, SIM115
    console.print(status_table(statuses(folders)))
    return console.export_text()


def test_a_sweep_lists_its_runs_in_order(tmp_path, queue):
    names = [f"lr-lr{rate}" for rate in ("0.1", "0.01", "0.001", "0.0001")]
    for number, name in enumerate(names):
        submitted(tmp_path / name, f"7_{number}")
    record_sweep_of(tmp_path / "lr", names[:2])
    record_sweep(tmp_path / "lr", names)  # launched again with more values
    assert [folder.name for folder in run_folders([tmp_path / "lr"])] == names
    queue |= {"7_0": JobState("COMPLETED"), "7_1": JobState("RUNNING", "", "n1", "1:00"), "7_2": JobState("FAILED"),
              "7_3": JobState("PENDING", "Resources: waits", "", "0:00", "2026-11-28T10:00:00")}  # fmt: skip
    record_sweep(tmp_path / "lr", [*names, "refused"])  # by SLURM
    assert [folder.name for folder in run_folders([tmp_path / "lr"])] == names
    with pytest.raises(ConfigError, match=r"refused: no job was submitted there"):
        run_folders([tmp_path / "refused"])
    found = statuses([tmp_path / "lr"])
    assert [(s.running, s.active, s.failed) for s in found] == [
        (False, False, False), (True, True, False), (False, False, True), (False, True, False),
    ]  # fmt: skip
    text = shown([tmp_path / "lr"], 200)
    assert "2026-11-28 10:00:00" in text and text.rstrip().endswith(
        "4 runs: 1 COMPLETED, 1 RUNNING, 1 FAILED, 1 PENDING"
    )
    assert "restarts" not in text  # nothing was restarted


def record_sweep_of(folder, names):
    folder.mkdir()
    record_sweep(folder, names)


def test_a_sweep_and_a_run_of_one_name_are_both_shown(tmp_path, recipe):
    _, runs = expand(recipe, ["seed=[1,2]", f"out={tmp_path}"])
    assert sweep_folder(runs[0].out, "r") == tmp_path / "r"
    for name in ("r", "r-seed1"):
        submitted(tmp_path / name, "7")
    record_sweep(tmp_path / "r", ["r-seed1"])
    assert run_folders([tmp_path / "r"]) == [tmp_path / "r-seed1"]
    (tmp_path / "r/config.yaml").touch()  # a training started since
    assert sweep_folder(runs[0].out, "r") == tmp_path / "r-sweep"
    assert run_folders([tmp_path / "r"]) == [tmp_path / "r", tmp_path / "r-seed1"]


def test_a_damaged_list_of_a_sweep_is_named(tmp_path):
    (tmp_path / "sweep.json").write_text('{"runs": [3]}')
    with pytest.raises(ConfigError, match="lacks the list `runs`"):
        run_folders([tmp_path])


def test_states_of_an_array_whose_elements_differ(tmp_path, queue):
    submitted(tmp_path / "run", "7")
    queue |= {"7_0": JobState("COMPLETED"), "7_1": JobState("CANCELLED"), "7_2": JobState("RUNNING", elapsed="0:10")}
    (status,) = statuses([tmp_path / "run"])
    assert status.active and status.running and not status.failed
    queue["7_2"] = JobState("OUT_OF_MEMORY")
    (status,) = statuses([tmp_path / "run"])
    assert status.failed and "--mem-gb" in status.reason


def test_records_of_an_earlier_start_are_not_shown_for_the_next(tmp_path, queue):
    records, now = submitted(tmp_path / "run", "7"), time.time()
    records.add("starts", {"job": "7", "restart": 0, "time": now - 600})
    beat = {"step": 5, "total": 9, "phase": "saving", "time": now - 60}
    (tmp_path / "run/heartbeat.json").write_text(json.dumps(beat))
    train = {"kind": "train", "step": 5, "samples": 40, "samples_per_second": 136.0, "loss": 1.5}
    (tmp_path / "run/metrics.jsonl").write_text(json.dumps(train) + "\n")
    queue["7"] = JobState("RUNNING", "", "n1", "9:50")
    (status,) = statuses([tmp_path / "run"])
    assert (status.rate, status.reason, status.metric) == (136.0, "saving", "loss 1.5")
    queue["7"] = JobState("RUNNING", "", "n2", "0:20")  # requeued; its first rank has no record yet
    (status,) = statuses([tmp_path / "run"])
    assert (status.rate, status.eta, status.reason, status.step) == (None, None, "", 5)
    assert JobState(elapsed="1-02:03:04").elapsed_seconds == 93784 and JobState(elapsed="x").elapsed_seconds is None


def test_progress_reads_the_end_of_a_long_file(tmp_path):
    with (tmp_path / "metrics.jsonl").open("w") as stream:
        stream.write('{"kind": "eval", "step": 1, "old": {"acc1": 0.1}}\n')
        for step in range(3000):
            stream.write(json.dumps({"kind": "train", "step": step, "loss": step / 2, "note": "x" * 60}) + "\n")
        stream.write('{"kind": "eval", "step": 2999, "zero": {"acc1": 0.25, "n": 4}}\n{"kind": "tr')
    assert read_progress(tmp_path, 0.0).metric == "zero acc1 0.250"
    (tmp_path / "metrics.jsonl").write_text('{"kind": "train", "step": 3, "loss": 2.0}\n')
    assert read_progress(tmp_path, 0.0).metric == "loss 2" and read_progress(tmp_path / "none", 0.0).metric == ""


def test_failures_before_python_are_shown(tmp_path, queue):
    records = submitted(tmp_path / "run", "7")
    queue["7"] = JobState("FAILED", "NonZeroExitCode", "n[1-2]")
    (tmp_path / "run/jobs").mkdir(exist_ok=True)
    assert "the first of its nodes (n[1-2]) could not write a log" in statuses([tmp_path / "run"])[0].reason
    (tmp_path / "run/jobs/70_0_log.err").write_text("of another job\n")
    assert "could not write a log" in statuses([tmp_path / "run"])[0].reason
    noise = "srun: error: n1: task 0: Exited with exit code 1\nslurmstepd: error: *** STEP 7.0 CANCELLED ***\n"
    (tmp_path / "run/jobs/7_0_log.err").write_text(f"bash: line 3: module: command not found\n{noise}\n")
    assert statuses([tmp_path / "run"])[0].reason == "n[1-2]: bash: line 3: module: command not found (7_0_log.err)"
    assert last_error_line(records.last_submission()) == "bash: line 3: module: command not found (7_0_log.err)"
    (tmp_path / "run/jobs/7_0_log.err").write_text(
        "ModuleNotFoundError: No module named 'pydantic'\nsrun: launch/slurm: _step_signal: Terminating StepId=7.1\n"
    )
    assert last_error_line(records.last_submission()).startswith("ModuleNotFoundError: No module named 'pydantic'")
    (tmp_path / "run/jobs/.7.nodes").write_text(
        "n1\tthe run folder is not there: /x\nn2\tthe run folder is not there: /x\n"
    )
    assert statuses([tmp_path / "run"])[0].reason == "n1, n2: the run folder is not there: /x"
    queue["7"] = JobState("PENDING", "BeginTime", "")
    assert (
        statuses([tmp_path / "run"])[0].reason
        == "BeginTime; started again without n1, n2: the run folder is not there: /x"
    )


def test_a_failure_without_a_message_is_named_by_its_kind(tmp_path, queue):
    records = submitted(tmp_path / "run", "7")
    failure = {"job": "7", "restart": 0, "rank": 3, "kind": "AssertionError", "message": "", "node": "n1"}
    records.add("failures", failure)
    queue["7"] = JobState("FAILED")
    assert statuses([tmp_path / "run"])[0].reason == "rank 3 on n1: AssertionError"


def test_a_run_that_failed_before_its_lane_was_cancelled_has_failed(tmp_path, queue):
    records = submitted(tmp_path / "run", "7", cluster={**CLUSTER, "kind": "local"})
    records.add("cancelled", {"job": "7"})
    assert statuses([tmp_path / "run"])[0].state == "CANCELLED"  # it never began
    for end, reason, state in (
        (2, "DataError: x", "FAILED"),
        (2, "LostRankError: x", "CANCELLED"),
        (75, "SIGTERM", "CANCELLED"),
    ):
        records.add("starts", {"job": "7", "restart": 0, "end": end, "reason": reason})
        assert statuses([tmp_path / "run"])[0].state == state


def test_jobs_that_slurm_forgot_have_the_state_of_their_records(tmp_path, queue, monkeypatch):
    records = submitted(tmp_path / "run", "7")
    assert statuses([tmp_path / "run"])[0].state == "UNKNOWN"
    for end, state in ((0, "COMPLETED"), (3, "FAILED"), (75, "UNKNOWN")):
        records.add("starts", {"job": "7", "restart": 0, "end": end, "reason": "x"})
        assert statuses([tmp_path / "run"])[0].state == state
    records.add("cancelled", {"job": "7_4"})
    assert statuses([tmp_path / "run"])[0].state == "CANCELLED"

    def away(jobs, accounting=True):
        raise SlurmAwayError("squeue: no answer")

    monkeypatch.setattr(status_module.slurm, "states", away)
    (status,) = statuses([tmp_path / "run"])
    assert (status.state, status.active, status.failed, status.reason) == ("UNKNOWN", True, False, "squeue: no answer")


def test_an_error_of_squeue_is_not_an_empty_queue(monkeypatch, tmp_path):
    (tmp_path / "squeue").write_text('#!/bin/sh\necho "slurm_load_jobs error: $SAYS" >&2; exit 1\n')
    (tmp_path / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("SAYS", "Protocol authentication error")
    with pytest.raises(SlurmAwayError, match="Protocol authentication error"):
        slurm.states(["7"])
    monkeypatch.setenv("SAYS", "Invalid job id specified")
    assert slurm.states(["7"], accounting=False) == {}


def test_runs_at_a_time_share_the_devices_of_a_shell(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,GPU-a")
    assert [_lane_devices(1, lane, 2) for lane in (0, 1)] == ["3", "5"]
    with pytest.raises(
        ConfigError, match="2 run\\(s\\) at a time need 4 GPU\\(s\\), but CUDA_VISIBLE_DEVICES=3,5,GPU-a"
    ):
        _lane_devices(2, 0, 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert [_lane_devices(2, lane, 2) for lane in (0, 1)] == ["0,1", "2,3"]


def test_the_submission_that_trains_is_shown_before_a_newer_one(tmp_path, queue):
    submitted(tmp_path / "run", "7")
    submitted(tmp_path / "run", "8")
    (tmp_path / "run/owner.json").write_text(json.dumps({"token": "x", "job": "7"}))
    queue |= {"7": JobState("RUNNING"), "8": JobState("FAILED")}
    assert current_submission(tmp_path / "run", queue)[0]["jobs"] == ["7"]
    queue["8"] = JobState("PENDING")
    record, others = current_submission(tmp_path / "run", queue)
    assert (record["jobs"], others) == (["7"], ["8"])
    assert "job 8 of this run is in the queue, too" in statuses([tmp_path / "run"])[0].reason
    queue["7"] = JobState("COMPLETED")
    assert current_submission(tmp_path / "run", queue)[0]["jobs"] == ["8"]


def test_the_log_of_an_element_is_its_own(tmp_path):
    records = submitted(tmp_path / "fan", "12")
    FanOut.make(tmp_path / "fan", "data", [{"arguments": ["data", "index"]}] * 12)
    for number in (1, 10, 11):
        (records.jobs / f"12_{number}_0_log.out").write_text(f"element {number}\n")
    (records.jobs / "121_0_log.out").write_text("another job\n")
    record = records.last_submission()
    assert [path.name for path in log_files(tmp_path / "fan", record, LogSource("12_1", 0))] == ["12_1_0_log.out"]
    assert len(log_files(tmp_path / "fan", record, LogSource(None, 0))) == 3
    failure = {"job": "12_10", "restart": 0, "rank": 0, "kind": "DataError", "message": "x", "node": "n1"}
    records.add("failures", failure)
    assert failing_rank(tmp_path / "fan", record) == LogSource("12_10", 0)


def test_a_finished_run_is_resubmitted_only_by_force(tmp_path, monkeypatch):
    cluster = {**CLUSTER, "kind": "local"}
    records = submitted(tmp_path / "run", "999999", cluster=cluster, code=str(tmp_path), cwd=str(tmp_path), name="run")
    records.add("starts", {"job": "999999", "restart": 0, "end": 0, "reason": "finished"})
    chosen = []
    monkeypatch.setattr(
        "launch.monitor.resubmit._submit", lambda folders, options: chosen.append(folders) or {folders[0]: ["8"]}
    )
    (tmp_path / "run/heartbeat.json").write_text('{"step": 3, "total": 9, "phase": "stop_after_steps"}')
    assert resubmit([tmp_path / "run"], [])[0].jobs == ["8"]  # it can continue
    (tmp_path / "run/heartbeat.json").write_text('{"step": 9, "total": 9, "phase": "finished"}')
    with pytest.raises(ConfigError, match=r"training finished at step 9\. Pass --force"):
        resubmit([tmp_path / "run"], [])
    assert resubmit([tmp_path / "run"], [], force=True)[0].jobs == ["8"] and len(chosen) == 2
    submitted(tmp_path / "other", "999998", cluster=cluster, code=str(tmp_path / "gone"), cwd=str(tmp_path), name="x")
    both = resubmit(
        [tmp_path / "run", tmp_path / "other"], []
    )  # with several folders, each one that is skipped has its reason
    assert [bool(run.jobs) for run in both] == [False, False] and "does not exist" in both[1].reason


def test_a_lock_is_held_for_a_launch(tmp_path, monkeypatch):
    monkeypatch.setattr("launch.jobs.records._LOCK_SECONDS", 0.2)
    with (
        launch_lock([tmp_path]),
        pytest.raises(ConfigError, match=r"has been submitting this run for 0\.2 s"),
        launch_lock([tmp_path]),
    ):
        pass
    with launch_lock([tmp_path, tmp_path]):
        pass


@pytest.fixture
def recipe(tmp_path, shards):
    path = tmp_path / "r.yaml"
    path.write_text(yaml.safe_dump({k: v for k, v in tiny_recipe(shards, tmp_path / "runs").items() if k != "name"}))
    return path


def test_a_plan_is_printed_and_nothing_is_written(recipe, tmp_path):
    words = (
        "launch",
        "train",
        str(recipe),
        "seed=[1,2]",
        "--cluster",
        "slurm",
        "--gpu-hour-cost",
        "2.5",
        "--parallel",
        "1",
    )
    done = sparo(
        *words,
        "--gpus-per-node",
        "2",
        "--time",
        "10:00:00",
        "--dry-run",
        cwd=tmp_path,
        PATH="/usr/bin:/bin",
        COLUMNS="200",
    )
    assert done.returncode == 0, done.stderr
    for line in (
        "r-seed1, ",
        "2 per run: 1 node(s) with 2 each",
        "2 per run, at most 2 at once",
        "at most 10 per start, 40 GPU hours",
        "at most 100.00 for one start of each run",
    ):
        assert line in done.stderr, (line, done.stderr)
    assert "#SBATCH --array=0-1%1" in done.stdout and "--kill-on-bad-exit=1" in done.stdout
    assert not (tmp_path / "runs").exists()
    done = sparo(
        "launch",
        "train",
        str(recipe),
        "steps=10",
        "optim.warmup_steps=50",
        "--cluster",
        "test",
        "--dry-run",
        cwd=tmp_path,
    )
    assert done.returncode == 2 and "optim.warmup_steps=50 must be below the 10 steps" in done.stderr


def test_a_sweep_file_finds_shipped_recipes_by_name(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({"recipe": "clip/scenes_tiny", "runs": {"a": {}, "b": {"overrides": ["seed=3"]}}}))
    name, runs = expand(path, ["eval={}"])
    assert name == "mine" and [run.name for run in runs] == ["mine-a", "mine-b"] and runs[1].seed == 3
    path.write_text(yaml.safe_dump({"recipe": "clip/scenes_tyni", "runs": {"a": {}}}))
    with pytest.raises(ConfigError, match="did you mean 'clip/scenes_tiny'"):
        expand(path, [])


def test_evaluations_have_readable_names(tmp_path):
    elements = [
        {"checkpoint": f"runs/{run}/export", "task": task, "arguments": ["eval"]} for run in "ab" for task in "xyz"
    ]
    assert FanOut(tmp_path, {"kind": "eval", "elements": elements}).job_name() == "eval-a-export+1-x+2"
    convert = [{"arguments": ["data", "convert", "a b"]}]
    assert FanOut(tmp_path, {"kind": "data", "elements": convert}).job_name() == "data-convert"
    assert load_cluster("test", ["--job-name", "mine"]).job_name == "mine"
