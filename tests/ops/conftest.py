"""Compiled kernels have no tests without a compiler: NUMBA_DISABLE_JIT=1 leaves the reference to test."""

from __future__ import annotations

from rimuru.base import env

collect_ignore_glob = ["test_cpu_*.py"] if env.jit_disabled() else []
