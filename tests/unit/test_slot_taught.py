"""Units selected by learning on other images: a linear layer, compared with a plain ridge regression."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from evals.feature_store.feature_table import Features
from evals.slots.probe_tasks import Linear

U, V, C = 5, 3, 4


def task(seed: int) -> Linear:
    rng = np.random.default_rng(seed)
    centres = rng.standard_normal((C, U * V))
    labels = {n: rng.integers(0, C, n) for n in (90, 60)}
    rows = {n: (centres[labels[n]] + rng.standard_normal((n, U * V))).astype(np.float32) for n in labels}
    features = {n: Features([rows[n][:20], rows[n][20:]], [str(i) for i in range(n)], labels[n].tolist()) for n in rows}
    units: Any = SimpleNamespace(number=U)
    return Linear(units, features[90], torch.tensor(labels[90]), features[60], torch.tensor(labels[60]), "data")


@pytest.mark.parametrize("units", [[0], [4, 1], [0, 1, 2, 3, 4]])
def test_a_linear_layer_is_ridge_regression(units):
    found = task(0)

    def kept(features):
        rows = features.in_memory().double().numpy()
        rows /= np.linalg.norm(rows, axis=1, keepdims=True)
        return rows, rows.reshape(len(rows), U, V)[:, units].reshape(len(rows), -1)

    (whole, bank), (_, test) = kept(found.bank), kept(found.test)
    truth = np.eye(C)[found.bank_labels.numpy()]
    x, y = bank - bank.mean(0), truth - truth.mean(0)
    penalty = 1e-3 * (whole - whole.mean(0)).var(0).mean() * len(bank)
    weight = np.linalg.solve(x.T @ x + penalty * np.eye(x.shape[1]), x.T @ y)
    right = ((test - bank.mean(0)) @ weight + truth.mean(0)).argmax(1) == found.labels.numpy()
    assert np.array_equal(found._right_answers(units).numpy(), right) and right.mean() > 0.4
    order = [3, 0, 4, 1, 2]
    curve = found.curve(order)
    assert torch.equal(curve[:, 0], found.single_unit()[:, 3]) and torch.equal(
        curve[:, 4], found._right_answers([0, 1, 2, 3, 4])
    )


def test_uninformative_units_get_a_score():
    found = task(1)
    for part in found.bank.parts:
        part[:] = part[:1]  # every image is encoded the same
    answers = found.single_unit()
    assert answers.shape == (60, U) and 0 < answers.double().mean() < 1
