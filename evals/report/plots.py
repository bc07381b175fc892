"""Plots of results: relative change per task (Figure 1 of the SPARO paper) and accuracy over the number of selected units."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from sparo_train.core.errors import DataError
from sparo_train.core.files import whole_file

from ..tasks.result import LOWER_IS_BETTER
from .results_file import Record


def save_figure(figure: Figure, path: Path, dpi: int) -> None:
    """Write a figure atomically, and close it."""
    try:
        with whole_file(path) as temporary:
            figure.savefig(temporary, dpi=dpi)
    finally:
        plt.close(figure)


@contextmanager
def literal() -> Iterator[None]:
    """Disable math text, because names come from users and may contain dollar signs."""
    with plt.rc_context({"text.parse_math": False}):
        yield


@literal()
def relative_change(first: Mapping[str, Record], second: Mapping[str, Record], path: Path) -> dict[str, float]:
    """Draw (second - first) / first of every shared task's headline, the largest gain on top; return the fractions.

    If less is better, the sign is reversed, so that a bar to the right is a gain. PSNR is skipped, because a logarithm
    has no relative change, and so are tasks whose headlines differ.

    Raises:
        DataError: no shared task.
    """
    headlines = {task: record.result.headline for task, record in first.items()}
    shared = [
        task
        for task, headline in headlines.items()
        if task in second and second[task].result.headline == headline and not headline.startswith("psnr")
    ]
    shared = [task for task in shared if first[task].result.value > 0]
    if not shared:
        raise DataError(
            "relative changes cannot be drawn, because the first checkpoint has no positive score on any task that both checkpoints share"
        )
    change = {task: second[task].result.value / first[task].result.value - 1 for task in shared}
    change = {t: -v if headlines[t] in LOWER_IS_BETTER else v for t, v in change.items()}
    order = sorted(shared, key=lambda task: change[task])
    names = [next(iter(side.values())).checkpoint for side in (first, second)]
    figure, axis = plt.subplots(figsize=(6.4, 0.9 + 0.3 * len(order)), layout="constrained")
    colours = ["#b2182b" if change[task] < 0 else "#2166ac" for task in order]
    bars = axis.barh(order, [100 * change[task] for task in order], color=colours)
    axis.bar_label(bars, fmt="%+.1f %%", padding=3, fontsize=8)
    axis.axvline(0, color="black", linewidth=0.8)
    axis.margins(x=0.18)
    axis.set_xlabel(f"relative change of the headline, per cent\n{names[1]} against {names[0]}", fontsize=8)
    axis.tick_params(labelsize=8)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    save_figure(figure, path, 130)
    return change


@literal()
def draw_curves(reports: Mapping[str, Mapping[str, Any]], k: int, title: str, path: Path) -> None:
    """Draw one panel per task: the order's curve, the middle 95 % of random orders, all units as a line, and the selection as a point."""
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
