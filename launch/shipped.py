"""Where `configs/` is: in a checkout, or the copy inside an installed wheel."""

from __future__ import annotations

from pathlib import Path


def configs() -> list[Path]:
    """Folders that may be it, the checkout's first."""
    here = Path(__file__).resolve().parent
    return [here.parent / "configs", here / "configs"]
