"""How a `sparo` process begins and ends: renamed options, its exit code, and the message of an error."""

from __future__ import annotations

import os
import shutil
import sys
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import parent_process
from multiprocessing.util import get_temp_dir
from typing import Any, NoReturn

from sparo_train.core.errors import ConfigError, SparoError, StoppedError
from sparo_train.core.files import disk_error
from sparo_train.core.world import launched_world

from ..views.terminal import console, last_flush, logs_on_terminal

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
            console.print(
                f"{name}: renamed to {new_names[name]}; the next release refuses the old name", soft_wrap=True
            )
            word = f"{new_names[name]}{equals}{value}"
        renamed.append(word)
    return renamed


def share_cores() -> None:
    """Let threads that wait for each other sleep instead of spinning; call before torch is imported.

    With another program on one of two cores, training of a small model is 1.6 times as fast; alone it is as fast as by default
    (benchmarks/threads.py). The results are the same bits.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "3000")


def call(app: Callable[[list[str]], Any], arguments: Sequence[str]) -> tuple[int, Exception | None]:
    """Run `sparo ARGUMENTS` in this process; return its exit code and its error. Errors that a user can fix are printed."""
    try:
        with logs_on_terminal():
            app(with_new_options(arguments))
    except StoppedError as stopped:
        if not stopped.repeated:
            console.print(str(stopped))
        return stopped.exit_code, stopped
    except SparoError as error:
        if not error.repeated:
            console.print_line(("error:", "red"), f" {error}")
        return error.exit_code, error
    except SystemExit as end:
        # typer's own: it has printed the usage error.
        return (end.code if isinstance(end.code, int) else int(end.code is not None)), None
    except Exception as error:
        # An error of the file system for a path, not a bug.
        full = disk_error(error)
        place = error.filename if isinstance(error, OSError) else None
        if place is not None or full is not None:
            message = error.strerror if isinstance(error, OSError) else os.strerror(full or 0)
            remedy = ". Free space or give another place, then run the same command again." if full else ""
            config_error = ConfigError(f"{place or 'a file could not be written'}: {message}{remedy}")
            console.print_line(("error:", "red"), f" {config_error}")
            return config_error.exit_code, config_error
        if launched_world():
            traceback.print_exc()
        return 1, error
    return 0, None


def leave(code: int) -> NoReturn:
    """End the process."""
    last_flush()
    if launched_world():
        # gloo's threads may outlive the interpreter and abort it, so nothing that runs at an exit does. multiprocessing's folder
        # is removed here; a child process of multiprocessing shares the folder with its parent, which removes it.
        if parent_process() is None:
            shutil.rmtree(get_temp_dir(), ignore_errors=True)
        os._exit(code & 255)
    sys.exit(code)
