"""The C library's heap: it keeps what was freed, hundreds of megabytes after a large text, until told otherwise."""

from __future__ import annotations

import ctypes
import sys

_TRIM = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
"""Of glibc; other C libraries have none."""


def give_back_freed() -> None:
    """Give freed memory back to the system: milliseconds, in which other Python threads run."""
    if _TRIM is not None:
        _TRIM(ctypes.c_size_t(0))
