"""Test a package that adds a loss and an optimizer (tests/plugin/losses_and_optimizers). No file of sparo knows them."""

import json
import re
from pathlib import Path

import pytest
import torch
import yaml
from torch.nn import functional as F

from sparo_data.writer import write_shards
from sparo_train.core.config import resolve
from sparo_train.core.disk import metrics
from sparo_train.core.errors import ConfigError
from sparo_train.core.recipe.layers import override
from sparo_train.engine.local import LocalEngine, LocalEngineConfig
from sparo_train.objectives.contrastive import contrastive
from sparo_train.train.build import build_objective
from sparo_train.train.run_config import RunConfig
from tests.e2e.test_plugin import PROGRAM, install, run
from tests.helpers.processes import start_sparo
from tests.helpers.ranks import free_port
from tests.helpers.recipes import tiny_recipe
from tests.helpers.runs import assert_bit_equal, finish, losses, wait_for_step
from tests.helpers.samples import eval_sets, sample

ENTRIES = """
[sparo.losses]
decoupled = losses_and_optimizers:DecoupledLoss
unfinished = losses_and_optimizers:UnfinishedLoss
[sparo.optimizers]
lion = losses_and_optimizers:LionConfig
[sparo.methods]
scaled_clip = losses_and_optimizers:METHOD
[sparo.encoders]
scaled_clip = evals.encoders.clip_encoder:clip_encoder
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    root = tmp_path_factory.mktemp("loss_and_optimizer")
    write_shards(root / "shards", (sample(i) for i in range(96)), 24)
    (root / "site").mkdir()
    install(root / "site", ENTRIES, "sparo-lion", "losses_and_optimizers")
    tree = tiny_recipe(root / "shards", root, name="whole")
    tree["objective"]["loss"] = {"kind": "decoupled", "weight": 0.9}
    tree["optim"] = {"kind": "lion", "lr": 1e-4, "betas": [0.9, 0.95]}
    tree["eval"] = {}
    (root / "recipe.yaml").write_text(yaml.safe_dump(tree))
    code, out = run(root, "train", "recipe.yaml")
    assert code == 0, out
    return root


def start(root, *arguments, **environment):
    return start_sparo(*arguments, cwd=root, program=PROGRAM.format(site=str(root / "site")), **environment)


def test_a_killed_run_resumes_bit_equal(place):
    cut = start(place, "train", "recipe.yaml", "name=cut")
    wait_for_step(place / "cut", 5, [cut])
    cut.kill()
    cut.communicate(timeout=60)
    code, out = run(place, "train", "recipe.yaml", "name=cut")
    assert code == 0 and "finished at step 12" in out, out
    assert_bit_equal(place / "cut", place / "whole")
    assert losses(place / "cut") == losses(place / "whole")


@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "deepspeed"])
def test_two_ranks_train_as_one_process_and_resume(place, engine):
    name = f"two-{engine}"

    def ranks():
        common = {
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "OMP_NUM_THREADS": "1",
        }
        block = f"engine={{kind: {engine}, device: cpu, precision: fp32, timeout: 60}}"
        words = ("train", "recipe.yaml", f"name={name}", block)
        return [start(place, *words, RANK=str(r), LOCAL_RANK=str(r), **common) for r in range(2)]

    found = finish(ranks())
    assert [code for code, _ in found] == [0, 0], found
    assert losses(place / name) == pytest.approx(losses(place / "whole"), rel=1e-3)
    last = place / name / "checkpoints/step-00000012"
    # One process resumes what two ranks saved: the state is found by parameter names.
    more = [
        "train",
        "recipe.yaml",
        f"name=more-{engine}",
        f"start_from={{checkpoint: {last}, optimizer: true}}",
        "steps=14",
    ]
    code, out = run(place, *more)
    assert code == 0, out
    assert len(metrics.read(place / f"more-{engine}/metrics.jsonl", "train")) >= 1


def test_a_loss_is_gathered_and_averaged_over_both_directions(place, monkeypatch):
    monkeypatch.syspath_prepend(str(place / "site"))
    config = resolve(RunConfig, yaml.safe_load((place / "recipe.yaml").read_text()), "r").objective.loss
    image, text = (F.normalize(torch.randn(6, 8, dtype=torch.float64), dim=-1) for _ in range(2))
    z = 7.0 * image @ text.T
    others = z.masked_fill(torch.eye(6, dtype=torch.bool), -torch.inf)
    expected = ((others.logsumexp(1) + others.logsumexp(0)) / 2 - 0.9 * z.diagonal()).mean()
    assert float(contrastive(image, text, torch.tensor(7.0), loss=config).total) == pytest.approx(
        float(expected), rel=1e-12
    )


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("objective.loss.exchange=ring", r"loss\.exchange=ring: loss\.kind=decoupled cannot be computed in tiles"),
        ("objective.model.init_logit_bias=-10", r"init_logit_bias: is not used by loss\.kind=decoupled"),
        ("objective.loss.kind=decuopled", r"objective\.loss\.kind: 'decuopled'; did you mean 'decoupled'"),
        (
            "objective.loss.kind=unfinished",
            r"'unfinished' of package sparo-lion 1\.0 .* has no mean_loss\. docs/guides/extending\.md",
        ),
        ("optim.kind=lino", r"optim\.kind: 'lino'; did you mean 'lion'"),
        ("optim.eps=1", r"optim\.eps: unknown key"),
    ],
)
def test_errors_name_the_key(place, monkeypatch, word, message):
    monkeypatch.syspath_prepend(str(place / "site"))
    tree = yaml.safe_load((place / "recipe.yaml").read_text())
    with pytest.raises(ConfigError, match=message):
        resolve(RunConfig, override(tree, [word], RunConfig), "r")


def test_another_optimizers_state_is_refused(place):
    code, out = run(
        place, "train", "recipe.yaml", "name=other", "optim.kind=adamw", "optim.betas=[0.9,0.98]", "steps=14",
        f"start_from={{checkpoint: {place / 'whole/checkpoints/step-00000012'}, optimizer: true}}",
    )  # fmt: skip
    assert code == 2 and "exp_avg" in out and "optim.kind" in out, out


def test_a_method_that_derives_from_clip_is_trained_scored_and_exported(place):
    tree = tiny_recipe(place / "shards", place, name="scaled", steps=4, eval={})
    tree["objective"] = {**tree["objective"], "kind": "scaled_clip", "factor": 0.25}
    (place / "scaled.yaml").write_text(yaml.safe_dump(tree))
    plain = {**tree, "name": "plain", "objective": {**tree["objective"], "kind": "clip"}}
    del plain["objective"]["factor"]
    (place / "plain.yaml").write_text(yaml.safe_dump(plain))
    for name in ("scaled", "plain"):
        code, out = run(place, "train", f"{name}.yaml")
        assert code == 0, out
    assert losses(place / "scaled")[0] == pytest.approx(0.25 * losses(place / "plain")[0], rel=1e-6)
    code, out = run(place, "export", "scaled")
    assert code == 0 and (place / "scaled/export/open_clip_config.json").is_file(), out
    code, out = run(place, "export", "scaled", "--layout", "sparo-clip")
    assert code == 2 and "runs of objective scaled_clip support open_clip" in out
    (place / "tasks.yaml").write_text(yaml.safe_dump({"tasks": eval_sets(place / "sets")}))
    words = ("--data", "tasks.yaml", "--features", "none", "--json", str(place / "both.json"))
    code, out = run(place, "eval", "scaled", "scaled/export", *words)
    scores = json.loads((place / "both.json").read_text())["results"]
    assert code == 0 and scores["scaled/zero"]["metrics"] == scores["export/zero"]["metrics"], out


def test_a_derived_kind_keeps_the_block_and_another_does_not(place, monkeypatch):
    monkeypatch.syspath_prepend(str(place / "site"))
    tree = yaml.safe_load((place / "recipe.yaml").read_text())
    block = override(tree, ["objective.kind=scaled_clip"], RunConfig)["objective"]
    assert block == {**tree["objective"], "kind": "scaled_clip"} and "model" in block
    assert override(tree, ["objective.kind=dino"], RunConfig)["objective"] == {"kind": "dino"}


def test_state_names_that_are_wrong_fail_at_the_first_save(place, monkeypatch):
    monkeypatch.syspath_prepend(str(place / "site"))
    from losses_and_optimizers import LionConfig

    class Wrong(LionConfig):
        state_names = ("step", "momentum_buffer")

    engine = LocalEngine(LocalEngineConfig(device="cpu", precision="fp32"), Wrong(lr=1e-3))
    tree = yaml.safe_load((place / "recipe.yaml").read_text())
    engine.prepare(build_objective(resolve(RunConfig, tree, "x")))
    engine.optimizer.state[next(engine.objective.parameters())]["exp_avg"] = torch.zeros(())
    with pytest.raises(
        ConfigError,
        match=r"state_names must list the state that the optimizer keeps \(exp_avg\), got momentum_buffer, step\. Correct",
    ):
        engine.pieces()


def test_the_blocks_of_the_documentation_work():
    page = (Path(__file__).parents[2] / "docs/guides/extending.md").read_text(encoding="utf-8")
    names: dict = {"__name__": "extending"}
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(block, names)
    logits, targets = torch.randn(4, 8), torch.arange(4) + 2
    others = logits.scatter(1, targets[:, None], -torch.inf).logsumexp(1)
    assert torch.equal(names["DecoupledLoss"]().mean_loss(logits, targets), (others - logits.diagonal(2)).mean())
    layer, config = torch.nn.Linear(2, 2), names["NAdamConfig"](lr=0.1)
    optimizer = config.build([{"params": list(layer.parameters()), "weight_decay": 0.1}])
    layer(torch.ones(2)).sum().backward()
    optimizer.step()
    assert {frozenset(state) for state in optimizer.state.values()} == {frozenset(config.state_names)}
    answers = names["answer"](
        torch.eye(2), lambda texts: torch.eye(2)[[len(t) % 2 for t in texts]], [["a", "bb"], ["c", "ddd"]]
    )
    assert answers.correct["acc"].tolist() == [True, False] and names["TASK"].facts == "captions"
    assert (
        names["METHOD"].exports == ("open_clip", "sparo-clip", "transformers", "onnx")
        and names["METHOD"].config.model_fields["kind"].default == "margin_clip"
    )
