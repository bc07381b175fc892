"""Time of `sparo --help`, compared with a Python process that imports only what a command line like ours needs.

python benchmarks/startup.py [--quick] [--json FILE]

The aim is a ratio of 0.2: at most five times as long.
"""

from __future__ import annotations

import subprocess
import sys

from common import interleave, parser, report, row, seconds

BASE = ("-c", "import pydantic, yaml, typer, rich")
VERBS = {"sparo --help": [], "sparo train --help": ["train"], "sparo launch --help": ["launch"]}


def run(*words: str) -> float:
    return seconds(lambda: subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL))


def main() -> None:
    options = parser(__doc__).parse_args()
    rounds = 7 if options.quick else 21
    rows = [
        row(
            name,
            interleave(lambda w=words: run("-m", "launch.cli", *w, "--help"), lambda: run(*BASE), rounds),
            0.2,
            "s",
            False,
        )
        for name, words in VERBS.items()
    ]
    report("start, against importing pydantic, yaml, typer and rich", rows, options.json)


if __name__ == "__main__":
    main()
