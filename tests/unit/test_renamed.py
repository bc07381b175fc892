"""Old names of recipe keys: refused in a recipe with the new name, accepted in what sparo wrote."""

from pathlib import Path

import pytest
import yaml

from sparo_train.core.config import Frozen, resolve
from sparo_train.core.errors import ConfigError
from sparo_train.core.recipe.config_keys import RegistryBlock, child_shape
from sparo_train.core.recipe.layers import is_sweep, load_recipe
from sparo_train.core.recipe.renamed import RENAMED
from sparo_train.train.run_config import RunConfig, load_run
from tests.conftest import tiny_recipe

RECIPES = [
    path
    for path in sorted(Path("configs").rglob("*.yaml"))
    if not path.name.startswith("_") and path.parts[1] not in ("sweeps", "clusters", "tasks")
]


def classes(base: type) -> dict[str, type[Frozen]]:
    return {cls.__name__: cls for sub in base.__subclasses__() for cls in (sub, *classes(sub).values())}


def with_old_names(shape, tree, used):
    """A resolved recipe as an older version wrote it; adds (class, old name) of what is replaced to `used`."""
    if not isinstance(tree, dict) or shape is None:
        return tree
    model = shape.from_registry.model_of(tree) if isinstance(shape, RegistryBlock) else shape
    old_names = {}
    for cls in model.__mro__ if isinstance(model, type) else ():
        old_names |= {new: (cls.__name__, old) for old, new in RENAMED.get(cls.__name__, {}).items()}
    used |= {old_names[key] for key in tree if key in old_names}
    return {
        old_names.get(key, ("", key))[1]: with_old_names(child_shape(shape, key, tree), value, used)
        for key, value in tree.items()
    }


def test_what_was_written_with_old_names_loads_and_a_recipe_is_told_the_new_ones():
    replaced = set()
    for path in RECIPES:
        if is_sweep(load_recipe(path)):
            continue
        config = load_run(path)
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
        assert set(keys.values()) <= fields.keys() and not keys.keys() & fields.keys(), name
    missing = {(name, old) for name, keys in RENAMED.items() for old in keys} - replaced
    assert not {name for name, _ in missing} & {
        "BinderConfig",
        "VisionConfig",
        "DataConfig",
        "OptimConfig",
        "NerfConfig",
    }


def test_the_error_of_an_old_key_says_the_new_one(shards, tmp_path):
    tree = tiny_recipe(shards, tmp_path)
    tree["optim"] = {**tree.get("optim", {}), "max_skipped": 3}
    with pytest.raises(ConfigError, match=r"optim\.max_skipped: was renamed, got 'max_skipped'\. Write optim\.max_con"):
        resolve(RunConfig, tree, "x")


def test_the_recipe_of_a_run_folder_may_have_old_names(shards, tmp_path):
    config = resolve(RunConfig, tiny_recipe(shards, tmp_path), "x")
    old = yaml.safe_dump(with_old_names(RunConfig, config.model_dump(mode="json"), set()))
    (tmp_path / "config.yaml").write_text(old)
    with pytest.raises(ConfigError, match=r"data\.window: was renamed"):
        load_run(tmp_path / "config.yaml")
    (tmp_path / "environment.json").write_text("{}")
    assert load_run(tmp_path / "config.yaml") == config
    # An override with the new name wins over the old one of the file.
    assert load_run(tmp_path / "config.yaml", ["data.shuffle_window=7"]).data.shuffle_window == 7
