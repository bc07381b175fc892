"""Log handlers. Modules log with `logging.getLogger(__name__)`, and programs choose handlers and levels."""

from __future__ import annotations

import logging
import logging.handlers
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from .files import escape_control_chars

PACKAGES = ("sparo", "sparo_train", "sparo_data", "object_centric", "evals", "launch")
# `logger.error(text, extra=FILE_ONLY)` is for messages that the terminal shows in another way.
FILE_ONLY = {"file_only": True}


@cache
def warn_once(logger: logging.Logger, text: str) -> None:
    """Log a warning, once per process: about a set that several tasks, or every evaluation of a training, open again."""
    logger.warning(text)


@contextmanager
def logging_to(handler: logging.Handler) -> Iterator[None]:
    """Also send log records of sparo's packages, from level INFO on, to a handler."""
    loggers = [logger for logger in map(logging.getLogger, PACKAGES) if handler not in logger.handlers]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.removeHandler(handler)
            logger.setLevel(level)


@contextmanager
def no_root_handler() -> Iterator[None]:
    """Keep functions of `logging`, which open_clip calls, from adding a handler that would print each of our records twice."""
    handler = logging.NullHandler()
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)


class RunLog(logging.handlers.MemoryHandler):
    """RUN/log.txt. Records stay in memory until `open`, because the run must own its folder before it writes there."""

    def __init__(self) -> None:
        super().__init__(capacity=1, flushOnClose=False)

    def open(self, path: Path) -> None:
        """Write the records collected so far, and from now on every record at once."""
        self.setTarget(_LineFile(path))
        self.flush()

    def close(self) -> None:
        target = self.target
        super().close()
        if target is not None:
            target.close()


class _LineFile(logging.FileHandler):
    def __init__(self, path: Path):
        super().__init__(path, "a", "utf-8", delay=True, errors="replace")

    def format(self, record: logging.LogRecord) -> str:
        time = logging.Formatter().formatTime(record, "%Y-%m-%dT%H:%M:%S")
        return f"{time}  {escape_control_chars(record.getMessage())}"

    def handleError(self, record: Any) -> None:  # noqa: N802  logging's name
        """Ignore a full disk or a missing folder: losing the log must not end a run."""
