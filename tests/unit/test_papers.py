"""Records, figures and verdicts of `sparo papers`, and a whole run of a small sweep."""

import json

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from pydantic import ValidationError

from launch.jobs.clusters import ClusterConfig
from launch.jobs.launching import LaunchOptions
from launch.jobs.sweep import SweepFigure, expand
from launch.papers import run as running
from launch.papers.figures import draw
from launch.papers.index import Claim, ClaimTest, PaperItem, read_index
from launch.papers.sweep_record import RecordRow, RunScores, SweepRecord, collect, read_record, write_record
from launch.papers.verdict import decide
from sparo_train.core.errors import ConfigError, DataError
from tests.helpers.processes import sparo
from tests.helpers.recipes import tiny_recipe
from tests.helpers.samples import eval_sets
from tests.unit.test_sweep_table import _scored


def record(figure=None, **rows):
    """Return a record with the score `t/acc1` for each row: (series, x, values by seed)."""
    return SweepRecord(
        sweep="s",
        machines=("m",),
        figure=figure,
        rows=tuple(
            RecordRow(
                name=name, series=series, x=x, parameters=1000 * (number + 1),
                runs=tuple(RunScores(seed=s, steps=1, seconds=2.0, scores={"t/acc1": v}) for s, v in enumerate(values)),
            )
            for number, (name, (series, x, values)) in enumerate(rows.items())
        ),
    )  # fmt: skip


def claim(controls=(), **test):
    return Claim(
        number=1, claim="a is better", items=("x",), sweep="s", why="because", controls=controls,
        no_control="" if controls else "none", tests=(ClaimTest(**{"score": "t/acc1", "row": "a", **test}),),
    )  # fmt: skip


HIGH, LOW, WIDE = [0.80, 0.81, 0.82, 0.80, 0.81], [0.70, 0.71, 0.70, 0.72, 0.71], [0.5, 0.9, 0.6, 0.8, 0.99]


@pytest.mark.parametrize(
    ("test", "a", "b", "outcome"),
    [
        ({"than": "b"}, HIGH, LOW, "shown"),
        ({"than": "b"}, LOW, HIGH, "refuted"),
        ({"than": "b"}, WIDE, LOW, "not decided"),
        ({"than": "b", "margin": 0.2}, HIGH, LOW, "refuted"),
        ({"than": "b", "expect": "less"}, LOW, HIGH, "shown"),
        ({"than": "b", "expect": "at_least", "margin": 0.15}, LOW, HIGH, "shown"),
        ({"than": "b", "expect": "at_least", "margin": 0.05}, LOW, HIGH, "refuted"),
        ({"than": "b", "expect": "equal", "margin": 0.15}, LOW, HIGH, "shown"),
        ({"than": "b", "expect": "equal", "margin": 0.05}, HIGH, LOW, "refuted"),
        ({"than": "b", "expect": "equal", "margin": 0.05}, WIDE, LOW, "not decided"),
        ({"than": "b", "expect": "different", "margin": 0.01}, LOW, HIGH, "shown"),
        ({"than": "b", "expect": "different", "margin": 0.2}, WIDE, WIDE, "not decided"),
        ({"than": "b", "expect": "different", "margin": 0.05}, HIGH, HIGH, "refuted"),
        ({"value": 0.5}, HIGH, LOW, "shown"),
        ({"value": 0.9}, HIGH, LOW, "refuted"),
        ({"value": 0.8, "expect": "equal", "margin": 0.05}, HIGH, LOW, "shown"),
    ],
)
def test_verdicts_follow_from_the_interval(test, a, b, outcome):
    found = decide(claim(**test), record(a=("A", 1, a), b=("B", 1, b)))
    assert found.outcome == outcome and found.findings[0].outcome == outcome
    assert "5 seeds. Expected" in found.findings[0].text and found.findings[0].text.endswith(outcome)


def test_too_few_seeds_and_untrained_controls_decide_nothing():
    rows = {"a": ("A", 1, HIGH[:3]), "b": ("B", 1, LOW)}
    found = decide(claim(than="b"), record(**rows))
    assert found.outcome == "not decided" and found.reason == "3 of 5 seeds"
    assert decide(claim(than="c"), record(**rows)).reason == "no scores"
    control = {"row": "b", "score": "t/acc1", "above": 0.705, "why": "chance"}
    found = decide(claim((control,), than="b"), record(a=("A", 1, HIGH), b=("B", 1, LOW)))
    assert found.outcome == "not decided"
    assert found.reason == "b has not learned: t/acc1 70.0 per cent with seed 0, needed above 70.5 (chance)"
    control["above"] = 0.6
    assert decide(claim((control,), than="b"), record(a=("A", 1, HIGH), b=("B", 1, LOW))).outcome == "shown"


def test_claims_without_margin_or_control_are_refused():
    with pytest.raises(ValidationError, match="margin: must be positive for expect=equal"):
        claim(than="b", expect="equal")
    with pytest.raises(ValidationError, match="expected exactly one of the keys `controls` and `no_control`"):
        Claim(number=1, claim="a", items=("x",), sweep="s", why="w", tests=())


@given(
    st.dictionaries(
        st.text(st.characters(categories=["L", "N"]), min_size=1, max_size=5),
        st.tuples(st.text(max_size=4), st.none() | st.floats(-9, 9) | st.text(max_size=3), st.lists(st.floats(0, 1), max_size=3)),
        min_size=1, max_size=4,
    )
)  # fmt: skip
@settings(max_examples=30, deadline=None)
def test_a_record_is_read_as_it_was_written(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("r") / "record.json"
    written = record(SweepFigure(score="t/acc1"), **rows)
    write_record(written, path)
    assert read_record(path) == written


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "record.json"),
        ('{"sweep": "s"}', "is not a record of a sweep: machines"),
        ('{"schema_version": 9, "sweep": "s", "machines": [], "figure": null, "rows": []}', "has format version 9"),
        ("{", "record.json"),
    ],
)
def test_files_other_than_a_record_are_refused(tmp_path, text, message):
    (tmp_path / "record.json").write_text(text)
    with pytest.raises(DataError, match=message):
        read_record(tmp_path / "record.json")
    done = sparo("eval", "sweep", "record.json", "--figure", "x.png", "--baseline", "a", cwd=tmp_path)
    assert done.returncode == 2 and "is a sweep's record, which can only be drawn as a figure" in done.stderr
    done = sparo("eval", "sweep", "record.json", "--figure", "x.png", cwd=tmp_path)
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr


def axes_of(monkeypatch, found, path, **options):
    kept = []
    monkeypatch.setattr("matplotlib.pyplot.close", kept.append)
    draw(found, path, **options)
    assert Image.open(path).size[0] > 600
    return kept[0].axes[0]


def test_figures_have_a_line_or_a_color_per_series(tmp_path, monkeypatch):
    rows = {"a_1": ("A", 1, HIGH), "a_2": ("A", 2, LOW), "b_2": ("B", 2, [0.35, 0.36]), "b_1": ("B", 1, [0.4])}
    lines = SweepFigure(score="t/acc1", x_label="layers")
    axis = axes_of(monkeypatch, record(lines, **rows), tmp_path / "lines.png")
    assert [list(line.get_xdata()) for line in axis.lines[:1]] == [[1, 2]]
    assert axis.get_legend_handles_labels()[1] == ["A", "B"] and axis.get_xlabel() == "layers"
    assert axis.get_ylabel().startswith("t/acc1, per cent\nmean, and its 95 %")
    axis = axes_of(monkeypatch, record(lines.model_copy(update={"relative_to": "A"}), **rows), tmp_path / "ratio.png")
    assert axis.lines[0].get_ydata() == pytest.approx([1, 1])
    far = {f"a_{x}": ("A", x, LOW) for x in (256, 8192)} | {"a_512": ("A", 512, [])}
    axis = axes_of(monkeypatch, record(lines.model_copy(update={"log_x": True}), **far), tmp_path / "log.png")
    assert [text.get_text() for text in axis.get_xticklabels()] == ["256", "8,192"]
    assert axis.get_xscale() == "log"
    bars = SweepFigure(kind="bars", score="t/acc1", y_label="accuracy")
    named = {f"{n}_{x}": (n, x, v) for n, x, v in (("A", "one", HIGH), ("A", "two", LOW), ("B", "two", LOW))}
    axis = axes_of(monkeypatch, record(bars, **named), tmp_path / "bars.png", mean=False)
    assert [text.get_text() for text in axis.get_xticklabels()] == ["one", "two"]
    assert len(axis.patches) == 3 and axis.get_ylabel() == "accuracy\nmedian, and range over seeds"
    axis = axes_of(
        monkeypatch, record(None, L_2=("", None, HIGH), L_8=("", None, LOW), clip=("", None, LOW)), tmp_path / "p.png"
    )
    assert axis.get_xlabel() == "trained parameters, millions" and axis.get_legend_handles_labels()[1] == ["L"]
    with pytest.raises(
        ConfigError, match=r"--task u: no run has this score; did you mean|--task u: no run has this score"
    ):
        draw(record(None, **rows), tmp_path / "x.png", "u")
    with pytest.raises(ConfigError, match="s: has no scored runs"):
        draw(record(None, a=("A", 1, [])), tmp_path / "x.png")


def test_a_record_holds_scores_measures_and_training(tmp_path):
    tree = tiny_recipe(tmp_path / "shards", tmp_path / "runs")
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(tree))
    measure = {"command": "sparo x {run} {file}", "scores": {"gain": "reports.pairs.gain.0"}, "rows": ["one"]}
    sweep = {"recipe": "recipe.yaml", "runs": {"one": {"x": 1}, "two": {"series": "B"}}, "measures": {"m": measure}}
    (tmp_path / "s.yaml").write_text(yaml.safe_dump(sweep))
    _, runs = expand(tmp_path / "s.yaml", [], 2)
    for run, value in zip(runs, (0.1, 0.2, 0.3, 0.4), strict=True):
        _scored(run, value)
        (run.folder / "measures").mkdir()
        (run.folder / "measures/m.json").write_text(json.dumps({"reports": [{"task": "pairs", "gain": [value, 0, 1]}]}))
        norms = [1.0, 1.0, 2.0, 6.0]
        lines = [
            {"kind": "train", "step": 10 * (n + 1), "loss": 4 - n, "grad_norm": norm, "step_seconds": 0.5}
            for n, norm in enumerate(norms)
        ]
        (run.folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = collect(tmp_path / "s.yaml")
    one, two = found.rows
    assert (one.series, one.x, two.series, two.x) == ("one", 1, "B", None)
    assert one.values("zero/acc1") == {0: 0.1, 1: 0.2} and one.values("m/gain") == {0: 0.1, 1: 0.2}
    assert two.values("m/gain") == {} and one.runs[0].steps == 40 and one.runs[0].seconds == 20
    assert one.runs[0].scores["train/loss"] == 1 and one.runs[0].scores["train/grad_norm_peak"] == 4
    diverged = {"kind": "train", "step": 50, "loss": float("nan"), "grad_norm": 1.0, "step_seconds": 0.5}
    with (runs[1].folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(diverged) + "\n")
    again = collect(tmp_path / "s.yaml").rows[0]
    assert again.values("train/loss") == {0: 1}, "a loss that is not finite is a missing score"
    (runs[0].folder / "measures/m.json").write_text('{"reports": []}')
    with pytest.raises(DataError, match=r"m.json: has no number at reports.pairs.gain.0. Delete the file, and measure"):
        collect(tmp_path / "s.yaml")


@pytest.mark.long
def test_one_command_makes_trains_measures_draws_and_decides(shards, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    task = eval_sets(tmp_path / "sets")["ret"]
    tree = tiny_recipe(shards, tmp_path / "runs", steps=3, optim={"lr": 1e-3, "warmup_steps": 0})
    tree["eval"] = {"tasks": {"retrieval": {"task": "retrieval", "root": task["root"], "k": [1], "workers": 0}}}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(tree))
    sweep = {
        "recipe": "recipe.yaml",
        "data": ["sparo data tetrominoes tet --train 4 --test 4"],
        "runs": {"sparo": {}, "clip": {"overrides": ["objective.model.readout={kind: token}"]}},
        "measures": {
            "quality": {
                "command": "sparo slots quality {run} --task retrieval --json {file}",
                "scores": {"effective": "rows.0.effective"},
                "rows": ["sparo"],
            }
        },
    }
    path = tmp_path / "two.yaml"
    path.write_text(yaml.safe_dump(sweep))
    monkeypatch.setattr(running, "recipe", lambda _: path)
    decided = claim(row="sparo", than="clip", expect="at_least", margin=0.9).model_copy(update={"sweep": "two"})
    test = ClaimTest(score="retrieval/mean_R@1", row="sparo", than="clip", expect="at_least", margin=0.9)
    decided = decided.model_copy(update={"tests": (test,)})
    monkeypatch.setattr(running, "read_index", lambda: read_index().model_copy(update={"claims": (decided,)}))
    item = PaperItem(name="Table 9", about="a", small="two", paper="P")
    options = LaunchOptions("local", ClusterConfig(kind="local"))
    verdicts = running.run_item(item, True, 2, options)
    assert (tmp_path / "tet/masks").is_dir()
    found = read_record(tmp_path / "runs/two/record.json")
    assert {row.name: len(row.runs) for row in found.rows} == {"sparo": 2, "clip": 2}
    assert set(found.row("sparo").values("quality/effective")) == {0, 1}
    assert Image.open(tmp_path / "runs/two/figure.png").size[0] > 600
    assert verdicts[0].outcome == "not decided" and verdicts[0].reason == "2 of 5 seeds"
    text = capsys.readouterr().out
    assert "claim 1: not decided: 2 of 5 seeds" in text and "P, Table 9" in text
    # Again: nothing is trained or measured a second time.
    stamps = {p: p.stat().st_mtime_ns for p in (tmp_path / "runs").rglob("*.json") if "two/" not in str(p)}
    running.run_item(item, True, 2, options)
    assert stamps == {p: p.stat().st_mtime_ns for p in stamps}
    with pytest.raises(ConfigError, match=r"P, Table 9: has no full sweep. Add --small."):
        running.run_item(item, False, 2, options)
