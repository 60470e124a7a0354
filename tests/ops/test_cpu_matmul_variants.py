"""Instruction variants, the cache of machine code, and the threads that run kernels."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import llvmlite.binding as llvm
import numpy as np
import pytest
from cases.matmul import random_rows

from rimuru.formats.quants import BY_NAME, ENGINE_FORMATS
from rimuru.ops.base import Weight
from rimuru.ops.cpu import dot, matmul, quantize, simd_build, simd_launch
from rimuru.ops.cpu.simd import GENERIC, I32X16, I64, Isa, Kernel, V, choose_isa

SOME = ["q8_0", "q4_k", "q6_k", "q2_k", "iq4_nl", "f32", "iq2_xxs", "iq3_s", "iq1_m", "tq1_0", "nvfp4"]
FEATURES = dict(llvm.get_host_cpu_features())
VARIANTS = [GENERIC]
if FEATURES.get("avx2"):
    VARIANTS.append(choose_isa({"avx2": True}))
if FEATURES.get("avxvnni") or FEATURES.get("avx512vnni"):
    VARIANTS.append(choose_isa({"avxvnni": True}))


def _forget() -> None:
    for cached in (dot.kernels, dot.quantizer):
        cached.cache_clear()


@pytest.fixture
def use_variant(monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    def use(isa: Isa) -> None:
        monkeypatch.setattr(simd_build, "host_isa", lambda: isa)
        _forget()

    yield use
    monkeypatch.undo()
    _forget()


def _results(formats: list[str]) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    results = []
    for name in formats:
        n_in = 768 if BY_NAME[name].block_elements == 256 else 320
        weight = Weight(random_rows(rng, BY_NAME[name], 21, n_in), BY_NAME[name], 21, n_in)
        for n_tokens in (1, 7):
            x = quantize.act(n_tokens, n_in)
            x.f32[:] = rng.standard_normal((n_tokens, n_in))
            quantize.quantize_act(x, n_tokens)
            out = np.zeros((n_tokens, 21), np.float32)
            matmul.linear(x, [weight], [out])
            results.append(out)
    return results


@pytest.mark.parametrize("isa", VARIANTS, ids=lambda isa: isa.name)
def test_variants_give_the_same_bits(isa: Isa, use_variant) -> None:  # type: ignore[no-untyped-def]
    # one format of each kind of scales and of each way to unpack; all of them in the plain variant
    names = [f.name for f in ENGINE_FORMATS] if isa is GENERIC else SOME
    want = _results(names)
    use_variant(isa)
    assert dot.kernels("q8_0").tiles[1:], "a variant has tiles of one and of two tokens"
    for a, b in zip(_results(names), want, strict=True):
        assert np.array_equal(a, b)


def test_choice_of_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_isa({"avx512vnni": True, "avx512bw": True, "avx512vl": True, "avx2": True}).name == "avx512vnni"
    assert choose_isa({"avxvnni": True, "avx2": True}).name == "avxvnni"
    assert choose_isa({"avx2": True, "avx512vnni": False}).name == "avx2"
    assert choose_isa({"neon": True}) is GENERIC
    monkeypatch.setenv("RIMURU_CPU_KERNELS", "generic")
    simd_build.host_isa.cache_clear()
    assert simd_build.host_isa() is GENERIC
    monkeypatch.undo()
    simd_build.host_isa.cache_clear()


def test_dot4_extremes() -> None:
    """255 * -127 four times per lane: beyond what saturating 16-bit instructions hold."""

    def emit(k: Kernel, acc: V, u8: V, s8: V, out: V) -> None:
        k.store(k.dot4(k.load(acc, I32X16), k.load(u8, I32X16), k.load(s8, I32X16)), out)

    rng = np.random.default_rng(1)
    for isa in [*VARIANTS, simd_build.host_isa()]:
        address = simd_build.build(f"test_dot4_{isa.name}", 4, emit, isa)
        for u8, s8 in (
            (np.full(64, 255, np.uint8), np.full(64, -127, np.int8)),
            (rng.integers(0, 256, 64).astype(np.uint8), rng.integers(-127, 128, 64).astype(np.int8)),
        ):
            acc, out = np.arange(16, dtype=np.int32), np.zeros(16, np.int32)
            _call(address, acc, u8, s8, out)
            assert np.array_equal(out, acc + (u8.astype(np.int32) * s8).reshape(16, 4).sum(1))


def _call(address: int, *arrays: np.ndarray) -> None:
    ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * len(arrays))(address)(*(a.ctypes.data for a in arrays))


def test_damaged_cache_file_is_rebuilt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def emit(k: Kernel, out: V) -> None:
        k.store(k.const(42, I64), out)

    monkeypatch.setattr(simd_build, "_cache_folder_once", lambda: tmp_path)
    out = np.zeros(1, np.int64)

    def build_and_run() -> int:
        simd_build.build.cache_clear()
        out[0] = 0
        _call(simd_build.build("test_cache", 1, emit, GENERIC), out)
        return int(out[0])

    assert build_and_run() == 42
    (file,) = tmp_path.iterdir()
    sound = file.read_bytes()
    assert build_and_run() == 42  # from the file
    for damage in (sound[:-1], sound[:40], b"", sound[:50] + bytes([sound[50] ^ 1]) + sound[51:]):
        file.write_bytes(damage)
        assert build_and_run() == 42
        assert file.read_bytes() == sound


def test_read_only_cache_costs_only_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def emit(k: Kernel, out: V) -> None:
        k.store(k.const(43, I64), out)

    monkeypatch.setattr(simd_build, "_cache_folder_once", lambda: tmp_path / "absent")
    out = np.zeros(1, np.int64)
    _call(simd_build.build("test_no_cache", 1, emit, GENERIC), out)
    assert out[0] == 43


def test_launches_from_several_threads() -> None:
    """Callers share the cores but nothing else."""
    rng = np.random.default_rng(2)
    before = simd_launch.threads()
    weight = Weight(random_rows(rng, BY_NAME["q4_0"], 512, 512), BY_NAME["q4_0"], 512, 512)
    inputs, wanted = [], []
    for n_tokens in (1, 2, 9):
        x = quantize.act(n_tokens, 512)
        x.f32[:] = rng.standard_normal((n_tokens, 512))
        quantize.quantize_act(x, n_tokens)
        out = np.zeros((n_tokens, 512), np.float32)
        matmul.linear(x, [weight], [out])
        inputs.append(x)
        wanted.append(out)
    wrong: list[int] = []

    def caller(i: int) -> None:
        for _ in range(60):
            out = np.zeros_like(wanted[i])
            matmul.linear(inputs[i], [weight], [out])
            if not np.array_equal(out, wanted[i]):
                wrong.append(i)

    try:
        for n in (2, 4, 1):
            simd_launch.set_threads(n)
            callers = [threading.Thread(target=caller, args=(i,)) for i in range(3)]
            for thread in callers:
                thread.start()
            for thread in callers:
                thread.join()
    finally:
        simd_launch.set_threads(before)
    assert not wrong


def test_sleeping_threads_wake_up() -> None:
    """Launches far apart find the other thread asleep, and wake it."""
    before = simd_launch.threads()
    rng = np.random.default_rng(3)
    weight = Weight(random_rows(rng, BY_NAME["q8_0"], 2048, 1024), BY_NAME["q8_0"], 2048, 1024)
    x = quantize.act(1, 1024)
    x.f32[:] = rng.standard_normal((1, 1024))
    quantize.quantize_act(x, 1)
    out = np.zeros((1, 2048), np.float32)
    try:
        simd_launch.set_threads(2)
        results = []
        for _ in range(3):
            out[:] = 0
            matmul.linear(x, [weight], [out])
            results.append(out.copy())
            pool = simd_launch._current_pool()
            parked = simd_launch._PARKED + simd_launch._LINE
            deadline = time.monotonic() + 20
            while pool.memory[parked] == 0:
                assert time.monotonic() < deadline, "the thread never went to sleep"
                time.sleep(0.001)
        generation = pool.memory[simd_launch._GENERATION]
        matmul.linear(x, [weight], [out])
        assert pool.memory[simd_launch._GENERATION] == generation + 1
        assert all(np.array_equal(r, results[0]) for r in results)
    finally:
        simd_launch.set_threads(before)
