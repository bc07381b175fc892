"""Effective ranks without labels: compared with the formulas, on views that share nothing or everything, and as a task of a run."""

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import linalg

from evals.encoders.pixels import BandPixels, Pixels
from evals.suite.rank_task import RandomView, RankTaskConfig
from evals.suite.suite import Suite
from evals.tasks import ranks
from sparo_train.core.errors import ConfigError
from sparo_train.objectives.dino_health import rankme as logged_rankme
from tests.helpers.compositional import BagOfWords
from tests.helpers.samples import image_folder


def test_lidar_as_in_the_paper():
    views = np.random.default_rng(0).normal(size=(30, 4, 6)) + 3 * np.random.default_rng(1).normal(size=(30, 1, 6))
    means, mean = views.mean(1), views.mean((0, 1))
    between = sum(np.outer(m - mean, m - mean) for m in means) / 30
    within = sum(
        np.outer(v - m, v - m) for row, m in zip(views, means, strict=True) for v in row
    ) / 120 + 1e-4 * np.eye(6)
    root = np.linalg.inv(linalg.sqrtm(within))
    values = np.linalg.eigvalsh(root @ between @ root)
    shares = values / values.sum() + 1e-7
    assert ranks.lidar(views) == pytest.approx(np.exp(-(shares * np.log(shares)).sum()), rel=1e-9)


def test_directions_count_if_they_distinguish_images():
    rng = np.random.default_rng(0)
    # Ten directions differ between images, and ten more only between views of one image.
    signal = np.concatenate([np.repeat(rng.normal(size=(200, 1, 10)), 5, 1), np.zeros((200, 5, 10))], -1)
    noise = np.concatenate([0.1 * rng.normal(size=(200, 5, 10)), rng.normal(size=(200, 5, 10))], -1)
    found = ranks.lidar(signal + noise)
    assert 8 < found < 11 and ranks.rankme((signal + noise)[:, 0]) > 18
    assert (
        ranks.lidar(np.repeat(rng.normal(size=(50, 1, 1)), 4, 1) * np.ones(8) + 1e-3 * rng.normal(size=(50, 4, 8)))
        < 1.5
    )


def test_rankme_equals_the_logged_value():
    encodings = np.random.default_rng(0).normal(size=(100, 40)).astype(np.float32)
    assert ranks.rankme(encodings) == pytest.approx(float(logged_rankme(torch.from_numpy(encodings))), rel=1e-6)


def test_intervals_cover_other_samples():
    rng = np.random.default_rng(0)
    make = lambda: rng.normal(size=(300, 3, 5)) + np.repeat(rng.normal(size=(300, 1, 5)) * [3, 2, 1, 1, 1], 3, 1)  # noqa: E731
    result = ranks.score(make())
    low, high = result.intervals["lidar"]
    others = [ranks.lidar(make()) for _ in range(20)]
    assert np.mean([low <= other <= high for other in others]) > 0.6 and high - low < 1
    assert ranks.score(np.zeros((3, 2, 4))).metrics["lidar"] >= 0


def test_the_task_needs_no_labels_and_views_are_the_same_in_every_process(tmp_path):
    image_folder(tmp_path / "images")
    task = RankTaskConfig(images=str(tmp_path / "images"), views=3, workers=0)
    encoder = BagOfWords()
    encoder.transform = Pixels(8, 8)
    first = Suite({"r": task}).run(encoder)["r"]
    assert first == Suite({"r": task}).run(encoder)["r"] and first.n == 24 and first.counts["views"] == 3
    assert Suite({"r": task.model_copy(update={"seed": 1})}).run(encoder)["r"].metrics != first.metrics
    image = Image.open(next((tmp_path / "images").rglob("*.jpg")))
    view = RandomView(16, 0, 1)
    before = torch.random.get_rng_state()
    assert np.array_equal(view(image), view(image)) and view(image).shape == (16, 16, 3)
    assert not np.array_equal(view(image), RandomView(16, 0, 2)(image))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert view(Image.new("I;16", (9, 7))).shape == (16, 16, 3) and view(Image.new("1", (1, 1))).shape == (16, 16, 3)
    encoder.transform = BandPixels(8, 8, bands=(0, 1))
    with pytest.raises(ConfigError, match=r"r\.task: bag of words reads other bands than RGB"):
        Suite({"r": task}).run(encoder)
