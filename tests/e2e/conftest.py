"""Fixtures: two small runs, and a data set for every task to score them on."""

import pytest
import yaml

from sparo_data.writer import write_shards, write_wds_layout
from tests.helpers.processes import sparo
from tests.helpers.recipes import dino_recipe, tiny_recipe
from tests.helpers.samples import eval_sets, jpeg, sample
from tests.unit.test_sets import sugar_crepe


@pytest.fixture(scope="session")
def world(tmp_path_factory):
    """Train two runs that differ by their seed, and write sets for every task in a folder called small."""
    root = tmp_path_factory.mktemp("eval")
    write_shards(root / "shards", (sample(i) for i in range(96)), 24)
    tasks = eval_sets(root / "small")
    for split, n in (("train", 60), ("test", 30)):
        rows = [(f"{i:03d}", {"jpg": jpeg(i % 12), "cls": str(i % 4).encode()}) for i in range(n)]
        write_wds_layout(root / "small/probe", rows, classnames=list("abcd"), split=split)
    sugar_crepe(root / "data/sugar_crepe")
    tasks["probe"] = {"task": "probe", "root": str(root / "small/probe"), "epochs": 2}
    tasks["shots"] = {**tasks["probe"], "fewshot_k": 3, "val_proportion": 0}
    places = {key: str(root / "small/probe" / key) for key in ("train", "test")}
    tasks["knn"] = {"task": "knn", "k": [1, 20], **places}
    tree = tiny_recipe(root / "shards", root / "runs", eval={"tasks": tasks})
    (root / "recipe.yaml").write_text(yaml.safe_dump(tree))
    for seed in (0, 1):
        done = sparo("train", str(root / "recipe.yaml"), f"name=s{seed}", f"seed={seed}", "eval.tasks={}", cwd=root)
        assert done.returncode == 0, done.stderr
    (root / "tasks.yaml").write_text(yaml.safe_dump({"tasks": tasks}))
    return root


@pytest.fixture(scope="session")
def scored(world):
    done = sparo(
        "eval", "runs/s0", "runs/s1", "--data", "tasks.yaml", "--results", "results", "--features", "store", cwd=world
    )
    assert done.returncode == 0, done.stderr
    return world, done.stdout


@pytest.fixture(scope="session")
def others(world):
    """Train encoders of other kinds: DINO with slots, CLIP without."""
    write_shards(world / "more", (sample(i) for i in range(96)), 24)
    for split, n in (("train", 40), ("test", 30)):
        rows = [(f"{i:03d}", {"jpg": jpeg(i % 12), "cls": str(i % 4).encode()}) for i in range(n)]
        write_wds_layout(world / "near", rows, classnames=list("abcd"), split=split)
    tree = dino_recipe(world / "more", world / "runs", steps=4)
    (world / "dino.yaml").write_text(yaml.safe_dump(tree))
    plain = yaml.safe_load((world / "recipe.yaml").read_text())
    plain["objective"]["model"]["readout"] = {"kind": "token"}
    (world / "plain.yaml").write_text(yaml.safe_dump({**plain, "name": "plain", "eval": {}, "steps": 4}))
    for recipe in ("dino.yaml", "plain.yaml"):
        done = sparo("train", recipe, cwd=world)
        assert done.returncode == 0, done.stderr
    return world
