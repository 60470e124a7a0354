"""The package's logger. Everything goes to stderr, one line a message."""

from __future__ import annotations

import logging
import sys

from rimuru.base.errors import BadInputError

LEVELS = ("debug", "info", "warning", "error")


def setup_logging(level: str) -> None:
    """Send the package's messages of `level` and above to stderr. Raises BadInputError for an unknown level."""
    if level.lower() not in LEVELS:
        raise BadInputError(f"unknown log level {level!r}; choose one of {', '.join(LEVELS)}")
    logger = logging.getLogger("rimuru")
    logger.setLevel(level.upper())
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S"))
        logger.addHandler(handler)
        logger.propagate = False
