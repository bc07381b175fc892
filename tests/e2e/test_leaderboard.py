"""Test the leaderboard and the table as pages: sorted, filtered and explained in a browser, readable without scripts, safe for any names."""

import re
import shutil
from contextlib import contextmanager

import pytest

from evals.report.results_file import append
from evals.tasks.result import Result, wilson
from tests.helpers.browser import chromium, until
from tests.helpers.processes import sparo

HOSTILE = 'x"><script>document.title="bad"</script>'


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    root = tmp_path_factory.mktemp("leaderboard")
    models = {"small": (0.3, 4_000_000, "scenes"), "large": (0.6, 90_000_000, "cc3m"), HOSTILE: (0.5, None, "scenes")}
    for number, (name, (share, parameters, data)) in enumerate(models.items()):
        for task, gain in (("one", 0.0), ("two", 0.1)):
            if task == "two" and name == "small":
                continue
            value = share + gain
            result = Result(
                "zeroshot", 900, "acc1", {"acc1": value}, 0.1, {"acc1": wilson(value, 900)}, data="d", note=HOSTILE
            )
            facts = {
                "parameters": parameters,
                "trained_on": data,
                "precision": "fp32",
                "checkpoint": {"sha256": "a" * 64},
            }
            append(root / f"runs/m{number}/evals", name, task, result, facts)
    return root


@pytest.fixture(scope="module")
def browser():
    with chromium() as started:
        yield started


@contextmanager
def opened(browser, path, **options):
    """Open a page and check that it has no script errors and that axe reports nothing."""
    from axe_playwright_python.sync_playwright import Axe

    context, wrong = browser.new_context(**options), []
    page = context.new_page()
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda line: wrong.append(line.text) if line.type in ("error", "warning") else None)
    page.goto(f"file://{path}")
    yield page
    found = Axe().run(page)
    assert found.violations_count == 0, found.generate_report()
    assert wrong == []
    context.close()


def test_a_leaderboard_is_sorted_filtered_and_explained(world, browser):
    done = sparo("eval", "leaderboard", "runs", "--out", "board.html", cwd=world)
    assert done.returncode == 0 and "board.html: 3 checkpoints, 2 columns" in done.stdout, done.stderr
    with opened(browser, world / "board.html") as page:

        def names():
            return page.locator("tbody tr:not([hidden]) th").all_inner_texts()

        assert page.title() == "Results" and len(names()) == 3
        page.get_by_role("button", name="one").click()
        assert names() == ["large", HOSTILE, "small"]
        page.get_by_role("button", name="one").click()
        assert names() == ["small", HOSTILE, "large"]
        page.get_by_role("button", name="two").press("Enter")
        assert names()[-1] == "small"  # rows without a score stay at the end
        page.get_by_label("Trained on").select_option("scenes")
        page.get_by_label("At most, million parameters").fill("10")
        assert names() == ["small"]
        until(page.locator("#shown")).to_have_text("1 of 3")
        page.locator("summary").last.click()
        assert page.get_by_text("a" * 16).last.is_visible()


def test_a_page_without_scripts_is_a_plain_table(world, browser):
    done = sparo("eval", "table", "runs/m0", "runs/m1", "--format", "html", "--reference", "small", cwd=world)
    assert done.returncode == 0, done.stderr
    (world / "table.html").write_text(done.stdout)
    assert "<script" not in done.stdout and "▲" in done.stdout and re.search(r"<strong>60\.0", done.stdout)
    with opened(browser, world / "table.html", viewport={"width": 390, "height": 800}) as page:
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
    done = sparo("eval", "leaderboard", "nothing", cwd=world)
    assert done.returncode == 2 and "nothing: has no results.jsonl. Give the parent folder of runs" in done.stderr


def test_a_damaged_file_does_not_end_the_leaderboard(world, tmp_path):
    folder = tmp_path / "runs"
    shutil.copytree(world / "runs", folder)
    lines = (folder / "m0/evals/results.jsonl").read_text()
    (folder / "m0/evals/results.jsonl").write_text(
        lines.replace('"checkpoint": {"sha256"', '"checkpoint": ["x"], "y": {"sha256"')
    )
    done = sparo("eval", "leaderboard", "runs", cwd=tmp_path)
    assert (
        done.returncode == 0
        and "2 checkpoints" in done.stdout
        and "skipped a results file: runs/m0/evals/results.jsonl" in done.stderr.replace("\n", "")
    )
