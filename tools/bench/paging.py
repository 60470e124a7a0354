"""What the page table costs: the experts' products through it against the same kernels on contiguous tensors.

    python tools/bench/paging.py [--tokens 1,2,4,...] [--layers 8] [--seconds 0.3] [--scattered] [--json FILE]

A layer of Qwen3-30B-A3B (128 experts, 8 of them a token), Q4_K with down in Q4_K and in Q6_K. Both sides launch
what the engine launches for gate/up and down, with the same grids; only where rows lie differs: in pages of a pool
(those that the engine's allocator gives after a long run of moves, or with --scattered each page anywhere) and, for the
rest of the experts, in loading buffers; or in tensors as a file holds them, by kernels that
look nothing up (-DCONTIGUOUS_EXPERTS=1). What copies rows of the table is measured with them: the sort, and the router
of few tokens, whose own time is then taken off what the cost is a share of. Scaling, which reads neither table nor
weights, is left out. The results must be equal, bit by bit. "looked up" is what looking
up costs by itself: through a table of the same tensors, which counts in no limit.

Launches go over several layers in one graph, so that weights are not found in the cache; the two graphs alternate,
and the median of the ratios counts. "noise" is the same ratio of the contiguous side with itself. Last, the rate at
which the kernels read experts in place from pinned host memory. Exit status 1 where the cost is above the limits or
results differ.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tools" / "bench")]

from cases.common import normal  # noqa: E402
from cases.matmul import filled_act, random_rows  # noqa: E402
from cases.moe import QWEN3_30B, expert_layout  # noqa: E402
from paged_weights import LOOKED_UP, PAGE_BYTES, SHARES, Weights, first_rows, pages_after_moves  # noqa: E402

from rimuru.formats.quants import BY_NAME  # noqa: E402
from rimuru.memory.specs import ExpertLayerLayout  # noqa: E402
from rimuru.ops.base import ExpertTable  # noqa: E402
from rimuru.ops.cuda.launch import Kernel  # noqa: E402
from rimuru.ops.cuda.routing import LINED_TOKENS  # noqa: E402

N_IN = 2048
MEASURED = ("router", "moe_sort", "moe_gate_up", "moe_down")
LIMITS = {"all": 0.008, "from 1024 tokens": 0.013, "1 token": 0.03}
"""Greatest mean overhead, of single and of grouped numbers of tokens."""


@dataclass(frozen=True)
class Launch:
    """One call of a Kernel."""

    kernel: Kernel
    grid: tuple[int, ...]
    block: tuple[int, ...]
    args: tuple[Any, ...]
    named: dict[str, Any]

    def __call__(self) -> None:
        self.kernel(self.grid, self.block, self.args, **self.named)

    def with_arguments(self, values: dict[str, Any]) -> Launch:
        """The same launch with other values of the parameters that it has of these names."""
        labels = [label for label, _ in self.kernel.parameters]
        return replace(self, args=tuple(values.get(n, a) for n, a in zip(labels, self.args, strict=True)))


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Launches of the measured kernels inside, which are also done."""
    launches: list[Launch] = []
    launch = Kernel.__call__

    def note(kernel: Kernel, grid: Any, block: Any, args: Any, **named: Any) -> None:
        if kernel.name.startswith(MEASURED):
            launches.append(Launch(kernel, grid, block, tuple(args), named))
        launch(kernel, grid, block, args, **named)

    with patch.object(Kernel, "__call__", note):
        yield launches


_contiguous: dict[int, Kernel] = {}


def contiguous_kernel(kernel: Kernel) -> Kernel:
    """The kernel without a page table."""
    if id(kernel) not in _contiguous:
        signature = ", ".join(f"{label}: {kind}" for label, kind in kernel.parameters)
        _contiguous[id(kernel)] = Kernel(
            kernel.path, kernel.name, signature, kernel.defines | {"CONTIGUOUS_EXPERTS": 1}
        )
    return _contiguous[id(kernel)]


def on_contiguous(launch: Launch, layout: ExpertLayerLayout, tensors: Any) -> Launch:
    """The launch on tensors (int64 [bytes / 8]) laid out by `first_rows`."""
    starts, _ = first_rows(layout)
    values: dict[str, Any] = {"addresses": tensors}
    for p in layout.projections:
        prefix = "" if p.name == "down" else f"{p.name}_"
        values |= {f"{prefix}first_page": starts[p.name], f"{prefix}rows_per_page": p.n_rows}
    if launch.kernel.name == "router":
        return launch.with_arguments({"addresses": None, "n_pages": 0, "lines": None})
    return replace(launch.with_arguments(values), kernel=contiguous_kernel(launch.kernel))


def run_layer(ops: Any, x: Any, ids: Any, table: ExpertTable, router: Any = None) -> tuple[Any, Any]:
    """Experts and weighted sum of a layer, as the engine calls them; gives (scratch, the sum). With a router (a float32
    matrix) ids are its choice, and where their experts lie is noted with them."""
    n_tokens, top_k = ids.shape
    scratch, total = ops.moe_scratch(n_tokens, QWEN3_30B, N_IN), ops.empty((n_tokens, N_IN), np.float32)
    scratch.only_summed = True
    weights = ops.upload(np.full((n_tokens, top_k), 1 / top_k, np.float32))
    if router is not None:
        logits = ops.empty((n_tokens, QWEN3_30B.n_experts), np.float32)
        ops.choose_experts(x, router, None, logits, QWEN3_30B, None, ids, weights, (table, scratch))
    ops.moe_experts(x, ids, table, None, QWEN3_30B, scratch)
    ops.moe_combine(scratch, weights, total, False, 1.0)
    return scratch, total


def router_for(ops: Any, n_tokens: int, seed: int) -> Any:
    """A random router, where the kernels that are measured have it look experts up; else None."""
    if n_tokens not in LINED_TOKENS:
        return None
    rows = normal(np.random.default_rng(seed), QWEN3_30B.n_experts, N_IN, scale=N_IN**-0.5)
    return ops.weight(rows.view(np.uint8), BY_NAME["f32"], N_IN)


def graph_of(ops: Any, launches: Sequence[Launch], n_times: int) -> Any:
    """All launches in one graph, n_times over."""
    import cupy

    # Not `with`, after which the null stream is the current one: what is then copied, filled and compared would not
    # wait for graphs, nor they for it.
    ops.stream.use()
    ops.stream.begin_capture(mode=cupy.cuda.runtime.streamCaptureModeThreadLocal)
    try:
        for _ in range(n_times):
            for launch in launches:
                launch()
    finally:
        graph = ops.stream.end_capture()
    return graph


def milliseconds(ops: Any, graph: Any) -> float:
    """One run of a graph."""
    import cupy

    start, end = cupy.cuda.Event(), cupy.cuda.Event()
    start.record(ops.stream)
    graph.launch(ops.stream)
    end.record(ops.stream)
    end.synchronize()
    return float(cupy.cuda.get_elapsed_time(start, end))


def alternate(ops: Any, graphs: Sequence[Any], seconds: float) -> list[list[float]]:
    """Milliseconds of each graph, one run of each in turn, the order turned round each time."""
    once = sum(milliseconds(ops, graph) for graph in graphs)
    times: list[list[float]] = [[] for _ in graphs]
    for i in range(max(9, int(seconds * 1e3 / once))):
        for k in range(len(graphs)) if i % 2 else reversed(range(len(graphs))):
            times[k].append(milliseconds(ops, graphs[k]))
    return times


def median_ratio(over: Sequence[float], under: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(over, under, strict=True))


def difference(outs: Sequence[Any], wanted: Sequence[Any]) -> str | None:
    """Which of the outputs differ, in how many values and by how much; None where none does."""
    parts = []
    for i, (out, right) in enumerate(zip(outs, wanted, strict=True)):
        n_other = int((out != right).sum())
        if n_other:
            worst, largest = float(abs(out - right).max()), float(abs(right).max())
            name = ("hidden" if i % 2 else "out") + f" of layer {i // 2}"
            parts.append(f"{name}: {n_other} of {out.size} values, by up to {worst:.3g} of {largest:.3g}")
    return "; ".join(parts) or None


@dataclass
class Bench:
    """The layers of one mix of types, and the rows measured on them."""

    ops: Any
    layout: ExpertLayerLayout
    layers: list[Weights]
    seconds: float

    def prepare(self, n_tokens: int) -> tuple[list[list[Launch]], list[Any], float]:
        """(launches of each layer, what they write, distinct experts a layer) for random ids."""
        rng = np.random.default_rng(n_tokens)
        spec, outs, distinct = QWEN3_30B, [], 0
        launches: list[list[Launch]] = []
        x = filled_act(self.ops, normal(rng, n_tokens, N_IN))
        for layer in self.layers:
            ids = np.argpartition(rng.random((n_tokens, spec.n_experts)), spec.top_k, axis=1)[:, : spec.top_k]
            table = ExpertTable(self.layout, PAGE_BYTES, layer.tables[1.0], {})
            chosen = self.ops.upload(ids.astype(np.int32))
            with recorded() as found:
                scratch, total = run_layer(self.ops, x, chosen, table, router_for(self.ops, n_tokens, len(launches)))
            distinct += len(np.unique(self.ops.download(chosen)))
            launches.append(list(found))
            is_summed = any(launch.kernel.name == "moe_down_sum" for launch in found)
            outs += [total if is_summed else scratch.out, scratch.private.hidden]
        return launches, outs, distinct / len(self.layers)

    def repeats(self, launches: Sequence[Launch], at_least_ms: float = 1.5) -> int:
        """How often the launches go into a graph."""
        once = graph_of(self.ops, launches, 1)
        milliseconds(self.ops, once)
        return max(1, round(at_least_ms / milliseconds(self.ops, once)))

    def measure(self, n_tokens: int, down: str) -> Iterator[dict[str, Any]]:
        """A row for each share of experts in the pool."""
        recorded_launches, outs, _ = self.prepare(n_tokens)
        pairs = list(zip(self.layers, recorded_launches, strict=True))
        plain = [on_contiguous(launch, self.layout, layer.tensors) for layer, found in pairs for launch in found]
        n_times = self.repeats(plain)
        for launch in plain:
            launch()
        wanted = [out.copy() for out in outs]
        contiguous, again = (graph_of(self.ops, plain, n_times) for _ in range(2))
        routers = [launch for launch in plain if launch.kernel.name == "router"]
        beside = graph_of(self.ops, routers, n_times) if routers else None
        for share in (*SHARES, LOOKED_UP):
            paged = [
                launch.with_arguments({"addresses": layer.tables[share]}) for layer, found in pairs for launch in found
            ]
            for out in outs:
                out.fill(np.nan)
            graph = graph_of(self.ops, paged, n_times)
            milliseconds(self.ops, graph)
            differs = difference(outs, wanted)
            if differs:
                milliseconds(self.ops, again)
                unsteady = difference(outs, wanted)
                differs += f" (contiguous, in a graph: {unsteady or 'as launched one by one'})"
            base, other, repeated = alternate(self.ops, [contiguous, graph, again], self.seconds)
            scale = 1e3 / (n_times * len(self.layers))
            base_us = statistics.median(base) * scale
            router_us = 0.0
            if beside is not None:
                router_us = statistics.median(milliseconds(self.ops, beside) for _ in range(9)) * scale
            share_of = base_us / (base_us - router_us)
            yield {
                "down": down, "tokens": n_tokens, "pool_share": share, "equal": differs is None, "differs": differs,
                "contiguous_us": base_us - router_us, "paged_us": statistics.median(other) * scale - router_us,
                "router_us": router_us, "overhead": (median_ratio(other, base) - 1) * share_of,
                "noise": (median_ratio(repeated, base) - 1) * share_of,
            }  # fmt: skip

    def in_place(self, n_tokens: int, tables: list[Any]) -> dict[str, Any]:
        """Rate of reading all experts from host memory; tables: of the first layers."""
        found, _, distinct = self.prepare(n_tokens)
        launches = [
            launch.with_arguments({"addresses": table})
            for table, some in zip(tables, found, strict=False)
            for launch in some
        ]
        (times,) = alternate(self.ops, [graph_of(self.ops, launches, 1)], self.seconds)
        seconds = statistics.median(times) / 1e3 / len(tables)
        n_bytes = distinct * self.layout.useful_bytes
        return {"tokens": n_tokens, "us": seconds * 1e6, "gb_per_s": n_bytes / seconds / 1e9}


def make_bench(
    ops: Any, down: str, n_layers: int, seconds: float, pool_memory: list[Any], scattered: bool = False
) -> Bench:
    """Weights of all layers, their pages in one pool."""
    import cupy

    rng = np.random.default_rng(1)
    formats = {"gate": "q4_k", "up": "q4_k", "down": down}
    layout = expert_layout(formats, QWEN3_30B.n_experts, N_IN, QWEN3_30B.width, PAGE_BYTES)
    if scattered:
        n_pages = n_layers * layout.n_experts * layout.n_pages
        pages = rng.permutation(n_pages).reshape(n_layers, layout.n_experts, layout.n_pages)
    else:
        pages, n_pages = pages_after_moves(rng, n_layers, layout.n_experts, layout.n_pages)
    n_beside = int((np.diff(pages, axis=-1) == 1).all(axis=-1).sum())
    print(
        f"down {down}: {n_beside / (n_layers * layout.n_experts):.0%} of experts have all pages side by side",
        flush=True,
    )
    memory = ops.reserve_pool(n_pages * PAGE_BYTES, n_pages * PAGE_BYTES)
    pool_memory.append(memory)
    raw = cupy.cuda.UnownedMemory(memory.base, n_pages * PAGE_BYTES, memory, ops.info.id)
    pool = cupy.ndarray((n_pages, PAGE_BYTES), np.uint8, cupy.cuda.MemoryPointer(raw, 0))
    samples = {
        p.name: ops.upload(
            np.stack([random_rows(rng, p.format, p.n_rows, p.n_in).reshape(p.n_rows, -1) for _ in range(3)])
        )
        for p in layout.projections
    }
    layers = [Weights(ops, layout, samples, pool, pages[i], i) for i in range(n_layers)]
    return Bench(ops, layout, layers, seconds)


def compile_kernels(ops: Any, tokens: Sequence[int]) -> None:
    """All kernels of both sides at once, which takes seconds where one after another takes a minute."""
    from rimuru.ops.cuda.launch import rehearsal

    used: dict[Kernel, int] = {}
    for down in ("q4_k", "q6_k"):
        layout = expert_layout({"gate": "q4_k", "up": "q4_k", "down": down}, 128, N_IN, QWEN3_30B.width, PAGE_BYTES)
        for n in tokens:
            x, ids = ops.act(n, N_IN), ops.empty((n, QWEN3_30B.top_k), np.int32)
            addresses = ops.empty((QWEN3_30B.n_experts, layout.n_pages), np.int64)
            with rehearsal() as found:
                run_layer(ops, x, ids, ExpertTable(layout, PAGE_BYTES, addresses, {}), router_for(ops, n, 0))
            used |= found
    products = [k for k in used if k.name.startswith(MEASURED) and k.name != "router"]
    ops.compile([*used, *map(contiguous_kernel, products)])
    for kernel, shared_bytes in used.items():
        kernel.load(shared_bytes)
        if kernel in products:
            contiguous_kernel(kernel).load(shared_bytes)


def means(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Mean overhead of the groups of LIMITS."""
    groups: dict[str, Callable[[int], bool]] = {
        "all": lambda n: True, "from 1024 tokens": lambda n: n >= 1024, "1 token": lambda n: n == 1,
    }  # fmt: skip
    found = {}
    for name, inside in groups.items():
        values = [row["overhead"] for row in rows if inside(row["tokens"]) and row["pool_share"] != LOOKED_UP]
        if values:
            found[name] = statistics.fmean(values)
    return found


def print_table(rows: list[dict[str, Any]]) -> None:
    shares = "".join(f"{f'{share:.0%} in pool':>14}" for share in SHARES)
    print(f"{'down':6}{'tokens':>7}{'contiguous us':>15}{shares}{'looked up':>14}  noise")
    for i in range(0, len(rows), len(SHARES) + 1):
        some = rows[i : i + len(SHARES) + 1]
        noise = max(abs(row["noise"]) for row in some)
        overheads = "".join(f"{row['overhead']:>+14.2%}" for row in some)
        print(f"{some[0]['down']:6}{some[0]['tokens']:>7}{some[0]['contiguous_us']:>15.1f}{overheads}  {noise:.2%}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", default="1,2,4,8,16,32,64,128,256,512,1024,2048,4096")
    parser.add_argument("--layers", type=int, default=8, help="layers of weights that launches go over")
    parser.add_argument("--seconds", type=float, default=0.3, help="time for each row")
    parser.add_argument("--scattered", action="store_true", help="each page of an expert anywhere")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    from rimuru.ops import create

    tokens = [int(n) for n in options.tokens.split(",")]
    ops: Any = create("cuda", None)
    compile_kernels(ops, tokens)
    gc.disable()  # nothing may be unpinned during a capture
    rows: list[dict[str, Any]] = []
    in_place: list[dict[str, Any]] = []
    pools: list[Any] = []
    for down in ("q4_k", "q6_k"):
        bench = make_bench(ops, down, options.layers, options.seconds, pools, options.scattered)
        for n in tokens:
            rows += bench.measure(n, down)
        if down == "q4_k":
            copier = ops.copier()
            tables = [layer.in_host_memory(ops, copier) for layer in bench.layers[:4]]
            in_place = [bench.in_place(n, tables) for n in (1, 2, 8)]
        del bench
    print_table(rows)
    for row in in_place:
        print(f"in place from host memory, {row['tokens']} tokens: {row['us']:.0f} us, {row['gb_per_s']:.1f} GB/s")
    found = means(rows)
    for name, value in found.items():
        worst = "within" if value <= LIMITS[name] else "ABOVE"
        print(f"mean overhead, {name}: {value:+.2%}, {worst} {LIMITS[name]:.1%}")
    equal = all(row["equal"] for row in rows)
    print("results are equal" if equal else "RESULTS DIFFER")
    for row in rows:
        if not row["equal"]:
            print(f"  {row['down']}, {row['tokens']} tokens, {row['pool_share']:.0%} in pool: {row['differs']}")
    if options.json:
        result = {"rows": rows, "mean_overhead": found, "limits": LIMITS, "in_place": in_place, "equal": equal}
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if equal and all(value <= LIMITS[name] for name, value in found.items()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
