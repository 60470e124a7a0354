"""Kernels that norm their own input on a GPU: every case, and equal to launches of their own, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cases import waiting
from cases.attention import QkvShape
from cases.common import Case, compare
from cases.fused import CASES, choose_case

from rimuru.arch.spec import MoeSpec
from rimuru.ops.cuda.routing import choose_by_two_launches

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", params=[False, True], ids=["fast", "deterministic"])
def ops(request: pytest.FixtureRequest) -> Iterator[Any]:
    from rimuru.ops.cuda import CudaOps

    yield CudaOps(deterministic=request.param)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equal_to_launches_of_their_own(ops: Any, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = case.inputs()
    got = case.run(ops, inputs)
    compare(got, case.expected(inputs), case.tolerance, case.tolerances)
    monkeypatch.setattr(ops, "choose_experts", choose_by_two_launches)
    apart = case.run(ops, inputs | {"waits": False})
    assert got.keys() == apart.keys() and all(np.array_equal(got[name], apart[name]) for name in got)


@pytest.mark.parametrize("case", waiting.CASES, ids=lambda case: case.name)
def test_attention_prepares_what_waited(ops: Any, case: Case) -> None:
    """The same bits as of two launches, in the output and in the pages."""
    inputs = case.inputs()
    got, apart = (case.run(ops, inputs | {"waits": waits}) for waits in (True, False))
    assert all(np.array_equal(got[name], apart[name]) for name in got)
    compare(got, case.expected(inputs), case.tolerance, case.tolerances)


@pytest.mark.parametrize("waits", [True, False])
def test_attention_does_not_depend_on_the_batch(waits: bool) -> None:
    """Deterministic: one query goes to a block of eight warps, one of 40 to one of four, prepared there or before."""
    from rimuru.ops.cuda import CudaOps

    many = 40
    shape = QkvShape([1] * many, [5 + 37 * i for i in range(many)], 16, 2, 128, 128, 72, "f16", "head", n_rot=128)
    ops, case = CudaOps(deterministic=True), waiting.waiting_case("of many", shape)
    inputs = case.inputs() | {"waits": waits}
    together, batch = case.run(ops, inputs), inputs["batch"]
    for seq in (0, 7, 21, 39):
        alone = replace(
            batch, token_ids=batch.token_ids[seq : seq + 1], positions=batch.positions[seq : seq + 1],
            seq_of_token=np.zeros(1, np.int32), query_start=np.array([0, 1], np.int32),
            context_len=batch.context_len[seq : seq + 1], logit_rows=np.zeros(1, np.int32),
            fresh_state=batch.fresh_state[seq : seq + 1],
            kv_pages=np.ascontiguousarray(batch.kv_pages[:, seq : seq + 1]),
        )  # fmt: skip
        mine = {name: inputs[name][seq : seq + 1] for name in "qkv"} | {"batch": alone}
        one = waiting.waiting_case("of one", replace(shape, n_new=[1], context_len=[shape.context_len[seq]]))
        got = one.run(ops, inputs | mine)
        assert all(np.array_equal(got[name][0], together[name][seq]) for name in got)


@pytest.mark.parametrize("waits", [True, False])
def test_the_choice_does_not_depend_on_the_batch(ops: Any, waits: bool) -> None:
    """One to four tokens norm themselves, more do not, and from nine on blocks take two."""
    spec, many = MoeSpec(128, 8, 32, renormalise=True), 37
    inputs = choose_case("of many", spec, many, 2048, False).inputs()
    together = choose_case("of many", spec, many, 2048, False).run(ops, inputs)
    for n in (1, 3, 8, 9):
        some = choose_case("of some", spec, n, 2048, waits).run(ops, inputs | {"x": inputs["x"][:n]})
        assert all(np.array_equal(some[name], together[name][:n]) for name in ("ids", "weights", "logits"))
