"""Backends: one set of verbs (`ops.base.Ops`) for NumPy, Numba and CUDA."""

from __future__ import annotations

import importlib.util

from rimuru.base import env
from rimuru.base.errors import BadInputError
from rimuru.base.extras import install_command
from rimuru.ops.base import Ops


def choose(asked: str) -> tuple[str, int | None, str]:
    """("cuda", free device bytes, "") or ("cpu", None, why not the GPU) for "auto", "cpu" or "cuda".

    "auto" takes the GPU if it is usable and says in one line why not if it is not; "cuda" raises that line.
    """
    if asked == "cpu":
        return "cpu", None, ""
    why_not, free_bytes = _probe_cuda()
    if why_not is None:
        return "cuda", free_bytes, ""
    if asked == "cuda":
        raise BadInputError(f"CUDA cannot be used: {why_not}")
    return "cpu", None, f"running on the CPU: {why_not}"


def _probe_cuda() -> tuple[str | None, int]:
    """(reason why no GPU is usable or None, free bytes of the first GPU)."""
    if importlib.util.find_spec("cupy") is None:
        return f"CuPy is not installed: {install_command('cuda13')} (or cuda12, as the driver supports)", 0
    from rimuru.ops.cuda import device

    why_not = device.usable()
    return why_not, 0 if why_not is not None else device.free_bytes()


def measured_rates() -> tuple[str, float, float]:
    """(name, bytes per second of memory, bytes per second of the link) of the GPU, which must be usable; measured."""
    from rimuru.ops.cuda import rates

    return rates.measured()


def create(name: str, threads: int | None = None, deterministic: bool = False) -> Ops:
    """The backend "cpu", "cuda" or "reference". Only the chosen one is imported. threads: cores of "cpu" (None = all).

    Raises BadInputError for another name; creating "cuda" raises whatever says why the device cannot be used.
    """
    if name == "cpu" and not env.jit_disabled():
        from rimuru.ops.cpu import CpuOps

        return CpuOps(threads)
    if name == "cuda":
        from rimuru.ops.cuda import CudaOps

        return CudaOps(deterministic)
    if name in ("reference", "cpu"):  # without Numba's compiler the CPU computes in NumPy
        from rimuru.ops.reference import ReferenceOps

        return ReferenceOps()
    raise BadInputError(f"there is no backend {name!r}; choose cpu, cuda or reference")
