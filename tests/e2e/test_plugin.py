"""Test a plug-in package of two files (tests/plugin/rotations) with its dist-info in a folder on the path. No line of sparo knows it."""

import json
import shutil
import time
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file

from sparo_data.writer import write_shards
from sparo_train.core.config import resolve
from sparo_train.core.disk import metrics
from sparo_train.core.errors import ConfigError
from sparo_train.core.registries import METHODS
from sparo_train.core.registry import Registry
from sparo_train.models.weight_files.description import infer_readout
from sparo_train.train.run_config import RunConfig
from tests.helpers.processes import start_sparo
from tests.helpers.ranks import free_port
from tests.helpers.recipes import tiny_recipe
from tests.helpers.runs import finish, losses, wait_for_step
from tests.helpers.samples import eval_sets, sample

ROWS = """
[sparo.methods]
rotations = rotations:METHOD
clip = rotations:METHOD
hyphen = my-pkg:METHOD
empty =
leaving = leaving:METHOD
unsaid = leaving_not:UNSAID
[sparo.readouts]
queries = rotations:QueriesReadOut
transformer = nowhere_at_all:ReadOut
[sparo.encoders]
rotations = rotations.scoring:RotationsEncoder
[sparo.tasks]
neighbour = rotations.scoring:TASK
[sparo.exports]
rotations-backbone = rotations.scoring:EXPORT
bare = bare.part:EXPORT
[sparo.engines]
broken = nowhere_at_all:ENGINE
half = rotations:RotationsConfig
"""
PROGRAM = "import sys; sys.path.insert(0, {site!r}); from launch.cli.main import main; main()"


def install(folder, rows=ROWS, name="sparo-rotations", package="rotations"):
    shutil.copytree(Path(__file__).parents[1] / "plugin" / package, folder / package, dirs_exist_ok=True)
    (folder / "bare").mkdir(exist_ok=True)
    (folder / "bare/part.py").write_text("EXPORT = None\n")
    (folder / "leaving.py").write_text("import sys; sys.exit(3)\n")
    (folder / "leaving_not.py").write_text(
        "class UNSAID:\n    config = objective = examples = rules = None\n    exports = ()\n"
    )
    info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(rows)


def recipe(root):
    tasks = eval_sets(root / "sets")
    tree = tiny_recipe(root / "shards", root, name="whole")
    tree["objective"] = {
        "kind": "rotations",
        "model": {
            "image_size": 32,
            "patch_size": 8,
            "width": 32,
            "depth": 2,
            "heads": 2,
            "drop_path": 0.0,
            "readout": {"kind": "queries", "slots": 3},
        },
    }
    del tree["data"]["hflip"]
    tree["log"]["flops"] = True
    tree["eval"] = {"tasks": {"near": {"task": "neighbour", "root": tasks["zero"]["root"]}}}
    return tree


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    root = tmp_path_factory.mktemp("plugin")
    write_shards(root / "shards", (sample(i) for i in range(96)), 24)
    (root / "site").mkdir()
    install(root / "site")
    (root / "recipe.yaml").write_text(yaml.safe_dump(recipe(root)))
    code, out = run(root, "train", "recipe.yaml")
    assert code == 0, out
    return root


def start(root, *arguments, **environment):
    return start_sparo(*arguments, cwd=root, program=PROGRAM.format(site=str(root / "site")), **environment)


def run(root, *arguments, **environment):
    process = start(root, *arguments, **environment)
    out, err = process.communicate(timeout=120)
    return process.returncode, out + err


def test_the_method_trains_and_resumes_bit_identically_after_a_kill(place):
    cut = start(place, "train", "recipe.yaml", "name=cut")
    wait_for_step(place / "cut", 5, [cut])
    cut.kill()
    cut.communicate(timeout=60)
    code, out = run(place, "train", "recipe.yaml", "name=cut")
    assert code == 0 and "finished at step 12" in out, out
    assert losses(place / "cut") == losses(place / "whole") and len(losses(place / "whole")) == 12
    record = metrics.read(place / "whole/metrics.jsonl", "train")[-1]
    assert {"loss", "accuracy", "tflops"} <= record.keys()  # the metrics contain no loss, so the total is logged


def test_two_sharded_ranks_train_like_one_process(place):
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    engine = "engine={kind: fsdp2, device: cpu, precision: fp32, timeout: 60}"
    ranks = [
        start(
            place,
            "train",
            "recipe.yaml",
            "name=pieces",
            engine,
            OMP_NUM_THREADS="1",
            RANK=str(r),
            LOCAL_RANK=str(r),
            **common,
        )
        for r in range(2)
    ]
    found = finish(ranks)
    assert [code for code, _ in found] == [0, 0], found
    assert losses(place / "pieces") == pytest.approx(losses(place / "whole"), rel=1e-4)


def test_the_method_is_counted_scored_and_exported(place):
    code, out = run(place, "train", "recipe.yaml", "--dry-run")
    assert code == 0 and "the objective does not define `footprint`" in out and "backbone" in out, out
    with Image.open(place / "whole/pictures/step-00000012.png") as drawn:  # drawn by the task's own function
        assert drawn.size == (32 * 6, 32)
    stored = json.loads((place / "whole/evals/step-00000012.json").read_text())["results"]["near"]
    code, out = run(place, "eval", "whole", "--features", str(place / "features"), "--json", str(place / "near.json"))
    again = json.loads((place / "near.json").read_text())["results"]["whole/near"]
    assert code == 0 and again["metrics"] == stored["metrics"] and again["data"] == stored["data"], out
    code, out = run(place, "export", "whole")
    assert code == 0 and "queries.query" in load_file(place / "whole/export/rotations.safetensors"), out
    assert (
        "load_encoder" not in next((place / "whole/export").glob("*.md")).read_text()
    )  # no loader for this file was named
    code, out = run(place, "export", "whole", "--layout", "open_clip")
    assert code == 2 and "runs of objective rotations support rotations-backbone" in out


def test_the_readout_works_in_clip_and_open_clip(place):
    tree = tiny_recipe(place / "shards", place, name="clip", steps=2, optim={"lr": 1e-3})
    tree["objective"]["model"]["readout"] = {"kind": "queries", "slots": 3}
    (place / "clip.yaml").write_text(yaml.safe_dump(tree))
    code, out = run(place, "train", "clip.yaml")
    assert code == 0, out
    code, out = run(place, "export", "clip")
    config = json.loads((place / "clip/export/open_clip_config.json").read_text())
    assert code == 0 and config["model_cfg"]["text_cfg"]["readout"]["kind"] == "queries", out
    code, out = run(place, "export", "clip", "--layout", "sparo-clip")
    assert code == 2 and "does not support the readout 'queries'" in out
    (place / "tasks.yaml").write_text(yaml.safe_dump({"tasks": eval_sets(place / "clip_sets")}))
    code, out = run(
        place,
        "eval",
        "clip",
        "clip/export",
        "--data",
        "tasks.yaml",
        "--features",
        "none",
        "--json",
        str(place / "both.json"),
    )
    scores = json.loads((place / "both.json").read_text())["results"]
    assert scores["clip/zero"]["metrics"] == scores["export/zero"]["metrics"], out
    assert code == 0, out


@pytest.mark.long
def test_a_job_contains_the_plugin(place):
    code, out = run(place, "launch", "train", "recipe.yaml", "name=job", "--cluster", "local")
    assert code == 0, out
    end = time.monotonic() + 120
    while time.monotonic() < end and not (place / "job/checkpoints/step-00000012").exists():
        time.sleep(0.3)
    assert losses(place / "job") == losses(place / "whole")
    (snapshot,) = [p for p in (place / "job/code").iterdir() if p.is_dir()]
    assert (snapshot / "bare/part.py").is_file()  # a package without __init__.py
    assert (snapshot / "rotations/scoring.py").is_file() and list(snapshot.glob("sparo_rotations-1.0.dist-info"))


def test_a_broken_entry_fails_only_for_recipes_that_name_it(place, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(place / "site"))
    tree = recipe(place)
    assert type(resolve(RunConfig, tree, "r").objective).__module__ == "rotations"
    clip = {**tree, "objective": {"kind": "clip"}, "eval": {}}
    assert (
        type(resolve(RunConfig, clip, "r").objective).__module__ == "sparo_train.objectives.clip_config"
    )  # our entry stays
    for change, message in (
        ({"objective": {"kind": "rotation"}}, r"objective\.kind: 'rotation'; did you mean 'rotations'"),
        ({"objective": {**tree["objective"], "modle": {}}}, r"objective\.modle: unknown key; did you mean 'model'"),
        (
            {"objective": {"kind": "rotations", "model": {"readout": {"kind": "queries", "slot": 1}}}},
            r"objective\.model\.readout\.slot: unknown key; did you mean 'slots'",
        ),
        (
            {"engine": {"kind": "broken"}},
            r"engine\.kind: 'broken' of package sparo-rotations 1\.0 .*ModuleNotFoundError.*Repair or uninstall",
        ),
        ({"engine": {"kind": "half"}}, r"engine\.kind: 'half' of package .* has no config, build, costs, one_process"),
        ({"objective": {"kind": "hyphen"}}, r"objective\.kind: 'hyphen' of package .*cannot be imported"),
        ({"objective": {"kind": "leaving"}}, r"'leaving' of package .*cannot be imported \(SystemExit: 3\)"),
        (
            {"objective": {"kind": "unsaid"}},
            r"objective\.kind: 'unsaid': the entry of sparo\.methods must be a pydantic model",
        ),
        (
            {"objective": {"kind": "clip", "model": {"readout": {"kind": "transformer"}}}},
            r"readout\.kind: 'transformer' of package .* is a reserved name of sparo\.readouts",
        ),
        ({"objective": []}, r"objective: expected a block with keys"),
        ({"eval": {"tasks": {"a": {"root": "x"}}}}, r"eval\.tasks\.a\.task: a value is required"),
    ):
        with pytest.raises(ConfigError, match=message):
            resolve(RunConfig, {**tree, **change}, "r")
    # A module that all towers have is not a readout, even if a plug-in uses its name.
    assert (
        infer_readout({"visual.transformer.x": torch.zeros(1), "visual.conv1.weight": torch.zeros(1)}, "visual.", 0)
        is None
    )
    (tmp_path / "other").mkdir()
    install(tmp_path / "other", "[sparo.methods]\nrotations = rotations.scoring:TASK\n", "another")
    monkeypatch.syspath_prepend(str(tmp_path / "other"))
    with pytest.raises(ConfigError, match=r"'rotations' is added by another 1\.0 and sparo-rotations 1\.0"):
        Registry("sparo.methods", {}).get("rotations")


def test_an_entry_with_the_name_of_a_built_in_one_is_reported(monkeypatch, caplog):
    hidden = EntryPoint("clip", "rotations:METHOD", "sparo.methods")
    monkeypatch.setattr("sparo_train.core.registry._entries", lambda group: [hidden])
    registry = Registry("sparo.methods", {"clip": "sparo_train.objectives.clip:METHOD"})
    with caplog.at_level("WARNING", "sparo_train"):
        assert registry.get("clip") is registry.get("clip") is METHODS.get("clip")
    assert [r.getMessage() for r in caplog.records].count(caplog.messages[0]) == 1
    assert "'clip' of package rotations:METHOD has the name of a built-in entry" in caplog.messages[0]


def test_keys_of_the_plugin_are_explained(place):
    code, out = run(place, "config", "objective.model.readout.heads")
    assert code == 0 and "kind=queries" in out, out
    code, out = run(place, "config", "objective.loss.weight")
    assert code == 2 and "not a key of a recipe" in out, out


def test_tasks_that_do_not_fit_are_refused_before_step_1(place):
    text = {"task": "zeroshot", "root": str(place / "sets/zero")}
    code, out = run(place, "train", "recipe.yaml", "name=unfit", f"eval.tasks={{zero: {json.dumps(text)}}}")
    dry = run(place, "train", "recipe.yaml", "--dry-run", f"eval.tasks={{zero: {json.dumps(text)}}}")
    far = [
        "launch",
        "train",
        "recipe.yaml",
        "name=far",
        "--cluster",
        "local",
        f"eval.tasks={{zero: {json.dumps(text)}}}",
    ]
    for said in (dry, run(place, *far)):
        assert said[0] == 2 and "eval.tasks.zero: needs a text tower" in said[1]
    assert not (place / "far").exists()
    assert code == 2 and "eval.tasks.zero: needs a text tower, but objective.kind=rotations has none" in out
    assert not list((place / "unfit/checkpoints").glob("step-*"))
