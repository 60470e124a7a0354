"""The CPU's attention: against the reference in float64, and its independence of batch, pieces, threads and pages."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from cases.attention import ATTENTION_CASES, QKV_CASES, AttentionShape, attention_inputs, run_attention
from cases.common import Case, Inputs, make_batch, poisoned

from rimuru.ops.cpu import CpuOps
from rimuru.ops.cpu.simd_launch import set_threads, threads

OPS = CpuOps()
SHAPES = {
    "plain": AttentionShape([70], [70], page_tokens=27, element="f16"),
    "many heads": AttentionShape([40], [40], n_head=16, n_head_kv=1, gated=True, sinks=True),
    "window": AttentionShape([90], [90], window=20, page_tokens=9, element="bf16"),
    "spans": AttentionShape([1100], [1100], n_head=4, n_head_kv=2, key_dim=32, value_dim=32, page_tokens=72),
}


@pytest.mark.parametrize("case", [*ATTENTION_CASES, *QKV_CASES], ids=lambda case: case.name)
def test_matches_the_reference(case: Case) -> None:
    case.check(OPS)


def _piece(shape: AttentionShape, inputs: Inputs, first: int, last: int) -> np.ndarray:
    """The rows first .. last - 1 of a whole prompt's attention, run as a step of their own."""
    batch = inputs["batch"]
    part = dataclasses.replace(
        batch,
        token_ids=batch.token_ids[first:last],
        positions=batch.positions[first:last],
        seq_of_token=batch.seq_of_token[first:last],
        query_start=np.array([0, last - first], np.int32),
        context_len=np.array([last], np.int32),
    )
    return run_attention(shape, OPS, {**inputs, "batch": part, "q": inputs["q"][first:last]})["out"]


@pytest.mark.parametrize("name", SHAPES)
def test_pieces_change_no_bit(name: str) -> None:
    shape = SHAPES[name]
    inputs = attention_inputs(shape, np.random.default_rng(4))
    whole = run_attention(shape, OPS, inputs)["out"]
    n = shape.n_new[0]
    for size in (1, 7, 64):
        starts = range(0, n, size) if n < 200 else (0, 63, 64, 500, 1023, 1024, n - 1)
        for first in starts:
            last = min(first + size, n)
            assert np.array_equal(_piece(shape, inputs, first, last), whole[first:last]), (size, first)


def test_the_batch_changes_no_bit() -> None:
    shape = AttentionShape([3, 1, 20, 1], [50, 90, 20, 1500], page_tokens=27, element="f16", sinks=True)
    inputs = attention_inputs(shape, np.random.default_rng(5))
    together = run_attention(shape, OPS, inputs)["out"]
    batch = inputs["batch"]
    for seq in range(4):
        rows = slice(int(batch.query_start[seq]), int(batch.query_start[seq + 1]))
        alone = dataclasses.replace(
            batch,
            token_ids=batch.token_ids[rows],
            positions=batch.positions[rows],
            seq_of_token=np.zeros(rows.stop - rows.start, np.int32),
            query_start=np.array([0, rows.stop - rows.start], np.int32),
            context_len=batch.context_len[seq : seq + 1],
            kv_pages=np.ascontiguousarray(batch.kv_pages[:, seq : seq + 1]),
        )
        out = run_attention(shape, OPS, {**inputs, "batch": alone, "q": inputs["q"][rows]})["out"]
        assert np.array_equal(out, together[rows])


def test_page_order_changes_no_bit() -> None:
    shape = AttentionShape([9, 1], [60, 300], page_tokens=9, element="f16")
    inputs = attention_inputs(shape, np.random.default_rng(6))
    batch = inputs["batch"]
    order = np.random.default_rng(7).permutation(shape.n_pages).astype(np.int32)
    pool = poisoned(inputs["pool"].size)
    for old, new in enumerate(order):
        size = shape.page_bytes
        pool[new * size : (new + 1) * size] = inputs["pool"][old * size : (old + 1) * size]
    moved = np.where(batch.kv_pages >= 0, order[batch.kv_pages], -1)
    out = run_attention(shape, OPS, {**inputs, "pool": pool, "batch": dataclasses.replace(batch, kv_pages=moved)})
    assert np.array_equal(out["out"], run_attention(shape, OPS, inputs)["out"])


@pytest.mark.parametrize("shape", [
    AttentionShape([1], [2600], page_tokens=72, element="f16"),
    AttentionShape([1, 1], [2100, 1500], n_head=16, n_head_kv=1, window=1400, sinks=True),
    AttentionShape([130], [300], n_head=16, n_head_kv=4),
])  # fmt: skip
def test_threads_change_no_bit(shape: AttentionShape) -> None:
    """One thread takes whole sequences, several share the spans of long ones."""
    inputs, before = attention_inputs(shape, np.random.default_rng(8)), threads()
    results = []
    try:
        for n in (1, 2, 5):
            set_threads(n)
            results.append(run_attention(shape, OPS, inputs)["out"])
    finally:
        set_threads(before)
    assert np.array_equal(results[0], results[1]) and np.array_equal(results[0], results[2])


@pytest.mark.parametrize("fill", [0x00, 0x7E, 0xFF])
def test_unwritten_slots_never_influence(fill: int) -> None:
    """Fault M01: whatever a page held before, its unwritten slots change no bit."""
    shape = AttentionShape([1, 5, 1], [10, 30, 65], page_tokens=27, element="f16", n_head=4)
    rng = np.random.default_rng(9)
    inputs = attention_inputs(shape, rng)
    clean = run_attention(shape, OPS, inputs)["out"]
    written = inputs["pool"] != 0xFF
    pool = np.where(written, inputs["pool"], np.uint8(fill))
    # bytes of written elements that happen to be 0xFF must stay
    halves = inputs["pool"].view(np.uint16)
    pool.view(np.uint16)[halves != 0xFFFF] = halves[halves != 0xFFFF]
    assert np.isfinite(clean).all()
    assert np.array_equal(run_attention(shape, OPS, {**inputs, "pool": pool})["out"], clean)


def test_given_back_pages_are_never_read() -> None:
    """Pages that have left the window are -1 in the table."""
    shape = AttentionShape([1], [200], page_tokens=16, window=40)
    inputs = attention_inputs(shape, np.random.default_rng(10))
    whole = run_attention(shape, OPS, inputs)["out"]
    batch = inputs["batch"]
    batch.kv_pages[0, 0, : (200 - 40) // 16] = -1
    assert np.array_equal(run_attention(shape, OPS, inputs)["out"], whole)


def test_an_empty_step_is_no_error() -> None:
    shape = AttentionShape([1], [5])
    inputs = attention_inputs(shape, np.random.default_rng(11))
    empty = make_batch(np.random.default_rng(0), [0], [5], [16])
    out = run_attention(shape, OPS, {**inputs, "batch": empty, "q": inputs["q"][:0]})["out"]
    assert out.shape == (0, 8 * 64)
