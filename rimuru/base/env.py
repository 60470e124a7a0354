"""The only reader of environment variables. One entry per variable, with its meaning."""

from __future__ import annotations

import os
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
