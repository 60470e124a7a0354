"""The CUDA backend. Importing this package needs no CuPy: it is loaded with `CudaOps`, or by `usable()`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rimuru.ops.cuda.backend import CudaOps as CudaOps

__all__ = ["CudaOps"]


def __getattr__(name: str) -> Any:
    if name == "CudaOps":
        from rimuru.ops.cuda.backend import CudaOps

        return CudaOps
    raise AttributeError(name)
