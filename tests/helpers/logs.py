"""The messages that sparo's packages log, as a list of texts."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from sparo_train.core.logs import logging_to


class _Texts(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@contextmanager
def logged() -> Iterator[list[str]]:
    """Collect the messages that are logged inside, from level INFO on."""
    handler = _Texts()
    with logging_to(handler):
        yield handler.texts
