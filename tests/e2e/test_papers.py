"""Test `sparo papers`: the whole index, searches, and the claims."""

import pytest

from launch.papers.index import read_index
from tests.helpers.processes import sparo


def listed(*words):
    return sparo("papers", *words, COLUMNS="300")


def test_the_index_lists_every_item_of_the_five_papers():
    done = listed()
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    items = read_index().items
    assert len({item.paper for item in items}) == 5 and len(items) > 35
    for item in items:
        assert any(line.strip().startswith(item.name) for line in lines), item.name
        assert item.status in ("measured", "measured at a smaller size", "not run", "nothing to run")
    assert "sparo papers sparo table 6 --run --small" in done.stdout


@pytest.mark.parametrize(
    ("words", "expected", "absent"),
    [
        (("sparo", "table", "6"), ["SPARO: Table 6", "sweeps/sparo_table6 ", "sweeps/sparo_table6_small", "docs/results/readouts.md"], ["Table B.1"]),
        (("sparo", "table", "1"), ["SPARO: Table 1", "CC3M CLIP", "0.141", "clip/cc3m_clip", "not run"], ["Table B.1", "Table 2"]),
        (("Inverted", "figure", "6"), ["Inverted-attention Transformers: Fig. 6", "inverted_fig6"], ["SPARO:", "Fig. 9"]),
        (("--claims", "combinations"), ["claim 1: ", "heldout/acc1: `sparo` minus `gap`"], ["claim 2"]),
    ],
)  # fmt: skip
def test_words_select_items(words, expected, absent):
    done = listed(*words)
    assert done.returncode == 0, done.stderr
    assert all(text in done.stdout for text in expected), done.stdout
    assert not any(text in done.stdout for text in absent), done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("sparo", "tabble", "6"), "tabble: no paper, table or figure has this word; did you mean 'table'?"),
        (("sparo", "table", "77"), "77: no paper, table or figure has this word"),
        (("optimal", "figure", "6"), "optimal figure 6: no table or figure has all of these words. Use fewer"),
        (("sparo", "table", "--run"), "--run: runs one table or figure, but the words in the command match 10 (Table 1, Table 2, "),
        (("sparo", "table", "6", "--small"), "--small: applies to --run only. Remove it, or add --run."),
        (("sparo", "table", "2", "--run"), "SPARO, Table 2: has no full sweep. `sparo papers` shows its commands."),
        (("sparo", "table", "6", "--run", "--on", "nowhere"), "nowhere"),
    ],
)  # fmt: skip
def test_mistakes_are_named(words, message):
    done = listed(*words)
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr, done.stderr
