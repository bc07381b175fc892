"""Significance in tables: Holm's correction, paired differences of every metric, the marked best, and layouts of suites."""

from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from scipy.stats import binomtest

from evals.report import grid_text
from evals.report import paper_tables as layouts
from evals.report.compare import compare
from evals.report.grid import BETTER, WORSE
from evals.report.results_file import append, read_records
from evals.report.significance import holm, mark_separated_best
from evals.report.suite_layouts import VTAB, suite_tasks
from evals.tasks import pairs, questions
from evals.tasks.result import Result, wilson
from sparo_train.core.errors import ConfigError, DataError

N = 200


def answers(seed, share, average="micro"):
    """Return a result of task matching with these shares of right answers."""
    rng = np.random.default_rng(seed)
    right = {name: torch.from_numpy(rng.random(N) < p) for name, p in share.items()}
    kinds = ["a"] * 150 + ["b"] * 50
    chance = {name: torch.full((N,), 0.25) for name in share}
    found = questions.score("matching", questions.Answers(right, chance, kinds, [str(i) for i in range(N)]), average)
    return found._replace(data="d" * 64)


def table(tmp_path, results, **options):
    for name, by_task in results.items():
        for task, result in by_task.items():
            append(tmp_path / name, name, task, result, {})
    return layouts.grid(read_records([tmp_path / name for name in results]), **{"layout": None, **options})


def test_holm_is_the_step_down_procedure():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, 0.9]) == [1.0, 1.0] and holm([]) == []


def test_every_metric_is_paired_on_its_own_answers(tmp_path):
    first, second = answers(0, {"group": 0.2, "text": 0.5}), answers(1, {"group": 0.2, "text": 0.9})
    for name, result in (("a", first), ("b", second)):
        append(tmp_path / name, name, "t", result, {})
    one, other = (read_records([tmp_path / name])[0] for name in "ab")
    found = compare(one, other, "text")
    x, y = first.predictions["text"], second.predictions["text"]
    assert found.difference == pytest.approx(y.mean() - x.mean()) and found.n == N
    better, worse = int((y & ~x).sum()), int((x & ~y).sum())
    assert found.p == pytest.approx(binomtest(better, better + worse).pvalue)
    part = compare(one, other, "text/b")
    assert part.difference == pytest.approx(y[150:].mean() - x[150:].mean()) and part.n == 50
    with pytest.raises(DataError, match=r"t: other does not count each sample as right or wrong"):
        compare(one, other, "other")


def test_a_mean_over_kinds_is_paired_within_kinds(tmp_path):
    first, second = (answers(seed, {"acc": share}, "macro") for seed, share in ((0, 0.4), (1, 0.6)))
    for name, result in (("a", first), ("b", second)):
        append(tmp_path / name, name, "t", result, {})
    found = compare(*(read_records([tmp_path / name])[0] for name in "ab"))
    assert found.stratified and found.difference == pytest.approx(second.value - first.value)
    kinds = ["x"] * 90 + ["y"] * 10
    for name, margin in (("c", [1.0] * 90 + [-1.0] * 10), ("d", [1.0] * 100)):
        scored = pairs.score_margins(torch.tensor(margin), kinds)._replace(keys=tuple(map(str, range(100))), data="d")
        append(tmp_path / name, name, "p", scored, {})
    one, other = (read_records([tmp_path / name])[0] for name in "cd")
    assert compare(one, other, "y").difference == 1.0 and compare(one, other, "x").difference == 0.0
    assert compare(one, other, "micro").difference == pytest.approx(0.1)


def test_only_a_significantly_best_score_is_marked(tmp_path):
    results = {
        name: {"t": answers(i, {"group": p})} for i, (name, p) in enumerate({"a": 0.3, "b": 0.32, "c": 0.8}.items())
    }
    found = table(tmp_path, results)
    assert found.best == (2,)
    assert grid_text.markdown(found).count("**") == 2 and "textbf" in grid_text.latex(found)
    close = table(tmp_path / "close", {name: results[name] for name in "ab"})
    assert close.best == (None,) and "**" not in grid_text.markdown(close)


def test_differences_to_a_row_are_marked_after_correction(tmp_path):
    shares = {"a": (0.5, 0.5), "b": (0.9, 0.5), "c": (0.1, 0.52)}
    results = {
        name: {"t": answers(i, {"group": p}), "u": answers(10 + i, {"group": q})}
        for i, (name, (p, q)) in enumerate(shares.items())
    }
    found = table(tmp_path, results, reference="a")
    signs = {row.name: [cell.sign for cell in row.cells] for row in found.rows}
    assert signs == {"a": ["", ""], "b": [BETTER, ""], "c": [WORSE, ""]}
    assert found.notes[-1].endswith("Holm's correction for 4 comparisons, all paired on the same samples")
    assert "$^{\\uparrow}$" in grid_text.latex(found) and BETTER in grid_text.markdown(found)
    with pytest.raises(ConfigError, match=r"--reference d: known: a, b, c"):
        table(tmp_path, results, reference="d")


def test_without_predictions_intervals_decide_and_the_note_says_so(tmp_path):
    results = {
        name: {"t": Result("zeroshot", N, "acc1", {"acc1": p}, 0.1, {"acc1": wilson(p, N)}, data="d")}
        for name, p in {"a": 0.3, "b": 0.9}.items()
    }
    found = table(tmp_path, results, reference="a")
    assert found.rows[1].cells[0].sign == BETTER and found.notes[-1].endswith("1 of them not paired")


def test_layouts_of_suites_show_what_was_scored(tmp_path):
    shares = {"group": 0.2, "text": 0.4, "image": 0.3, "group_match": 0.6}
    found = table(tmp_path, {"a": {"winoground": answers(0, shares)}}, layout="compositional")
    assert [column.label for column in found.columns] == ["text", "image", "group", "group match"]
    assert "no results: sugar_crepe, sugar_crepe_pp" in found.notes[0]
    guessed = {"aro/vg_relation": answers(0, {"acc": 0.6, "blind": 0.59})}
    notes = table(tmp_path / "blind", {"a": guessed}, layout="compositional").notes
    assert "best guess from the captions alone (chance): ARO VG-R 57.5 (25.0)" in notes
    catalogue_sets = yaml.safe_load(Path("evals/suite/datasets/compositional.yaml").read_text())
    assert {task.name for task in suite_tasks("compositional")} == {"sugar_crepe", *catalogue_sets}
    with pytest.raises(
        ConfigError,
        match=r"--layout compositional: only 0 of the layout's 27 data sets are scored, too few for any column\. Score the others with sparo eval --suite",
    ):
        table(tmp_path / "none", {"a": {"other": answers(0, shares)}}, layout="compositional")
    accuracy = {
        task: Result("zeroshot", N, "acc1", {"acc1": 0.5}, 0.1, {"acc1": wilson(0.5, N)}, data=task) for task in VTAB
    }
    mean = table(tmp_path / "vtab", {"a": accuracy}, layout="reviewer").rows[0].cells[0]
    low, high = wilson(0.5, N)
    assert mean.value == pytest.approx(0.5) and mean.high - mean.low == pytest.approx((high - low) / len(VTAB) ** 0.5)
    del accuracy["sun397"]  # the mean of 18 sets would be another number
    with pytest.raises(
        ConfigError, match=r"--layout reviewer: only 18 of the layout's 27 data sets are scored, too few for any column"
    ):
        table(tmp_path / "part", {"a": accuracy}, layout="reviewer")


def test_the_best_over_seeds_differs_from_all_others(tmp_path):
    results = {
        name: {"t": answers(i, {"group": p})} for i, (name, p) in enumerate({"a": 0.2, "b": 0.9, "c": 0.25}.items())
    }
    found = table(tmp_path, results)._replace(best=())
    assert mark_separated_best(found).best == (1,)
    rows = [row._replace(cells=[row.cells[0]._replace(low=None, high=None)]) for row in found.rows]
    assert mark_separated_best(found._replace(rows=rows)).best == (None,)


def test_kinds_with_names_of_metrics_and_other_tie_rules_are_told_apart(tmp_path):
    right = {"acc": torch.tensor([True] * 6 + [False] * 4)}
    kinds = ["acc"] * 3 + ["text"] * 7
    made = questions.Answers(right, {"acc": torch.full((10,), 0.5)}, kinds, [str(i) for i in range(10)])
    first = questions.score("choice", made)._replace(data="d")
    second = first._replace(
        metrics={**first.metrics, "acc": 0.4, "acc/acc": 0.0, "acc/text": 4 / 7},
        predictions={**first.predictions, "acc": ~first.predictions["acc"], "right": ~first.predictions["right"]},
    )
    for name, result in (("a", first), ("b", second)):
        append(tmp_path / name, name, "t", result, {})
    found = compare(*(read_records([tmp_path / name])[0] for name in "ab"))
    assert found.n == 10 and found.difference == pytest.approx(-0.2)
    for name, ties in (("c", "lose"), ("d", "first")):
        append(tmp_path / name, name, "t", first._replace(options={**first.options, "ties": ties}), {})
    with pytest.raises(DataError, match=r"was scored with ties=lose, but d with ties=first"):
        compare(*(read_records([tmp_path / name])[0] for name in "cd"))
