"""The only reader of environment variables. One entry per variable, with its meaning."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def _flag(name: str, default: bool) -> bool:
    value = os.environ.get(name)
    return default if value is None else value.strip().lower() not in ("", "0", "false", "no", "off")


def audit_every_step() -> bool:
    """RIMURU_AUDIT=1: every structure checks its invariants after each step (slow; for tests and bug hunts)."""
    return _flag("RIMURU_AUDIT", False)


def check_launches() -> bool:
    """RIMURU_CHECK=0: skip the argument checks before kernel launches."""
    return _flag("RIMURU_CHECK", True)


def dependent_launches() -> bool:
    """RIMURU_DEPENDENT_LAUNCH=0: every kernel starts after the one before has ended (to compare; see ops/cuda)."""
    return _flag("RIMURU_DEPENDENT_LAUNCH", True)


def poison_free_pages() -> bool:
    """RIMURU_POISON=1: fill pages with NaN patterns when they are released, so that stale reads show."""
    return _flag("RIMURU_POISON", False)


def cuda_source_dir() -> Path | None:
    """RIMURU_CUDA_SRC: folder of the CUDA sources, instead of the packaged ones."""
    value = os.environ.get("RIMURU_CUDA_SRC")
    return Path(value) if value else None


def cpu_kernels() -> str:
    """RIMURU_CPU_KERNELS: auto, or generic to turn the processor's integer dot instructions off."""
    return os.environ.get("RIMURU_CPU_KERNELS", "auto")


def jit_disabled() -> bool:
    """NUMBA_DISABLE_JIT=1: Numba functions run as plain Python (tests of the control plane)."""
    return _flag("NUMBA_DISABLE_JIT", False)


def user_cache_folders() -> tuple[Path, ...]:
    """The user's cache folder of this package (it may not exist yet); none where there is no home folder."""
    try:
        return (Path.home() / ".cache" / "rimuru",)
    except RuntimeError:  # no HOME, and a user without an account, as in some containers
        return ()


def models_folders() -> tuple[Path, ...]:
    """RIMURU_MODELS: folders in which models are looked for by name, with `:` between them; ~/models if not set."""
    value = os.environ.get("RIMURU_MODELS")
    if value is not None:
        return tuple(Path(part).expanduser() for part in value.split(os.pathsep) if part)
    try:
        return (Path.home() / "models",)
    except RuntimeError:  # as above
        return ()


def is_writable(folder: Path) -> bool:
    """Whether a file can be written there; the folder is made if need be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def ensure_code_cache() -> None:
    """Set NUMBA_CACHE_DIR to a temporary folder where neither the package's nor the user's folder can be written.

    Numba refuses to define a cached function without a place for it. Runs before Numba is imported.
    """
    asked = os.environ.get("NUMBA_CACHE_DIR")
    usual = (Path(asked),) if asked else ()
    if any(is_writable(folder) for folder in (*usual, Path(__file__).parent / "__pycache__", *user_cache_folders())):
        return
    folder = Path(tempfile.gettempdir()) / f"rimuru-cache-{os.getuid() if hasattr(os, 'getuid') else ''}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.stat()
        is_ours = status.st_uid == getattr(os, "getuid", lambda: status.st_uid)() and not status.st_mode & 0o022
    except OSError:
        is_ours = False
    os.environ["NUMBA_CACHE_DIR"] = str(folder) if is_ours else tempfile.mkdtemp(prefix="rimuru-cache-")
