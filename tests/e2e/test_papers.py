"""`sparo papers`: the index of tables and figures, whole and by words."""

import pytest

from launch.commands.papers import read_items
from tests.helpers.processes import sparo


def listed(*words):
    return sparo("papers", *words, COLUMNS="300")


def test_the_index_lists_every_item_of_the_five_papers():
    done = listed()
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    items = read_items()
    assert len({item.paper for item in items}) == 5 and len(items) > 35
    for item in items:
        assert any(line.strip().startswith(item.name) for line in lines), item.name
        assert item.status in ("measured", "measured at a smaller size", "not run")


@pytest.mark.parametrize(
    ("words", "expected", "absent"),
    [
        (("sparo", "table", "6"), ["SPARO: Table 6", "configs/sweeps/table6.yaml", "docs/results/readouts.md"], ["Table B.1"]),
        (("sparo", "table", "1"), ["SPARO: Table 1", "CC3M CLIP", "0.141", "clip/cc3m_clip", "not run"], ["Table B.1", "Table 2"]),
        (("Inverted", "figure", "6"), ["Inverted-attention Transformers: Fig"], ["SPARO:"]),
    ],
)  # fmt: skip
def test_words_choose_items(words, expected, absent):
    done = listed(*words)
    assert done.returncode == 0, done.stderr
    assert all(text in done.stdout for text in expected), done.stdout
    assert not any(text in done.stdout for text in absent), done.stdout


def test_unknown_words_are_refused_with_a_suggestion():
    done = listed("sparo", "tabble", "6")
    assert (
        done.returncode == 2 and "tabble: no paper, table or figure has this word; did you mean 'table'?" in done.stderr
    )
    done = listed("sparo", "table", "77")
    assert done.returncode == 2 and "77: no paper, table or figure has this word" in done.stderr
    done = listed("optimal", "figure", "6")
    assert (
        done.returncode == 2 and "optimal figure 6: no table or figure has all of these words. Use fewer" in done.stderr
    )
