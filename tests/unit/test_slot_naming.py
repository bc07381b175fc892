"""Names of slots and search in slots, compared with plain loops and on encodings with known slots."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score
from torch.nn import functional as F

from evals.slots.naming import auc_interval, caption_words, contain_names, name_slots, roc_auc
from evals.slots.slot_search import search_slots
from sparo_train.core.errors import ConfigError

COLOURS, SHAPES = ("red", "green", "blue"), ("cube", "ball", "cone")


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(-3, 3), st.booleans()), min_size=4, max_size=40))
def test_auc_equals_scikit_learns(rows):
    scores, labels = np.array([s for s, _ in rows], float), np.array([right for _, right in rows])
    if 2 <= labels.sum() <= len(labels) - 2:
        expected = roc_auc_score(labels, scores)
        assert roc_auc(scores[:, None], labels)[0] == pytest.approx(expected, abs=1e-12)
        auc, low, high = auc_interval(scores, labels)
        assert auc == pytest.approx(expected, abs=1e-12) and 0 <= low <= auc <= high <= 1


def test_a_perfect_auc_of_few_images_has_a_wide_interval():
    scores = np.arange(100.0)
    for positives, low in ((2, 0.158), (5, 0.478), (30, 0.884)):
        found = auc_interval(scores, scores >= 100 - positives)
        assert found == (1.0, pytest.approx(low, abs=1e-3), 1.0)
        assert auc_interval(-scores, scores >= 100 - positives) == (0.0, 0.0, pytest.approx(1 - low, abs=1e-3))


def test_the_interval_covers_the_auc():
    """Scores of positives are one standard deviation above those of negatives: AUC 0.760."""
    rng, covered = np.random.default_rng(0), 0
    for _ in range(300):
        labels = np.arange(80) < 30
        _, low, high = auc_interval(rng.normal(size=80) + labels, labels)
        covered += low <= 0.7602 <= high
    assert covered >= 270


def world(n=400, noise=0.3):
    """Return images of a colour and a shape: slot 0 encodes the colour, slot 1 the shape, slot 2 noise."""
    generator = torch.Generator().manual_seed(0)
    directions = F.normalize(torch.randn(6, 16, generator=generator), dim=1)
    colour, shape = (torch.randint(0, 3, (n,), generator=generator) for _ in range(2))
    images = noise * torch.randn(n, 3, 16, generator=generator)
    images[:, 0] += directions[colour]
    images[:, 1] += directions[3 + shape]
    captions = [[f"a {COLOURS[c]} {SHAPES[s]}"] for c, s in zip(colour.tolist(), shape.tolist(), strict=True)]
    texts = torch.zeros(6, 3, 16)
    texts[:3, 0], texts[3:, 1] = directions[:3], directions[3:]
    texts[:, 2] = torch.randn(6, 16, generator=generator)
    return images, texts, captions, colour, shape


def test_slots_get_the_names_of_what_they_encode():
    images, texts, captions, _, _ = world()
    names = [*COLOURS, *SHAPES]
    naming = name_slots(images, texts, names, contain_names(captions, names), 3, 5, 0)
    assert set(naming.slots[0].passing) == set(COLOURS) and set(naming.slots[1].passing) == set(SHAPES)
    assert naming.slots[2].passing == [] and all(0.3 < test.auc < 0.7 for test in naming.slots[2].tests)
    assert naming.slots[0].shuffled < 0.65 < 0.95 < naming.slots[0].tests[0].auc and naming.names == 6
    assert name_slots(images, texts, names, contain_names(captions, names), 3, 5, 0) == naming
    with pytest.raises(ConfigError, match="None of the 6 names"):
        name_slots(images, texts, names, contain_names(captions, names), 3, 150, 0)


def test_words_of_captions_are_whole_words():
    captions = [["A red-hot Cube, and a cubes"], ["le café, 2 cubes"], ["ein Würfel"]]
    assert set(caption_words(captions, 99)) == {"red-hot", "cube", "cubes", "le", "café", "ein", "würfel"}
    has = contain_names(captions, ["cube", "red", "café", "red-hot cube", "c++"])
    assert has.tolist() == [[True, True, False, True, False], [False, False, True, False, False], [False] * 5]


def test_search_finds_the_same_colour_in_another_shape():
    images, _, _, colour, shape = world(noise=0.1)
    found = search_slots(images.split(64), images[7], [0], 0.5, 10, 7)
    numbers = torch.tensor([one.image for one in found])
    assert 7 not in numbers and (colour[numbers] == colour[7]).all() and (shape[numbers] != shape[7]).all()
    for one in found:  # the plain loop
        assert one.alike == pytest.approx(
            float(F.cosine_similarity(images[one.image, 0], images[7, 0], dim=0)), abs=1e-5
        )
        rest = F.cosine_similarity(images[one.image, 1:].flatten(), images[7, 1:].flatten(), dim=0)
        assert one.rest == pytest.approx(float(rest), abs=1e-5)
    in_one_block = search_slots([images], images[7], [0], 0.5, 10, 7)
    assert [one.image for one in in_one_block] == [one.image for one in found]
    whole = search_slots([images], images[7], [0, 1, 2], 0.5, 3)
    assert whole[0].image == 7 and whole[0].rest == 0 and whole[0].alike == pytest.approx(1)
