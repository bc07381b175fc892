"""Relative change of one checkpoint against another, task by task, as Fig. 2 of the SPARO paper draws it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from sparo_train.core.errors import DataError
from sparo_train.core.files import whole_file

from ..tasks.result import LOWER_IS_BETTER
from .results_file import Record


def save_figure(figure: Figure, path: Path, dpi: int) -> None:
    """Write a figure as a whole file, and close it."""
    try:
        with whole_file(path) as temporary:
            figure.savefig(temporary, dpi=dpi)
    finally:
        plt.close(figure)


@contextmanager
def literal() -> Iterator[None]:
    """Names are of others: what stands between two dollars in one is no formula."""
    with plt.rc_context({"text.parse_math": False}):
        yield


@literal()
def relative_change(first: Mapping[str, Record], second: Mapping[str, Record], path: Path) -> dict[str, float]:
    """Draw (second - first) / first of every shared task's headline, the largest gain on top; returns the fractions.

    Where less is better the sign is turned, so that a bar to the right is a gain. PSNR is left out: of a logarithm there is no share. So
    are tasks that the two show by other metrics.

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
        raise DataError("the two checkpoints share no task whose score is above zero and a share of something")
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
