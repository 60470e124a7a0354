"""Dependent launches: a kernel may start while the one before it in its stream ends (compute capability 9.0 and later).

Kernels take part by calling follow_predecessor() (cuda_src/common/follow.cuh). One that does not is launched as usual,
after all that precedes it has ended. In a captured graph such launches become edges of the same meaning.
"""

from __future__ import annotations

import ctypes
import re
import struct
import sys
from collections.abc import Callable
from typing import Any

from rimuru.base import env

MIN_CAPABILITY = 90
MIN_DRIVER = 12030
"""CUDA 12.3: the first driver that keeps dependent launches when they are captured."""

_STREAM_SERIALIZATION = 6
"""CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION."""

_SHAPE = struct.Struct("=7I4xQ")
"""The first fields of CUlaunchConfig: grid, block, bytes of dynamic shared memory, stream."""

CONFIG_BYTES = 56
_ATTRIBUTE_BYTES = 72


def waits_for_predecessor(text: str, name: str) -> bool:
    """Whether the kernel `name` of a CUDA source calls follow_predecessor()."""
    for part in re.split(r'extern\s+"C"', text)[1:]:
        head, _, body = part.partition("{")
        if re.search(rf"\b{name}\s*\(", head):
            return re.search(r"^\s*follow_predecessor\(\);", body, flags=re.M) is not None
    return False


class DependentLaunch:
    """Launches one kernel at a time, with the arguments of cupy.cuda.driver.launchKernel."""

    def __init__(self, launch_ex: Callable[..., int], check: Callable[[int], Any]) -> None:
        self._launch_ex, self._check = launch_ex, check
        self._attribute = ctypes.create_string_buffer(struct.pack("=I4xi", _STREAM_SERIALIZATION, 1), _ATTRIBUTE_BYTES)
        attributes = struct.pack("=QI4x", ctypes.addressof(self._attribute), 1)
        self._config = ctypes.create_string_buffer(bytes(_SHAPE.size) + attributes, CONFIG_BYTES)
        self._config_at = ctypes.addressof(self._config)

    def __call__(
        self, function: int, x: int, y: int, z: int, bx: int, by: int, bz: int, shared_bytes: int, stream: int,
        arguments: int, extra: int,
    ) -> None:  # fmt: skip
        _SHAPE.pack_into(self._config, 0, x, y, z, bx, by, bz, shared_bytes, stream)
        status = self._launch_ex(self._config_at, function, arguments, extra)
        if status:
            self._check(status)


def launcher() -> DependentLaunch | None:
    """For one kernel of the current device; None where it has no dependent launches or RIMURU_DEPENDENT_LAUNCH=0."""
    if not env.dependent_launches():
        return None
    import cupy

    if int(cupy.cuda.Device().compute_capability) < MIN_CAPABILITY or cupy.cuda.runtime.driverGetVersion() < MIN_DRIVER:
        return None
    try:
        library = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        launch_ex = library.cuLaunchKernelEx
    except (OSError, AttributeError):  # a driver older than the function
        return None
    launch_ex.argtypes = [ctypes.c_void_p] * 4
    launch_ex.restype = ctypes.c_int
    return DependentLaunch(launch_ex, cupy.cuda.driver.check_status)
