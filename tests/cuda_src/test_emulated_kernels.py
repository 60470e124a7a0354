"""Launchers and kernels of matmul and moe on the host: the cases of the device, one of each kind of kernel."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
import emulate
from cases import matmul as matmul_cases
from cases import moe as moe_cases
from cases.common import Case

from rimuru.arch.spec import MoeSpec
from rimuru.ops.base import ExpertTable
from rimuru.ops.cuda.launch import Kernel

pytestmark = [
    pytest.mark.skipif(emulate.compiler() is None, reason="no C++ compiler on this machine"),
    pytest.mark.usefixtures("on_the_host"),
]

LINEAR = (
    "q, k, v of three types T=1", "q, k, v of three types T=17", "q4_k 300x512 T=130", "q5_0 3x288 T=8",
    "f32 and q8_0 T=20", "f32 router 70x80 T=1030", "q4_k constant 1e5 T=1", "factors T=1", "factors T=17",
    "iq1_s 127x256 T=1", "iq2_xs 127x256 T=40", "iq3_xxs 300x512 T=130", "tq2_0 5x768 T=9",
)  # fmt: skip
EXPERTS = (
    "q4_k_m T=1", "q4_k_m T=8", "q4_k_m T=20", "three types T=7", "mxfp4 T=60", "biases T=64", "no gate T=64",
    "q8_0 T=700", "factors T=1", "factors T=7", "factors T=64", "iq1_m T=2", "iq2_s T=2", "iq3_s T=2",
    "factors and biases T=1", "factors and biases T=7", "factors and biases T=64",
)  # fmt: skip
ROUTES = (
    "ties",
    "E01 renormalised",
    "sigmoid in groups",
    "selected",
    "512 experts, the last ones win",
    "replayed T=97",
)


def pick(cases: list[Case], family: str, names: tuple[str, ...]) -> list[Case]:
    found = {case.name: case for case in cases}
    return [found[f"{family} {name}"] for name in names]


CASES = [
    *pick(matmul_cases.EDGE_CASES, "linear", LINEAR),
    *pick(moe_cases.EDGE_CASES, "experts", EXPERTS),
    *pick(moe_cases.SUMMED_CASES, "summed experts", ("q4_k_m T=1", "q4_k_m T=4", "q4_k_m T=20")),
    *pick(moe_cases.ROUTE_CASES, "route", ROUTES),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case(case: Case) -> None:
    case.check(emulate.EmulatedOps())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "n_out", "width", "n_tokens"),
    [
        ("q4_k", 35, 2560, 7),
        ("q6_k", 35, 2048, 11),
        ("q8_0", 35, 2080, 8),
        ("q4_k", 24, 4352, 5),
        ("q5_0", 10300, 64, 6),
    ],
)
def test_strips_whose_warps_share_rows(name: str, n_out: int, width: int, n_tokens: int) -> None:
    """By 8 warps and by 16, where each has one step, where some have two, and none; many rows through shared memory."""
    case = matmul_cases.linear_case("shared rows", [name], [n_out], width, n_tokens, full=True)
    case.check(emulate.EmulatedOps())  # type: ignore[arg-type]


def test_deterministic_results_do_not_depend_on_the_batch() -> None:
    rng = np.random.default_rng(3)
    ops: Any = emulate.EmulatedOps(deterministic=True)
    fmt = matmul_cases.BY_NAME["q4_k"]
    weight = ops.weight(matmul_cases.random_rows(rng, fmt, 40, 512), fmt, 512)
    x = rng.standard_normal((11, 512)).astype(np.float32)

    def rows(chosen: list[int]) -> np.ndarray:
        out = np.zeros((len(chosen), 40), np.float32)
        ops.linear(matmul_cases.filled_act(ops, x[chosen]), [weight], [out])
        return out

    whole = rows(list(range(11)))
    for chosen in ([0], [4, 2], [10, 9, 8, 7, 6]):
        assert np.array_equal(rows(chosen), whole[chosen])


def test_experts_are_equal_wherever_they_lie() -> None:
    rng = np.random.default_rng(4)
    ops: Any = emulate.EmulatedOps()
    spec = MoeSpec(4, 2, 64)
    layout = moe_cases.expert_layout({"gate": "q5_0", "up": "q5_0", "down": "q8_0"}, 4, 64, 64, 4096)
    pool, pages = moe_cases.fill_pool(rng, layout, 4096)
    x = moe_cases.normal(rng, 3, 64)
    ids = np.array([[0, 1], [1, 3], [2, 0]], np.int32)
    results = []
    for shift in (0, 4096, 3 * 4096):
        moved = emulate.aligned(pool.size + shift, np.uint8)
        moved[shift:] = pool
        table = ExpertTable(layout, 4096, moved.ctypes.data + shift + pages.astype(np.int64) * 4096, {})
        scratch = ops.moe_scratch(3, spec, 64)
        ops.moe_experts(matmul_cases.filled_act(ops, x), ids, table, None, spec, scratch)
        results.append(scratch.out[:6].copy())
    assert np.array_equal(results[0], results[1]) and np.array_equal(results[0], results[2])


@pytest.mark.parametrize("n_tokens", [2, 6, 20, 90])
def test_experts_in_two_turns_are_bit_equal(n_tokens: int, emulator: emulate.Emulator) -> None:
    """Some experts first and the others later, as where the others come meanwhile: by every family of kernels."""
    ops: Any = emulate.EmulatedOps()
    spec = MoeSpec(6, 3, 64)
    case = moe_cases.experts_case("in turns", {"gate": "q5_0", "up": "q5_0", "down": "q8_0"}, spec, 64, n_tokens)
    inputs = case.inputs()
    first = len(emulator.launched)
    whole = case.run(ops, inputs)["slots"]
    family = {2: "moe_gate_up", 6: "moe_gate_up_strip", 20: "moe_gate_up_strip", 90: "moe_gate_up_tile"}[n_tokens]
    assert family in emulator.launched[first:]
    table, pool = moe_cases.expert_table(ops, inputs)
    scratch, x = ops.moe_scratch(n_tokens, spec, 64), matmul_cases.filled_act(ops, inputs["x"])
    now = np.array([True, False, True, True, False, False])
    for active in (now, ~now):
        ops.moe_experts(x, ops.upload(inputs["ids"]), table, ops.upload(active), spec, scratch)
    assert np.array_equal(scratch.out[: n_tokens * spec.top_k], whole)
    del pool


@pytest.mark.parametrize(
    ("down", "top_k", "width", "n_tokens"),
    [
        ("q8_0", 3, 256, 2), ("q6_k", 9, 256, 1), ("q5_0", 2, 1280, 1), ("q6_k", 2, 256, 7), ("q4_k", 1, 256, 13),
        ("nvfp4", 4, 256, 3),
    ],
)  # fmt: skip
def test_down_and_the_sum_in_one_kernel_are_equal_to_both(
    down: str, top_k: int, width: int, n_tokens: int, emulator: emulate.Emulator
) -> None:
    """Slots beyond the block's warps, both numbers of lanes a row; thirteen tokens are sorted and take two kernels."""
    ops: Any = emulate.EmulatedOps()
    spec = MoeSpec(10, top_k, width)
    formats = {"gate": "q5_0", "up": "q5_0", "down": down}
    vectors = {"biases": top_k in (4, 9), "factors": top_k in (3, 4)}
    case = moe_cases.experts_case("summed", formats, spec, 64, n_tokens, **vectors)
    inputs = case.inputs()
    apart = case.run(ops, inputs)["out"]
    first = len(emulator.launched)
    at_once = moe_cases.summed_at_once(ops, inputs, spec)
    names = [name for name in emulator.launched[first:] if name.startswith("moe_") and name != "moe_sort"]
    assert names == (["moe_gate_up", "moe_down_sum"] if n_tokens < 13 else ["moe_gate_up", "moe_down", "moe_combine"])
    assert np.array_equal(apart, at_once) and not np.array_equal(apart, inputs["before"])


def test_the_kernel_of_a_launch_does_not_hang_on_the_order_of_its_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Q6_K bounds the rows a lane, wherever it is."""
    from rimuru.ops.cuda import matmul

    launched: list[Kernel] = []
    monkeypatch.setattr(Kernel, "__call__", lambda kernel, *args, **options: launched.append(kernel))
    ops: Any = emulate.EmulatedOps()
    rows = {"q4_k": 16000, "q6_k": 1000}
    types = {name: matmul_cases.BY_NAME[name] for name in rows}
    weights = {n: ops.weight(np.zeros((rows[n], fmt.row_bytes(256)), np.uint8), fmt, 256) for n, fmt in types.items()}
    gemv = set()
    for names in (("q4_k", "q6_k"), ("q6_k", "q4_k")):
        outs = [np.zeros((1, rows[name]), np.float32) for name in names]
        x = matmul_cases.filled_act(ops, np.ones((1, 256), np.float32))
        launched.clear()
        matmul.linear(x, [weights[name] for name in names], outs)
        (kernel,) = [kernel for kernel in launched if kernel.name == "gemv"]
        assert kernel.defines["LANE_ROWS"] == 2
        gemv.add(id(kernel))
    assert len(gemv) == 1
