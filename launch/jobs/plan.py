"""Plan of a launch that is not submitted: ranks, GPUs, hours and cost."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .clusters import ClusterConfig, minutes

_SHOWN = 8  # runs that are listed by name


@dataclass(frozen=True)
class LaunchPlan:
    """A launch that was not submitted: names of its jobs, their name in the queue, and the folder of their logs and code."""

    runs: tuple[str, ...]
    cluster: ClusterConfig
    name: str
    home: Path


def plan_lines(plan: LaunchPlan, parallel: int | None) -> list[str]:
    """Return a launch in words: runs, ranks, GPUs, the most hours that one start of each may take, and their cost."""
    cluster, count = plan.cluster, len(plan.runs)
    more = f" and {count - _SHOWN} more" if count > _SHOWN else ""
    units, unit = (cluster.nodes * cluster.gpus_per_node, "GPU") if cluster.gpus_per_node else (cluster.ranks, "rank")
    at_once = units * min(count, parallel or count)
    hours = minutes(cluster.time) / 60
    lines = [
        f"runs         {count}: {', '.join(plan.runs[:_SHOWN])}{more}",
        f"job name     {cluster.job_name or plan.name}",
        f"ranks        {cluster.ranks} per run: {cluster.nodes} node(s) with {cluster.ranks_per_node} each",
        f"hours        at most {hours:g} per start, {hours * units * count:g} {unit} hours for one start of each run",
    ]
    if cluster.gpus_per_node:
        lines.insert(3, f"GPUs         {units} per run, at most {at_once} at once")
    if cluster.gpu_hour_cost is not None:
        lines.append(
            f"cost         at most {hours * units * count * cluster.gpu_hour_cost:.2f} for one start of each run"
        )
    warning = cluster.margin_warning()
    return [*lines, f"warning      {warning}"] if warning else lines
