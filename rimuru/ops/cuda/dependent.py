"""Dependent launches: a kernel may start while the one before it ends (compute capability 9.0 and later).

Kernels take part by calling follow_predecessor() (cuda_src/common/follow.cuh). One that does not is launched as usual,
after all that precedes it has ended. Only in a graph, and only behind one kernel: there it is an edge of the graph.
What such a launch means behind a copy, behind a whole graph or where streams meet is not said anywhere.
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
"""CUDA 12.3: the first driver that keeps dependent launches when they are captured, and tells of a capture's nodes."""

_STREAM_SERIALIZATION = 6
"""CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION."""

_SHAPE = struct.Struct("=7I4xQ")
"""The first fields of CUlaunchConfig: grid, block, bytes of dynamic shared memory, stream."""

_CAPTURING = 1
"""CU_STREAM_CAPTURE_STATUS_ACTIVE."""

_KERNEL_NODE = 0
"""CU_GRAPH_NODE_TYPE_KERNEL."""

CONFIG_BYTES = 56
_ATTRIBUTE_BYTES = 72


def waits_for_predecessor(text: str, name: str) -> bool:
    """Whether the kernel `name` of a CUDA source calls follow_predecessor()."""
    for part in re.split(r'extern\s+"C"', text)[1:]:
        head, _, body = part.partition("{")
        if re.search(rf"\b{name}\s*\(", head):
            return re.search(r"^[^/\n]*\bfollow_predecessor\(\);", body, flags=re.M) is not None  # not in a comment
    return False


class Predecessor:
    """Whether what is launched next on a stream goes into a graph, behind one kernel and nothing else.

    capture_info: cuStreamGetCaptureInfo_v3; node_type: cuGraphNodeGetType; is_capturing: of a stream.
    """

    def __init__(
        self, is_capturing: Callable[[int], bool], capture_info: Callable[..., int], node_type: Callable[..., int]
    ) -> None:
        self._is_capturing, self._capture_info, self._node_type = is_capturing, capture_info, node_type
        self._status, self._kind = ctypes.c_int(), ctypes.c_int()
        self._nodes, self._edges, self._n_nodes = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_size_t()
        self._outputs = (
            ctypes.byref(self._status), None, None, ctypes.byref(self._nodes), ctypes.byref(self._edges),
            ctypes.byref(self._n_nodes),
        )  # fmt: skip

    def __call__(self, stream: int) -> bool:
        if not stream or not self._is_capturing(stream):
            return False
        if self._capture_info(stream, *self._outputs) or self._status.value != _CAPTURING or self._n_nodes.value != 1:
            return False
        node = ctypes.c_void_p.from_address(self._nodes.value or 0).value
        return self._node_type(node, ctypes.byref(self._kind)) == 0 and self._kind.value == _KERNEL_NODE


class DependentLaunch:
    """Launches one kernel, with the arguments of cupy.cuda.driver.launchKernel: `plain`, where the stream's state does
    not allow more (`predecessor`)."""

    def __init__(
        self,
        launch_ex: Callable[..., int],
        check: Callable[[int], Any],
        plain: Callable[..., Any],
        predecessor: Callable[[int], bool],
    ) -> None:
        self._launch_ex, self._check, self._plain, self._predecessor = launch_ex, check, plain, predecessor
        self._attribute = ctypes.create_string_buffer(struct.pack("=I4xi", _STREAM_SERIALIZATION, 1), _ATTRIBUTE_BYTES)
        attributes = struct.pack("=QI4x", ctypes.addressof(self._attribute), 1)
        self._config = ctypes.create_string_buffer(bytes(_SHAPE.size) + attributes, CONFIG_BYTES)
        self._config_at = ctypes.addressof(self._config)

    def __call__(
        self, function: int, x: int, y: int, z: int, bx: int, by: int, bz: int, shared_bytes: int, stream: int,
        arguments: int, extra: int,
    ) -> None:  # fmt: skip
        if not self._predecessor(stream):
            self._plain(function, x, y, z, bx, by, bz, shared_bytes, stream, arguments, extra)
            return
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
        launch_ex, capture_info = library.cuLaunchKernelEx, library.cuStreamGetCaptureInfo_v3
        node_type = library.cuGraphNodeGetType
    except (OSError, AttributeError):  # a driver older than the functions
        return None
    launch_ex.argtypes = [ctypes.c_void_p] * 4
    capture_info.argtypes = [ctypes.c_void_p] * 7
    node_type.argtypes = [ctypes.c_void_p] * 2
    for function in (launch_ex, capture_info, node_type):
        function.restype = ctypes.c_int
    predecessor = Predecessor(cupy.cuda.runtime.streamIsCapturing, capture_info, node_type)
    return DependentLaunch(launch_ex, cupy.cuda.driver.check_status, cupy.cuda.driver.launchKernel, predecessor)
