"""What the card and its link reach now: for forecasts before anything is loaded."""

from __future__ import annotations

from rimuru.base.units import MIB
from rimuru.ops.cuda.device import DeviceInfo, PinnedMemory, free_bytes

SAMPLE_BYTES = 256 * MIB
"""More than caches hold."""
N_COPIES = 4
_HOST_TO_DEVICE, _DEVICE_TO_DEVICE = 1, 3


def measured(device_id: int = 0) -> tuple[str, float, float]:
    """(name of the card, bytes per second of its memory, bytes per second from pinned host memory), by the fastest of a
    few copies. A copy inside the card reads and writes: both count. Takes about a tenth of a second."""
    import cupy

    runtime = cupy.cuda.runtime
    n_bytes = min(SAMPLE_BYTES, free_bytes() // 8)
    with cupy.cuda.Device(device_id), cupy.cuda.Stream(non_blocking=True) as stream:
        source, target = cupy.zeros(n_bytes, cupy.uint8), cupy.empty(n_bytes, cupy.uint8)
        host = PinnedMemory(n_bytes, DeviceInfo.of(device_id).host_pointers)
        host.array[:] = 0

        def rate(address: int, kind: int) -> float:
            best_ms = float("inf")
            for _ in range(N_COPIES):
                start, stop = cupy.cuda.Event(), cupy.cuda.Event()
                start.record(stream)
                runtime.memcpyAsync(target.data.ptr, address, n_bytes, kind, stream.ptr)
                stop.record(stream)
                stop.synchronize()
                best_ms = min(best_ms, cupy.cuda.get_elapsed_time(start, stop))
            return n_bytes / (best_ms * 1e-3)

        try:
            memory = 2.0 * rate(source.data.ptr, _DEVICE_TO_DEVICE)
            link = rate(host.address, _HOST_TO_DEVICE)
        finally:
            stream.synchronize()
            host.close()
    return DeviceInfo.of(device_id).name, memory, link
