"""Descriptions of clusters: the YAML file, options that override it, time limits."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.jobs.cluster_files import add_allocation, load_cluster, split_options, with_options
from launch.jobs.clusters import ClusterConfig, minutes, with_one_gpu
from launch.jobs.sbatch_options import translate_options
from launch.jobs.submit import _extra_parameters
from sparo_train.core.errors import ConfigError
from sparo_train.core.recipe.recipe_yaml import parse_yaml

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("text", "expected"),
    [(30, 30), ("30", 30), ("90:30", 91), ("24:00:00", 1440), ("2-12", 3600), ("1-00:30:00", 1470), ("0:0:1", 1)],
)
def test_time_limits_are_read_as_slurm_reads_them(text, expected):
    assert minutes(text) == expected


@pytest.mark.parametrize("text", ["", "x", "1:2:3:4", "-3", 0, "00:00:00"])
def test_other_time_limits_are_refused(text):
    with pytest.raises(ValueError, match=r"time limit|time limit must be positive"):
        minutes(text)


@given(st.integers(0, 9), st.integers(0, 23), st.integers(0, 59), st.integers(0, 59))
def test_a_time_limit_in_days_equals_the_same_in_hours(days, hours, mins, secs):
    if days + hours + mins + secs:
        assert minutes(f"{days}-{hours}:{mins}:{secs}") == minutes(f"{24 * days + hours}:{mins:02d}:{secs:02d}")


def test_yaml_times_are_text_and_numbers_are_numbers():
    found = parse_yaml("[24:00:00, 1_000, 0x1F, 1e-3, -3, 5, .5]", "x")
    assert found == ["24:00:00", 1000, 31, 0.001, -3, 5, 0.5]


@pytest.mark.parametrize("path", sorted((ROOT / "configs/clusters").glob("*.yaml")), ids=lambda p: p.stem)
def test_every_shipped_cluster_resolves(path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert load_cluster(str(path)).ranks >= 1


def test_the_clusters_page_shows_the_shipped_files():
    page = (ROOT / "docs/guides/clusters.md").read_text(encoding="utf-8")
    blocks = [
        parse_yaml(block, "docs/guides/clusters.md") for block in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    ]
    for name in ("slurm", "slurm_container", "slurm_apptainer", "slurm_conda", "slurm_modules"):
        shipped = parse_yaml((ROOT / f"configs/clusters/{name}.yaml").read_text(encoding="utf-8"), name)
        assert shipped in blocks or {**shipped, "partition": "gpu", "account": "lab"} in blocks, name


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
    assert split_options(["a=1", "--exclusive", "b=2", "--nodes=2", "--time", "3", "c"]) == (
        ["a=1", "b=2", "c"],
        ["--exclusive", "--nodes=2", "--time", "3"],
    )


@pytest.mark.parametrize(
    ("gres", "ranks"), [("gpu", 1), ("gpu:4", 4), ("gpu:h100:8(S:0-1)", 8), ("nvme:1,gpu:a100:2", 2), ("nvme:4", 1)]
)
def test_a_gres_only_site_has_one_rank_per_gpu(gres, ranks):
    cluster = load_cluster(str(ROOT / "configs/clusters/test.yaml"), ["--sbatch.gres", gres])
    assert (cluster.ranks, cluster.gpus_by_gres) == (ranks, "gpu" in gres)
    assert _extra_parameters(cluster)["gres"] == gres and "gpus_per_node" not in _extra_parameters(cluster)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("-p gpu -N2 --ntasks-per-node=4", "--partition gpu --nodes 2 --tasks-per-node 4"),
        ("-J name -t 30 -A lab -w n1", "--job-name name --time 30 --account lab --nodelist n1"),
        ("--mem 4G --mail-user=me --hold", "--sbatch.mem 4G --sbatch.mail-user me --sbatch.hold true"),
        ("optim.lr=1 --gres gpu:2 --nodes 2", "optim.lr=1 --sbatch.gres gpu:2 --nodes 2"),
        ("--exclusive --begin now+1hour", "--exclusive --sbatch.begin now+1hour"),
        ("--frob 3 --sbatch.x y", "--frob 3 --sbatch.x y"),
        (
            "--srun-args --gpu-bind=none --srun-args --export=ALL",
            "--srun-args --gpu-bind=none --srun-args --export=ALL",
        ),
        ("--kill-on-invalid-dep=yes", "--sbatch.kill-on-invalid-dep yes"),
    ],
)
def test_options_of_sbatch_are_understood(words, expected):
    assert translate_options(words.split(), tuple(ClusterConfig.model_fields), ("exclusive",)) == expected.split()


def test_values_of_sbatch_options_stay_strings():
    cluster = load_cluster(
        "test", ["--sbatch.kill-on-invalid-dep", "yes", "--sbatch.nice", "100", "--sbatch.hold", "true"]
    )
    assert cluster.sbatch == {"kill-on-invalid-dep": "yes", "nice": 100, "hold": True}


@pytest.mark.parametrize(
    ("gres", "one"), [("gpu:4", "gpu:1"), ("nvme:2,gpu:h100:8", "nvme:2,gpu:h100:1"), ("gpu", "gpu:1")]
)
def test_an_element_of_a_fan_out_has_one_gpu(gres, one):
    cluster = with_one_gpu(load_cluster("test", ["--sbatch.gres", gres]))
    assert (cluster.ranks, cluster.gpus_per_node, cluster.sbatch["gres"]) == (1, 1, one)


def test_an_allocation_has_the_nodes_and_gpus_of_its_shell(monkeypatch):
    monkeypatch.setattr(
        "launch.jobs.cluster_files.ask",
        lambda *words: "JobId=7 TRES=cpu=8,node=2,gres/gpu=8 TresPerNode=gres:gpu:h100:4",
    )
    shell = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2"}
    assert add_allocation({"kind": "allocation"}, shell) == {"kind": "allocation", "nodes": 2, "gpus_per_node": 4}
    assert add_allocation({"nodes": 1}, {**shell, "SLURM_GPUS_PER_NODE": "h100:8"}) == {"nodes": 1, "gpus_per_node": 8}
    with pytest.raises(ConfigError, match=r"--nodes 3: the allocation 7 has 2 node\(s\)"):
        add_allocation({"nodes": 3}, shell)
    assert add_allocation({"nodes": "many"}, shell)["nodes"] == "many"  # `load_cluster` refuses this value
    with pytest.raises(ConfigError, match="this shell is not in an allocation"):
        add_allocation({}, {})


@pytest.mark.parametrize(
    ("word", "instead"),
    [("--array=1-3", "a sweep"), ("-n", "--nodes and --tasks-per-node"), ("-o", "launch logs"), ("--dependency", "--after RUN"),
     ("--signal", "--signal-seconds"), ("-M", "SLURM_CLUSTERS"), ("--wrap", "nothing: sparo writes the script")],
)  # fmt: skip
def test_reserved_options_name_their_replacement(word, instead):
    with pytest.raises(ConfigError, match=f"{word}: sparo sets it itself. Use .*{instead}"):
        split_options(["r.yaml", word, "x"])


def test_a_limit_without_time_to_train_is_reported():
    cluster = load_cluster("test", ["--time", "3", "--signal-seconds", "90"])
    assert "leaves less than 60 s for work" in cluster.margin_warning() and "--time to 4" in cluster.margin_warning()
    assert load_cluster("test", ["--time", "4", "--signal-seconds", "90"]).margin_warning() == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--sbatch.gres", "gpu:2", "--gpus-per-node", "4"],
            "sbatch.gres: requests 2 GPU(s) per node, but gpus_per_node=4",
        ),
        (["--sbatch.gres", "gpu:h100:many"], "sbatch.gres=gpu:h100:many: the number of GPUs is not a whole number"),
        (["--node", "2"], "--node: not an option of clusters; did you mean 'nodes'?"),
        (["--frob", "2"], "The options are --kind, --partition, --account"),
        (["--nodes"], "--nodes: a value is required"),
        (["--nodes", "x"], "nodes: Input should be a valid integer"),
        (["--environment", "x"], "expected --environment.NAME value"),
        (["--time", "1", "--signal-seconds", "60"], "signal_seconds=60: must be below the time limit 1"),
        (
            ["--kind", "debug", "--tasks-per-node", "2"],
            "kind=debug: starts one rank only (in this process), got 2. Use kind=local for several ranks",
        ),
        (["--kind", "local", "--nodes", "2"], "nodes=2: local is one machine"),
        (["--kind", "local", "--setup", "module load x"], "setup: applies to SLURM only; local jobs inherit"),
    ],
)
def test_an_unknown_option_lists_the_known_ones(words, message):
    with pytest.raises(ConfigError) as error:
        load_cluster("test", words)
    assert message in str(error.value)


def test_an_unknown_cluster_names_the_near_one(tmp_path, monkeypatch):
    with pytest.raises(
        ConfigError, match=r"--cluster tets: did you mean 'test'\? A cluster is a file configs/clusters/NAME.yaml"
    ):
        load_cluster("tets")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "sparo/clusters").mkdir(parents=True)
    (tmp_path / "sparo/clusters/mine.yaml").write_text("partition: p\ntime: 24:00:00\n")
    assert load_cluster("mine").partition == "p" and with_options({}, []) == {}


def test_kinds_of_gpus_and_further_arguments_replace_submitits_own():
    words = ["--gpus-per-node", "4", "--gpu-type", "h100", "--sbatch.mail-user", "me", "--sbatch.requeue", "false"]
    found = _extra_parameters(load_cluster("slurm", words))
    assert found["gpus_per_node"] == "h100:4" and found["mail_user"] == "me" and "requeue" not in found
