"""Sweep files: the runs that they describe, errors in them, and their table over seeds."""

import pytest
import yaml
from scipy.stats import ttest_ind

from evals.report import grid_text
from evals.report.results_file import append
from evals.report.seed_average import difference
from evals.tasks.result import Result
from launch.commands.sweep_table import sweep_grid, sweep_rows
from launch.jobs.sweep import expand
from sparo_train.core.config import dump
from sparo_train.core.errors import ConfigError, DataError
from sparo_train.train.run_config import load_run
from tests.helpers.processes import sparo
from tests.helpers.recipes import tiny_recipe

SWEEP = """
recipe: recipe.yaml
overrides: [steps=3]
runs:
  clip: {overrides: ["objective.model.readout={kind: token}"]}
  L_2: {overrides: [objective.model.readout.slots=2]}
  L_8: {overrides: [objective.model.readout.slots=8, "optim.betas=[0.9, 0.95]"]}
  other: {recipe: other.yaml}
"""


@pytest.fixture
def place(tmp_path):
    tree = tiny_recipe(tmp_path / "shards", tmp_path / "runs")
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(tree))
    (tmp_path / "other.yaml").write_text(yaml.safe_dump({**tree, "optim": {"lr": 0.5}}))
    (tmp_path / "grid.yaml").write_text(SWEEP)
    return tmp_path


def test_every_run_has_its_overrides_and_the_common_ones(place):
    name, runs = expand(place / "grid.yaml", ["optim.lr=[0.1, 0.2]"], 2)
    assert name == "grid" and len(runs) == 16 and {run.steps for run in runs} == {3}
    assert [run.name for run in runs[:4]] == [f"grid-clip-lr{lr}-seed{s}" for lr in ("0.1", "0.2") for s in (0, 1)]
    assert runs[8].objective.model.readout.slots == 8 and runs[8].optim.betas == (0.9, 0.95)
    assert expand(place / "grid.yaml", [])[1][3].optim.lr == 0.5
    with pytest.raises(
        ConfigError,
        match=r"grid.yaml: is a sweep of 4 runs. Train them with `sparo launch train .*grid.yaml --cluster local`",
    ):
        load_run(place / "grid.yaml")
    for text, said in (
        ("runs: {a: {overrides: [steps=3]}}", "runs.a.recipe: is required"),
        ("recipe: recipe.yaml\nruns: {a: {words: [steps=3]}}", "runs.a.words: unknown key"),
        ("recipe: recipe.yaml\nruns: {}", "runs"),
        ("recipe: nowhere.yaml\nruns: {a: {}}", "nowhere.yaml: no such recipe"),
        ("recipe: recipe.yaml\nruns: {a: {overrides: [stepps=3]}}", "did you mean 'steps'"),
    ):
        (place / "wrong.yaml").write_text(text)
        with pytest.raises(ConfigError, match=said):
            expand(place / "wrong.yaml", [])


def _scored(config, value, what="", note="", task="zero", **facts):
    config.folder.mkdir(parents=True, exist_ok=True)
    (config.folder / "config.yaml").write_text(dump(config))
    intervals = {"acc1": (value - 0.1, value + 0.1)}
    result = Result("zeroshot", 40, "acc1", {"acc1": value}, 0.25, intervals=intervals, note=note)
    append(config.folder / "evals", f"{config.folder}{what}", task, result, facts, predictions=False)


def test_splits_of_runs_and_sets_are_not_seeds(place):
    _, runs = expand(place / "grid.yaml", [], 1)
    _scored(runs[0], 0.1, note="other pictures in place of the listed ones")
    _scored(runs[1], 0.8)
    _scored(runs[1], 0.2, " (slots 0)")
    _scored(runs[1], 0.3, "/checkpoints/step-00000001")
    _scored(runs[2], 0.9, limit=10)
    rows = sweep_rows(place / "grid.yaml")
    assert [(len(row.folders), row.cell("zero") and row.cell("zero").value) for row in rows[:3]] == [
        (1, 0.1),
        (1, 0.8),
        (0, None),
    ]
    text = grid_text.markdown(sweep_grid("grid", rows))
    assert "10.0†" in text and "the data differ from the catalogue: other pictures" in text and "90.0" not in text
    _scored(runs[3], 0.4, task="imagenetv2")
    done = sparo("eval", "sweep", "grid.yaml", "--layout", "B.2", "--figure", "f.png", cwd=place)
    assert done.returncode == 0 and (place / "f.png").is_file(), done.stderr
    done = sparo("eval", "sweep", "grid.yaml", "--baseline", "clip", "--format", "markdown", cwd=place)
    assert done.returncode == 0 and "differences of means to clip" in done.stdout, done.stderr
    done = sparo("eval", "sweep", "grid.yaml", "--baseline", "clip", "--mean", cwd=place)
    assert done.returncode == 2 and "already shows differences of means. Remove --mean." in done.stderr
    done = sparo("eval", "sweep", "grid.yaml", "--layout", "B.2", "--paper", "CC15m", cwd=place)
    assert (
        done.returncode == 2
        and "--paper CC15m: layout B.2 has no rows of this name; did you mean 'CC15M'" in done.stderr
    )


def test_differences_of_rows_have_intervals_over_seeds(place):
    _, runs = expand(place / "grid.yaml", [], 3)
    for run, value in zip(runs[:7], (0.1, 0.3, 0.2, 0.5, 0.6, 0.7, 0.9), strict=True):
        _scored(run, value)
    rows = sweep_rows(place / "grid.yaml")
    apart = sweep_grid("grid", rows, baseline="clip")
    reach = 2.776445 * (2 * 0.1**2 / 3) ** 0.5  # four degrees of freedom: both rows have the same standard deviation
    ahead, alone, never = (row.cells[0] for row in apart.rows)
    assert (ahead.value, ahead.low, ahead.high) == pytest.approx((0.4, 0.4 - reach, 0.4 + reach))
    assert (alone.value, alone.low) == (pytest.approx(0.7), None) and never is None
    assert apart.spans.startswith("differences of means to clip") and "clip" not in [row.name for row in apart.rows]
    theirs = ttest_ind([0.1, 0.5, 0.2, 0.7], [0.6, 0.9, 0.7], equal_var=False).confidence_interval(0.95)
    assert difference([0.1, 0.5, 0.2, 0.7], [0.6, 0.9, 0.7])[1:] == pytest.approx((theirs.low, theirs.high))
    assert difference([0.5] * 3, [0.4, 0.4])[1:] == (None, None)
    behind = sweep_grid("grid", rows, baseline="L_2").rows[0].cells[0]
    assert behind.span == "-62.7 to -17.3"
    for words, message in (
        ({"baseline": "clop"}, "--baseline clop: .*'clip'"),
        ({"baseline": "clip", "paper": ["all"]}, "Remove --paper"),
    ):
        with pytest.raises(ConfigError, match=message):
            sweep_grid("grid", rows, None, **words)
    record = rows[0].results["zero"][0]
    noted = record._replace(result=record.result._replace(note="other pictures"))
    marked = rows[0]._replace(results={"zero": [noted, *rows[0].results["zero"][1:]]})
    assert rows[1].cell("zero", baseline=marked).odd and not rows[1].cell("zero", baseline=rows[0]).odd


def test_rows_have_the_median_and_range_of_their_seeds(place):
    with pytest.raises(DataError, match="grid: has no scored runs"):
        sweep_grid("grid", sweep_rows(place / "grid.yaml"))
    _, runs = expand(place / "grid.yaml", [], 3)
    for run, value in zip(runs[:7], (0.1, 0.3, 0.2, 0.5, 0.6, 0.7, 0.9), strict=True):
        _scored(run, value)
    runs[8].folder.mkdir(parents=True)  # prepared, not trained
    (runs[8].folder / "config.yaml").write_text(dump(runs[8]))
    rows = sweep_rows(place / "grid.yaml")
    assert [(row.name, len(row.folders)) for row in rows] == [("clip", 3), ("L_2", 3), ("L_8", 1), ("other", 0)]
    assert rows[2].parameters - rows[1].parameters == 6 * 2 * (
        8 + 32 * 8 + 8
    )  # per slot: query, key and its bias, twice
    grid = sweep_grid("grid", rows)
    cells = [row.cells[0] for row in grid.rows]
    assert [cell and (cell.value, cell.low, cell.high) for cell in cells] == [
        (0.2, 0.1, 0.3), (0.6, 0.5, 0.7), (0.9, None, None), None
    ]  # fmt: skip
    assert len(grid.notes) == 1 and not grid.unranked
    means = sweep_grid("grid", rows, mean=True)
    reach = 4.302653 * 0.1 / 3**0.5  # Student's t with two degrees of freedom
    first, single = means.rows[0].cells[0], means.rows[2].cells[0]
    assert (first.value, first.low, first.high) == pytest.approx((0.2, 0.2 - reach, 0.2 + reach))
    assert (single.value, single.low) == (0.9, None) and means.spans.startswith("mean, and its 95 % interval")
    mixed = rows[0].results["zero"][0]
    mixed = mixed._replace(result=mixed.result._replace(data="e" * 64))
    (_, note) = sweep_grid("grid", [rows[0]._replace(results={"zero": [mixed, *rows[0].results["zero"][1:]]})]).notes
    assert note.startswith("zero: rows were not scored on the same samples")
    assert "3" in grid.rows[0].name and grid.spans == "median, and range over seeds"
    with pytest.raises(DataError, match="--layout 6: needs scores for one of the tasks imagenet1k, got zero"):
        sweep_grid("grid", rows, "6")
    with pytest.raises(ConfigError, match="--layout 7"):
        sweep_grid("grid", rows, "7")
    with pytest.raises(ConfigError, match="--paper all: the paper's rows can only be shown with a --layout"):
        sweep_grid("grid", rows, None, ["all"])
    named = [row._replace(results={"imagenet1k": row.results.get("zero", [])}) for row in rows]
    six = sweep_grid("grid", named, "6", ["CC15M"])
    assert [row.readout_cells[:4] for row in six.rows[:2]] == [("N/A",) * 4, ("Yes", "Separate-head", "N/A", "N/A")]
    assert (
        six.rows[1].readout_cells[4] == f"{rows[1].parameters / 1e6:.1f}M"
        and six.rows[1].cells[0] == grid.rows[1].cells[0]
    )
    assert six.rows[-1].paper and six.rows[-1].readout_cells == ("Yes", "Separate-head", "N/A", "N/A", "151M")
    with pytest.raises(
        ConfigError, match=r"recipe.yaml: has no runs. For runs of one recipe, use `sparo eval table RUNS --seeds`"
    ):
        sweep_rows(place / "recipe.yaml")
    assert sweep_rows(place / "grid.yaml", place / "elsewhere")[0].folders == ()
    for words, told in (
        (["--figure", "a.xyz"], "--figure a.xyz: expected a .png, .pdf or .svg file"),
        (["--task", "zero"], "--task zero: applies to --figure"),
    ):
        done = sparo("eval", "sweep", "grid.yaml", *words, cwd=place)
        assert done.returncode == 2 and told in done.stderr and "Traceback" not in done.stderr, done.stderr
    _scored(runs[0].model_copy(update={"name": "grid-clip"}), 0.4)
    with pytest.raises(
        ConfigError, match=r"grid-clip and .*grid-clip-seed0 have the same seed. Move one of them to another folder"
    ):
        sweep_rows(place / "grid.yaml")
    older = yaml.safe_load(dump(runs[0].model_copy(update={"seed": 9})))  # written by a version without these keys
    del older["start_from"], older["freeze"], older["optim"]["kind"]
    older["data"]["workers"] = 0
    (place / "runs/grid-clip/config.yaml").write_text(yaml.safe_dump(older))
    assert len(sweep_rows(place / "grid.yaml")[0].folders) == 4
    (place / "runs/grid-clip/config.yaml").write_text(dump(runs[0].model_copy(update={"seed": 9, "steps": 7})))
    with pytest.raises(ConfigError, match=r"grid-clip and .*grid-clip-seed0 differ in more than their seed"):
        sweep_rows(place / "grid.yaml")
    (place / "runs/grid-clip/config.yaml").write_text(dump(runs[3]))
    with pytest.raises(ConfigError, match="grid-clip: is named like a row of the sweep but has another objective"):
        sweep_rows(place / "grid.yaml")
