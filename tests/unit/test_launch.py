"""Launching without SLURM: clusters, sweeps, snapshots, records, and submitit's executors of one machine."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from launch import batch, slurm
from launch.clusters import ClusterConfig, load_cluster, minutes, split_words, with_options
from launch.fanout import FanOut
from launch.rank import _stuck
from launch.records import Records
from launch.snapshot import take_snapshot
from launch.submit import _further, _refusal, submit
from launch.sweep import expand
from sparo_train.core.config import parse_yaml
from sparo_train.core.errors import ConfigError
from sparo_train.data.convert import convert_folder
from tests.conftest import eval_sets, jpeg, sparo, tiny_recipe

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("text", "expected"),
    [(30, 30), ("30", 30), ("90:30", 91), ("24:00:00", 1440), ("2-12", 3600), ("1-00:30:00", 1470), ("0:0:1", 1)],
)
def test_time_limits_are_read_as_slurm_reads_them(text, expected):
    assert minutes(text) == expected


@pytest.mark.parametrize("text", ["", "x", "1:2:3:4", "-3", 0, "00:00:00"])
def test_other_time_limits_are_refused(text):
    with pytest.raises(ValueError, match=r"time limit|limit of nothing"):
        minutes(text)


@given(st.integers(0, 9), st.integers(0, 23), st.integers(0, 59), st.integers(0, 59))
def test_a_time_limit_in_days_equals_the_same_in_hours(days, hours, mins, secs):
    if days + hours + mins + secs:
        assert minutes(f"{days}-{hours}:{mins}:{secs}") == minutes(f"{24 * days + hours}:{mins:02d}:{secs:02d}")


def test_yaml_times_are_text_and_numbers_are_numbers():
    found = parse_yaml("[24:00:00, 1_000, 0x1F, 1e-3, -3, 5, .5]", "x")
    assert found == ["24:00:00", 1000, 31, 0.001, -3, 5, 0.5]


@pytest.mark.parametrize("path", sorted((ROOT / "configs/clusters").glob("*.yaml")), ids=lambda p: p.stem)
def test_every_shipped_cluster_resolves(path):
    assert load_cluster(str(path)).ranks >= 1


def test_options_change_a_cluster():
    words = (
        "--nodes 2 --time 2-12 --exclusive --account 123 --environment.A 3 --setup x --sbatch.mail-user=me --mem-gb 3.5"
    )
    cluster = load_cluster(str(ROOT / "configs/clusters/slurm_modules.yaml"), words.split())
    assert (cluster.nodes, cluster.time, cluster.exclusive, cluster.account, cluster.mem_gb) == (
        2,
        "2-12",
        True,
        "123",
        3.5,
    )
    assert cluster.environment == {"NCCL_SOCKET_IFNAME": "ib0", "A": "3"} and cluster.sbatch == {"mail-user": "me"}
    assert len(cluster.setup) == 3 and cluster.ranks == 8
    assert split_words(["a=1", "--exclusive", "b=2", "--nodes=2", "--time", "3", "c"]) == (
        ["a=1", "b=2", "c"],
        ["--exclusive", "--nodes=2", "--time", "3"],
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--node", "2"], "--node: no option of a cluster; did you mean 'nodes'?"),
        (["--frob", "2"], "The options are --kind, --partition, --account"),
        (["--nodes"], "--nodes: a value is required"),
        (["--nodes", "x"], "nodes: Input should be a valid integer"),
        (["--environment", "x"], "write --environment.NAME value"),
        (["--time", "1", "--signal-seconds", "60"], "signal_seconds=60: not below the time limit 1"),
        (["--kind", "debug", "--tasks-per-node", "2"], "debug runs one rank in this process; use local for several"),
        (["--kind", "local", "--nodes", "2"], "nodes=2: local is one machine"),
        (["--kind", "local", "--setup", "module load x"], "setup: local runs in the environment of the shell"),
    ],
)
def test_a_wrong_option_says_what_there_is(words, message):
    with pytest.raises(ConfigError) as error:
        load_cluster("test", words)
    assert message in str(error.value)


def test_an_unknown_cluster_names_the_near_one(tmp_path, monkeypatch):
    with pytest.raises(
        ConfigError, match=r"--on tets: did you mean 'test'\? A cluster is a file configs/clusters/NAME.yaml"
    ):
        load_cluster("tets")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "sparo/clusters").mkdir(parents=True)
    (tmp_path / "sparo/clusters/mine.yaml").write_text("partition: p\ntime: 24:00:00\n")
    assert load_cluster("mine").partition == "p" and with_options({}, []) == {}


@pytest.fixture
def recipe(tmp_path, shards):
    path = tmp_path / "r.yaml"
    path.write_text(yaml.safe_dump({k: v for k, v in tiny_recipe(shards, tmp_path / "runs").items() if k != "name"}))
    return path


def test_lists_are_swept_where_the_recipe_has_none(recipe):
    name, runs = expand(recipe, ["optim.lr=[1e-3,5e-4]", "objective.mean=[0.1,0.2,0.3]"], 2)
    assert name == "r" and [run.name for run in runs] == [
        "r-lr0.001-seed0", "r-lr0.001-seed1", "r-lr0.0005-seed0", "r-lr0.0005-seed1",
    ]  # fmt: skip
    assert {(run.optim.lr, run.seed) for run in runs} == {(1e-3, 0), (1e-3, 1), (5e-4, 0), (5e-4, 1)}
    assert all(run.objective.mean == (0.1, 0.2, 0.3) for run in runs)
    name, runs = expand(recipe, ["name=x", "objective.model.readout=[{kind: token}, {kind: gap}]"])
    assert [run.name for run in runs] == ["x-readouttoken", "x-readoutgap"]
    assert [run.name for run in expand(recipe, ["steps=5"])[1]] == ["r"]


@pytest.mark.parametrize(
    ("overrides", "seeds", "message"),
    [
        (["optim.lr=[]"], None, "an empty list of values"),
        (["optim.lr=[1e-3,1e-3]"], None, "two runs of the sweep would be called 'r-lr0.001'"),
        (["seed=[1,2]"], 2, "give at least 1, or seed="),
        (["optim.learning=[1,2]"], None, "optim.learning: unknown key"),
        ([], 2000, "2000 runs: more than 1000 in one array"),
    ],
)
def test_a_sweep_that_makes_no_sense_is_refused(recipe, overrides, seeds, message):
    with pytest.raises(ConfigError) as error:
        expand(recipe, overrides, seeds)
    assert message in str(error.value)


def test_a_snapshot_is_the_running_code_and_runs_alone(tmp_path):
    first, second = take_snapshot(tmp_path / "code"), take_snapshot(tmp_path / "code")
    assert first == second and first.commit is not None and len(first.commit) == 40
    ask = "import launch, sparo_train, evals; print(launch.__file__, sparo_train.__file__, evals.__file__)"
    env = {**os.environ, "PYTHONPATH": str(first.path)}
    out = subprocess.run(
        [sys.executable, "-c", ask], capture_output=True, text=True, env=env, cwd=tmp_path, check=True
    ).stdout
    assert out.count(str(first.path)) == 3
    (tmp_path / "launch").mkdir()  # as in a checkout that was edited since
    (tmp_path / "launch/__init__.py").write_text("raise SystemExit('the checkout')")
    path = [
        line.removeprefix("export ") for line in batch.before((), {}, first.path) if line.startswith("export PYTHON")
    ]
    env = {**os.environ, **dict(line.replace("${PYTHONPATH:+:$PYTHONPATH}", "").split("=", 1) for line in path)}
    subprocess.run([sys.executable, "-m", "launch.batch"], env=env, cwd=tmp_path, check=True)
    assert not list(first.path.rglob("*.pyc")) and (first.path / "configs/clip").is_dir()
    assert (tmp_path / f"code/{first.path.name}.commit").read_text().strip() == first.commit


def test_values_reach_the_batch_script_as_they_are():
    lines = batch.before(("module load x",), {"A": "it's $HOME; rm"}, Path("/runs/a b/code"))
    script = "\n".join([*lines[1:3], 'printf "%s|%s" "$A" "$PYTHONPATH"'])
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": "/old"}
    out = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=env, check=True).stdout
    assert out == "it's $HOME; rm|/runs/a b/code:/old" and lines[0] == "module load x"


def _batch(tmp_path, code, state="RUNNING", restarts="0", marks=("started",), own="0"):
    """Whether the lines behind srun ask for a requeue."""
    (tmp_path / "jobs").mkdir()
    (tmp_path / "scontrol").write_text(
        f'#!/bin/sh\n[ "$1" = show ] && echo "JobId=7 JobState={state} Reason=None Requeue=1 Restarts={restarts} BatchFlag=1"\n'
        f'[ "$1" = requeue ] && touch {tmp_path}/requeued\nexit 0\n'
    )
    (tmp_path / "sleep").write_text("#!/bin/sh\n")
    for name in ("scontrol", "sleep"):
        (tmp_path / name).chmod(0o755)
    for mark in marks:
        (tmp_path / f"jobs/.7-{own}.{mark}").touch()
    script = f"(exit {code})\n" + "\n".join(batch.after(tmp_path / "jobs"))
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": own}
    ended = subprocess.run(["bash", "-c", script], env=env, check=False).returncode
    requeued = (tmp_path / "requeued").exists()
    assert ended == (0 if requeued else code)  # there it waits to be ended
    assert not list((tmp_path / "jobs").iterdir())
    return requeued


@pytest.mark.parametrize("code", [75, 137, 140])
def test_the_batch_script_requeues_what_may_go_on(tmp_path, code):
    assert _batch(tmp_path, code)


@pytest.mark.parametrize(
    ("code", "facts", "again"),
    [
        (3, {}, False),
        (0, {}, False),
        (3, {"marks": ("started", "lost")}, True),
        (1, {"marks": ()}, True),  # its node could not start it
        (1, {"marks": (), "own": "3", "restarts": "3"}, False),
        (0, {"marks": ()}, False),
        (75, {"state": "COMPLETING"}, False),
        (75, {"restarts": "1"}, False),  # SLURM has started it elsewhere: we are what is left of the first start
    ],
)
def test_the_batch_script_looks_before_it_requeues(tmp_path, code, facts, again):
    assert _batch(tmp_path, code, **facts) is again


def test_starts_without_progress_are_counted_per_job(tmp_path):
    records = Records(tmp_path)
    place = {"job": "5", "restart": 0, "node": "n1"}
    for restart, step in enumerate([0, 0, 10, 10, 10]):
        records.add("starts", {**place, "restart": restart, "step": step})
    (tmp_path / "checkpoints/step-00000010").mkdir(parents=True)
    (tmp_path / "checkpoints/step-00000010/meta.json").touch()
    now = {**place, "restart": 5}
    assert _stuck(records, now, 3) is None
    told = _stuck(records, now, 2)
    assert (
        told and "3 starts in a row brought no checkpoint beyond step 10" in told and "killed, or out of memory" in told
    )
    records.add("failures", {**now, "restart": 4, "rank": 3, "code": 2, "kind": "DataError", "message": "x.tar: gone"})
    assert "rank 3 on n1: x.tar: gone" in (_stuck(records, now, 2) or "")
    assert _stuck(records, {**now, "job": "6"}, 0) is None


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified", "--account"),
        ("sbatch: error: QOSMaxSubmitJobPerUserLimit\nsbatch: error: Batch job submission failed: Job violates accounting/QOS policy", "in the queue"),
        ("sbatch: error: Batch job submission failed: Requested node configuration is not available", "--gpus-per-node"),
        ("sbatch: error: Something new", "sbatch refused the job: Something new"),
        ("sbatch: fatal: Could not establish a configuration source", "set SLURM_CONF"),
        ("sbatch: error: Batch job submission failed: Unable to contact slurm controller", "nothing was submitted"),
    ],
)  # fmt: skip
def test_refusals_say_what_to_change(said, message):
    assert message in str(_refusal(said))


def test_without_submitit_it_says_how_to_get_it(recipe, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(ConfigError, match=r"sparo launch needs submitit: pip install 'sparo\[slurm\]'"):
        submit(load_cluster("local"), [], tmp_path, "x", tmp_path, None, None, print)


def test_reasons_are_explained():
    assert slurm.explained("(Resources)") == "(Resources): waits for nodes to become free"
    assert slurm.explained("ReqNodeNotAvail, UnavailableNodes:n1").endswith("drained, down or reserved")
    assert slurm.explained("None") == "" and slurm.explained("SomethingElse") == "SomethingElse"


def test_debug_runs_here_and_ends_with_the_code(recipe, tmp_path):
    done = sparo("launch", "train", str(recipe), "name=here", "--on", "debug", cwd=tmp_path)
    assert done.returncode == 0 and "finished at step 12" in done.stderr, done.stderr
    assert state_of(tmp_path / "runs/here", tmp_path)["state"] == "COMPLETED"
    bad = ("launch", "train", str(recipe), "name=bad", "data.sources.a.shards=/nowhere", "--on", "debug")
    done = sparo(*bad, cwd=tmp_path)
    assert done.returncode == 2 and "/nowhere" in done.stderr and "Traceback" not in done.stderr
    seen = state_of(tmp_path / "runs/bad", tmp_path)
    assert seen["state"] == "FAILED" and "/nowhere" in seen["reason"]


def test_local_evaluations_fan_out_and_merge(shards, tmp_path):
    tree = tiny_recipe(shards, tmp_path / "runs", steps=3, eval={"tasks": eval_sets(tmp_path / "sets")})
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(tree))
    assert sparo("train", str(tmp_path / "r.yaml")).returncode == 0
    words = ("launch", "eval", "runs/tiny", "--tasks", "zero", "--on", "debug", "--name", "e")
    done = sparo(*words, cwd=tmp_path)
    assert done.returncode == 0 and "acc1" in done.stdout, done.stderr
    assert not FanOut(tmp_path / "runs/evals/e").missing()
    results = json.loads((tmp_path / "runs/evals/e/results.json").read_text())["results"]
    assert list(results) == ["runs/tiny/zero"]
    with pytest.raises(ConfigError, match="holds another plan; give another --name"):
        FanOut.make(tmp_path / "runs/evals/e", "eval", [])
    done = sparo("launch", "eval", "runs", "--on", "debug", cwd=tmp_path)
    assert done.returncode == 2 and "give a YAML with `tasks:`" in done.stderr


def test_kinds_of_gpus_and_further_arguments_replace_submitits_own():
    words = ["--gpus-per-node", "4", "--gpu-type", "h100", "--sbatch.mail-user", "me", "--sbatch.requeue", "false"]
    found = _further(load_cluster("slurm", words))
    assert found["gpus_per_node"] == "h100:4" and found["mail_user"] == "me" and "requeue" not in found


def test_parts_of_a_conversion_are_the_whole(tmp_path):
    for i in range(11):
        path = tmp_path / "images" / "cat" / f"{i:02d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(jpeg(i))
    convert_folder(tmp_path / "images", tmp_path / "whole", per_shard=2)
    counts = [
        convert_folder(tmp_path / "images", tmp_path / "parts", per_shard=2, part=(i, 4)) for i in (2, 0, 3, 1, 0)
    ]
    whole, parts = ({p.name: p.read_bytes() for p in (tmp_path / name).glob("*.tar")} for name in ("whole", "parts"))
    assert whole == parts and sum(counts[:4]) == 11
    with pytest.raises(Exception, match="holds 6 shard"):
        convert_folder(tmp_path / "images", tmp_path / "parts", per_shard=3, part=(0, 4))
    done = sparo("data", "convert", "images", "x", "--part", "4/4", cwd=tmp_path)
    assert done.returncode == 2 and "write I/N with I from 0 to N-1" in done.stderr


def test_what_a_recipe_cannot_share_is_refused_before_anything_is_submitted(recipe, tmp_path):
    done = sparo("launch", "train", str(recipe), "name=x", "--on", "local", "--tasks-per-node", "3", cwd=tmp_path)
    assert done.returncode == 2 and "3 ranks cannot share them evenly" in done.stderr
    done = sparo("launch", "train", str(recipe), "name=x", "world_size=4", "--on", "local", cwd=tmp_path)
    assert done.returncode == 2 and "1 node(s) of 1 rank(s) are 1" in done.stderr
    assert not (tmp_path / "runs/x").exists()
    assert ClusterConfig().ranks == 1


def state_of(folder: Path, cwd: Path) -> dict:
    done = sparo("launch", "status", str(folder), "--json", cwd=cwd)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)[0]


def wait_for(ready, seconds: float = 90) -> None:
    end = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < end
        time.sleep(0.2)
