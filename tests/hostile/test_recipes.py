"""Recipes whose YAML is ambiguous, infinite or invalid, and values that would fail late."""

import os

import pytest
import yaml

from tests.hostile.conftest import assert_ends

BOMB = "a: &a [1,1,1,1,1,1,1,1,1]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{','.join(['*' + chr(97 + i)] * 9)}]\n" for i in range(9)
)
TEXTS = {
    "a key twice": (b"name: a\nbatch_size: 8\nbatch_size: 16\n", "'batch_size' is given here"),
    "a nested key twice": (b"optim: {lr: 1e-3, lr: 1e-4}\n", "'lr' is given here"),
    "not UTF-8": (b"name: caf\xe9\n", "line 1 is not UTF-8"),
    "UTF-16": ("name: a\n".encode("utf-16"), "is not UTF-8"),
    "a NUL byte": (b"name: a\x00b\n", "not valid YAML"),
    "an ESC byte": (b"name: a\x1b[31m\n", "not valid YAML"),
    "an alias in itself": (b"data: &x [*x]\n", "line 1: this value refers to itself through an alias"),
    "a mapping in itself": (b"data: &x {sources: *x}\n", "an alias"),
    "aliases of aliases": (BOMB.encode(), "aliases (*name) expand to more than"),
    "a deep nest": (b"[" * 5000, "nested too deeply"),
    "an object": (b"name: !!python/object/apply:os.system ['echo hi']\n", "could not determine a constructor"),
    "a date that is none": (b"name: !!timestamp hello\n", "a value is not valid for its YAML tag"),
    "a number that is none": (b"batch_size: !!int eight\n", "a value is not valid for its YAML tag"),
    "bytes that are none": (b"name: !!binary '%'\n", ""),
    "a set": (b"name: !!set {a}\n", "a value has a type that recipes cannot hold"),
    "5,000 digits": (b"batch_size: " + b"9" * 5000, "a value is not valid for its YAML tag"),
    "two documents": (b"name: a\n--- \nname: b\n", "not valid YAML"),
    "a list": (b"- name\n", "expected a mapping of keys"),
    "a word": (b"hello\n", "expected a mapping of keys"),
    "nothing": (b"", "expected a mapping of keys"),
    "an unfinished quote": (b"name: 'a\n", "not valid YAML"),
    "a list as a key": (b"? [a, b]\n: 1\n", "unhashable key"),
    "a tab": (b"data:\n\tsources: {}\n", "not valid YAML"),
    "itself as parent": (b"extends: bad.yaml\n", "is circular"),
    "a number as parent": (b"extends: 7\n", "extends: expected a path or a list of paths"),
    "a parent that is not there": (b"extends: nowhere.yaml\n", "no such recipe"),
    "two megabytes": (b"name: " + b"a" * (2 << 20), "Is it a recipe?"),
    "HTML": (b"<!DOCTYPE html><html></html>", "expected a mapping of keys"),
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_file_other_than_a_recipe_is_refused_by_name_and_line(name, home, tmp_path):
    content, says = TEXTS[name]
    (tmp_path / "bad.yaml").write_bytes(content)
    assert_ends(["train", "bad.yaml"], 2, ["bad.yaml", says], cwd=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["bad.yaml"]


VALUES = {
    "optim.lr=.inf": "optim.lr: Input should be a finite number",
    "optim.lr=.nan": "optim.lr",
    "optim.lr=1e999": "optim.lr",
    "optim.lr=-1": "optim.lr",
    "optim.lr=fast": "optim.lr",
    "optim.betas=[0.9,1.5]": "optim.betas: every number must be between 0 and 1",
    "optim.betas=[0.9]": "optim.betas",
    "optim.weight_decay=.inf": "optim.weight_decay",
    "optim.warmup_steps=100": "optim.warmup_steps=100 must be below",
    "data.crop_scale=[-1,0.5]": "data.crop_scale: every number must be between",
    "data.crop_scale=[0.9,0.5]": "the smaller one first",
    "data.crop_scale=[0.5,.nan]": "data.crop_scale",
    "data.sources.a.weight=.inf": "data.sources.a",
    "data.sources.a.weight=-1": "data.sources.a",
    "data.sources.a.weight=1e300": "data.sources.a",
    "data.workers=100000": "data.workers",
    "data.prefetch=1000000000": "data.prefetch",
    "data.shuffle_window=99999999999999999999": "data.shuffle_window",
    "data.streams=7": "data.streams=7 does not divide",
    "data.streams=4096": "data.streams=4096",
    "data.sources.a.shards=nowhere/*.tar": "matches no shard",
    "data.sources.a.shards='{0..999999999999}.tar'": "brace range",
    "data.sources.a.shards='{0..'": "data.sources.a.shards",
    "data.sources.a.shards=[]": "data.sources.a.shards",
    "data.sources.a.shards='pipe:cat x.tar'": "runs a shell command",
    "data.sources.a.shards=nope://x/y.tar": "nope://",
    "data.sources.a.shards=sftp:///x.tar": "sftp:",
    "data.sources={}": "data.sources",
    "data.sources=7": "data.sources",
    "data.sources.a.kind=floppy": "data.sources.a",
    "engine.threads=1000000": "engine.threads",
    "engine.threads=-3": "engine.threads",
    "engine.kind=warp": "engine",
    "engine.device=tpu": "engine.device",
    "engine.precision=fp8": "engine.precision",
    "seed=99999999999999999999999": "seed",
    "seed=-1": "seed",
    "batch_size=0": "batch_size",
    "batch_size=99999999999": "batch_size",
    "steps=0": "steps",
    "steps=1e400": "steps",
    "steps=null": "set exactly one of steps, epochs, samples",
    "epochs=.inf": "epochs",
    "micro_batch_size=0": "micro_batch_size",
    "name=../x": "name",
    "name=''": "name",
    "name='a\x1b[31m'": "name",
    "out=good.yaml": "cannot be",
    "out='bad\0name'": "",
    "objective.kind=clap": "objective",
    "objective.model.vision.image_size=33": "does not divide",
    "objective.model.vision.image_size=1000000": "image_size",
    "objective.model.vision.layers=1": "both towers need more layers",
    "objective.model.text.layers=1000000": "layers",
    "objective.model.readout.kind=capsule": "readout",
    "objective.std=[0,0,0]": "objective.std",
    "objective.mean=[.nan,0,0]": "objective.mean",
    "eval.tasks.x={task: zeroshot, root: nowhere}": "nowhere: no such file or folder",
    "eval.tasks.x={task: juggling}": "eval.tasks.x",
    "eval.tasks.x={task: zeroshot}": "eval.tasks.x",
    "checkpoint.keep_last=0": "checkpoint.keep_last",
    "log.every_steps=0": "log.every_steps",
    "nothing.at.all=1": "unknown key",
    "optim.lr": "expected key.path=value",
    "=3": "expected key.path=value",
    "optim.lr.x=3": "optim.lr",
    "data.sources.a={shards: [1, 2]}": "data.sources.a",
}


@pytest.mark.parametrize("override", VALUES)
def test_an_invalid_value_is_refused_by_its_key_before_anything_is_created(override, home, tmp_path):
    runs = tmp_path / "runs"
    assert_ends(["train", "good.yaml", f"out={runs}", override], 2, [VALUES[override]], cwd=home)
    assert not (runs / "tiny/checkpoints").exists()


def test_a_pipe_for_a_recipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.yaml")
    assert_ends(["train", "pipe.yaml"], 2, ["pipe.yaml"], cwd=tmp_path, seconds=20)


CLUSTERS = {
    "a line end in a partition": ({"partition": "gpu\n#SBATCH --wrap=x"}, "partition: 'gpu\\n"),
    "a line end in srun's arguments": ({"srun_args": ["--x=1\nrm -rf"]}, "srun_args"),
    "a line end in sbatch's arguments": ({"sbatch": {"comment": "a\nb"}}, "sbatch"),
    "a line end in the interpreter": ({"python": "python\nfalse"}, "python"),
    "a variable of no name": ({"environment": {"A B": "1"}}, "'A B' is not the name of a variable"),
    "a command for a variable": ({"environment": {"A;rm -rf x": "1"}}, "is not the name of a variable"),
    "a NUL in a variable": ({"environment": {"A": "x\0y"}}, "environment.A: contains a NUL character"),
    "a time that is none": ({"time": "soon"}, "is not a time limit"),
    "no nodes": ({"nodes": 0}, "nodes"),
    "infinite memory": ({"mem_gb": float("inf")}, "mem_gb"),
    "an unknown key": ({"gpus": 8}, "unknown key"),
}


@pytest.mark.parametrize("name", CLUSTERS)
def test_values_of_a_cluster_cannot_add_lines_to_the_batch_script(name, home, tmp_path):
    content, says = CLUSTERS[name]
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(content))
    order = [
        "launch",
        "train",
        str(home / "good.yaml"),
        f"out={tmp_path}/runs",
        "--cluster",
        str(tmp_path / "mine.yaml"),
    ]
    assert_ends(order, 2, ["mine.yaml", says], cwd=tmp_path)
    assert not (tmp_path / "runs").exists()
