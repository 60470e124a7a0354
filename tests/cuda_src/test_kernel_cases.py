"""Every kernel has a case that is timed: the launches of all cases are gone through without a device."""

from __future__ import annotations

import gc
import importlib.util
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools" / "bench"))
import kernels
from cases import residency, timed
from cases.common import Case

from rimuru.formats.quants import QuantFormat
from rimuru.ops.cuda import device, loader, sampling
from rimuru.ops.cuda.launch import Kernel
from rimuru.ops.host import HostCopier

H200 = device.DeviceInfo(0, "H200", (9, 0), 132, 140 << 30, 227 << 10, 228 << 10, True)


class DeviceArray(np.ndarray[Any, Any]):
    """Host memory with what launchers ask of an array on a device."""

    @property
    def data(self) -> Any:
        return types.SimpleNamespace(ptr=self.ctypes.data)


def zeros(shape: Any, dtype: Any = np.float32) -> DeviceArray:
    return np.zeros(shape, dtype).view(DeviceArray)


def as_device_array(host: np.ndarray) -> DeviceArray:
    return np.ascontiguousarray(host).view(DeviceArray)


class Staged:
    """StagedBytes whose views are the arrays that were sent."""

    n_bytes = 0

    def reserve(self, n_bytes: int) -> None: ...

    def send(self, arrays: list[np.ndarray]) -> list[int]:
        self.arrays = arrays
        return list(range(len(arrays)))

    def view(self, address: int, shape: Any, dtype: Any) -> DeviceArray:
        return as_device_array(self.arrays[address])


def empty_rows(rng: np.random.Generator, fmt: QuantFormat, n_rows: int, n_in: int, std: float = 0.0) -> np.ndarray:
    return np.zeros((n_rows, fmt.row_bytes(n_in)), np.uint8)


def empty_experts(rng: np.random.Generator, layout: Any, page_bytes: int) -> tuple[np.ndarray, np.ndarray]:
    n_pages = layout.n_experts * layout.n_pages
    return np.zeros(n_pages * page_bytes, np.uint8), np.arange(n_pages).reshape(layout.n_experts, -1)


EMPTY = {
    "random_rows": empty_rows, "fill_pool": empty_experts, "write_kv": lambda *_: None,
    "poisoned": lambda n_bytes: np.zeros(n_bytes, np.uint8),
    "normal": lambda rng, *shape, scale=1.0: np.zeros(shape, np.float32),
}  # fmt: skip
"""What fills the inputs of cases: no kernel runs, and memory that nobody touches costs nothing."""


@pytest.fixture
def ops(monkeypatch: pytest.MonkeyPatch) -> Any:
    """CudaOps without a device, from a module of its own: nothing else may find one that was imported like this."""
    cupy = mock.MagicMock(empty=zeros, zeros=zeros, asarray=as_device_array)
    cupy.asnumpy = lambda array, stream=None: np.asarray(array)
    for name in ("float32", "int32", "uint8", "uint32", "uint64"):
        setattr(cupy, name, getattr(np, name))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    spec = importlib.util.spec_from_file_location("backend", Path(loader.__file__).with_name("backend.py"))
    assert spec is not None and spec.loader is not None
    backend = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(backend)
    monkeypatch.setattr(backend, "StagedBytes", Staged)
    monkeypatch.setattr(sampling, "StagedBytes", Staged)
    monkeypatch.setattr(device.DeviceInfo, "of", lambda device_id: H200)
    for name, module in list(sys.modules.items()):
        for function in EMPTY if name.startswith("cases.") else ():
            if hasattr(module, function):
                monkeypatch.setattr(module, function, EMPTY[function])
    made = backend.CudaOps()
    made.upload, made.copier = as_device_array, HostCopier
    return made


def launched(case: Case, ops: Any, launches: list[Kernel]) -> set[str]:
    """Kernels that the verbs of a case launch; launches: all of them, also of what makes inputs ready."""
    found: list[Kernel] = []

    def note(call: Callable[[], None]) -> None:
        launches.clear()
        call()
        found.extend(launches)

    case.run(kernels.Hooked(ops, kernels.verbs_of(case), note), case.inputs())  # type: ignore[arg-type]
    assert found, f"{case.name}: its verbs launch nothing"
    return {kernels.function_of(kernel) for kernel in found}


def test_every_kernel_has_a_case(ops: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launched by the verbs that are timed, not by what makes their inputs ready."""
    every, launches = kernels.kernel_functions(), list[Kernel]()
    assert len(every) > 50
    monkeypatch.setattr(Kernel, "__call__", lambda kernel, *args, **named: launches.append(kernel))
    used = {name for case in timed.cases() for name in launched(case, ops, launches)}
    assert used <= every
    assert sorted(every - used) == []


def test_rows_name_the_peaks_that_they_are_held_against(
    ops: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A row of each kind, as if every call took a millisecond; kernels without a case are told by name."""
    top = {"bytes_per_s": 4e12, "flops_per_s": 7e14, "link_bytes_per_s": 5e10, "float32_flops_per_s": 6e13}
    streams: list[set[str]] = []

    def a_millisecond(bench: Any, launches: list[Any], n_calls: int) -> float:
        streams.append({name for _, _, named in launches for name in named})
        return 1000.0

    monkeypatch.setattr(Kernel, "__call__", lambda kernel, *args, **named: None)
    monkeypatch.setattr(kernels, "peaks", lambda ops: top)
    monkeypatch.setattr(kernels.DeviceBench, "microseconds", a_millisecond)
    monkeypatch.setattr(
        kernels.DeviceBench, "compile",
        lambda bench, cases: bench._inputs.update({case.name: case.inputs() for case in cases}),
    )  # fmt: skip
    names = ("32 into buffers, aside", "nobody missed, aside", "router T=4096", "summed experts qwen3-30b T=1")
    chosen = [case for case in timed.cases() if case.name.endswith(names)]
    result = kernels.device_result(ops, chosen, 0.0)
    gc.enable()  # a benchmark goes without
    assert len(result["cases"]) == len(names)
    experts, nobody, router, summed = (next(r for r in result["cases"] if r["case"].endswith(name)) for name in names)
    useful = 32 * residency.MODEL_FETCHES["qwen3-30b T=32, 32 into buffers, aside"][0].layout.useful_bytes
    assert experts["bytes_over"] == "link" and experts["bandwidth_share"] == pytest.approx(useful / 1e-3 / 5e10)
    assert nobody["bytes_over"] == "memory" and nobody["bandwidth_share"] < 1e-5
    assert set(experts["kernels"]) == set(nobody["kernels"]) == {"moe_fetch", "moe_bring", "moe_border"}
    assert router["flops_on"] == "float32" and router["flops_share"] == pytest.approx(router["flops"] / 1e-3 / 6e13)
    assert set(summed["kernels"]) == {"moe_gate_up", "moe_down_sum"} and summed["flops_on"] == "products"
    assert "moe/moe_decode.cu: moe_down" in result["without_case"]
    assert "moe/residency.cu: moe_fetch" not in result["without_case"]
    assert not any("stream" in named for named in streams)  # launches of a graph are all on its own
    assert " link " in capsys.readouterr().out
