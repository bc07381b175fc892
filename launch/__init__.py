"""The `sparo` command: its subcommands, the jobs that it submits and the pages that it serves."""

from __future__ import annotations

from pathlib import Path


def config_folders() -> list[Path]:
    """Return the folders that may hold `configs/`: in a checkout first, then the copy inside an installed wheel."""
    here = Path(__file__).resolve().parent
    return [here.parent / "configs", here / "configs"]
