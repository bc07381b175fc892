"""Old names: recipe keys are refused in a recipe and accepted in files that sparo wrote; options work with a notice."""

import json
import re
from pathlib import Path

import pytest
import torch
import typer
import yaml

from launch.cli.main import app
from launch.cli.process import RENAMED as RENAMED_OPTIONS
from launch.cli.process import with_new_options
from sparo_train.core.config import Frozen, resolve
from sparo_train.core.disk import checkpoint_store as store
from sparo_train.core.disk.pieces import Piece
from sparo_train.core.errors import CheckpointError, ConfigError
from sparo_train.core.recipe.config_keys import RegistryBlock, child_shape
from sparo_train.core.recipe.layers import is_sweep, load_recipe, override
from sparo_train.core.recipe.renamed import RENAMED, RENAMED_PARAMETERS, parameter_name
from sparo_train.train.build import build_objective
from sparo_train.train.run_config import RunConfig, load_run
from tests.helpers.recipes import tiny_recipe
from tests.helpers.samples import image_folder

RECIPES = [
    path
    for path in sorted(Path("configs").rglob("*.yaml"))
    if not path.name.startswith("_") and path.parts[1] not in ("sweeps", "clusters", "tasks")
]


def classes(base: type) -> dict[str, type[Frozen]]:
    return {cls.__name__: cls for sub in base.__subclasses__() for cls in (sub, *classes(sub).values())}


def with_old_names(shape, tree, used):
    """Return a resolved recipe as an older version wrote it; add (class, old name) of each replacement to `used`."""
    if not isinstance(tree, dict) or shape is None:
        return tree
    model = shape.from_registry.find_model(tree) if isinstance(shape, RegistryBlock) else shape
    old_names = {}
    for cls in model.__mro__ if isinstance(model, type) else ():
        old_names |= {new: (cls.__name__, old) for old, new in RENAMED.get(cls.__name__, {}).items()}
    used |= {old_names[key] for key in tree if key in old_names}
    return {
        old_names.get(key, ("", key))[1]: with_old_names(child_shape(shape, key, tree), value, used)
        for key, value in tree.items()
    }


def test_stored_recipes_load_with_old_names_and_new_recipes_are_refused(tmp_path):
    replaced, words = set(), [f"data={image_folder(tmp_path)}"]
    for path in RECIPES:
        if is_sweep(load_recipe(path)):
            continue
        config = load_run(path, words if path.stem.startswith("own_") and path.parts[1] == "dino" else None)
        used = set()
        old = with_old_names(RunConfig, config.model_dump(mode="json"), used)
        replaced |= used
        assert resolve(RunConfig, old, str(path), stored=True) == config
        if used:
            with pytest.raises(ConfigError, match="was renamed, got"):
                resolve(RunConfig, old, str(path))
    found = classes(Frozen)
    for name, keys in ((name, keys) for name, keys in RENAMED.items() if name in found):
        fields = found[name].model_fields
        assert {
            name.partition("=")[0] for name in keys.values()
        } <= fields.keys() and not keys.keys() & fields.keys(), name
    missing = {(name, old) for name, keys in RENAMED.items() for old in keys} - replaced
    assert not {name for name, _ in missing} & {
        "BinderConfig",
        "VisionConfig",
        "DataConfig",
        "AdamWConfig",
        "NerfConfig",
    }


def test_the_error_for_an_old_key_names_the_new_one(shards, tmp_path):
    tree = tiny_recipe(shards, tmp_path)
    tree["optim"] = {**tree.get("optim", {}), "max_skipped": 3}
    with pytest.raises(ConfigError, match=r"optim\.max_skipped: was renamed, got 'max_skipped'\. Write optim\.max_con"):
        resolve(RunConfig, tree, "x")


def test_the_former_muon_block_is_read(shards, tmp_path):
    tree = tiny_recipe(shards, tmp_path)
    adamw = resolve(RunConfig, {**tree, "optim": {"lr": 1e-3, "muon": None}}, "x", stored=True).optim
    muon = resolve(
        RunConfig, {**tree, "optim": {"lr": 1e-3, "muon": {"momentum": 0.9, "adamw": ["*x*"]}}}, "x", stored=True
    ).optim
    assert (adamw.kind, adamw.lr, muon.kind, muon.lr, muon.momentum, muon.adamw_patterns) == (
        "adamw", 1e-3, "muon", 1e-3, 0.9, ("*x*",)
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"optim\.muon: was renamed, got 'muon'\. Write optim\.kind=muon\."):
        resolve(RunConfig, {**tree, "optim": {"muon": {}}}, "x")


def test_a_recipe_keeps_its_rate_when_another_optimizer_is_chosen():
    base = {"optim": {"kind": "muon", "lr": 2e-3, "momentum": 0.9}}
    assert override(base, ["optim.kind=adamw"], RunConfig)["optim"] == {"kind": "adamw", "lr": 2e-3, "momentum": 0.9}


def test_the_recipe_of_a_run_folder_may_have_old_names(shards, tmp_path):
    config = resolve(RunConfig, tiny_recipe(shards, tmp_path), "x")
    old = yaml.safe_dump(with_old_names(RunConfig, config.model_dump(mode="json"), set()))
    (tmp_path / "config.yaml").write_text(old)
    with pytest.raises(ConfigError, match=r"data\.window: was renamed"):
        load_run(tmp_path / "config.yaml")
    (tmp_path / "environment.json").write_text("{}")
    assert load_run(tmp_path / "config.yaml") == config
    # An override with the new name takes precedence over the file's old one.
    assert load_run(tmp_path / "config.yaml", ["data.shuffle_window=7"]).data.shuffle_window == 7


def _options(command, words: tuple[str, ...]) -> set[str]:
    if hasattr(command, "commands"):
        return {
            option
            for name, child in command.commands.items()
            if not words or words[0] == name
            for option in _options(child, words[1:])
        }
    return {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}


@pytest.mark.parametrize("words", RENAMED_OPTIONS, ids=" ".join)
def test_a_renamed_option_is_passed_on_under_its_new_name(words, capsys):
    options = _options(typer.main.get_command(app), words)
    for old, new in RENAMED_OPTIONS[words].items():
        assert with_new_options([*words, f"{old}=1", old, "x", "--", old]) == [*words, f"{new}=1", new, "x", "--", old]
        assert f"{old}: renamed to {new}" in capsys.readouterr().err
        assert new in options, (words, new)
        # `slots score` handles --on separately; the --out of `eval sweep` is another option.
        assert old not in options or (words, old) == (("eval", "sweep"), "--out")


def test_other_words_of_a_command_line_are_unchanged(capsys):
    words = ["eval", "run", "--tasks", "--on", "--to", "--most=3"]
    assert with_new_options(words) == words and not capsys.readouterr().err


def test_old_parameter_names_of_slot_models_are_mapped():
    rules = [(before, old, new) for before, names in RENAMED_PARAMETERS for old, new in names.items()]
    used = set()
    for path in RECIPES:
        if path.parts[1] not in ("slots", "video", "scenes3d") or is_sweep(load_recipe(path)):
            continue
        config = load_run(path)
        try:
            with torch.device("meta"):
                names = build_objective(config).state_dict()
        except CheckpointError:
            continue  # its frozen backbone must be downloaded
        for name in names:
            old_name = name
            for before, old, new in rules:
                earlier = re.sub(rf"({before}){new}(?=[./]|$)", rf"\g<1>{old}", old_name)
                used |= {(before, old)} if earlier != old_name else set()
                old_name = earlier
            assert parameter_name(old_name, config.objective.kind) == name
            assert parameter_name(name, config.objective.kind) == name
            assert parameter_name(old_name, "of a package") == old_name
    # No recipe has a hint of masks, and those with a patch decoder need a downloaded backbone.
    assert {(before, old) for before, old, _ in rules} - used == {(r"\.hint\.", "see"), (r"\.decoder\.", "places")}


def test_a_checkpoint_and_a_recipe_with_old_parameter_names_load(tmp_path):
    recipe = {"objective": {"kind": "slate"}}
    pieces = {
        "model": {"model.begin": Piece.unsharded(torch.arange(3.0)), "x": Piece.unsharded(torch.ones(1))},
        "optimizer": {"model.begin/exp_avg": Piece.unsharded(torch.zeros(3))},
    }
    checkpoints = store.CheckpointStore(tmp_path)
    path = checkpoints.complete(1, *checkpoints.write(1, pieces), {"recipe": recipe})
    assert set(store.read_part(path, "model")) == {"model.begin", "x"}  # present files are read unchanged

    meta = json.loads((path / "meta.json").read_text()) | {"format": 2}
    del meta["checksum"]
    (path / "meta.json").write_text(json.dumps({**meta, "checksum": store._checksum(meta)}))
    model, optimizer = store.read_part(path, "model"), store.read_part(path, "optimizer")
    assert model["model.bos"].tolist() == [0, 1, 2] and set(model) == {"model.bos", "x"}
    assert set(optimizer) == {"model.bos/exp_avg"}

    stored = load_run(Path("configs/video/steve_movi.yaml")).model_dump(mode="json")
    stored["optim"]["groups"][0]["match"] = ["model.begin", "model.places"]
    config = resolve(RunConfig, stored, "stored", stored=True)
    assert config.optim.groups[0].match == ("model.bos", "model.pos_embed")
