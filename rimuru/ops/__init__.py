"""Backends: one set of verbs (`ops.base.Ops`) for NumPy, Numba and CUDA."""

from __future__ import annotations

from rimuru.base.errors import BadInputError
from rimuru.ops.base import Ops


def create(name: str) -> Ops:
    """The backend "cpu", "cuda" or "reference". Only the chosen one is imported.

    Raises BadInputError for another name; creating "cuda" raises whatever says why the device cannot be used.
    """
    if name == "cpu":
        from rimuru.ops.cpu import CpuOps

        return CpuOps()
    if name == "cuda":
        from rimuru.ops.cuda import CudaOps

        return CudaOps()
    if name == "reference":
        from rimuru.ops.reference import ReferenceOps

        return ReferenceOps()
    raise BadInputError(f"there is no backend {name!r}; choose cpu, cuda or reference")
