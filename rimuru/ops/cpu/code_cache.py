"""Where Numba keeps the compiled code of this package: a folder named by a digest of the package's sources.

Numba's own key is the file of the outermost function; an edit in a file that it calls would be met by old code.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from numba.core import config as _config

from rimuru.base.env import is_writable, user_cache_folders

_FOLDER = Path(__file__).resolve().parent
_numba: Any = _config  # its names are made at run time


@cache
def _folder() -> str | None:
    """The folder, made if need be; None (Numba's default) where nothing can be written."""
    digest = hashlib.sha256()
    for path in sorted(_FOLDER.glob("*.py")):
        digest.update(path.read_bytes())
    name = f"rimuru-{digest.hexdigest()[:16]}"
    own = [Path(_numba.CACHE_DIR)] if _numba.CACHE_DIR else []
    for parent in (*own, _FOLDER / "__pycache__", *user_cache_folders()):
        if is_writable(parent / name):
            return str(parent / name)
    return None


@contextmanager
def code_cache() -> Iterator[None]:
    """Functions that are decorated inside keep their code in the folder; other users of Numba are left alone."""
    folder, before = _folder(), _numba.CACHE_DIR
    if folder is not None:
        _numba.CACHE_DIR = folder
    try:
        yield
    finally:
        _numba.CACHE_DIR = before
