"""The CPU backend: all verbs on host memory, compiled with Numba.

Matrices: matmul.py, moe.py, embed.py over dot*.py; how work is spread over cores: simd_launch.py; float sums: lanes.py.
"""

from __future__ import annotations

from rimuru.ops.cpu.code_cache import code_cache

with code_cache():
    from rimuru.ops.cpu.backend import CpuOps

__all__ = ["CpuOps"]
