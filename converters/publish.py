"""A folder that appears whole or not at all: written under a hidden name beside its target, then renamed once.

.model.rimuru.partial/   being written; locked by its writer; leftovers of a killed one are cleared by the next
model.rimuru/            complete, always
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rimuru.base.errors import BadInputError

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


@contextmanager
def staging_folder(target: Path) -> Iterator[Path]:
    """An empty folder beside `target`, for this process alone; gone afterwards unless it was published.

    Raises BadInputError when it cannot be made or another conversion to the same target is running.
    """
    staging = target.parent / f".{target.name}.partial"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        staging.mkdir(exist_ok=True)
        lock = os.open(staging, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise BadInputError(f"{target}: cannot be written: {error.strerror}; choose another place with -o") from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The folder may have been published or removed between the two calls: then the lock is on another one.
            mine = staging.is_dir() and os.path.samestat(os.fstat(lock), staging.stat())
        except BlockingIOError:
            mine = False
        if not mine:
            raise BadInputError(f"{target}: another conversion to this folder is running; wait for it to end")
        for leftover in staging.iterdir():
            if leftover.is_dir():
                shutil.rmtree(leftover)
            else:
                leftover.unlink()
        try:
            yield staging
        finally:
            if staging.is_dir() and os.path.samestat(os.fstat(lock), staging.stat()):
                shutil.rmtree(staging, ignore_errors=True)
    finally:
        os.close(lock)


def publish(staging: Path, target: Path) -> None:
    """Make `staging`, whose files are complete, appear as `target` by one rename; an old target disappears with it."""
    for file in staging.iterdir():
        fsync(file)
    fsync(staging)
    if not target.exists():
        os.rename(staging, target)
    elif _exchange(staging, target):
        shutil.rmtree(staging)  # which is the old folder now
    else:
        # Without an exchange the old folder goes first: a reader may find none for a moment, but never half of one.
        old = target.parent / f".{target.name}.old"
        shutil.rmtree(old, ignore_errors=True)
        os.rename(target, old)
        os.rename(staging, target)
        shutil.rmtree(old)
    fsync(target.parent)


def fsync(path: Path) -> None:
    """Bring a file or folder to the disk. File systems that cannot do that for folders are left alone."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError:
        if not path.is_dir():
            raise
    finally:
        os.close(fd)


def _exchange(a: Path, b: Path) -> bool:
    """Swap two paths in one step (Linux); False where the system or the file system cannot."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return False
    if renameat2(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(b))
