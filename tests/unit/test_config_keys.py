"""Descriptions of keys and recipes: the page, the terminal, names instead of paths, completion."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import pytest
from pydantic import TypeAdapter

from launch.cli.given_options import normalize_overrides
from launch.commands.key_tables import example, examples, find_keys
from launch.recipes import find_recipe, shipped_recipes
from sparo_train.core.errors import ConfigError
from sparo_train.core.recipe.config_keys import Entries, RegistryBlock, list_keys
from sparo_train.core.recipe.layers import assignment
from sparo_train.train.run_config import RunConfig, load_run
from tests.helpers.processes import sparo

ROOT = Path(__file__).resolve().parents[2]


def test_every_key_has_an_example_that_its_model_takes():
    known, seen = examples(), 0
    for key in list_keys(RunConfig):
        if isinstance(key.shape, type | RegistryBlock | Entries) or "[]" in key.dotted:
            continue
        written = example(key, known)
        assert written, key.dotted
        value = assignment(written).value
        TypeAdapter(Annotated[key.field.annotation, "", *key.field.metadata]).validate_json(json.dumps(value))
        seen += 1
    assert seen > 400


@pytest.mark.parametrize(
    ("word", "found"),
    [
        ("optim.lr", ["optim.lr"]),
        ("lr_factor", ["optim.groups[].lr_factor"]),
        ("data.sources.mine.weight", ["data.sources.NAME.weight"]),
        ("objective.model.readout.slots", ["objective.model.readout.slots"]),
        ("checkpoint.keep_last", ["checkpoint.keep_last"]),
    ],
)
def test_a_key_is_found_by_its_place_or_its_end(word, found):
    assert list(dict.fromkeys(key.dotted for key in find_keys(word))) == found


def test_a_block_lists_its_keys_without_those_of_entries_below_it():
    model = {key.dotted for key in find_keys("objective.model")}
    assert {"objective.model.readout", "objective.model.vision.width"} <= model
    assert "objective.model.readout.slots" not in model
    assert {key.dotted for key in find_keys("")} == set(RunConfig.model_fields)
    with pytest.raises(ConfigError, match=r"optim\.lrr: not a key of a recipe; did you mean 'optim\.lr'"):
        find_keys("optim.lrr")
    with pytest.raises(ConfigError, match=r"did you mean 'optim\.lr' or"):
        find_keys("learning_rate")


def test_recipes_are_found_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_recipe(Path("emoji_small")).name == "emoji_small.yaml"
    assert load_run(find_recipe(Path("dino/scenes_tiny"))).objective.kind == "dino"
    own = tmp_path / "emoji_small"
    own.write_text("steps: 1\n")
    assert find_recipe(Path("emoji_small")).resolve() == own  # a file of the user takes precedence
    for word, told in {
        "scenes_tiny": "2 recipes have this name. Write clip/scenes_tiny or dino/scenes_tiny",
        "scenes_tin": "did you mean 'scenes_tiny'",
        "configs/clip/cc3m_clip.yaml": "no such file. Write clip/cc3m_clip to use a shipped recipe",
    }.items():
        with pytest.raises(ConfigError, match=told):
            find_recipe(Path(word))
    lines = sparo("recipes", "emoji").stdout
    assert "clip/emoji_small" in lines and "dino/emoji_tiny" in lines and "cc3m" not in lines
    assert all(own.line and own.path.is_file() and own.hardware != "Others" for own in shipped_recipes())
    assert lines.index("Runs on a laptop:") < lines.index("clip/emoji_small") and "Needs one GPU" not in lines


def test_a_key_written_as_an_option_is_reported_with_its_value():
    assert normalize_overrides(["a=1", "--optim.lr", "1e-3", "--steps=2", "b=2"]) == [
        "a=1",
        "--optim.lr=1e-3",
        "--steps=2",
        "b=2",
    ]
    for verb in (("train",), ("launch", "train")):
        done = sparo(*verb, "emoji_small", "--optim.lr", "1e-3")
        assert done.returncode == 2 and "write optim.lr=1e-3" in done.stderr, done.stderr
    done = sparo("train", "emoji_small", "--optim.lr", "1e-3", "--dry-run")
    assert done.returncode == 2 and "write optim.lr=1e-3" in done.stderr


def test_help_version_print_and_keys_in_the_terminal():
    assert sparo("-h").stdout == sparo("--help").stdout and "sparo " in sparo("--version").stdout
    assert sparo("data", "check", "-h").returncode == 0
    done = sparo("train", "emoji_small", "optim.lr=1e-3", "--print")
    assert "# command line: optim.lr=1e-3" in done.stdout and "steps: 800" in done.stdout
    done = sparo("config", "optim.lr")
    assert "float > 0; default 0.0005" in done.stdout and "example: optim.lr=" in done.stdout


@pytest.mark.parametrize(("words", "offered"), [("sparo tr", "train"), ("sparo train emoji_s", "emoji_small")])
def test_the_shell_completes(words, offered):
    program = [sys.executable, "-c", "import sys; sys.argv[0] = 'sparo'; from launch.cli.main import main; main()"]
    asked = {"_SPARO_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    done = subprocess.run(program, env=os.environ | asked, capture_output=True, text=True, check=False)
    assert offered in done.stdout.split(), done.stderr
