"""Terminal output: results to stdout, everything else to stderr.

Text is never parsed as markup, control characters are escaped, and a terminal that is gone, full or ASCII-only does not
end a run.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any

from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.segment import Segments
from rich.text import Text

from sparo_train.core.errors import SparoError
from sparo_train.core.files import escape_control_chars
from sparo_train.core.logs import logging_to
from sparo_train.core.world import launched_world


class _SafeStream:
    """A stream whose write errors are ignored as far as possible."""

    def __init__(self, stream: IO[str], quiet: bool):
        self._stream, self._quiet = stream, quiet

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except UnicodeEncodeError:
            encoding = getattr(self._stream, "encoding", None) or "ascii"
            # Replace characters that an old terminal cannot show, instead of ending a run.
            return self._stream.write(text.encode(encoding, "replace").decode(encoding))
        except BrokenPipeError:
            if not self._quiet:
                raise  # rich ends the command, as expected with `| head`
        except (OSError, ValueError) as error:  # closed, or on a full disk
            if not self._quiet:
                raise SparoError(f"stdout: cannot be written ({error})") from None
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except (OSError, ValueError):
            if not self._quiet:
                raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class Terminal(Console):
    """rich's console for foreign text: strings are literal everywhere, even in tables.

    Args:
        stderr: for messages, whose loss is ignored; the loss of stdout is reported.
    """

    def __init__(self, stderr: bool = False):
        super().__init__(stderr=stderr, markup=False, emoji=False, highlight=False)

    @property
    def file(self) -> IO[str]:
        # Look it up each time, because tests and notebooks replace the stream.
        stream = self._file or (sys.stderr if self.stderr else sys.stdout)
        if stream is None:  # the process was started without one
            stream = open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115
        return _SafeStream(getattr(stream, "rich_proxied_file", stream), self.stderr)  # type: ignore[return-value]

    @file.setter
    def file(self, new_file: IO[str]) -> None:
        self._file = new_file

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(escape_control_chars(text), **options)

    def print_wide(self, table: RenderableType) -> None:
        """Print a table in its natural width if the terminal is narrower: wrapped lines keep all digits, narrow columns lose some."""
        needed = Measurement.get(self, self.options.update(width=1 << 16), table).maximum
        # Rendered first, because `print` reduces any width to that of the terminal.
        segments = self.render(table, self.options.update(width=max(self.width, needed)))
        self.print(Segments(segments), soft_wrap=True, end="")

    def print_line(self, *parts: str | tuple[str, str]) -> None:
        """Print a line that does not wrap, of texts and (text, style)."""
        fragments = [
            escape_control_chars(part) if isinstance(part, str) else (escape_control_chars(part[0]), part[1])
            for part in parts
        ]
        self.print(Text.assemble(*fragments), soft_wrap=True)


def last_flush() -> None:
    """Flush the buffers if possible; the interpreter itself would exit with code 120 if it cannot."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # pyright: ignore[reportOptionalMemberAccess]


console = Terminal(stderr=True)
out = Terminal()


class _TerminalHandler(logging.Handler):
    """Handler that prints records on stderr, above a progress bar. rich's own handler wraps lines, so that paths could not be copied."""

    title = ""  # of the run to which these records belong

    def emit(self, record: logging.LogRecord) -> None:
        world = launched_world()
        if (world is None or world.rank == 0) and not getattr(record, "file_only", False):
            console.print(f"{self.title}  {record.getMessage()}" if self.title else record.getMessage(), soft_wrap=True)


_HANDLER = _TerminalHandler()


@contextmanager
def logs_on_terminal(title: str = "") -> Iterator[None]:
    """Print log records of sparo's packages on rank 0, each line after the title of a run."""
    before, _HANDLER.title = _HANDLER.title, title or _HANDLER.title
    try:
        with logging_to(_HANDLER):
            yield
    finally:
        _HANDLER.title = before
