"""Where words go: what was asked for to stdout, everything else to stderr."""

from __future__ import annotations

from rich.console import Console

console = Console(stderr=True)
out = Console()
