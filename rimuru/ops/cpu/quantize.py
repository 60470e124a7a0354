"""Activations on the CPU: float32, and 8-bit records for the integer dot products (layout in quantize_record.py).

Rounding an activation to 8 bits per 32 elements costs a normalised mean squared error of about 3e-5 in a product;
weights of type F32, F16 and BF16 use the float32 values, and quantised ones always the records.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rimuru.ops.base import Act
from rimuru.ops.cpu import dot
from rimuru.ops.cpu.quantize_record import RECORD_BYTES, record_row_bytes
from rimuru.ops.cpu.simd_calls import call, fetch_add, i64_at
from rimuru.ops.cpu.simd_launch import address_of, aligned_empty, launch, threads, workspace
from rimuru.ops.cpu.work import Worker

BLOCK = 32


@dataclass(slots=True)
class ActQuant:
    """8-bit records of T tokens, uint8 [T, record_row_bytes(width)]."""

    records: np.ndarray

    def head(self, n_tokens: int) -> ActQuant:
        """The first n_tokens rows, sharing memory."""
        return ActQuant(self.records[:n_tokens])


def act(n_tokens: int, width: int) -> Act:
    """Storage for an activation. Widths that are no multiple of 32 have no 8-bit form (no quantised row has one)."""
    values = aligned_empty(n_tokens * width * 4).view(np.float32).reshape(n_tokens, width)
    values[:] = 0.0
    if width % BLOCK:
        return Act(values, None)
    row_bytes = record_row_bytes(width)
    records = aligned_empty(n_tokens * row_bytes).reshape(n_tokens, row_bytes)
    records[:] = 0
    return Act(values, ActQuant(records))


def act_bytes(n_tokens: int, width: int) -> int:
    """Bytes that `act` takes."""
    return n_tokens * (4 * width + (0 if width % BLOCK else record_row_bytes(width)))


_COUNTER, _N_TOKENS, _X, _X_STRIDE, _RECORDS, _RECORD_STRIDE, _N_BLOCKS, _KERNEL, _CHUNK = range(9)


@Worker
def _quantize_worker(context, index):  # type: ignore[no-untyped-def]
    c = i64_at(context, 16)
    while True:
        first = fetch_add(context, c[_CHUNK])
        if first >= c[_N_TOKENS]:
            return
        for t in range(first, min(first + c[_CHUNK], c[_N_TOKENS])):
            row = c[_RECORDS] + t * c[_RECORD_STRIDE]
            n_blocks = c[_N_BLOCKS]
            call(c[_KERNEL], (c[_X] + t * c[_X_STRIDE], row, n_blocks, 0, (n_blocks + 7) // 8 * 8))


_PARALLEL_ELEMENTS = 1 << 16


def quantize_act(out: Act, n_tokens: int) -> None:
    """Fill the 8-bit records of the first n_tokens rows from out.f32; every verb that fills an Act ends with this."""
    if out.quant is None:
        return
    records, values = out.quant.records, out.f32
    width = values.shape[1]
    space = workspace()
    n_chunk = max(1, n_tokens // (4 * threads()))
    space.context[:9] = (
        0, n_tokens, address_of(values), values.strides[0], address_of(records), records.strides[0],
        width // BLOCK, dot.quantizer(), n_chunk,
    )  # fmt: skip
    launch(_quantize_worker.address, space.context_address, n_tokens * width >= _PARALLEL_ELEMENTS)


def dequantize_records(records: np.ndarray, width: int) -> np.ndarray:
    """float32 [T, width] that the records stand for: what the integer products see."""
    n_tokens = len(records)
    parts = records.reshape(n_tokens, -1, RECORD_BYTES)
    quants = parts[:, :, :256].view(np.int8).reshape(n_tokens, -1, 8, 8, 4)  # [step][block][element]
    scales = np.ascontiguousarray(parts[:, :, 256:288]).view(np.float32)  # [block]
    values = quants.transpose(0, 1, 3, 2, 4).reshape(n_tokens, -1, 8, 32) * scales[..., None]
    return values.reshape(n_tokens, -1)[:, :width].astype(np.float32)
