"""Times the verbs of a backend on the kernel cases of tests/cases.

    python tools/bench/kernels.py [--device cpu|cuda] [--filter TEXT] [--threads N] [--seconds 0.5] [--json FILE]

Only the verb itself is timed: uploads, staging and downloads of a case are left out.

CPU: the best call counts; microseconds, GB/s, Gflop/s.

CUDA: all kernels that the verb launches, in a graph that goes over several copies of the inputs where these are large,
so that weights are not found in the cache; the median of several runs of the graph. Beside it the shares of the card's
own peaks, which are measured first: of reading memory, or of the link to the host's for what comes over it, and of
products of 16-bit matrices, or of float32 arithmetic for what must not be rounded; a row names a peak that is not the
first of its kind. Only bytes and flops count that no implementation can do without. Small calls reach a small share: a
launch takes 1 to 2 us whatever it does. What runs beside others in an engine is timed after them here.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from cases import timed  # noqa: E402
from cases.common import Case  # noqa: E402

from rimuru.ops import create  # noqa: E402
from rimuru.ops.base import Ops  # noqa: E402

VERBS = {
    "experts ": ("moe_experts",),
    "summed experts ": ("moe_experts", "moe_combine"),
    "latent rows": ("prepare_qkv",),
    "route replayed": ("replay_routing",),
}
"""Verbs of a case by the beginning of its name, where that is not one that its first word names."""

COLD_BYTES = 150e6
"""A call's inputs are not found in the cache where so many others have been read since."""

MOST_COPIES = 12
LARGE_BYTES = 4e6
"""Smaller inputs are what the kernel before has just written, or lie in the cache in a real step too."""


def verbs_of(case: Case) -> tuple[str, ...]:
    named = (verbs for start, verbs in VERBS.items() if case.name.startswith(start))
    return next(named, (case.name.split()[0],))


class Hooked:
    """A backend some of whose verbs are called through `call`, and which keeps what is uploaded or in host memory."""

    def __init__(self, ops: Ops, verbs: tuple[str, ...], call: Callable[[Callable[[], None]], None]) -> None:
        self._ops, self._verbs, self._call = ops, verbs, call
        self.kept: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._ops, name)
        if name not in self._verbs:
            return found
        return lambda *args, **named: self._call(lambda: found(*args, **named))

    def upload(self, host: np.ndarray) -> Any:
        array = self._ops.upload(host)
        self.kept.append(array)  # tables hold addresses of arrays that nothing else holds
        return array

    def copier(self) -> Any:
        self.kept.append(self._ops.copier())  # with the memory that it has pinned
        return self.kept[-1]


def best_of_calls(case: Case, ops: Ops, seconds: float) -> float:
    """Seconds of the fastest call of the case's verb; of several, their sum."""
    total = 0.0

    def repeat(call: Callable[[], None]) -> None:
        nonlocal total
        best = float("inf")
        call()
        ops.synchronize()
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            start = time.perf_counter()
            call()
            ops.synchronize()
            best = min(best, time.perf_counter() - start)
        total += best

    case.run(Hooked(ops, verbs_of(case), repeat), case.inputs())  # type: ignore[arg-type]
    return total


# ---- CUDA


class DeviceBench:
    """Times cases on a CUDA device."""

    def __init__(self, ops: Any, seconds: float) -> None:
        self.ops, self.seconds = ops, seconds
        self._inputs: dict[str, Any] = {}
        self.functions: set[str] = set()
        """Kernels that have been timed, as in `kernel_functions`."""

    def compile(self, cases: list[Case]) -> None:
        """Compile what all cases use at once, from a run of each in which nothing is launched."""
        from rimuru.ops.cuda.launch import Kernel, rehearsal

        used: dict[Kernel, int] = {}
        with ThreadPoolExecutor(8) as pool:
            self._inputs = dict(zip([c.name for c in cases], pool.map(Case.inputs, cases), strict=True))
        for case in cases:
            with rehearsal() as found:
                case.run(self.ops, self._inputs[case.name])
            for kernel, shared_bytes in found.items():
                used[kernel] = max(shared_bytes, used.get(kernel, 0))
        self.ops.compile(list(used))
        for kernel, shared_bytes in used.items():
            kernel.load(shared_bytes)

    def launches(self, case: Case, n_copies: int) -> tuple[list[Any], list[Any]]:
        """(launches of the verb on each copy of the inputs, everything that must live meanwhile)."""
        found: list[Any] = []
        kept: list[Any] = []
        for _ in range(n_copies):
            hooked = Hooked(self.ops, verbs_of(case), lambda call: self._record(call, found))
            case.run(hooked, self._inputs[case.name])  # type: ignore[arg-type]
            kept += hooked.kept
        return found, kept

    @staticmethod
    def _record(call: Callable[[], None], found: list[Any]) -> None:
        with recorded() as launches:
            call()
        # A stream of its own is none that a graph of these launches would wait for.
        found += [(kernel, args, {k: v for k, v in named.items() if k != "stream"}) for kernel, args, named in launches]

    def graph(self, launches: list[Any], n_times: int) -> Any:
        import cupy

        self.ops.stream.use()  # not `with`, after which the null stream would be the current one
        self.ops.stream.begin_capture(mode=cupy.cuda.runtime.streamCaptureModeThreadLocal)
        try:
            for _ in range(n_times):
                for kernel, args, named in launches:
                    kernel(*args, **named)
        finally:
            graph = self.ops.stream.end_capture()
        return graph

    def microseconds(self, launches: list[Any], n_calls: int) -> float:
        """Of one call, of which the launches are n_calls."""
        import cupy

        stream = self.ops.stream

        def once(graph: Any) -> float:
            start, end = cupy.cuda.Event(), cupy.cuda.Event()
            start.record(stream)
            graph.launch(stream)
            end.record(stream)
            end.synchronize()
            return float(cupy.cuda.get_elapsed_time(start, end)) * 1e3

        graph = self.graph(launches, 1)
        once(graph)
        n_times = max(1, min(200, round(1000 / once(graph))))
        graph = self.graph(launches, n_times)
        first = once(graph)
        runs = max(5, min(50, int(self.seconds * 1e6 / first)))
        return statistics.median(once(graph) for _ in range(runs)) / (n_times * n_calls)

    def measure(self, case: Case) -> dict[str, Any]:
        """Time of a case's verb, and of each of its kernels where it has several."""
        inputs = self._inputs[case.name]
        n_bytes, n_flops = case.bytes_moved(inputs), case.flops(inputs)
        cached = n_bytes < LARGE_BYTES or case.bytes_over == "link"  # the host's memory is never in the device's cache
        n_copies = 1 if cached else max(1, min(MOST_COPIES, round(COLD_BYTES / n_bytes)))
        launches, kept = self.launches(case, n_copies)
        self.functions |= {function_of(launch[0]) for launch in launches}
        us = self.microseconds(launches, n_copies)
        kernels = self.parts(launches, n_copies, us)
        del kept, self._inputs[case.name]
        return {"us": us, "bytes": n_bytes, "flops": n_flops, "kernels": kernels}

    def parts(self, launches: list[Any], n_calls: int, us: float) -> dict[str, float]:
        """Microseconds of each kernel of a call that takes `us`: what it adds to the ones before it. None is launched
        without those, whose results it may need."""
        n_launches = len(launches) // n_calls
        found: dict[str, float] = {}
        before = 0.0
        for i in range(n_launches):
            until = us
            if i < n_launches - 1:
                some = [launch for k, launch in enumerate(launches) if k % n_launches <= i]
                until = self.microseconds(some, n_calls)
            name = launches[i][0].name
            found[name] = found.get(name, 0.0) + until - before
            before = until
        return found


def function_of(kernel: Any) -> str:
    """A kernel's source and name, as in `kernel_functions`."""
    return f"{kernel.path}: {kernel.name}"


def kernel_functions() -> set[str]:
    """Every kernel of cuda_src, by its source and name."""
    from rimuru.ops.cuda.loader import source_root

    bounds = r"(?:__launch_bounds__\((?:[^()]|\([^()]*\))*\)\s*)?"
    kernel = re.compile(rf"__global__\s+void\s+{bounds}(\w+)\(")
    root = source_root()
    sources = [(path.relative_to(root).as_posix(), path.read_text(encoding="utf-8")) for path in root.glob("*/*.cu*")]
    return {f"{path}: {name}" for path, text in sources for name in kernel.findall(text)}


@contextmanager
def recorded() -> Any:
    """(kernel, arguments, named arguments) of launches inside, which are also done."""
    from rimuru.ops.cuda.launch import Kernel

    launches: list[Any] = []
    launch = Kernel.__call__

    def note(kernel: Any, *args: Any, **named: Any) -> None:
        launches.append((kernel, args, named))
        launch(kernel, *args, **named)

    with patch.object(Kernel, "__call__", note):
        yield launches


_SWEEP = """
extern "C" __global__ void sweep(const uint4* x, long long n, unsigned* out) {
    unsigned sum = 0;
    long long step = (long long)gridDim.x * blockDim.x;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += 4 * step) {
#pragma unroll
        for (int k = 0; k < 4; k++) {
            if (i + k * step < n) {
                uint4 v = x[i + k * step];
                sum ^= v.x ^ v.y ^ v.z ^ v.w;
            }
        }
    }
    if (sum == 0x12345678u) out[0] = sum;
}
"""


_FMAS = """
extern "C" __global__ void fmas(float* out, float x, float y, int n) {
    float sums[16];
#pragma unroll
    for (int k = 0; k < 16; k++) sums[k] = (float)(threadIdx.x + k);
#pragma unroll 8
    for (int i = 0; i < n; i++) {
#pragma unroll
        for (int k = 0; k < 16; k++) sums[k] = fmaf(sums[k], x, y);
    }
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < 16; k++) sum += sums[k];
    if (sum == 12345.0f) out[0] = sum;
}
"""


def peaks(ops: Any) -> dict[str, float]:
    """The card's own: bytes a second of reading 2 GiB and of a copy from pinned host memory; flops of a product of
    16-bit matrices (0 where CuPy finds no library for it) and of float32 multiply-adds."""
    import cupy

    from rimuru.ops.cuda import rates

    rng = np.random.default_rng(0)
    ops.stream.use()
    data = cupy.empty((32, 16 << 20), np.uint32)
    data[...] = ops.upload(rng.integers(0, 2**32, 16 << 20, dtype=np.uint32))
    n_bytes, out, kernel = data.nbytes, cupy.zeros(1, np.uint32), cupy.RawKernel(_SWEEP, "sweep")
    grid = (ops.info.n_multiprocessors * 8,)
    bytes_per_s = n_bytes / fastest(ops, lambda: kernel(grid, (512,), (data, np.int64(n_bytes // 16), out)))
    n = 8192
    a, b = (ops.upload(rng.standard_normal((n, n), dtype=np.float32).astype(np.float16)) for _ in range(2))
    product = cupy.empty((n, n), np.float16)
    try:
        flops = 2 * n**3 / fastest(ops, lambda: cupy.matmul(a, b, out=product))
    except Exception as error:  # no cuBLAS: the table goes without
        print(f"no peak of matrix products: {error}", file=sys.stderr)
        flops = 0.0
    blocks, n_fmas, fmas = ops.info.n_multiprocessors * 8, 4096, cupy.RawKernel(_FMAS, "fmas")
    arguments = cupy.zeros(1, np.float32), np.float32(0.999), np.float32(0.001), np.int32(n_fmas)
    float32 = 2 * 16 * n_fmas * 256 * blocks / fastest(ops, lambda: fmas((blocks,), (256,), arguments))
    _, _, link = rates.measured(ops.info.id)
    ops.stream.use()  # it has left another one
    return {
        "bytes_per_s": bytes_per_s, "flops_per_s": flops, "link_bytes_per_s": link, "float32_flops_per_s": float32
    }  # fmt: skip


def fastest(ops: Any, call: Callable[[], None]) -> float:
    """Seconds, by events."""
    import cupy

    call()
    best = float("inf")
    for _ in range(10):
        start, end = cupy.cuda.Event(), cupy.cuda.Event()
        start.record(ops.stream)
        call()
        end.record(ops.stream)
        end.synchronize()
        best = min(best, float(cupy.cuda.get_elapsed_time(start, end)) / 1e3)
    return best


def device_result(ops: Any, cases: list[Case], seconds: float) -> dict[str, Any]:
    """A row for each case, the peaks, and kernels that no case launches."""
    bench = DeviceBench(ops, seconds)
    top = peaks(ops)
    print(
        f"peaks: memory {top['bytes_per_s'] / 1e12:.2f} TB/s, link {top['link_bytes_per_s'] / 1e9:.1f} GB/s; products"
        f" {top['flops_per_s'] / 1e12:.0f} Tflop/s, float32 {top['float32_flops_per_s'] / 1e12:.1f} Tflop/s"
    )
    bench.compile(cases)
    gc.disable()  # nothing may be unpinned during a capture
    rows = []
    for case in cases:
        row = {"case": case.name} | bench.measure(case)
        row |= shares_of_peaks(case, row, top)
        rows.append(row)
        parts = " ".join(f"{name} {us:.1f}" for name, us in row["kernels"].items())
        others = " ".join(peak for peak in (row["bytes_over"], row["flops_on"]) if peak not in ("memory", "products"))
        shares = f"{row['bandwidth_share']:7.1%} {row['flops_share']:7.1%} {others:8s}"
        print(f"{case.name:48s}{row['us']:10.1f} us {shares} {parts}", flush=True)
    return {"peaks": top, "cases": rows, "without_case": sorted(kernel_functions() - bench.functions)}


def shares_of_peaks(case: Case, row: dict[str, Any], top: dict[str, float]) -> dict[str, Any]:
    """How near a measured row comes to the peaks that bound it, and which these are."""
    bytes_per_s = top["link_bytes_per_s" if case.bytes_over == "link" else "bytes_per_s"]
    flops_per_s = top["float32_flops_per_s" if case.flops_on == "float32" else "flops_per_s"]
    seconds = row["us"] / 1e6
    return {
        "bandwidth_share": row["bytes"] / seconds / bytes_per_s, "bytes_over": case.bytes_over,
        "flops_share": row["flops"] / seconds / flops_per_s if flops_per_s else 0.0, "flops_on": case.flops_on,
    }  # fmt: skip


def host_rows(ops: Ops, cases: list[Case], seconds: float) -> list[dict[str, Any]]:
    rows = []
    for case in cases:
        inputs, best = case.inputs(), best_of_calls(case, ops, seconds)
        rates = case.bytes_moved(inputs) / best / 1e9, case.flops(inputs) / best / 1e9
        rows.append({"case": case.name, "us": best * 1e6, "gb_per_s": rates[0], "gflop_per_s": rates[1]})
        print(f"{case.name:60s} {best * 1e6:11.1f} us {rates[0]:8.1f} GB/s {rates[1]:9.1f} Gflop/s", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--filter", default="", help="only cases whose name holds this text; several: a|b")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--seconds", type=float, default=0.5, help="time for each case")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    ops: Any = create(options.device, options.threads)
    chosen = [case for case in timed.cases() if any(text in case.name for text in options.filter.split("|"))]
    if options.device == "cpu":
        chosen = [case for case in chosen if case.bytes_over == "memory"]
        result: dict[str, Any] = {"cases": host_rows(ops, chosen, options.seconds)}
    else:
        result = device_result(ops, chosen, options.seconds)
        if not options.filter:
            print("kernels without a case:", ", ".join(result["without_case"]) or "none")
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
