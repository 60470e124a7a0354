"""The package's logger. Everything goes to stderr, one line a message."""

from __future__ import annotations

import logging
import sys
from typing import TextIO

from rimuru.base.errors import BadInputError

LEVELS = ("debug", "info", "warning", "error")


class StderrHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to what sys.stderr is at the time of the message, not to what it was when logging was set up."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)

    def emit(self, record: logging.LogRecord) -> None:
        stream: TextIO = sys.stderr
        self.stream = stream
        super().emit(record)


def setup_logging(level: str) -> None:
    """Send the package's messages of `level` and above to stderr. Raises BadInputError for an unknown level."""
    if level.lower() not in LEVELS:
        raise BadInputError(f"unknown log level {level!r}; choose one of {', '.join(LEVELS)}")
    logger = logging.getLogger("rimuru")
    logger.setLevel(level.upper())
    if not logger.handlers:
        handler = StderrHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S"))
        logger.addHandler(handler)
        logger.propagate = False
