"""Options that were renamed. For one release the old name works, and a line on stderr names the new one."""

from __future__ import annotations

from collections.abc import Sequence

from ..views.terminal import console

# By the first words of the command; an entry applies to every command that begins with them.
RENAMED: dict[tuple[str, ...], dict[str, str]] = {
    ("train",): {"--dry": "--dry-run"},
    ("export",): {"--to": "--out"},
    ("data",): {"--most": "--max-objects", "--larger": "--size-scale"},
    ("launch",): {"--on": "--cluster"},
    ("eval",): {"--latest": "--write-to-run", "--no-latest": "--no-write-to-run"},
    ("eval", "table"): {"--against": "--baseline"},
    ("eval", "sweep"): {"--against": "--baseline", "--out": "--runs"},
    ("eval", "export"): {"--to": "--out"},
    ("slots",): {
        "--on": "--task",
        "--report": "--report-tasks",
        "--per": "--granularity",
        "--last": "--last-epoch",
        "--by": "--reference",
        "--cosine": "--min-cosine",
        "--share": "--min-share",
    },
    ("slots", "score"): {"--on": "--tasks"},
}


def with_new_options(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of `sparo` with the present names of renamed options; words after `--` stay as they are."""
    new_names: dict[str, str] = {}
    for length in (1, 2):
        new_names |= RENAMED.get(tuple(arguments[:length]), {})
    renamed: list[str] = []
    for number, word in enumerate(arguments):
        if word == "--":
            return renamed + list(arguments[number:])
        name, equals, value = word.partition("=")
        if name in new_names:
            console.print(f"{name}: is {new_names[name]} now; the next release refuses the old name", soft_wrap=True)
            word = f"{new_names[name]}{equals}{value}"
        renamed.append(word)
    return renamed
