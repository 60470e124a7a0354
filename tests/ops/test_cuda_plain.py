"""Parts of the CUDA backend that need no device: sources, signatures, buckets, the pool's bookkeeping, packing."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases.common import make_batch

from rimuru.base.errors import NotEnoughMemoryError
from rimuru.base.units import MIB
from rimuru.ops.base import SampleParams
from rimuru.ops.cuda import dependent, graphs, loader
from rimuru.ops.cuda.launch import Kernel
from rimuru.ops.cuda.pool import Driver, DriverError, MappedPool


def test_flatten_puts_includes_in_once_and_keeps_lines(tmp_path: Path) -> None:
    (tmp_path / "common").mkdir()
    (tmp_path / "common" / "a.cuh").write_text('#pragma once\n#include "common/b.cuh"\nint a;\n')
    (tmp_path / "common" / "b.cuh").write_text("#pragma once\nint b;\n")
    (tmp_path / "k.cu").write_text('#include <cuda_fp16.h>\n#include "common/a.cuh"\n#include "common/b.cuh"\nint k;\n')
    text = loader.flatten("k.cu", tmp_path)
    assert text.count("int b;") == 1 and "#include <cuda_fp16.h>" in text and "pragma once" not in text
    lines = text.splitlines()
    assert lines[lines.index("int k;") - 2] == '#line 3 "k.cu"' and '#line 3 "common/a.cuh"' in lines


def test_a_changed_header_changes_the_cache_key(tmp_path: Path) -> None:
    (tmp_path / "common").mkdir()
    (tmp_path / "common" / "a.cuh").write_text("int a;\n")
    (tmp_path / "k.cu").write_text('#include "common/a.cuh"\n')
    before = loader.flatten("k.cu", tmp_path)
    (tmp_path / "common" / "a.cuh").write_text("int changed;\n")
    assert loader.flatten("k.cu", tmp_path) != before


def test_missing_sources_are_named(tmp_path: Path) -> None:
    (tmp_path / "k.cu").write_text('\n#include "gone.cuh"\n')
    with pytest.raises(loader.KernelBuildError, match=r"k\.cu:2: the include gone\.cuh"):
        loader.flatten("k.cu", tmp_path)
    with pytest.raises(loader.KernelBuildError, match=r"no CUDA source x\.cu"):
        loader.flatten("x.cu", tmp_path)


def test_options_have_one_order() -> None:
    assert loader.compile_options({"B": 1, "A": "x"}) == loader.compile_options({"A": "x", "B": 1})


def test_only_the_loader_builds_modules() -> None:
    package = Path(loader.__file__).parents[2]
    users = [p.name for p in package.rglob("*.py") if "RawModule" in p.read_text() or "RawKernel(" in p.read_text()]
    assert users == ["loader.py"]


class FakeArray:
    def __init__(self, dtype: Any, contiguous: bool = True) -> None:
        self.dtype, self.shape = np.dtype(dtype), (2, 2)
        self._c_contiguous = contiguous
        self.data = type("Data", (), {"ptr": 4096})


def test_launch_checks_and_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel("a.cu", "k", "x: f32*, y: *, n: i32, total: i64, eps: f32")
    launched: list[tuple[Any, ...]] = []

    def launch(*args: Any) -> None:
        pointers = (ctypes.c_void_p * 5).from_address(args[9])
        types = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int32, ctypes.c_int64, ctypes.c_float)
        launched.append((*args[:9], *(kind.from_address(at).value for kind, at in zip(types, pointers, strict=True))))

    monkeypatch.setattr(kernel, "_launch_kernel", launch)
    monkeypatch.setattr(kernel, "_current_stream", lambda: type("Stream", (), {"ptr": 77}))
    good = FakeArray(np.float32)
    kernel((5,), (32, 2), (good, None, np.int32(-3), 1 << 40, np.float32(0.5)))
    assert launched == [(0, 5, 1, 1, 32, 2, 1, 0, 77, 4096, 0, -3, 1 << 40, 0.5)]
    for bad, error in (
        ((good, None, 3, 4), TypeError),
        ((FakeArray(np.float16), None, 3, 4, 0.5), TypeError),
        ((FakeArray(np.float32, contiguous=False), None, 3, 4, 0.5), ValueError),
        ((good, None, 1 << 31, 4, 0.5), ValueError),
    ):
        with pytest.raises(error, match="k"):
            kernel((1,), (32,), bad)
    for grid, block in (((0,), (32,)), ((1,), (2048,)), ((1, 70000), (32,))):
        with pytest.raises(ValueError, match="cannot be launched"):
            kernel(grid, block, (good, None, 3, 4, 0.5))
    with pytest.raises(ValueError, match="unknown type"):
        Kernel("a.cu", "k", "x: f31*")


LAUNCHED_AS_USUAL = {"moe_bring", "moe_border"}
"""Where streams part and meet: kernels that have more than one predecessor, or one of another stream."""


def test_every_kernel_waits_for_its_predecessor() -> None:
    """One that does not starts after all before it has ended, which takes longer: only where that is meant."""
    found = 0
    for path in sorted(loader.source_root().glob("*/*.cu")):
        text = path.read_text()
        for part in text.split('extern "C" __global__')[1:]:
            name = re.findall(r"(\w+)\s*\(", re.sub(r"__launch_bounds__\([^{]*?\)\s+(?=\w+\()", "", part))[0]
            waits = dependent.waits_for_predecessor(text, name)
            assert waits == (name not in LAUNCHED_AS_USUAL), f"{path.name}: {name}"
            found += 1
    assert found >= 47
    text = (
        'extern "C" __global__ void a(int n) {\n int c;\n}\n'
        + 'extern "C" __global__ void b() {\n  follow_predecessor();\n}'
    )
    assert not dependent.waits_for_predecessor(text, "a") and dependent.waits_for_predecessor(text, "b")
    assert not dependent.waits_for_predecessor(text, "c")


def test_a_dependent_launch_hands_over_the_drivers_configuration() -> None:
    class Attribute(ctypes.Structure):
        _fields_ = [
            ("id", ctypes.c_uint),
            ("pad", ctypes.c_char * 4),
            ("value", ctypes.c_int),
            ("rest", ctypes.c_char * 60),
        ]

    class Config(ctypes.Structure):
        _fields_ = [
            ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint),
            ("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(Attribute)), ("n", ctypes.c_uint),
        ]  # fmt: skip

    assert ctypes.sizeof(Config) == dependent.CONFIG_BYTES and ctypes.sizeof(Attribute) == 72
    seen: list[Any] = []

    def launch_ex(config: int, function: int, arguments: int, extra: int) -> int:
        c = Config.from_address(config)
        attribute = c.attributes[0]
        seen.append((list(c.grid), list(c.block), c.shared, c.stream, c.n, attribute.id, attribute.value))
        seen.append((function, arguments, extra))
        return 0 if c.shared == 512 else 701

    def check(status: int) -> None:
        raise RuntimeError(f"status {status}")

    launch = dependent.DependentLaunch(launch_ex, check, lambda *args: seen.append(args), lambda stream: stream == 77)
    launch(9, 5, 6, 7, 32, 2, 1, 512, 77, 4096, 0)
    assert seen == [([5, 6, 7], [32, 2, 1], 512, 77, 1, 6, 1), (9, 4096, 0)]
    with pytest.raises(RuntimeError, match="701"):
        launch(9, 5, 6, 7, 32, 2, 1, 0, 77, 4096, 0)
    launch(9, 5, 6, 7, 32, 2, 1, 512, 78, 4096, 0)
    assert seen[-1] == (9, 5, 6, 7, 32, 2, 1, 512, 78, 4096, 0)


@pytest.mark.parametrize(
    ("stream", "capturing", "status", "nodes", "kind", "follows"),
    [
        (5, True, 1, [11], 0, True),  # behind one kernel
        (5, False, 0, [], 0, False),  # no graph: as usual, whatever the stream has done
        (0, True, 1, [11], 0, False),
        (5, True, 2, [11], 0, False),  # a capture that failed
        (5, True, 1, [], 0, False),  # the first of a graph
        (5, True, 1, [11, 12], 0, False),  # where streams meet
        (5, True, 1, [11], 1, False),  # behind a copy
    ],
)
def test_only_behind_one_kernel_of_a_graph_a_launch_is_dependent(
    stream: int, capturing: bool, status: int, nodes: list[int], kind: int, follows: bool
) -> None:
    dependencies = (ctypes.c_void_p * len(nodes))(*nodes)
    types: Any = [
        ctypes.POINTER(ctypes.c_int), ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p),
        ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_size_t),
    ]  # fmt: skip

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, *types)
    def capture_info(of: int, out: Any, unique: int, graph: int, found: Any, edges: Any, n: Any) -> int:
        assert of == stream and not unique and not graph and edges
        out[0], found[0], n[0] = status, ctypes.addressof(dependencies), len(nodes)
        return 0

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int))
    def node_type(node: int, out: Any) -> int:
        assert node == 11
        out[0] = kind
        return 0

    as_driver: list[Any] = []
    for function, n_arguments in ((capture_info, 7), (node_type, 2)):  # as `launcher` declares the driver's functions
        address = ctypes.cast(function, ctypes.c_void_p).value
        as_driver.append(ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * n_arguments)(address or 0))
    assert dependent.Predecessor(lambda of: capturing, as_driver[0], as_driver[1])(stream) is follows


def test_only_what_no_kernel_writes_is_read_past_coherence() -> None:
    """The compiler reads what is const and __restrict__ as __ldg does, by a path whose cache a dependent launch finds
    as it was; so __ldg has one place, the loads that are named for it, and nothing is __restrict__."""
    allowed = {"common/types.cuh": 3}
    for path in sorted(loader.source_root().glob("*/*.cu*")):
        text, name = re.sub(r"//[^\n]*", "", path.read_text()), f"{path.parent.name}/{path.name}"
        assert "__restrict" not in text and ".nc." not in text, name
        grids = len(re.findall(r"__ldg\(iq\w+_grid", text))  # tables of the program
        assert text.count("__ldg") - grids == allowed.get(name, 0), name
        if "load_constant(" in text and name != "common/types.cuh":
            constants = set(re.findall(r"load_constant\(\(?(?:const float4\*\)\(?)?([\w.]+)", text))
            of_models = {"m.bias", "bias", "biases", "factors", "w_from", "vector", "weights"}
            of_models |= {"q_norm", "k_norm", "table"}
            assert constants <= of_models, (name, constants)
        if "load_constant_here(" in text and name != "common/types.cuh":
            assert set(re.findall(r"load_constant_here\(([\w.]+)", text)) == {"weights"}, name
    for path in sorted((loader.source_root() / "moe").glob("*.cu")):
        text = path.read_text()
        if '"common/experts.cuh"' in text:  # weights that moe_fetch brings
            assert "WEIGHTS_HERE" not in text
            assert text.index("#define SETTLED_WEIGHTS") < text.index("#include")


def test_buckets() -> None:
    buckets = [graphs.bucket_of(n) for n in range(1, 300)]
    assert all(bucket >= n for n, bucket in enumerate(buckets, start=1)) and buckets[:9] == [1, 2, 3, 4, 5, 6, 7, 8, 12]
    assert all(bucket <= 1.5 * n for n, bucket in enumerate(buckets, start=1))
    assert len(set(buckets)) < 40
    assert [graphs.block_bucket(n) for n in (1, 16, 17, 100)] == [16, 16, 32, 128]


def test_pad_decode() -> None:
    batch = make_batch(np.random.default_rng(0), [1, 1, 1], [5, 9, 1], (4, 8), 2, (3,))
    padded = graphs.pad_decode(batch, 5, 16)
    assert padded.is_decode and padded.n_seqs == 5 and padded.kv_pages.shape == (2, 5, 16)
    assert padded.positions.tolist() == [4, 8, 0, -1, -1] and padded.query_start.tolist() == list(range(6))
    assert np.array_equal(padded.kv_pages[:, :3, :3], batch.kv_pages)
    assert (padded.kv_pages[:, 3:] == -1).all() and (padded.ssm_pages[3:] == -1).all()
    assert padded.logit_rows.tolist() == [0, 1, 2, -1, -1] and padded.fresh_state[3:].all()
    for name in ("token_ids", "positions", "kv_pages", "ssm_pages", "conv_pages", "fresh_state", "logit_rows"):
        assert getattr(padded, name).dtype == getattr(batch, name).dtype, name
    with pytest.raises(ValueError, match="does not fit"):
        graphs.pad_decode(batch, 2, 16)


class FakeLibrary:
    """The driver's memory functions over a budget of bytes; `ranges` is what is mapped."""

    def __init__(self, budget_bytes: int, failing: str = "") -> None:
        self.budget_bytes, self.failing = budget_bytes, failing
        self.handles: dict[int, int] = {}
        self.ranges: dict[int, int] = {}
        self.next_handle = 1
        for name in ("cuMemGetAllocationGranularity", "cuMemAddressReserve", "cuMemAddressFree", "cuMemCreate",
                     "cuMemRelease", "cuMemMap", "cuMemUnmap", "cuMemSetAccess"):  # fmt: skip
            setattr(self, name, self._function(name))

    def _function(self, name: str) -> Any:
        def call(*args: Any) -> int:
            return 801 if name == self.failing else int(getattr(self, "do_" + name)(*args))

        return call

    def do_cuMemGetAllocationGranularity(self, out: Any, properties: Any, option: int) -> int:
        out._obj.value = 2 * MIB
        return 0

    def do_cuMemAddressReserve(self, out: Any, n: int, *_: int) -> int:
        out._obj.value = 1 << 40
        return 0

    def do_cuMemAddressFree(self, base: int, n: int) -> int:
        return 0 if not self.ranges else 1

    def do_cuMemCreate(self, out: Any, n: int, *_: Any) -> int:
        if sum(self.handles.values()) + n > self.budget_bytes:
            return 2
        out._obj.value = self.next_handle
        self.handles[self.next_handle] = n
        self.next_handle += 1
        return 0

    def do_cuMemRelease(self, handle: int) -> int:
        del self.handles[handle]
        return 0

    def do_cuMemMap(self, address: int, n: int, *_: int) -> int:
        assert address not in self.ranges
        self.ranges[address] = n
        return 0

    def do_cuMemUnmap(self, address: int, n: int) -> int:
        assert self.ranges.pop(address) == n
        return 0

    def do_cuMemSetAccess(self, address: int, n: int, access: Any, count: int) -> int:
        assert self.ranges[address] == n and ctypes.sizeof(access._obj) == 12
        return 0


def test_mapped_pool_bookkeeping() -> None:
    library, waits = FakeLibrary(64 * MIB), [0]
    pool = MappedPool(Driver(0, library), 10 * MIB, 100 * MIB, lambda: waits.__setitem__(0, waits[0] + 1))
    assert pool.mapped_bytes == 10 * MIB and pool.piece_bytes == 2 * MIB and waits == [0]
    pool.resize(64 * MIB)
    assert sum(library.ranges.values()) == 64 * MIB
    with pytest.raises(NotEnoughMemoryError, match="no 80"):
        pool.resize(80 * MIB)  # the device has 64: what was mapped for it is undone
    assert pool.mapped_bytes == 64 * MIB and len(library.handles) == 32
    pool.resize(MIB)
    assert pool.mapped_bytes == 2 * MIB and waits == [1] and list(library.ranges) == [pool.base]
    pool.close()
    assert not library.handles and not library.ranges


def test_a_failing_map_leaves_nothing_behind() -> None:
    library = FakeLibrary(64 * MIB, failing="cuMemSetAccess")
    with pytest.raises(DriverError, match="cuMemSetAccess failed with CUDA error 801"):
        MappedPool(Driver(0, library), 10 * MIB, 100 * MIB, lambda: None)
    assert not library.handles and not library.ranges


def test_pack_penalties() -> None:
    from rimuru.ops.cuda.sampling import has_penalties, pack_penalties

    def ids(*values: int) -> np.ndarray:
        return np.array(values, np.int32)

    params = SampleParams(
        temperature=np.ones(2, np.float32), top_k=np.zeros(2, np.int32), top_p=np.ones(2, np.float32),
        min_p=np.zeros(2, np.float32), uniform=np.zeros(2, np.float32),
        repetition_penalty=np.array([1.0, 1.3], np.float32), presence_penalty=np.array([0.5, 0.0], np.float32),
        frequency_penalty=np.zeros(2, np.float32), history=[ids(1, 2), ids(3, 4, 5)], output_ids=[ids(7), ids(8, 9)],
        output_counts=[ids(2), ids(1, 1)], bias_ids=[ids(), ids(6)],
        bias_values=[np.zeros(0, np.float32), np.array([2.5], np.float32)],
    )  # fmt: skip
    assert has_penalties(params)
    start, flat, values, penalties = pack_penalties(params)
    # bias: none, [6]; history only where the repetition penalty acts; outputs only where the others act
    assert start.tolist() == [[0, 0, 1], [1, 1, 4], [4, 5, 5]]
    assert flat.tolist() == [6, 3, 4, 5, 7] and values.tolist() == [2.5, 0, 0, 0, 2]
    np.testing.assert_allclose(penalties, [[1.0, 0.0, 0.5], [1.3, 0.0, 0.0]], rtol=1e-6)
