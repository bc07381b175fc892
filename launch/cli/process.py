"""How a `sparo` process ends: its exit code, and the last words of an error."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from rich.markup import escape

from sparo_train.core.errors import SparoError, StoppedError
from sparo_train.core.world import started

from ..views.terminal import console


def call(app: Callable[[list[str]], Any], arguments: Sequence[str]) -> tuple[int, Exception | None]:
    """`sparo ARGUMENTS` in this process: its exit code, and the error that it ended with; what a user can solve is printed."""
    try:
        app(list(arguments))
    except StoppedError as stopped:
        if not stopped.repeated:
            console.print(str(stopped), highlight=False)
        return stopped.exit_code, stopped
    except SparoError as error:
        if not error.repeated:
            console.print(f"[red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        return error.exit_code, error
    except SystemExit as end:
        return (end.code if isinstance(end.code, int) else int(end.code is not None)), None
    except Exception as error:
        if started():
            traceback.print_exc()
        return 1, error
    return 0, None


def leave(code: int) -> NoReturn:
    """End the process."""
    if started():  # gloo's threads may outlive the interpreter and abort it; nothing is left to be done
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code & 255)
    sys.exit(code)
