"""Comparisons and tables of results, compared with values computed by hand."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy.stats import binom

from evals.report import grid_text
from evals.report import paper_tables as layouts
from evals.report.compare import compare
from evals.report.leaderboard import read_leaderboard
from evals.report.plots import draw_curves, relative_change
from evals.report.results_file import append, find_records, read_records
from evals.report.seed_average import over_seeds
from evals.report.suite_layouts import SUITE_LAYOUTS
from evals.tasks import pairs, retrieval, zeroshot
from evals.tasks.objects import reconstruction
from evals.tasks.result import Result, bootstrap, format_metric, percentiles
from launch.commands.sweep_table import checkpoint_readout_cells
from launch.papers.figures import draw
from launch.papers.sweep_record import RecordRow, RunScores, SweepRecord
from sparo_train.core.errors import ConfigError, DataError


def scored(right):
    labels = torch.arange(len(right)) % 3
    found = torch.where(torch.tensor(right).bool(), labels, (labels + 1) % 3)[:, None]
    result = zeroshot.result_from_ranking(found, labels, 3, "zeroshot")
    return result._replace(keys=tuple(f"{i}" for i in range(len(right))), data="d" * 64)


def two(tmp_path, first, second, task="t"):
    for name, result in (("a", first), ("b", second)):
        append(tmp_path / name, name, task, result, {})
    return [read_records([tmp_path / name])[0] for name in "ab"]


def test_mcnemar_is_the_exact_one_and_the_interval_holds_the_difference(tmp_path):
    first, second = [1] * 60 + [0] * 40, [1] * 50 + [0] * 10 + [1] * 30 + [0] * 10
    found = compare(*two(tmp_path, scored(first), scored(second)))
    assert (found.only_first, found.only_second, found.n) == (10, 30, 100)
    assert found.difference == pytest.approx(0.2) and found.p == pytest.approx(2 * binom.cdf(10, 40, 0.5))
    assert 0.05 < found.interval[0] < 0.2 < found.interval[1] < 0.35
    same = compare(*two(tmp_path / "same", scored(first), scored(first)))
    assert (same.difference, same.interval, same.p) == (0.0, (0.0, 0.0), 1.0)


def test_a_macro_mean_is_compared_within_its_kinds(tmp_path):
    kinds = ["x"] * 90 + ["y"] * 10
    results = [
        pairs.score_margins(torch.tensor(m), kinds)._replace(keys=tuple(map(str, range(100))), data="d")
        for m in ([1.0] * 90 + [-1.0] * 10, [1.0] * 100)
    ]
    found = compare(*two(tmp_path, *results))
    assert found.difference == pytest.approx(0.5) and found.interval == (
        0.5,
        0.5,
    )  # all answers of y and none of x are right


def test_retrieval_is_compared_over_the_same_resampled_images(tmp_path):
    g = torch.Generator().manual_seed(0)
    image = torch.randn(80, 8, generator=g)
    owner = torch.arange(80).repeat_interleave(2)
    results = [
        retrieval.score(image, image[owner] + noise * torch.randn(160, 8, generator=g), owner)._replace(
            keys=tuple(map(str, range(80))), data="d"
        )
        for noise in (2.0, 0.5)
    ]
    found = compare(*two(tmp_path, *results))
    assert found.difference == pytest.approx(results[1].value - results[0].value) and found.p is None
    assert 0 < found.interval[0] < found.difference < found.interval[1] and found.only_second > found.only_first
    assert compare(*two(tmp_path / "same", results[0], results[0])).interval == (0.0, 0.0)


def drawn(errors, pixels=True):
    found = reconstruction.score(np.asarray(errors), 48, pixels)
    return found._replace(keys=tuple(f"{i}" for i in range(len(errors))), data="d" * 64)


def test_per_image_scores_are_compared_image_by_image(tmp_path):
    errors = np.random.default_rng(0).uniform(0.01, 0.2, 50)
    better = errors * np.where(np.arange(50) < 40, 0.5, 1.1)
    found = compare(*two(tmp_path, drawn(errors), drawn(better)))
    expected = (40 * 10 * np.log10(2) - 10 * 10 * np.log10(1.1)) / 50
    assert found.difference == pytest.approx(expected, rel=1e-5) and found.p is None
    assert (found.only_first, found.only_second, found.n) == (10, 40, 50)
    assert found.interval[0] < expected < found.interval[1]
    found = compare(*two(tmp_path / "features", drawn(errors, False), drawn(better, False)))
    assert found.difference < 0 and (found.only_first, found.only_second) == (10, 40)  # a smaller error is better


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 7)), min_size=1, max_size=3))
def test_damaged_predictions_are_reported_by_file(tmp_path, flips):
    folder = tmp_path / str(len(list(tmp_path.iterdir())))
    first, second = two(folder, scored([1, 0] * 30), scored([1, 1, 0] * 20))
    path = folder / "a/predictions" / first.predictions
    data = bytearray(path.read_bytes())
    for at, bit in flips:
        data[at % len(data)] ^= 1 << bit
    path.write_bytes(data)
    try:
        assert compare(first, second).n == 60
    except DataError as error:
        assert str(path) in str(error) or "other keys" in str(error) or "labels of" in str(error)


def test_names_are_not_parsed_as_formulas_in_figures(tmp_path):
    name = r"runs/$x^{ a$ \frac"
    sides = []
    for checkpoint, right in (("a", [1, 0]), ("b", [1, 1])):
        append(tmp_path / checkpoint, name + checkpoint, name, scored(right), {})
        sides.append({name: read_records([tmp_path / checkpoint])[0]})
    assert relative_change(*sides, tmp_path / "c.png")[name] == pytest.approx(1)
    curve = {key: [0.1, 0.2] for key in ("curve", "random_mean", "random_low", "random_high")}
    report = {**curve, "whole": [0.3], "chosen": [0.2, 0.1, 0.3], "draws": 2, "share": "held out", "n": 9}
    draw_curves({name: report}, 1, name, tmp_path / "d.png")
    runs = tuple(RunScores(seed=seed, steps=1, seconds=1.0, scores={f"{name}/acc1": 0.3}) for seed in range(2))
    row = RecordRow(name=name, series=name, x=name, parameters=10, runs=runs)
    for kind in (None, {"kind": "bars", "score": f"{name}/acc1", "x_label": name}):
        sweep = {"sweep": name, "machines": [name], "figure": kind, "rows": [row]}
        draw(SweepRecord.model_validate(sweep), tmp_path / "e.png")
    assert all((tmp_path / f"{letter}.png").stat().st_size > 5000 for letter in "cde")


def test_scores_of_other_kinds_are_not_paired_nor_ranked(tmp_path):
    one = drawn([0.1, 0.2])._replace(options={"drawn": "features of a", "numbers": 48})
    other = one._replace(options={"drawn": "features of b", "numbers": 48})
    with pytest.raises(
        DataError, match="drawn=features of a, but b with drawn=features of b, so their psnr cannot be paired"
    ):
        compare(*two(tmp_path, one, other))
    first, second = two(tmp_path / "mixed", drawn([0.1, 0.2]), drawn([0.2, 0.3], False))
    text = grid_text.markdown(layouts.grid([first, second], None))
    assert "**" not in text and "per cent unless another unit is given" in text
    first, second = two(tmp_path / "less", drawn([0.1, 0.1], False), drawn([0.3, 0.3], False))
    assert relative_change({"d": first}, {"d": second}, tmp_path / "c.png")["d"] == pytest.approx(-2)
    first, second = two(tmp_path / "log", drawn([0.1, 0.1]), drawn([0.3, 0.3]))
    with pytest.raises(DataError, match="no positive score on any task that both checkpoints share"):
        relative_change({"d": first}, {"d": second}, tmp_path / "c.png")
    for headline in ("psnr_held_out", "other"):  # of views, and of a task with two metrics
        odd = second._replace(result=second.result._replace(headline=headline, metrics={headline: 0.5}))
        other = odd if headline == "psnr_held_out" else first
        with pytest.raises(DataError, match="no positive score on any task that both checkpoints share"):
            relative_change({"d": other}, {"d": odd}, tmp_path / "c.png")
    nothing = one._replace(predictions={"psnr": np.full(2, np.nan)})
    with pytest.raises(DataError, match="no sample has psnr for both checkpoints"):
        compare(*two(tmp_path / "none", one, nothing))
    with pytest.raises(DataError, match="shown=2, but b with shown=3"):
        compare(*two(tmp_path / "views", *(drawn([0.1, 0.2])._replace(options={"shown": n}) for n in (2, 3))))


def test_metrics_other_than_shares_have_their_own_unit(tmp_path):
    assert [
        format_metric("fg_ari", 0.5),
        format_metric("psnr", 23.456, unit=True),
        format_metric("mse", -0.001, "+"),
    ] == [
        "50.0",
        "23.46 dB",
        "-0.00100",
    ]
    for name, errors in (("a", [0.01, 0.012] * 15), ("b", [0.001, 0.0012] * 15)):
        for task, pixels in (("drawn", True), ("features", False)):
            append(tmp_path / name, name, task, drawn(errors, pixels), {})
    found = layouts.grid(read_records([tmp_path / "a", tmp_path / "b"]), None)
    text = grid_text.markdown(found)
    assert "| 19.60 dB (" in text and "**29.60 dB (" in text and "**0.00110 mse (" in text


def test_other_data_labels_and_headlines_are_not_compared(tmp_path):
    one = scored([1, 0, 1])
    with pytest.raises(DataError, match="different data or with different headline metrics"):
        compare(*two(tmp_path / "1", one, one._replace(data="e")))
    with pytest.raises(DataError, match="have different keys"):
        compare(*two(tmp_path / "2", one, one._replace(keys=("x", "y", "z"))))
    other = one._replace(predictions={**one.predictions, "label": np.zeros(3, np.int64)})
    with pytest.raises(DataError, match="labels of a and b differ"):
        compare(*two(tmp_path / "3", one, other))
    with pytest.raises(DataError, match=r"was scored by .* but b by probe"):
        compare(*two(tmp_path / "5", one, one._replace(task="probe")))
    for key, values in (("templates", (1, 80)), ("trained_on", ("a", "b")), ("resize", (None, 40))):
        with pytest.raises(DataError, match=f"scored with {key}="):
            compare(*two(tmp_path / key, *(one._replace(options={key: value}) for value in values)))
    assert (
        compare(*two(tmp_path / "6", one, one._replace(options={"trained_on": "a"}))).n == 3
    )  # unknown for older results
    records = two(tmp_path / "4", one, one)
    next((tmp_path / "4/b/predictions").iterdir()).unlink()
    with pytest.raises(DataError, match=r"has no predictions of b on t. Score it again"):
        compare(*records)


def test_a_row_of_several_checkpoints_is_marked(tmp_path):
    one = scored([1, 0, 1])
    for task, sha, precision in (("x", "1", "fp32"), ("y", "2", "bf16")):
        facts = {"checkpoint": {"sha256": sha}, "precision": precision, "storage": "fp32"}
        append(tmp_path / "mix", "w.pt", task, one, facts)
        append(tmp_path / "same", "v.pt", task, one, {**facts, "checkpoint": {"sha256": "1"}, "precision": "fp32"})
    text = grid_text.markdown(layouts.grid(read_records([tmp_path / "mix", tmp_path / "same"]), None))
    assert "w.pt: its scores differ in weights and precision" in text and "v.pt: its" not in text


def test_a_renamed_run_is_compared_under_its_current_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "runs/old"
    (run / "evals").mkdir(parents=True)
    (run / "config.yaml").write_text("name: old\nsteps: 3\n")
    for name, right in (("runs/old", [1, 0]), ("runs/old (slots 0,1)", [1, 1]), ("else", [0, 0])):
        append(run / "evals", name, "t", scored(right), {})
    run.rename(tmp_path / "runs/new")
    assert {r.checkpoint for r in read_records(["runs/new"])} == {"runs/new", "runs/new (slots 0,1)", "else"}
    for name, value in (("runs/new", 0.5), ("runs/new/", 0.5), ("runs/new (slots 0,1)", 1.0)):
        (record,) = find_records(name)
        assert record.result.value == value
    with pytest.raises(ConfigError, match=r"contains results of runs/new, runs/new \(slots 0,1\), else. Give one"):
        find_records("runs/new (slots 7)")
    with pytest.raises(ConfigError, match="evals: contains results of runs/old, "):
        find_records("runs/new/evals")


def test_a_column_of_several_sets_is_marked_and_has_no_best(tmp_path):
    whole, part = scored([1, 0, 1]), scored([1, 1])._replace(data="e" * 64)
    for name, of_t in (("a", whole), ("b", part)):
        append(tmp_path / name, name, "t", of_t, {})
        append(tmp_path / name, name, "u", whole, {})
    found = layouts.grid(read_records([tmp_path / "a", tmp_path / "b"]), None)
    assert found.notes == [
        "t: rows were not scored on the same samples (n 2, 3): another set, or a part of it; the best is not marked"
    ]
    for text in (grid_text.markdown(found), grid_text.latex(found)):
        assert "**" not in text and "textbf" not in text  # both scores of u are equal
    other = scored([1, 0, 0])._replace(data="f" * 64)
    append(tmp_path / "c", "c", "u", other, {})
    (note,) = layouts.grid(read_records([tmp_path / "a", tmp_path / "c"]), None).notes
    assert note.startswith("u: rows were not scored on the same samples (n 3 each)")


def test_the_bootstrap_has_its_nominal_coverage():
    """With clusters of two equal answers, the interval is that of 200 clusters, not of 400 samples."""
    rng = np.random.default_rng(0)
    p = (rng.random(200) < 0.5).astype(float)
    draws = bootstrap(np.stack([2 * p], 1), np.full((200, 1), 2.0))[:, 0]
    low, high = percentiles(draws)
    assert (high - low) / 2 == pytest.approx(1.96 * (p.mean() * (1 - p.mean()) / 200) ** 0.5, rel=0.1)
    assert draws.mean() == pytest.approx(p.mean(), abs=0.01)


def test_results_survive_truncation_and_the_newest_line_counts(tmp_path):
    one = scored([1, 0, 1])
    append(tmp_path, "a", "t", scored([0, 0, 1]), {})
    append(tmp_path, "a", "t", one, {"x": 1})
    with (tmp_path / "results.jsonl").open("a") as stream:
        stream.write('{"schema": 1, "checkp')
    (found,) = read_records([tmp_path])
    assert found.result.metrics == one.metrics and found.facts == {"x": 1}
    append(tmp_path, "b", "t", one, {})  # after the incomplete line, which is the only one lost
    assert [r.checkpoint for r in read_records([tmp_path])] == ["a", "b"]
    (tmp_path / "results.jsonl").write_text('no json\n{"schema": 1}\n')
    with pytest.raises(DataError, match=r"line 2 is not a result .*'checkpoint'"):
        read_records([tmp_path])


def test_every_printed_row_has_its_columns(tmp_path):
    append(tmp_path, "runs/a_b", "imagenet1k", scored([1, 0, 1]), {})
    for name, columns in layouts.LAYOUTS.items():
        if name in SUITE_LAYOUTS:
            continue
        found = layouts.grid(read_records([tmp_path]), name, ["all"])
        assert all(len(row.cells) == len(columns) for row in found.rows) and len(found.rows) in (13, 15, 37)
        assert all(len(row.readout_cells) == len(found.heads) for row in found.rows) and bool(found.heads) == (
            name == "6"
        )
    (tmp_path / "config.yaml").write_text("a stranger's, beside which files of weights lie")
    assert (
        checkpoint_readout_cells("open_clip:ViT-B-32@openai")
        == checkpoint_readout_cells(str(tmp_path / "x.pt"))
        == ("–",) * 5
    )
    with pytest.raises(ConfigError, match="--paper CC12M: layout 6 has no rows of this name"):
        layouts.grid(read_records([tmp_path]), "6", ["CC12M"])
    six = layouts.grid(read_records([tmp_path]), "6", ["all"])
    assert "| runs/a_b | – | – | – | – | – | 66.7 (" in grid_text.markdown(six)  # there is no run at this path
    assert "| paper: CC15M C+AttPool | No | Multi-head | No | No | 440M | 31.2 |" in grid_text.markdown(six)
    assert "& \\multicolumn{5}{c}{} & \\multicolumn{1}{c}{ImageNet}" in grid_text.latex(six)
    assert (
        grid_text.as_csv(six).splitlines()[-1].startswith("paper: CC15M C+SPARO,Yes,Separate-head,N/A,N/A,151M,0.37,")
    )
    one = layouts.grid(read_records([tmp_path]), "1", ["CC15M"])
    assert [row.name for row in one.rows] == [
        "runs/a_b",
        "paper: CC15M CLIP16",
        "paper: CC15M C+GAP",
        "paper: CC15M C+SPARO",
    ]
    assert "runs/a\\_b & 66.7 & -- " in grid_text.latex(
        one
    ) and "| paper: CC15M C+SPARO | 43.7 |" in grid_text.markdown(one)
    turned = grid_text.markdown(one, transpose=True)
    assert "|  | runs/a_b | paper: CC15M CLIP16 |" in turned and "| ImageNet- V1 | 66.7 (" in turned
    assert "ImageNet- V2 & -- & 33.7 & " in grid_text.latex(one, transpose=True)
    first, value, low = grid_text.as_csv(one, transpose=True).splitlines()[:3]
    assert first.startswith("checkpoint,runs/a_b,paper: CC15M CLIP16") and low.startswith("imagenet1k acc1 low,0.")
    assert value.split(",") == ["imagenet1k acc1", str(2 / 3), "0.384", "0.399", "0.437"]
    macro = [cell.value for row in layouts.grid([], "B.1", ["all"]).rows for cell in row.cells[:7]]
    means = np.asarray(macro).reshape(-1, 7).mean(axis=1)
    printed = [row.cells[7].value for row in layouts.grid([], "B.1", ["all"]).rows]
    assert np.abs(means - printed).max() < 1.1e-3  # Table B.1's average is the unweighted mean


def test_a_limited_result_never_stands_for_the_whole(tmp_path):
    def rows():
        return [(row.name, row.cells[0].value) for row in layouts.grid(read_records([tmp_path]), None).rows]

    append(tmp_path, "a", "t", scored([1]), {"limit": 1})
    assert rows() == [("a (limit 1)", 1.0)]
    append(tmp_path, "a", "t", scored([1, 0, 1]), {"limit": None})
    append(tmp_path, "a", "t", scored([1]), {"limit": 1})
    assert rows() == [("a", 2 / 3)]
    with pytest.raises(
        ConfigError,
        match=r"--paper CC15M: .* need a table with --layout, but --layout is not set\. Choose one of 1, 2, 3, 6, B\.1, B\.2",
    ):
        layouts.grid(read_records([tmp_path]), None, ["CC15M"])


def test_a_result_survives_json():
    found = scored([1, 0, 1])
    back = Result.from_dict(found.as_dict())
    assert back.metrics == found.metrics and back.interval == found.interval and back.data == found.data


def test_seeds_of_one_recipe_are_one_row(tmp_path):
    runs = {
        "tsa-seed0": (0, 1e-3, [1, 1, 0, 0]),
        "tsa-seed1": (1, 1e-3, [1, 1, 1, 1]),
        "tsa-seed2": (2, 1e-3, [1, 0, 0, 0]),
        "sa": (0, 2e-3, [0, 0, 0, 1]),
    }
    for name, (seed, lr, right) in runs.items():
        (tmp_path / name / "evals").mkdir(parents=True)
        recipe = f"name: {name}\nseed: {seed}\nout: {tmp_path}\noptim: {{lr: {lr}}}\n"
        (tmp_path / name / "config.yaml").write_text(recipe)
        append(tmp_path / name / "evals", str(tmp_path / name), "t", scored(right), {})
    places = [str(tmp_path / name) for name in runs]
    found = over_seeds(layouts.grid(read_records(places), None))
    assert [row.name for row in found.rows] == [f"{tmp_path}/tsa (3 seeds)", str(tmp_path / "sa")]
    (cell,), (alone,) = (row.cells for row in found.rows)
    assert cell == layouts.Cell(0.5, 0.25, 1.0, metric="acc1")
    assert alone == layouts.Cell(0.25, None, None, metric="acc1")  # one seed has no range
    assert "median, and range over seeds" in grid_text.markdown(found) and "50.0 (25.0–100.0)" in grid_text.markdown(
        found
    )
    with_paper = layouts.Grid(
        "", found.columns, [*layouts.grid(read_records(places), None).rows, layouts.Row("paper", [None], True)], []
    )
    assert over_seeds(with_paper).rows[-1].paper
    append(tmp_path / "tsa-seed0/evals", str(tmp_path / "tsa-seed0"), "u", scored([1, 0]), {})
    one_alone = over_seeds(layouts.grid(read_records(places), None)).rows[0].cells
    assert one_alone[0] == cell and one_alone[1] is None
    apart = over_seeds(layouts.grid(read_records(places), None), baseline=f"{tmp_path}/sa")
    ((lead, other),) = (row.cells for row in apart.rows)
    assert (lead.value, lead.low) == (pytest.approx((0.5 + 1.0 + 0.25) / 3 - 0.25), None) and other is None
    assert apart.spans.startswith(f"differences of means to {tmp_path}/sa,")
    (behind,) = over_seeds(layouts.grid(read_records(places), None), baseline=f"{tmp_path}/tsa").rows
    assert behind.name == f"{tmp_path}/sa" and behind.cells[0].value == pytest.approx(-1 / 3)
    with pytest.raises(ConfigError, match=r"--baseline sa: "):
        over_seeds(layouts.grid(read_records(places), None), baseline="sa")
    with pytest.raises(ConfigError, match="Remove --paper"):
        over_seeds(with_paper, baseline="tsa")
    append(tmp_path / "again", f"{tmp_path}/tsa-seed0/checkpoints/step-1", "t", scored([1, 0]), {})
    append(tmp_path / "again", f"{tmp_path}/sa (slots 0,3)", "t", scored([1, 0]), {})
    assert len(over_seeds(layouts.grid(read_records([*places, tmp_path / "again"]), None)).rows) == 4
    (tmp_path / "tsa-seed1/config.yaml").write_text((tmp_path / "tsa-seed0/config.yaml").read_text())
    with pytest.raises(ConfigError, match="tsa-seed1 has the same seed, 0, as another"):
        over_seeds(layouts.grid(read_records(places), None))
    with pytest.raises(ConfigError, match="all of these runs have different recipes"):
        over_seeds(layouts.grid(read_records(places[2:]), None))
    append(tmp_path / "other", "weights.pt", "t", scored([1, 0]), {})
    with pytest.raises(ConfigError, match=r"weights\.pt has no config\.yaml"):
        over_seeds(layouts.grid(read_records([tmp_path / "other"]), None))


def grouped(rows, classes, headline):
    """Score predictions (label, predicted, group) by a metric that is not a mean over samples."""
    labels, predicted, groups = (torch.tensor(column) for column in zip(*rows, strict=True))
    found = torch.stack([(predicted + i) % classes for i in range(classes)], 1)[:, :5]
    result = zeroshot.with_macro_f1(zeroshot.result_from_ranking(found, labels, classes, "zeroshot"))
    result = zeroshot.with_groups(result, groups.tolist())
    return result._replace(headline=headline, keys=tuple(map(str, range(len(rows)))), data="d" * 64)


@pytest.mark.parametrize("headline", ["f1_macro", "acc1_worst_group", "acc5_worst_group"])
def test_metrics_that_are_no_mean_are_compared_by_their_own_difference(tmp_path, headline):
    rng = np.random.default_rng(0)
    labels, groups = rng.integers(0, 6, 200), rng.integers(0, 2, 200)
    second = np.where(rng.random(200) < 0.3, labels, rng.integers(0, 6, 200))
    # Better in one group only, where the lowest accuracy and some classes do not change.
    first = np.where((groups == 1) & (rng.random(200) < 0.8), labels, second)
    results = [grouped(list(zip(labels, x, groups, strict=True)), 6, headline) for x in (first, second)]
    found = compare(*two(tmp_path, *results))
    expected = results[1].metrics[headline] - results[0].metrics[headline]
    assert found.difference == pytest.approx(expected, abs=1e-12) and found.p is None
    assert found.interval[0] <= expected <= found.interval[1]
    accuracy = compare(*two(tmp_path / "acc1", *(r._replace(headline="acc1") for r in results)))
    assert accuracy.difference != pytest.approx(expected, abs=1e-3)


def test_retrieval_with_another_k_is_compared_by_the_common_metric(tmp_path):
    g = torch.Generator().manual_seed(0)
    image = torch.randn(60, 8, generator=g)
    text = [image + noise * torch.randn(60, 8, generator=g) for noise in (1.0, 0.7)]

    def scored_at(number, ks):
        found = retrieval.score(image, text[number], torch.arange(60), ks)
        return found._replace(headline="mean_R@5", keys=tuple(map(str, range(60))), data="d")

    same = compare(*two(tmp_path / "same", scored_at(0, (1, 5)), scored_at(1, (1, 5))))
    other = compare(*two(tmp_path / "other", scored_at(0, (1, 5)), scored_at(1, (5, 10, 20))))
    assert other == same and same.interval[0] <= same.difference <= same.interval[1]


def test_a_metric_that_right_answers_do_not_give_is_not_paired(tmp_path):
    results = [scored([1] * n + [0] * (10 - n)) for n in (4, 6)]
    odd = [r._replace(headline="mine", metrics={**r.metrics, "mine": r.metrics["acc1"] / 2}) for r in results]
    with pytest.raises(DataError, match="mine is not a mean over samples"):
        compare(*two(tmp_path, *odd))


def test_tables_report_other_options_and_precisions(tmp_path):
    results = [scored([1] * n + [0] * (10 - n)) for n in (4, 6)]
    for name, result, templates, precision in (("a", results[0], 6, "fp32"), ("b", results[1], 1, "bf16")):
        options = {"templates": templates}
        append(tmp_path / name, name, "t", result._replace(options=options), {"precision": precision})
    notes = layouts.grid(read_records([tmp_path / "a", tmp_path / "b"]), None).notes
    assert "t: rows were scored with different templates; the best is not marked" in notes
    assert any(note.startswith("scores were computed in different precisions (bf16: b; fp32: a)") for note in notes)


def test_the_newest_result_is_on_the_leaderboard(tmp_path):
    for name, right, time in (("a_new", 6, "2026-02-02T00:00:00+00:00"), ("b_old", 4, "2026-01-01T00:00:00+00:00")):
        append(tmp_path / name, "run", "t", scored([1] * right + [0] * (10 - right)), {"time": time})
    (entry,) = read_leaderboard(tmp_path).entries
    assert entry.cells[0].value == pytest.approx(0.6)
