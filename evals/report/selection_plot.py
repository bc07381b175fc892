"""Curves of selections: accuracy over the number of units, beside random choices and all units."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from .plots import literal, save_figure


@literal()
def draw_curves(reports: Mapping[str, Mapping[str, Any]], k: int, title: str, path: Path) -> None:
    """A panel per task: the order's curve, the middle 95 % of random orders, all units as a line, and the choice as a point."""
    columns = min(3, len(reports))
    rows = -(-len(reports) // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(4.2 * columns, 3.2 * rows + 0.4), layout="constrained", squeeze=False
    )
    for axis in axes.flat[len(reports) :]:
        axis.set_visible(False)
    for axis, (name, report) in zip(axes.flat, reports.items(), strict=False):
        x = range(1, len(report["curve"]) + 1)
        per_cent = {
            key: [100 * v for v in report[key]] for key in ("curve", "random_mean", "random_low", "random_high")
        }
        axis.fill_between(x, per_cent["random_low"], per_cent["random_high"], color="#bbbbbb", alpha=0.6, linewidth=0)
        axis.plot(
            x, per_cent["random_mean"], color="#666666", linestyle="--", label=f"random, {report['draws']} orders"
        )
        axis.plot(x, per_cent["curve"], color="#1b6ca8", label="chosen order")
        axis.axhline(100 * report["whole"][0], color="black", linewidth=0.8, linestyle=":", label="all")
        value, low, high = (100 * v for v in report["chosen"])
        axis.errorbar(
            [k],
            [value],
            yerr=[[value - low], [high - value]],
            color="#b2182b",
            marker="o",
            capsize=3,
            label=f"first {k}",
        )
        axis.set_title(f"{name}, {report['share']}, n = {report['n']}", fontsize=9)
        axis.set_xlabel("units", fontsize=8)
        axis.set_ylabel("accuracy, per cent", fontsize=8)
        axis.tick_params(labelsize=8)
        axis.legend(fontsize=7, loc="lower right")
    figure.suptitle(title, fontsize=9)
    save_figure(figure, path, 130)
