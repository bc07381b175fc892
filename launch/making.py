"""The work behind `sparo data scenes|emoji|fashion-mnist|convert`, with progress."""

from __future__ import annotations

from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from sparo_train.data.emoji import install
from sparo_train.data.emoji_sets import make_emoji
from sparo_train.data.scene_sets import ScenesConfig, render_scenes

from .view import console


def bar() -> Progress:
    """A progress bar for countable work."""
    return Progress(
        TextColumn("[bold]{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )


def make_scenes(folder: Path, train: int, size: int, seed: int, processes: int = 2, **sizes: int) -> None:
    """Render scenes into `folder` (what is there already stays)."""
    config = ScenesConfig.model_validate({"train": train, "size": size, "seed": seed, **sizes})
    with bar() as progress:
        task = progress.add_task("rendering scenes", total=None)
        render_scenes(folder, config, processes, lambda done, total: progress.update(task, completed=done, total=total))


def make_emoji_set(folder: Path, size: int, seed: int, processes: int) -> dict[str, int]:
    """Fetch and rasterise the emoji; returns samples per part."""
    with bar() as progress:
        task = progress.add_task("npm install", total=None)
        modules = install(folder / "npm")
        progress.update(task, description="rasterising emoji")
        return make_emoji(
            folder,
            modules,
            size,
            seed,
            processes,
            lambda done, total: progress.update(task, completed=done, total=total),
        )
