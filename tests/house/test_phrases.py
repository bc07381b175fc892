"""The product and its documentation use plain words."""

from tests.house.phrases import bad_starts, findings, tracked


def test_no_phrase_has_to_be_translated():
    assert [line for path in tracked() for line in findings(path)] == []


def test_docstrings_begin_with_a_verb_or_noun():
    assert [line for path in tracked() for line in bad_starts(path)] == []
