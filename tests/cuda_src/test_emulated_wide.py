"""Experts on tensor cores with weights by way of shared memory, bit for bit as without; and with few tokens by few
lanes a row."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
import emulate
import nvrtc
from cases import matmul as matmul_cases
from cases import moe as moe_cases
from cases.common import Case

from rimuru.arch.spec import MoeSpec
from rimuru.formats.quants import BY_NAME, ENGINE_FORMATS
from rimuru.ops.cuda import moe, moe_kernels
from rimuru.ops.cuda.launch import Kernel

emulated = pytest.mark.skipif(emulate.compiler() is None, reason="no C++ compiler on this machine")


@pytest.fixture(scope="module")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> emulate.Emulator:
    return emulate.Emulator(tmp_path_factory.mktemp("kernels"))


@pytest.fixture
def launched(emulator: emulate.Emulator, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Kernel]]:
    kernels: list[Kernel] = []

    def call(kernel: Kernel, grid: Any, block: Any, args: Any, shared_bytes: int = 0, stream: Any = None) -> None:
        assert shared_bytes <= moe_kernels.MAX_SHARED_BYTES
        kernels.append(kernel)
        emulator.launch(kernel, grid, block, args)

    monkeypatch.setitem(sys.modules, "cupy", emulate.fake_cupy())
    monkeypatch.setattr(Kernel, "__call__", call)
    yield kernels


def set_rings(monkeypatch: pytest.MonkeyPatch, slots: int) -> None:
    """As many for every type; 0: none."""
    rings = {fmt.name: (slots, 512) for fmt in ENGINE_FORMATS} if slots else {}
    for table in (moe_kernels.UP_RINGS, moe_kernels.DOWN_RINGS):
        for n_tokens in table:
            monkeypatch.setitem(table, n_tokens, rings)


def of_types(gate: str | None, up: str, down: str) -> dict[str, str]:
    return ({} if gate is None else {"gate": gate}) | {"up": up, "down": down}


def case(formats: dict[str, str], spec: MoeSpec, n_in: int, n_tokens: int, **options: Any) -> Case:
    return moe_cases.experts_case("rings", formats, spec, n_in, n_tokens, **options)


CASES = [
    case(of_types("q4_k", "q4_k", "q6_k"), MoeSpec(3, 1, 768), 2048, 9),  # eight steps and three, as Qwen3-30B
    case(of_types("q4_k", "q4_k", "q4_k"), MoeSpec(3, 2, 256), 4352, 13),  # more than one piece of activations
    case(of_types("q6_k", "q4_k", "q4_k"), MoeSpec(3, 2, 256), 512, 9, page_bytes=20000),  # two types in one strip
    case(of_types("q8_0", "q8_0", "q5_0"), MoeSpec(4, 2, 96), 352, 7, biases=True),  # rows that end within a step
    case(of_types(None, "mxfp4", "mxfp4"), MoeSpec(4, 2, 288), 288, 17),  # rows at odd addresses; 16 tokens
    case(of_types("nvfp4", "nvfp4", "nvfp4"), MoeSpec(4, 2, 128), 192, 9, factors=True, active=True),
    case(
        of_types("q4_k", "q4_k", "q4_k"), MoeSpec(4, 2, 256), 1280, 30
    ),  # 32 tokens, one slot, two pieces of activations
    case(of_types("f16", "f16", "q8_0"), MoeSpec(3, 2, 64), 288, 9, repeated=True),
]


@emulated
@pytest.mark.parametrize("case", CASES, ids=lambda case: str(CASES.index(case)))
def test_rings_give_the_same_bits(case: Case, launched: list[Kernel], monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, ops = case.inputs(), emulate.EmulatedOps()
    set_rings(monkeypatch, 0)
    without = case.run(ops, inputs)  # type: ignore[arg-type]
    assert not any("STRIP_RING" in kernel.defines for kernel in launched)
    set_rings(monkeypatch, 3)
    launched.clear()
    found = case.run(ops, inputs)  # type: ignore[arg-type]
    rings = [kernel.name for kernel in launched if "STRIP_RING" in kernel.defines]
    assert rings == ["moe_gate_up_strip", "moe_down_strip"]
    assert all(np.array_equal(found[name], without[name]) for name in without)
    case.check(ops)  # type: ignore[arg-type]


@emulated
@pytest.mark.parametrize(
    ("types", "rings"),
    [
        (("q4_k", "q4_k", "q6_k"), [(1, 768), (1, 768)]),
        (("q4_k", "q4_k", "q8_0"), [(1, 768), (1, 512)]),
        (("q4_k", "q4_k", "q5_0"), [(1, 768), (1, 768)]),
    ],
    ids=["qwen3", "deepseek q8_0", "deepseek q5_0"],
)
def test_rings_of_strips_as_they_are_chosen(
    types: tuple[str, str, str], rings: list[tuple[int, int]], launched: list[Kernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = case(of_types(*types), MoeSpec(5, 2, 512), 1024, 9)
    inputs, ops = chosen.inputs(), emulate.EmulatedOps()
    found = chosen.run(ops, inputs)  # type: ignore[arg-type]
    strips = [kernel.defines for kernel in launched if "STRIP_TOKENS" in kernel.defines]
    assert [(defines.get("STRIP_RING"), defines["STRIP_RESIDENT"]) for defines in strips] == rings
    chosen.check(ops)  # type: ignore[arg-type]
    set_rings(monkeypatch, 0)
    without = chosen.run(ops, inputs)  # type: ignore[arg-type]
    assert all(np.array_equal(found[name], without[name]) for name in without)


FEW = [
    ("q6_k", 768, 1, ("moe_down_sum", 4, 1)), ("q6_k", 768, 3, ("moe_down_sum", 4, 2)),
    ("q4_k", 768, 2, ("moe_down_sum", 4, 2)), ("q6_k", 512, 2, ("moe_down_sum", 8, 2)),
    ("q6_k", 1280, 2, ("moe_down_sum", 32, 2)), ("q5_k", 256, 1, ("moe_down_sum", 4, 1)),
]  # fmt: skip


@emulated
@pytest.mark.parametrize(("down", "width", "n_tokens", "found"), FEW)
def test_few_tokens(down: str, width: int, n_tokens: int, found: tuple[str, int, int], launched: list[Kernel]) -> None:
    """Right, and equal by one kernel and by two; the same for every token whatever else is in the batch."""
    spec = MoeSpec(5, 2, width)
    chosen = case(of_types("q6_k", "q6_k", down), spec, 512, n_tokens)
    inputs, ops = chosen.inputs(), emulate.EmulatedOps()
    apart = chosen.run(ops, inputs)["out"]  # type: ignore[arg-type]
    launched.clear()
    assert np.array_equal(moe_cases.summed_at_once(ops, inputs, spec), apart)
    last = next(kernel for kernel in launched if kernel.name.startswith("moe_down"))
    assert (last.name, last.defines["ROW_LANES"], last.defines["LANE_ROWS"]) == found
    chosen.check(ops)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("n_tokens", "n_experts", "down", "tile"),
    [(12, 4, "q5_0", 1), (13, 128, "q5_0", 2), (16, 128, "q4_k", 1), (16, 64, "q6_k", 4), (17, 256, "q6_k", 2)],
)
def test_sparse_assignments_of_measured_types_stay_unsorted(
    n_tokens: int, n_experts: int, down: str, tile: int
) -> None:
    assert moe.dot_tile(n_tokens, n_tokens * 8 / n_experts, down) == tile


@emulated
def test_results_of_few_lanes_do_not_depend_on_the_batch(launched: list[Kernel]) -> None:
    """Alone, and with others, sorted, in tiles of tokens."""
    ops: Any = emulate.EmulatedOps(deterministic=True)
    spec = MoeSpec(3, 2, 768)
    chosen = case(of_types("q4_k", "q4_k", "q6_k"), spec, 256, 14)
    inputs = chosen.inputs()
    table, pool = moe_cases.expert_table(ops, inputs)

    def slots(tokens: list[int]) -> np.ndarray:
        scratch = ops.moe_scratch(len(tokens), spec, 256)
        x = matmul_cases.filled_act(ops, inputs["x"][tokens])
        ops.moe_experts(x, ops.upload(inputs["ids"][tokens]), table, None, spec, scratch)
        return scratch.out[: 2 * len(tokens)].copy()

    whole = slots(list(range(14)))
    kinds = {
        (kernel.defines["TOKEN_TILE"], kernel.defines["LANE_ROWS"]) for kernel in launched if "down" in kernel.name
    }
    for tokens in ([0], [5, 2], [13, 7, 1]):
        found = slots(tokens).reshape(len(tokens), 2, -1)
        assert np.array_equal(found, whole.reshape(14, 2, -1)[tokens])
    kinds |= {
        (kernel.defines["TOKEN_TILE"], kernel.defines["LANE_ROWS"]) for kernel in launched if "down" in kernel.name
    }
    assert len(kinds) > 2
    del pool


def ring_shape(name: str, load: float, n_in: int) -> moe_kernels.Shape:
    return moe_kernels.with_ring(moe_kernels.up_matrix_shape(load), [BY_NAME[name]], n_in, moe_kernels.UP_RINGS)


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("fmt", ENGINE_FORMATS, ids=lambda fmt: fmt.name)
def test_a_ring_holds_every_step_and_fits(fmt: Any, slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever a row starts, the whole 16 bytes that a step lies in; rows an odd number of them apart."""
    set_rings(monkeypatch, slots)
    step_bytes = 256 // fmt.block_elements * fmt.block_bytes
    unit = np.gcd(fmt.block_bytes, 16) if not fmt.is_float else 16
    starts = np.arange(0, 16, unit)
    pitch = moe_kernels.ring_pitch(fmt)
    assert pitch >= max((start + step_bytes + 15) // 16 * 16 for start in starts) and pitch // 16 % 2 == 1
    for load in (1, 8, 20, 30):
        for n_in in (256, 768, 2048, 7168):
            shape = ring_shape(fmt.name, load, n_in)
            assert shape.shared_bytes <= 99 * 1024 and shape.ring <= slots


@pytest.mark.parametrize("name", ["q4_k", "q6_k", "q8_0"])
def test_no_ring_where_it_would_cost_threads(name: str) -> None:
    """A multiprocessor of 100 KiB holds one block with a ring where it held two without."""
    for load in (1, 8):
        shape = moe_kernels.down_matrix_shape(load)
        for kib, has_ring in ((100, False), (228, True)):
            found = moe_kernels.with_ring(shape, [BY_NAME[name]], 768, moe_kernels.DOWN_RINGS, kib << 10)
            assert (found.ring > 0) == has_ring and (has_ring or found == shape)
            assert not has_ring or found.resident // found.threads * found.shared_bytes <= kib << 10


@pytest.mark.skipif(not nvrtc.available(), reason="no compiler library")
@pytest.mark.parametrize("architecture", [80, 90, 120])
@pytest.mark.parametrize("name", ["q4_k", "q6_k", "q8_0", "mxfp4"])
def test_they_compile(name: str, architecture: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "mxfp4":  # rows at any address
        set_rings(monkeypatch, 3)
    for load in (2, 8):
        up = moe_kernels.up_matrix_kernel(name, name, ring_shape(name, load, 2048), listed=True)
        after = moe_kernels.down_matrix_shape(load)
        after = moe_kernels.with_ring(after, [BY_NAME[name]], 768, moe_kernels.DOWN_RINGS)
        down = moe_kernels.down_matrix_kernel(name, after, listed=True)
        for kernel in (down,) if name == "q8_0" else (up, down):
            text = nvrtc.compile_source(kernel.path, kernel.defines, architecture, kind="PTX").decode(errors="replace")
            # Weights are copied past the registers, and read out of shared memory by loads that know whose it is.
            assert "cp.async.cg.shared.global" in text and "ld.shared" in text
            assert not [line for line in text.splitlines() if "\tld.u" in line or "\tld.v" in line or "\tld.b" in line]
