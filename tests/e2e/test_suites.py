"""Test `sparo eval --suite`: the sets that exist in one pass, with an estimate, a line per set, the averages, and its errors."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from sparo_data.writer import write_shards
from tests.helpers import datacomp
from tests.helpers.processes import sparo
from tests.helpers.recipes import tiny_recipe
from tests.helpers.samples import sample

TWO_CLASSES = ("wilds/camelyon17", "renderedsst2", "vtab/pcam", "vtab/kitti_closest_vehicle_distance")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    root = tmp_path_factory.mktemp("suites")
    write_shards(root / "shards", (sample(i) for i in range(48)), 24)
    (root / "recipe.yaml").write_text(yaml.safe_dump(tiny_recipe(root / "shards", root / "runs", steps=3)))
    done = sparo("train", "recipe.yaml", "name=one", cwd=root)
    assert done.returncode == 0, done.stderr
    for seed, name in enumerate(TWO_CLASSES):
        datacomp.write_labelled(root / "data", name, seed, 600)
    for name in ("fairness/fairface", "fairness/utkface"):
        datacomp.write_faces(root / "data", name, 1, 40)
    datacomp.write_retrieval(root / "data/mscoco_captions", "test_5k_mscoco_2014.csv", "images_mscoco_2014_5k_test")
    datacomp.write_retrieval(root / "data/flickr30k", "test_1k_flickr.csv", "images")
    datacomp.write_winogavil(root / "data/winogavil")
    return root


def suite(world, *more, **options):
    return sparo("eval", "runs/one", "--suite", "datacomp", "--features", "features", *more, cwd=world, **options)


def test_a_suite_scores_what_exists_and_shows_the_averages_that_are_complete(world):
    done = suite(world, "--json", "out.json")
    assert done.returncode == 0, done.stderr
    assert "--suite datacomp: 31 of 40 sets are not in data: imagenet1k, imagenet_sketch" in done.stderr
    table = [line.split() for line in done.stdout.splitlines() if line.strip()]
    rows = {line[0]: line for line in table if "/" in line[0] or line[0] in ("renderedsst2", "flickr30k")}
    assert rows["wilds/camelyon17"][1:4] == ["acc1", "600", "50.0"] and rows["wilds/camelyon17"][-1] == "s"
    assert rows["misc/winogavil"][1] == "jaccard/10-12" and rows["flickr30k"][1] == "mean_R@1"
    assert "retrieval (3)" in done.stdout.replace("\n", " ") or "retrieval" in done.stdout
    assert (
        "averages that are not shown: shifts (6) lacks 6 sets, VTAB (13) lacks 11 sets, average (38) lacks 31 sets"
        in done.stdout
    )
    # A line per set, with its time, while the suite runs.
    assert any(line.startswith("wilds/camelyon17  acc1 ") and "n = 600  " in line for line in done.stderr.splitlines())
    results = json.loads((world / "out.json").read_text())["results"]
    mean = sum(results[f"one/{name}"]["metrics"]["mean_R@1"] for name in ("flickr30k", "mscoco_captions"))
    mean = (mean + results["one/misc/winogavil"]["metrics"]["jaccard/10-12"]) / 3
    assert f"{100 * mean:.1f}" in done.stdout.split("averages")[0]
    shown = sparo("eval", "table", "runs/one", "--layout", "datacomp", "--format", "csv", cwd=world)
    assert f"{mean}"[:8] in shown.stdout
    lines = [json.loads(line) for line in (world / "runs/one/evals/results.jsonl").read_text().splitlines()]
    assert all(line["facts"]["seconds"] >= 0 for line in lines if line["name"] in TWO_CLASSES)


@pytest.mark.long
def test_a_killed_suite_encodes_nothing_twice(world):
    command = [sys.executable, "-m", "launch.cli", "eval", "runs/one", "--suite", "datacomp", "--features", "killed"]
    env = {**os.environ, "PYTHONPATH": str(Path.cwd())}
    process = subprocess.Popen(command, cwd=world, env=env, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    for line in process.stderr:
        if line.startswith("vtab/pcam"):  # two sets are scored by now
            break
    process.send_signal(signal.SIGKILL)
    process.wait()
    parts = {path: path.stat().st_mtime_ns for path in (world / "killed/images").glob("*/*.npy")}
    assert len(parts) >= 2
    time.sleep(0.05)
    done = suite(world, "--features", "killed")
    assert done.returncode == 0, done.stderr
    assert {path: path.stat().st_mtime_ns for path in parts} == parts


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--suite", "datacom"), "--suite datacom: did you mean 'datacomp'?"),
        (("--tasks", "x"), "--tasks x: cannot be combined with --suite datacomp. Remove one of them."),
        (
            ("--data", "recipe.yaml"),
            "--data recipe.yaml: cannot be combined with --suite datacomp. Remove one of them.",
        ),
        (
            ("--root", "empty"),
            "--suite datacomp: none of the suite's 40 data sets is in empty. Give their folder with --root;",
        ),
    ],
)
def test_errors_of_suites(world, more, message):
    done = suite(world, *more)
    assert done.returncode != 0 and message in done.stderr, done.stderr


def test_a_set_of_another_size_is_reported_before_anything_is_encoded(world, tmp_path):
    datacomp.write_labelled(tmp_path / "data", "mnist", 1, 12)
    done = suite(world, "--root", str(tmp_path / "data"), "--features", str(tmp_path / "features"))
    assert done.returncode != 0 and "wds_mnist_test: expected 10 class names, got 7" in done.stderr
    assert not (tmp_path / "features/images").exists()


def test_all_damaged_sets_are_named_at_once(world, tmp_path):
    for name in ("renderedsst2", "vtab/pcam"):
        datacomp.write_labelled(tmp_path, name, 1, 12)
    datacomp.write_winogavil(tmp_path / "winogavil")
    tar = tmp_path / "wds_vtab-pcam_test/test/0.tar"
    tar.write_bytes(tar.read_bytes()[:700])
    (tmp_path / "wds_renderedsst2_test/classnames.txt").unlink()
    (tmp_path / "wds_renderedsst2_test/test/0.tar").write_bytes(b"")
    done = suite(world, "--root", str(tmp_path))
    assert done.returncode != 0 and "2 of 3 sets cannot be scored:" in done.stderr, done.stderr
    assert "wds_vtab-pcam_test" in done.stderr and "wds_renderedsst2_test" in done.stderr


def test_the_next_commands_read_the_results_of_a_suite(world):
    assert suite(world, "--results", "kept").returncode == 0
    assert suite(world, "--results", "limited", "--limit", "20").returncode == 0
    for command in (
        ("compare", "kept", "kept"),
        ("export", "kept", "--out", "exported"),
        ("leaderboard", "kept", "--out", "board.html"),
        ("table", "kept", "--format", "html"),
    ):
        done = sparo("eval", *command, cwd=world)
        assert done.returncode == 0, (command, done.stderr)
