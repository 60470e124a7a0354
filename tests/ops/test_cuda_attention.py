"""CUDA attention: the cases of every backend, and what only this one has: splits, tiles, padding, freed pages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cases.attention import (
    ATTENTION_CASES,
    QKV_CASES,
    AttentionShape,
    attention_case,
    attention_inputs,
    run_attention,
)
from cases.common import Case, Inputs, compare, relative_error

from rimuru.batch import Batch

pytestmark = pytest.mark.gpu

# The kernels for 16-bit elements round queries and softmax weights to them; everything else is float32.
TOLERANCE = {"f32": 1e-4, "f16": 1e-2, "bf16": 8e-2}

SHAPES = {
    "decode, 2500 keys": AttentionShape([1], [2500], 32, 4, 128, 128, 72, "f16"),
    "decode, one block a context": AttentionShape([1] * 150, [20 + i for i in range(150)], 2, 2, element="f16"),
    "decode, groups of 5": AttentionShape([1] * 2, [33, 90], 10, 2, 96, 64, element="f16"),
    "decode, groups of 32": AttentionShape([1, 1], [70, 71], 32, 1, element="f16"),
    "decode, window of f16": AttentionShape([1] * 4, [3, 64, 130, 700], element="f16", window=100),
    "latent keys of f16": AttentionShape([1, 9], [300, 60], 16, 1, 576, 0, element="f16", value_width=512),
    "latent keys, prompts": AttentionShape([70, 33, 1], [70, 200, 90], 16, 1, 576, 0, 72, "f16", value_width=512),
    "latent keys, 128 heads": AttentionShape([5, 9], [40, 100], 128, 1, 576, 0, element="f16", value_width=512),
    "latent keys of bf16": AttentionShape([20], [66], 16, 1, 576, 0, element="bf16", value_width=512),
    "latent keys, narrow, window": AttentionShape(
        [40, 7], [90, 70], 6, 1, 96, 0, 27, "f16", value_width=64, window=33, sinks=True
    ),
    "prompt of one tile": AttentionShape([8], [8], 16, 2, element="f16"),
    "prompt, 128 dims": AttentionShape([100], [100], 16, 2, 128, 128, 72, "f16"),
    "prompt, 192 and 128 dims": AttentionShape([70], [70], 8, 2, 192, 128, element="f16"),
    "prompt, 256 dims, gate": AttentionShape([70, 40], [70, 90], 16, 2, 256, 256, element="f16", gated=True),
    "prompt, 96 and 80 dims": AttentionShape([70], [90], 6, 2, 96, 80, element="f16"),
    "prompt pieces": AttentionShape([7, 64, 33], [100, 64, 300], element="f16", page_tokens=27),
    "prompt, window": AttentionShape([120], [260], element="f16", window=64),
    "prompt, window, sinks": AttentionShape([90, 3], [200, 131], 16, 2, element="f16", window=128, sinks=True),
    "prompt, bf16": AttentionShape([66], [99], element="bf16"),
    "prompt, groups of 7": AttentionShape([50], [77], 14, 2, element="f16"),
    "mixed": AttentionShape([1, 40, 1, 1, 9], [50, 40, 1, 200, 109], 16, 2, element="f16"),
}
CASES = (*ATTENTION_CASES, *(attention_case(name, shape) for name, shape in SHAPES.items()))


@pytest.fixture(scope="module")
def ops() -> Any:
    from rimuru.ops.cuda import CudaOps

    return CudaOps()


@pytest.fixture(scope="module")
def exact_ops() -> Any:
    from rimuru.ops.cuda import CudaOps

    return CudaOps(deterministic=True)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_attention(case: Case, ops: Any, exact_ops: Any) -> None:
    inputs = case.inputs()
    want = case.expected(inputs)
    loosest = TOLERANCE["bf16" if "bf16" in case.name or "after a context" in case.name else "f16"]
    for backend in (ops, exact_ops):
        compare(case.run(backend, inputs), want, loosest)


def test_float32_elements_stay_float32(ops: Any) -> None:
    case = attention_case("float32", AttentionShape([1, 1, 9], [300, 17, 40], 8, 2, 128, 128, 72))
    inputs = case.inputs()
    compare(case.run(ops, inputs), case.expected(inputs), TOLERANCE["f32"])


@pytest.mark.parametrize("case", QKV_CASES, ids=lambda case: case.name)
def test_prepare_qkv(case: Case, ops: Any) -> None:
    inputs = case.inputs()
    compare(case.run(ops, inputs), case.expected(inputs), 2e-5, case.tolerances)


def rows_of(batch: Batch, tokens: slice, seqs: slice) -> Batch:
    """The part of a batch with these tokens, which belong to these sequences in full or at their end."""
    starts = np.clip(batch.query_start, tokens.start, tokens.stop) - tokens.start
    return replace(
        batch,
        token_ids=batch.token_ids[tokens],
        positions=batch.positions[tokens],
        seq_of_token=batch.seq_of_token[tokens] - seqs.start,
        query_start=starts[seqs.start : seqs.stop + 1].astype(np.int32),
        context_len=batch.context_len[seqs],
        kv_pages=np.ascontiguousarray(batch.kv_pages[:, seqs]),
        fresh_state=batch.fresh_state[seqs],
    )


def part(inputs: Inputs, tokens: slice, seqs: slice) -> Inputs:
    return {**inputs, "batch": rows_of(inputs["batch"], tokens, seqs), "q": inputs["q"][tokens]}


@pytest.mark.parametrize("latent", [False, True])
def test_decode_does_not_depend_on_the_batch(exact_ops: Any, latent: bool) -> None:
    """A sequence alone (many blocks share its context) and among 150 (one block each): the same bits."""
    ops = exact_ops
    kind: dict[str, Any] = (
        {"n_head_kv": 1, "key_dim": 576, "value_dim": 0, "value_width": 512}
        if latent
        else {"n_head_kv": 2, "key_dim": 128, "value_dim": 128}
    )
    shape = AttentionShape([1] * 150, [700 + i for i in range(150)], 8, element="f16", **kind)
    inputs = attention_inputs(shape, np.random.default_rng(1))
    together = run_attention(shape, ops, inputs)["out"]
    for seq in (0, 77, 149):
        alone = run_attention(shape, ops, part(inputs, slice(seq, seq + 1), slice(seq, seq + 1)))["out"]
        assert np.array_equal(alone[0], together[seq])


@pytest.mark.parametrize(
    "shape",
    [
        AttentionShape([130], [130], 8, 2, page_tokens=27, element="f16"),
        AttentionShape([130], [130], 8, 2, page_tokens=27, element="f16", window=50),
        AttentionShape([130], [130], 16, 1, 576, 0, page_tokens=27, element="f16", value_width=512),
    ],
    ids=["all keys", "window", "latent"],
)
def test_prompt_does_not_depend_on_the_pieces(ops: Any, exact_ops: Any, shape: AttentionShape) -> None:
    """The last 30 tokens of a prompt, alone or with the 100 before them: the same bits. Exact: even the last one."""
    inputs = attention_inputs(shape, np.random.default_rng(2))
    for backend, first in ((ops, 100), (exact_ops, 100), (exact_ops, 129)):
        whole = run_attention(shape, backend, inputs)["out"]
        piece = run_attention(shape, backend, part(inputs, slice(first, 130), slice(0, 1)))["out"]
        assert np.array_equal(piece, whole[first:])


def test_pages_left_of_the_window_are_not_read(ops: Any) -> None:
    """Their ids are -1: they were given back."""
    shape = AttentionShape([1, 20], [300, 290], 8, 2, element="f16", window=64)
    inputs = attention_inputs(shape, np.random.default_rng(3))
    want = run_attention(shape, ops, inputs)["out"]
    for seq, first in ((0, 300 - 64), (1, 290 - 20 + 1 - 64)):
        inputs["batch"].kv_pages[0, seq, : first // 16] = -1
    assert np.array_equal(run_attention(shape, ops, inputs)["out"], want)


@pytest.mark.parametrize("fill", [0x00, 0x7E])
@pytest.mark.parametrize("key_dim", [64, 128])
def test_unwritten_slots_never_influence(ops: Any, exact_ops: Any, fill: int, key_dim: int) -> None:
    """Fault M01: NaN patterns (0xFF, as in every case here), 0x7E7E or zeros where nothing was written: equal bits."""
    shape = AttentionShape([1, 5, 1, 40], [10, 30, 65, 75], 8, 2, key_dim, key_dim, page_tokens=27, element="f16")
    inputs = attention_inputs(shape, np.random.default_rng(6))
    halves = inputs["pool"].view(np.uint16)
    pool = np.where(halves == 0xFFFF, np.uint16(fill << 8 | fill), halves).view(np.uint8)
    assert not np.array_equal(pool, inputs["pool"])
    for backend in (ops, exact_ops):
        clean = run_attention(shape, backend, inputs)["out"]
        assert np.isfinite(clean).all()
        assert np.array_equal(run_attention(shape, backend, {**inputs, "pool": pool})["out"], clean)


def test_padding_rows(ops: Any) -> None:
    """Rows with position -1 and no pages change nothing, and give finite values."""
    from rimuru.ops.cuda.graphs import pad_decode

    shape = AttentionShape([1] * 5, [30, 1, 99, 64, 65], 8, 2, element="f16")
    inputs = attention_inputs(shape, np.random.default_rng(4))
    want = run_attention(shape, ops, inputs)["out"]
    padded = pad_decode(inputs["batch"], 8, 16)
    q = np.concatenate([inputs["q"], np.full((3, inputs["q"].shape[1]), np.nan, np.float32)])
    got = run_attention(shape, ops, {**inputs, "batch": padded, "q": q})["out"]
    assert np.array_equal(got[:5], want)
    assert np.array_equal(got[5:], np.zeros_like(got[5:]))


@pytest.mark.parametrize("key_dim", [64, 128])
def test_long_prompt(ops: Any, key_dim: int) -> None:
    """2,000 tokens against one dense float64 softmax."""
    n, heads = 2000, 4
    shape = AttentionShape([n], [n], heads, 1, key_dim, key_dim, 72, "f16")
    inputs = attention_inputs(shape, np.random.default_rng(5))
    pages = inputs["pool"].reshape(-1, shape.page_bytes)[inputs["batch"].kv_pages[0, 0]]
    layer = pages[:, shape.layer_offset_bytes : shape.layer_offset_bytes + shape.group.layer_bytes]
    stored = np.ascontiguousarray(layer).view(np.float16).astype(np.float64)
    k, v = (half.reshape(-1, key_dim)[:n] for half in np.split(stored, 2, axis=1))
    q = inputs["q"].reshape(n, heads, key_dim).astype(np.float64)
    got = run_attention(shape, ops, inputs)["out"].reshape(n, heads, key_dim)
    for head in range(heads):
        scores = np.where(np.tri(n, dtype=bool), q[:, head] @ k.T * key_dim**-0.5, -np.inf)
        shares = np.exp(scores - scores.max(axis=1, keepdims=True))
        assert relative_error(got[:, head], shares @ v / shares.sum(axis=1, keepdims=True)) < TOLERANCE["f16"]
