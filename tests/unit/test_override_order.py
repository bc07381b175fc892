"""Overrides, sweeps and files in which a kind changes keep what the user wrote."""

import json
import shutil

import pytest
import yaml

from launch.commands.train import train
from launch.jobs.sweep import expand, read_sweep
from sparo_train.core.config import resolve
from sparo_train.core.errors import ConfigError
from sparo_train.train.run_config import RunConfig, load_run
from tests.helpers.recipes import dino_recipe, tiny_recipe


@pytest.fixture
def base(shards, tmp_path):
    return write(tmp_path / "base.yaml", tiny_recipe(shards, tmp_path / "runs", steps=8))


def write(path, tree):
    path.write_text(yaml.safe_dump(tree))
    return path


def test_a_kind_does_not_drop_keys_of_the_same_command_line(base):
    words = ["objective.model.readout.slots=8", "objective.model.readout.kind=sparo"]
    for given in (words, words[::-1]):
        assert load_run(base, given).objective.model.readout.slots == 8
    twice = load_run(base, ["objective.model.readout.kind=attpool", "objective.model.readout.kind=sparo"])
    assert twice.objective.model.readout.kind == "sparo"
    block = load_run(base, ["objective.model.readout={kind: attpool}", *words[::-1]])
    assert (block.objective.model.readout.kind, block.objective.model.readout.slots) == ("sparo", 8)
    with pytest.raises(ConfigError, match="lots"):  # the whole block comes last
        load_run(base, [*words, "objective.model.readout={kind: token, slots: 3}"])


def test_an_engine_keeps_the_keys_that_all_engines_have(base, tmp_path):
    whole = {"extends": str(base), "engine": {"kind": "local", "device": "cpu", "precision": "fp32"}}
    parent = write(tmp_path / "parent.yaml", whole)
    child = write(tmp_path / "child.yaml", {"extends": str(parent), "engine": {"kind": "ddp"}})
    for config in (load_run(parent, ["engine.kind=ddp"]), load_run(child), load_run(base, ["engine.kind=ddp"])):
        assert (config.engine.kind, config.engine.precision) == ("ddp", "fp32")
    ddp = write(tmp_path / "ddp.yaml", {"extends": str(base), "engine": {"kind": "ddp", "bucket_mb": 5}})
    assert load_run(ddp, ["engine.kind=fsdp2"]).engine.kind == "fsdp2"  # which has no bucket_mb


def test_an_architecture_in_a_child_replaces_the_sizes_of_its_parent(shards, tmp_path):
    parent = write(tmp_path / "dino.yaml", dino_recipe(shards, tmp_path, steps=4))
    child = write(tmp_path / "child.yaml", {"extends": str(parent), "objective": {"model": {"arch": "vit_small"}}})
    own = write(tmp_path / "own.yaml", {"extends": str(child), "objective": {"model": {"depth": 3}}})
    given = load_run(parent, ["objective.model.arch=vit_small"]).objective.model
    assert load_run(child).objective.model == given and given.width == 384
    assert load_run(own).objective.model.depth == 3


def test_sweeps_apply_words_in_their_order(base):
    kinds = "objective.model.readout.kind=[sparo,attpool]"
    for words in ([kinds, "objective.model.readout.slots=8"], ["objective.model.readout.slots=8", kinds]):
        assert [run.objective.model.readout.slots for run in expand(base, words)[1]] == [8, 8]
    _, runs = expand(base, ["optim.lr=[1e-3,2e-3]", "optim.lr=5e-4"])
    assert [run.optim.lr for run in runs] == [5e-4]


def test_the_command_line_precedes_lists_of_a_sweep_file(base, tmp_path):
    rows = {"a": {"overrides": ["optim.lr=[1e-3,2e-3]"]}, "b": {"overrides": ["optim.lr=3e-3"]}}
    sweep = write(tmp_path / "sweep.yaml", {"recipe": str(base), "runs": rows})
    assert [run.optim.lr for run in expand(sweep, [])[1]] == [1e-3, 2e-3, 3e-3]
    assert [run.optim.lr for run in expand(sweep, ["optim.lr=9e-3"])[1]] == [9e-3, 9e-3]


def test_an_empty_entry_of_a_file_is_refused_if_no_parent_has_it(base, tmp_path):
    sweep = write(tmp_path / "sweep.yaml", {"recipe": str(base), "runs": {"baseline": None, "big": {"overrides": []}}})
    with pytest.raises(
        ConfigError, match=r"runs\.baseline: an empty value removes .* Write baseline: \{\} for an entry"
    ):
        read_sweep(sweep)
    child = write(tmp_path / "child.yaml", {"extends": str(base), "data": {"sources": {"scenez": None}}})
    with pytest.raises(
        ConfigError, match=r"data\.sources\.scenez: an empty value removes .*no parent recipe has this entry"
    ):
        load_run(child)


def test_the_place_of_runs_is_expanded(base, monkeypatch):
    monkeypatch.setenv("SCRATCH_OF_TEST", "/scratch/me")
    assert load_run(base, ["out=$SCRATCH_OF_TEST/runs"]).out == "/scratch/me/runs"
    assert not load_run(base, ["out=~/runs"]).out.startswith("~")
    with pytest.raises(ConfigError, match=r"out: the environment variable \$NO_SUCH_VARIABLE is not set"):
        load_run(base, ["out=$NO_SUCH_VARIABLE/runs"])


def test_epochs_are_not_shortened_by_rounding(base):
    config = load_run(base, ["epochs=0.58", "batch_size=2", "optim.warmup_steps=0"])
    assert config.total_steps(200) == 58


def test_a_checkpoint_of_another_recipe_is_not_resumed(base, tmp_path):
    train(load_run(base, ["name=first", "stop_after_steps=4"]))
    copy = tmp_path / "runs/copy"
    shutil.copytree(tmp_path / "runs/first/checkpoints", copy / "checkpoints")
    with pytest.raises(ConfigError, match=r"step-0*4: contains a run of another recipe:\n  optim\.lr:"):
        train(load_run(base, ["name=copy", "optim.lr=0.5"]))
    assert train(load_run(base, ["name=copy"])).step == 8


def test_a_changed_start_is_reported_and_not_recorded(base, tmp_path, caplog):
    train(load_run(base, ["name=own", "stop_after_steps=4"]))
    train(load_run(base, ["name=own", "start_from=runs/nope"]))
    assert "start_from: has no effect on a resumed run, which began with random weights" in caplog.text
    recorded = resolve(RunConfig, yaml.safe_load((tmp_path / "runs/own/config.yaml").read_text()), "x", stored=True)
    assert recorded.start_from is None
    meta = json.loads(next((tmp_path / "runs/own/checkpoints").glob("step-*8/meta.json")).read_text())
    assert meta["recipe"]["start_from"] is None


def test_a_comment_in_a_value_is_refused(base):
    with pytest.raises(ConfigError, match=r"' #' begins a comment in YAML\. Write quotation marks"):
        load_run(base, ["name=x #y"])
    assert load_run(base, ["out='a #b'"]).out == "a #b"


def test_an_empty_config_of_a_run_folder_is_named(base, tmp_path):
    train(load_run(base, ["name=whole", "stop_after_steps=4"]))
    (tmp_path / "runs/whole/config.yaml").write_text("")
    with pytest.raises(ConfigError, match=r"config\.yaml: has no keys\. Copy the recipe"):
        train(load_run(base, ["name=whole"]))


def test_files_that_only_extend_or_repeat_others_change_nothing(base, shards, tmp_path):
    only = write(tmp_path / "only.yaml", {"extends": str(base)})
    assert load_run(only, ["name=x"]) == load_run(base, ["name=x"])
    dino = write(tmp_path / "dino.yaml", dino_recipe(shards, tmp_path, steps=4))
    model = {"arch": "vit_small"}
    first = write(tmp_path / "first.yaml", {"extends": str(dino), "objective": {"model": model}})
    deep = write(tmp_path / "deep.yaml", {"extends": str(first), "objective": {"model": {"depth": 3}}})
    again = write(tmp_path / "again.yaml", {"extends": str(deep), "objective": {"model": model}})
    assert load_run(again).objective.model.depth == 3 and load_run(deep).objective.model.depth == 3


def test_a_block_after_a_list_inside_of_it_is_refused(base):
    with pytest.raises(ConfigError, match=r"replaces the block that contains optim\.lr, but an earlier override sets"):
        expand(base, ["optim.lr=[0.1,0.2]", "optim={kind: adamw, warmup_steps: 0}"])
    _, runs = expand(base, ["optim={kind: adamw, warmup_steps: 0}", "optim.lr=[0.1,0.2]"])
    assert [run.optim.lr for run in runs] == [0.1, 0.2]


def test_a_home_folder_of_nobody_is_an_error_of_the_key(base):
    with pytest.raises(ConfigError, match="out: names the home folder of an unknown user"):
        load_run(base, ["out=~no_such_user_here/x"])
    assert load_run(base, ["out=runs/$5"]).out == "runs/$5"
