"""Speed of the CPU's matrix products for every format, beside what the memory allows.

    python tools/bench/cpu_matmul.py [--formats q4_k,q6_k] [--threads 1,2] [--json FILE]

One token: GB/s of weights from a matrix that no cache holds; the bound is the rate at which the same cores read plain
memory. Many tokens: 10^9 multiply-adds per second. The best of several runs counts: other programs only slow it down.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rimuru.formats.quants import BY_NAME, ENGINE_FORMATS
from rimuru.formats.quants_encode import quantize as encode
from rimuru.ops.base import Act, Weight
from rimuru.ops.cpu import matmul, quantize, simd_build, simd_launch
from rimuru.ops.cpu.simd import I32X16, I64, Kernel, V

N_IN = 2048
MATRIX_BYTES = 192 << 20
GEMM_ROWS = 2048


def best_seconds(function: Callable[[], None], runs: int) -> float:
    function()
    best = float("inf")
    for _ in range(runs):
        start = time.perf_counter()
        function()
        best = min(best, time.perf_counter() - start)
    return best


def emit_read(k: Kernel, context: V, index: V) -> None:
    """A worker that reads memory: context [counter, address, bytes of a chunk, chunks, result]."""
    address, chunk, n_chunks = (k.load(context + 8 * i, I64) for i in (1, 2, 3))
    sums = [k.var(k.const(0, I32X16)) for _ in range(4)]
    # a static share for each core: chunk `index` of n_chunks equal ones
    with k.when(index.compare("<", n_chunks)):
        with k.loop(chunk, step=256) as i:
            for lane, total in enumerate(sums):
                total.set(total.get() ^ k.load(address + index * chunk + i + 64 * lane, I32X16))
        result = sums[0].get() ^ sums[1].get() ^ sums[2].get() ^ sums[3].get()
        k.store(result, context + 64 + index * 64)


def read_bound(data: np.ndarray, n_threads: int, runs: int) -> float:
    """GB/s at which n_threads cores read memory."""
    worker = simd_build.build("bench_read", 2, emit_read, simd_build.host_isa())
    context = np.zeros(16 + 8 * n_threads, np.int64)
    chunk = data.nbytes // n_threads // 256 * 256
    context[:4] = 0, simd_launch.address_of(data), chunk, n_threads
    seconds = best_seconds(lambda: simd_launch.launch(worker, simd_launch.address_of(context)), runs)
    return chunk * n_threads / seconds / 1e9


def random_weight(name: str, n_rows: int) -> Weight:
    """Random codes under scales of one; repeated blocks are as good as new ones for timing."""
    fmt = BY_NAME[name]
    rng = np.random.default_rng(0)
    base = rng.standard_normal((64, N_IN)).astype(np.float32)
    raw = np.resize(encode(base, fmt), (n_rows, fmt.row_bytes(N_IN)))
    return Weight(np.ascontiguousarray(raw), fmt, n_rows, N_IN)


def activation(n_tokens: int) -> Act:
    x = quantize.act(n_tokens, N_IN)
    x.f32[:] = np.random.default_rng(1).standard_normal((n_tokens, N_IN))
    quantize.quantize_act(x, n_tokens)
    return x


def measure(name: str, n_tokens: int, runs: int) -> tuple[float, float]:
    """(GB/s of weights, 10^9 multiply-adds per second)"""
    row_bytes = BY_NAME[name].row_bytes(N_IN)
    n_rows = MATRIX_BYTES // row_bytes if n_tokens == 1 else GEMM_ROWS
    weight, x = random_weight(name, n_rows), activation(n_tokens)
    out = np.zeros((n_tokens, n_rows), np.float32)
    seconds = best_seconds(lambda: matmul.linear(x, [weight], [out]), runs)
    return n_rows * row_bytes / seconds / 1e9, n_rows * N_IN * n_tokens / seconds / 1e9


def launch_microseconds() -> float:
    """Time of a call of `linear` that has next to nothing to do but is shared among the cores."""
    weight, x = random_weight("q4_k", 256), activation(1)
    out = np.zeros((1, 256), np.float32)
    return best_seconds(lambda: [matmul.linear(x, [weight], [out]) for _ in range(200)] and None, 5) / 200 * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default=",".join(f.name for f in ENGINE_FORMATS))
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--tokens", default="4,64,256", help="batch sizes of the many-token figures")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    batches = [int(n) for n in args.tokens.split(",")]
    report: dict[str, Any] = {"isa": simd_build.host_isa().name, "n_in": N_IN, "threads": {}}
    data = np.ones(MATRIX_BYTES, np.uint8)
    for n_threads in (int(n) for n in args.threads.split(",")):
        simd_launch.set_threads(n_threads)
        bound = read_bound(data, n_threads, args.runs)
        entry: dict[str, Any] = {"read_gb_per_s": bound, "launch_us": launch_microseconds(), "formats": {}}
        print(f"{n_threads} threads: memory read {bound:.1f} GB/s, small launch {entry['launch_us']:.1f} us")
        print(f"{'format':>8} {'1 token':>9} {'of bound':>9}" + "".join(f"{f'{n} tokens':>12}" for n in batches))
        for name in args.formats.split(","):
            rate, _ = measure(name, 1, args.runs)
            macs = {str(n): measure(name, n, args.runs)[1] for n in batches}
            entry["formats"][name] = {"gb_per_s": rate, "gmac_per_s": macs}
            columns = "".join(f"{value:12.1f}" for value in macs.values())
            print(f"{name:>8} {rate:9.1f} {rate / bound:9.0%}{columns}", flush=True)
        report["threads"][str(n_threads)] = entry
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
