"""Tests of the commands, as a user types them."""

import json
import shlex
import shutil

import pytest
import yaml

from evals.encoders.loading import load_encoder
from evals.feature_store.features import FeatureStore
from evals.sets.wds import FACTS, WdsSet
from evals.suite.suite import Suite
from evals.suite.zeroshot_tasks import ZeroshotTaskConfig
from launch.cli.main import app
from launch.cli.process import call
from launch.commands.train import train
from sparo_data.writer import write_shards
from sparo_train.core.config import resolve
from sparo_train.core.disk import metrics
from sparo_train.core.errors import CheckpointError, DataError, StoppedError
from sparo_train.train.run_config import RunConfig
from sparo_train.train.state import Outcome
from tests.helpers.processes import sparo
from tests.helpers.recipes import tiny_recipe
from tests.helpers.samples import eval_sets, sample


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Make a run of twelve steps and its evaluation sets by the command line."""
    root = tmp_path_factory.mktemp("cli")
    write_shards(root / "shards", (sample(i) for i in range(96)), 24)
    tree = tiny_recipe(root / "shards", root / "runs", eval={"every_steps": 6, "tasks": eval_sets(root / "sets")})
    (root / "recipe.yaml").write_text(yaml.safe_dump(tree))
    (root / "odd.yaml").write_text("task: {}\n")
    done = sparo("train", str(root / "recipe.yaml"), "name=cli", cwd=root)
    assert done.returncode == 0, done.stderr
    assert "finished at step 12" in done.stderr
    said = "data a: 100.0% of the samples read; 96 samples, 1.00 passes"
    assert said in done.stderr and said in (root / "runs/cli/log.txt").read_text()
    return root


def test_training_evaluates_as_it_goes(trained):
    evals = sorted((trained / "runs/cli/evals").glob("*.json"))
    assert [p.name for p in evals] == ["step-00000006.json", "step-00000012.json"]
    content = json.loads(evals[-1].read_text())
    assert content["results"]["zero"]["n"] == 12 and len(content["results"]["pairs"]["interval"]) == 2
    # Commands that read results find those of the training; results of the last step have predictions.
    table = sparo("eval", "table", "runs/cli", "--format", "csv", cwd=trained).stdout
    assert f"{content['results']['zero']['metrics']['acc1']}" in table
    done = sparo("eval", "compare", "runs/cli", "runs/cli", cwd=trained)
    assert done.returncode == 0 and "zero" in done.stdout and "are not there" not in done.stderr, done.stderr
    lines = [json.loads(line) for line in (trained / "runs/cli/evals/results.jsonl").read_text().splitlines()]
    kept = {(line["facts"]["step"], bool(line["predictions"])) for line in lines if line["name"] == "zero"}
    assert kept == {(6, False), (12, True)}


def test_eval_gives_equal_scores_for_runs_exports_and_files(trained, tmp_path):
    run = trained / "runs/cli"
    assert sparo("export", str(run)).returncode == 0
    done = sparo("export", str(run), "--layout", "sparo-clip", "--out", str(tmp_path / "sc.pt"))
    assert done.returncode == 0 and done.stdout.strip().replace("\n", "") == str(tmp_path / "sc.pt")
    (tmp_path / "tasks.yaml").write_text(yaml.safe_dump({"tasks": eval_sets(tmp_path / "sets")}))
    out = sparo(
        "eval",
        str(run),
        str(run / "export"),
        str(tmp_path / "sc.pt"),
        "--data",
        str(tmp_path / "tasks.yaml"),
        "--json",
        str(tmp_path / "r.json"),
    )
    assert out.returncode == 0, out.stderr
    assert "mean_R@5" in out.stdout and "swap_att" in out.stdout
    results = json.loads((tmp_path / "r.json").read_text())["results"]
    assert results["cli/ret"]["metrics"] == results["export/ret"]["metrics"] == results["sc.pt/ret"]["metrics"]
    only = sparo("eval", str(run), "--tasks", "zero")
    assert only.returncode == 0 and "retrieval" not in only.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "nothing.yaml"], "nothing.yaml: no such recipe"),
        (["train", "{root}/recipe.yaml", "optim.lrr=1"], "optim.lrr: unknown key; did you mean 'lr'?"),
        (["eval", "{root}/nine", "--data", "{root}/recipe.yaml"], "{root}/nine: no such file or folder"),
        (["eval", "{root}/sets", "--data", "{root}/recipe.yaml"], "not a run folder, checkpoint folder"),
        (["eval", "{root}/sets", "--data", "{root}/odd.yaml"], "task: unknown key; did you mean 'tasks'?"),
        (["eval", "{root}/runs/cli", "--tasks", "zerro"], "--tasks zerro: did you mean 'zero'?"),
        (["eval", "{root}/runs/cli", "--tasks", "my.yaml"], "To use a file with tasks, pass it as --data"),
        (
            ["eval", "{root}/runs/cli", "{root}/shards"],
            "--data: missing, and {root}/shards has no run with eval.tasks",
        ),
        (["train", "{root}/recipe.yaml", "name=new", "eval.tasks.zero.root=none"], "none: no such file or folder"),
        (
            ["train", "{root}/recipe.yaml", "out={root}/recipe.yaml"],
            "out: {root}/recipe.yaml/tiny cannot be",
        ),
        (["data", "scenes", "{root}/small", "--size", "8"], "size: Input should be greater than or equal to 16"),
        (["export", "{root}/shards"], "has no config.yaml, so it is not a run folder"),
        (["export", "{root}/runs/cli", "--layout", "x"], "--layout: 'x'; known: dino, onnx, open_clip, sparo-clip"),
        (
            ["data", "convert", "{root}/recipe.yaml", "{root}/out"],
            "cannot be converted. Name an image folder, a .csv or .tsv file or a data set, or pass --as NAME",
        ),
        (["data", "check", "{root}/sharts"], "did you mean 'shards'?"),
    ],
)
def test_mistakes_end_with_code_two_and_no_traceback(trained, arguments, message):
    done = sparo(*(a.format(root=trained) for a in arguments))
    assert done.returncode == 2, done.stderr
    assert message.format(root=trained) in done.stderr and "Traceback" not in done.stderr


def test_runs_are_named_by_the_typed_folder(trained, tmp_path):
    """Runs with the same name in two folders are two rows. A run that was also scored by its absolute path is one row."""
    for place in ("a", "b"):
        shutil.copytree(trained / "runs/cli", tmp_path / place / "cli")
    done = sparo("eval", "table", "a/cli", "b/cli/", "--format", "csv", cwd=tmp_path)
    assert [line.partition(",")[0] for line in done.stdout.splitlines()[1:]] == ["a/cli", "b/cli"], done.stdout
    done = sparo("eval", str(tmp_path / "a/cli"), "--tasks", "zero", cwd=trained)
    assert done.returncode == 0, done.stderr
    done = sparo("eval", "compare", "a/cli", "b/cli", cwd=tmp_path)
    assert done.returncode == 0 and "zero" in done.stdout, done.stderr


def test_training_continues_if_results_cannot_be_written(trained, tmp_path):
    """Such scores are missing in tables, but metrics.jsonl and the file of the step contain them."""
    (tmp_path / "cli/evals/results.jsonl").mkdir(parents=True)
    done = sparo("train", str(trained / "recipe.yaml"), "name=cli", f"out={tmp_path}", cwd=trained)
    assert done.returncode == 0 and "results.jsonl: could not be written" in done.stderr, done.stderr
    assert (tmp_path / "cli/evals/step-00000012.json").is_file()


def test_a_refused_start_leaves_the_run_as_it_was(trained, tmp_path):
    """`sparo eval` scores by the run's config.yaml, and eval.tasks may differ between starts."""
    run = trained / "runs/cli"
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    write_shards(tmp_path / "other", (sample(i) for i in range(50, 150)), 24)
    for words in (
        (f"data.sources={{a: {{shards: {tmp_path}/other}}}}", "eval.tasks={}"),
        ("eval.tasks.zero.root=nowhere",),
    ):
        done = sparo("train", str(trained / "recipe.yaml"), "name=cli", *words, cwd=trained)
        assert done.returncode == 2, done.stderr
        after = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
        assert {p for p in after if after[p] != before.get(p)} <= {run / "log.txt", run / "owner.json"}, done.stderr


def test_dry_run_counts_without_training(trained, tmp_path):
    done = sparo(
        "train", str(trained / "recipe.yaml"), "--dry-run", f"out={tmp_path}", "+data.sources.b={shards: none.tar}"
    )
    assert done.returncode == 0, done.stderr
    assert "visual.sparo" in done.stdout and "matches no shard" in done.stdout and not list(tmp_path.iterdir())
    done = sparo("train", str(trained / "recipe.yaml"), "--dry-run")
    assert "12 steps x 8 = 96 samples" in done.stdout and "100.0%" in done.stdout
    done = sparo("train", str(trained / "recipe.yaml"), "--dry-run", "start_from=nowhere")
    assert done.returncode == 2 and "start_from.checkpoint=nowhere: nowhere: no such file or folder" in done.stderr


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("objective.model.vision.init_from=nowhere", "objective.model.vision.init_from=nowhere: nowhere: no such file"),
        (
            "objective.model.text.init_from=hf:nowhere",
            "objective.model.text.init_from=hf:nowhere: nowhere: no such file",
        ),
        ("freeze=[model.visual.*,model.text.*]", "only model.logit_scale would be trained. Freeze less"),
        (
            "optim.groups=[{match: [model.visuall.*]}]",
            "optim.groups.0.match=model.visuall.*: matches no trained parameter",
        ),
    ],
)
def test_dry_run_refuses_what_training_would_refuse(trained, word, message):
    code, error = call(app, ["train", str(trained / "recipe.yaml"), "--dry-run", word])
    assert code == 2 and message in str(error)


def test_data_commands(trained):
    done = sparo("data", "check", str(trained / "shards"), "--json", str(trained / "check.json"))
    assert done.returncode == 0 and "nothing broken" in done.stdout
    assert json.loads((trained / "check.json").read_text())["samples"] == 96
    done = sparo("data", "bench", str(trained / "recipe.yaml"), "--samples", "32")
    assert done.returncode == 0 and "decode" in done.stdout
    done = sparo("data", "index", str(trained / "shards"))
    assert "4 shards, 96 samples, 0 truncated or unreadable" in done.stderr
    assert len(list((trained / "shards").glob("*.idx.npy"))) == 4


def test_a_missing_checkpoint_is_reported(tmp_path):
    with pytest.raises(
        CheckpointError,
        match="not a run folder, checkpoint folder, exported folder, DeepSpeed folder, or weight file",
    ):
        load_encoder(tmp_path)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(tiny_recipe(tmp_path, tmp_path)))
    with pytest.raises(CheckpointError, match="no complete checkpoint yet"):
        load_encoder(tmp_path)


def test_wrong_evaluation_data_is_named(trained, tmp_path):
    encoder = load_encoder(trained / "runs/cli")
    eval_sets(tmp_path)
    task = {"zero": ZeroshotTaskConfig(task="zeroshot", root=str(tmp_path / "zero"))}
    names = (tmp_path / "zero/classnames.txt").read_text().splitlines()
    for again in (names[0], f"  {names[0].upper()} "):  # equal texts for CLIP's tokenizer
        (tmp_path / "zero/classnames.txt").write_text("\n".join([*names[:-1], again]) + "\n")
        remarks = Suite(task).run(encoder)["zero"].remarks()
        assert any("1 class(es) have the same name as an earlier class" in remark for remark in remarks)
    (tmp_path / "zero/classnames.txt").write_text("one\ntwo\n")
    seen = []
    with pytest.raises(DataError, match=r"has label 2, but there are 2 classes"):
        Suite(task, FeatureStore(on_progress=lambda *done: seen.append(done))).run(encoder)
    assert not seen  # reported before the batch with this sample is encoded
    (tmp_path / "zero/classnames.txt").unlink()
    with pytest.raises(DataError, match=r"classnames\.txt: no such file"):
        Suite(task).run(encoder)
    with pytest.raises(DataError, match=r"nshards\.txt: missing"):
        WdsSet(tmp_path / "none", "label")
    tar = tmp_path / "ret/test/0.tar"
    tar.write_bytes(tar.read_bytes()[:3000])
    with pytest.raises(DataError, match=r"without a complete sample; first: \S+0\.tar \(unreadable tar\)"):
        WdsSet(tmp_path / "ret", "captions")
    for kind, message in (("label", "has no label"), ("labels", r"lacks the \.npy member")):
        with pytest.raises(DataError, match=message):
            WdsSet(tmp_path / "pairs", kind).read(0)
    with pytest.raises(DataError, match="needs the texts `kind`, `caption` and `negative_caption`"):
        FACTS["pairs"]({}, "here")


def test_an_interrupted_demo_stops(tmp_path, monkeypatch):
    from launch.commands import demo

    trained = []
    monkeypatch.setattr(demo, "make_scenes", lambda *_, **__: None)
    monkeypatch.setattr(demo, "train", lambda config: trained.append(config.name) or Outcome("SIGINT", 3, tmp_path))
    with pytest.raises(StoppedError, match="run the same command again to resume") as caught:
        demo.run_demo(tmp_path, quick=True)
    assert caught.value.exit_code == 75 and trained == ["clip"]


def test_evaluations_are_neither_lost_nor_repeated(trained, tmp_path):
    tree = yaml.safe_load((trained / "recipe.yaml").read_text())
    tree |= {"out": str(tmp_path), "eval": {**tree["eval"], "every_steps": 3}, "checkpoint": {"every_steps": 3}}
    done = []

    def steps() -> list[int]:
        return [r["step"] for r in metrics.read(tmp_path / "tiny/metrics.jsonl", "eval")]

    def train_until(step):
        done.append(train(resolve(RunConfig, {**tree, "stop_after_steps": step}, "test")))
        return steps()

    assert train_until(6) == [3, 6]
    log = tmp_path / "tiny/metrics.jsonl"
    log.write_text("".join(line + "\n" for line in log.read_text().splitlines() if '"eval", "step": 6' not in line))
    assert steps() == [3]  # as if the process was killed between the checkpoint and the evaluation of step 6
    assert train_until(None) == [3, 6, 9, 12]
    assert train_until(None) == [3, 6, 9, 12] and done[-1].reason == "finished"


@pytest.mark.long
def test_the_quick_demo_writes_the_whole_page(tmp_path):
    done = sparo("demo", "--quick", "--folder", str(tmp_path / "demo"))
    assert done.returncode == 0, done.stderr
    assert "Baseline without images" in done.stdout and "CLIP+SPARO" in done.stdout
    assert max(map(len, done.stdout.partition("page:")[0].splitlines())) <= 80
    page = (tmp_path / "demo/demo.html").read_text()
    assert 2 <= page.count('<section class="slot">') <= 4 and "mean_R@5" in page.partition("<details>")[2]
    assert "Quick run." in page and '<mark class="w' in page
    first = page.partition('<table class="scores">')[2].partition("</table>")[0]
    assert (
        first.count("<tr>") == 7 and first.count('class="interval"') == 12
    )  # six rows and a header; both models have an interval
    assert (tmp_path / "demo/demo.png").stat().st_size > 10_000
    assert "<pre>sparo slots explore " in page
    # the commands that the page suggests
    own = page.partition('<pre class="own">')[2].partition("</pre>")[0].replace("&#39;", "'").splitlines()
    assert len(own) == 3
    for line in own:
        done = sparo(*shlex.split(line)[1:], cwd=tmp_path)
        assert done.returncode == 0, f"{line}: {done.stderr}"
