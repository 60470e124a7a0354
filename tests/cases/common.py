"""The form of a kernel case, and the paged memory that cases are run in.

A case is one call of one verb. `run` works on any backend: it uploads the inputs, calls the verb, and returns what the
verb wrote as NumPy arrays. The truth is the same `run` on the reference backend in float64.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from rimuru.batch import Batch
from rimuru.memory.specs import ConvLayout, KvGroupLayout, SsmLayout
from rimuru.ops.base import Ops
from rimuru.ops.host import encode
from rimuru.ops.reference import ReferenceOps

Inputs = dict[str, Any]
Outputs = dict[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class Case:
    """One call of a verb.

    tolerance: greatest allowed |got - want|, in units of the root mean square of the wanted array. Integer and bool
    outputs must be equal. kind: "edge" shapes are tested, "model" shapes are tested and timed.
    """

    name: str
    make_inputs: Callable[[np.random.Generator], Inputs]
    run: Callable[[Ops, Inputs], Outputs]
    bytes_moved: Callable[[Inputs], int]
    flops: Callable[[Inputs], int]
    tolerance: float
    kind: Literal["edge", "model"] = "edge"
    tolerances: dict[str, float] = field(default_factory=dict)
    """Tolerance of single outputs, where it differs."""
    bytes_over: Literal["memory", "link"] = "memory"
    """What the bytes come through: the device's memory, or its link to the host's."""
    flops_on: Literal["products", "float32"] = "products"
    """What the flops run on: units for products of 16-bit matrices, or those for float32."""

    def inputs(self) -> Inputs:
        """The same inputs on every call."""
        return self.make_inputs(np.random.default_rng(zlib.crc32(self.name.encode())))

    def expected(self, inputs: Inputs) -> Outputs:
        """The outputs in float64."""
        return self.run(ReferenceOps(np.float64), inputs)

    def check(self, ops: Ops) -> None:
        """Run on a backend and compare; raises AssertionError with the output's name and the error."""
        inputs = self.inputs()
        compare(self.run(ops, inputs), self.expected(inputs), self.tolerance, self.tolerances)


def compare(got: Outputs, want: Outputs, tolerance: float, tolerances: dict[str, float] | None = None) -> None:
    """Assert that outputs agree; see `Case.tolerance`. NaN is never accepted in `got`."""
    assert got.keys() == want.keys()
    for name, wanted in want.items():
        value = got[name]
        assert value.shape == wanted.shape, f"{name}: shape {value.shape}, expected {wanted.shape}"
        if wanted.dtype.kind in "iub":
            assert np.array_equal(value, wanted), f"{name}: {np.count_nonzero(value != wanted)} entries differ"
            continue
        limit = (tolerances or {}).get(name, tolerance)
        error = relative_error(value, wanted)
        assert error <= limit, f"{name}: error {error:.3g}, allowed {limit:.3g}"


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    """Greatest absolute difference over the root mean square of `want`; inf where `got` is not finite."""
    if want.size == 0:
        return 0.0
    if not np.isfinite(got).all():
        return float("inf")
    scale = float(np.sqrt(np.mean(np.square(want.astype(np.float64)))))
    return float(np.abs(got.astype(np.float64) - want).max()) / max(scale, 1e-30)


def address_of(array: Any) -> int:
    """Address of an uploaded array, on the host or on a device."""
    return int(array.ctypes.data) if isinstance(array, np.ndarray) else int(array.data.ptr)


def normal(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> np.ndarray:
    """float32 normal numbers."""
    return (rng.standard_normal(shape) * scale).astype(np.float32)


def act_of(ops: Ops, values: np.ndarray) -> Any:
    """An Act that holds uploaded float32 values (its `quant` is not filled)."""
    act = ops.act(values.shape[0], values.shape[1])
    act.f32[...] = ops.upload(values)
    return act


# ---- batches and pages


def make_batch(
    rng: np.random.Generator,
    n_new: Sequence[int],
    context_len: Sequence[int],
    page_tokens: Sequence[int] = (),
    n_recurrent: int = 0,
    conv_rows: Sequence[int] = (),
) -> Batch:
    """A step in which sequence s brings its last n_new[s] of context_len[s] tokens; page ids are shuffled.

    page_tokens: of each KV group. conv_rows: rows (consecutive pages) of each convolution layer's state.
    A sequence whose tokens are all new has fresh_state.
    """
    n_seqs = len(n_new)
    starts = np.concatenate([[0], np.cumsum(n_new)]).astype(np.int32)
    positions = np.concatenate([np.arange(c - n, c) for n, c in zip(n_new, context_len, strict=True)])
    blocks = [[-(-c // tokens) for c in context_len] for tokens in page_tokens]
    ids = rng.permutation(sum(map(sum, blocks)))
    kv_pages = np.full((len(page_tokens), n_seqs, max([1, *(b for row in blocks for b in row)])), -1, np.int32)
    at = 0
    for group, row in enumerate(blocks):
        for seq, count in enumerate(row):
            kv_pages[group, seq, :count] = ids[at : at + count]
            at += count
    runs = [(seq, layer) for seq in range(n_seqs) for layer in range(len(conv_rows))]
    conv_pages = np.zeros((n_seqs, len(conv_rows)), np.int32)
    first = 0
    for pick in rng.permutation(len(runs)):
        seq, layer = runs[pick]
        conv_pages[seq, layer] = first
        first += conv_rows[layer]
    return Batch(
        token_ids=rng.integers(0, 100, int(starts[-1])).astype(np.int32),
        positions=positions.astype(np.int32),
        seq_of_token=np.repeat(np.arange(n_seqs), n_new).astype(np.int32),
        query_start=starts,
        context_len=np.asarray(context_len, np.int32),
        kv_pages=kv_pages,
        ssm_pages=rng.permutation(n_seqs * n_recurrent).reshape(n_seqs, n_recurrent).astype(np.int32),
        conv_pages=conv_pages,
        fresh_state=np.asarray([n == c for n, c in zip(n_new, context_len, strict=True)]),
        logit_rows=(starts[1:] - 1).astype(np.int32),
    )


def poisoned(n_bytes: int) -> np.ndarray:
    """uint8 memory whose every f32, f16 and bf16 is NaN."""
    return np.full(n_bytes, 0xFF, np.uint8)


def write_kv(
    pool: np.ndarray,
    page_bytes: int,
    group: KvGroupLayout,
    layer_offset_bytes: int,
    pages: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
) -> None:
    """Store keys [n, n_head_kv, key_dim] and values [n, n_head_kv, value_dim] of positions 0..n in a pool image."""
    size, n = group.element_bytes, keys.shape[0]
    n_heads, tokens = group.n_head_kv, group.page_tokens
    for start in range(0, n, tokens):
        stop = min(start + tokens, n)
        at = int(pages[start // tokens]) * page_bytes + layer_offset_bytes
        for values_of, dim in ((keys, group.key_dim), (values, group.value_dim)):
            n_bytes = n_heads * tokens * dim * size
            rows = pool[at : at + n_bytes].reshape(n_heads, tokens, dim * size)
            stored = encode(np.ascontiguousarray(values_of[start:stop].transpose(1, 0, 2)), group.element)
            rows[:, : stop - start] = stored.view(np.uint8).reshape(n_heads, stop - start, dim * size)
            at += n_bytes


def write_ssm(pool: np.ndarray, layout: SsmLayout, page: int, state: np.ndarray) -> None:
    """Store a float32 recurrent state in its page of a pool image."""
    at = page * layout.page_bytes
    pool[at : at + state.nbytes] = np.ascontiguousarray(state, np.float32).reshape(-1).view(np.uint8)


def read_ssm(pool: np.ndarray, layout: SsmLayout, page: int, shape: tuple[int, ...]) -> np.ndarray:
    """The float32 recurrent state in a page of a pool image."""
    at = page * layout.page_bytes
    return pool[at : at + int(np.prod(shape)) * 4].view(np.float32).reshape(shape).copy()


def write_conv(pool: np.ndarray, layout: ConvLayout, first: int, state: np.ndarray) -> None:
    """Store a convolution state [n_rows, channels] in consecutive pages of a pool image."""
    for row, values in enumerate(state):
        at = (first + row) * layout.page_bytes
        pool[at : at + layout.row_bytes] = np.ascontiguousarray(values, np.float32).view(np.uint8)


def read_conv(pool: np.ndarray, layout: ConvLayout, first: int) -> np.ndarray:
    """The convolution state [n_rows, channels] in consecutive pages of a pool image."""
    rows = [(first + row) * layout.page_bytes for row in range(layout.n_rows)]
    return np.stack([pool[at : at + layout.row_bytes].view(np.float32) for at in rows])
