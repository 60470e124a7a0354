"""Activations on the device: the forms that matrices read, and the norm that makes them (cuda_src/pointwise/norm.cu).

The norm of few tokens may wait until somebody reads its result (`rms_norm(..., may_wait=True)`): kernels that multiply
one row norm it themselves, in every block, which takes less time than a launch (cuda_src/matmul/normed.cuh).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from rimuru.base.units import align_up, ceil_div
from rimuru.ops.base import Act, Array
from rimuru.ops.cuda.launch import Kernel

ACT_BLOCK = 32
MAX_GEMV_TOKENS = 4
"""Up to this many tokens integer dot products are used; beyond, tensor cores."""

ACT_SIGNATURE = "act_values: i8*, act_scales: f32*, act_sums: i32*"
_MAX_EXPERT_DOT_TOKENS = 256
"""Beyond this many tokens experts run on tensor cores too, whatever the model's share of active experts."""

_MAX_WAITING_WIDTH = 4096
"""Four columns for each of a norm's 1,024 threads (cuda_src/matmul/normed.cuh)."""

RMS_NORM_KERNEL = Kernel(
    "pointwise/norm.cu",
    "rms_norm",
    f"x: f32*, weight: f32*, out: f32*, {ACT_SIGNATURE}, halves: f16*, half_scales: f32*, width: i32, eps: f32",
)


class PendingNorm(NamedTuple):
    """rms_norm(x; weight) that nobody has made yet. x [T, width] and weight [width] are not changed until then."""

    x: Any
    weight: Any
    eps: float


@dataclass(slots=True)
class ActQuant:
    """What the matrix kernels read of an activation beside its float32 values (layout: cuda_src/common/types.cuh)."""

    values: Array | None  # int8 [T, width]; None where 32 does not divide the width
    scales: Array | None  # float32 [T, width / 32]
    sums: Array | None  # int32 [T, width / 32], two sums of 16 values each
    halves: Array | None  # float16 [T, width]; None: the tensor-core kernels are not used
    half_scales: Array | None  # float32 [T], powers of two
    has_halves: bool = False
    """Who filled the activation also filled the halves; otherwise who reads them makes them (`make_halves`)."""

    norm: PendingNorm | None = None
    """What the activation will hold, and what whoever reads it makes first (`settle`)."""

    def head(self, n_tokens: int) -> ActQuant:
        """The first n_tokens rows, sharing memory."""
        parts: tuple[Any, ...] = (self.values, self.scales, self.sums, self.halves, self.half_scales)
        values, scales, sums, halves, half_scales = (None if part is None else part[:n_tokens] for part in parts)
        return ActQuant(values, scales, sums, halves, half_scales)


def act(n_tokens: int, width: int, deterministic: bool = False) -> Act:
    """Storage for an activation of n_tokens rows."""
    import cupy

    blocks = width % ACT_BLOCK == 0
    halves = blocks and not deterministic and n_tokens > MAX_GEMV_TOKENS
    quant = ActQuant(
        cupy.empty((n_tokens, width), np.int8) if blocks else None,
        cupy.empty((n_tokens, width // ACT_BLOCK), np.float32) if blocks else None,
        cupy.empty((n_tokens, width // ACT_BLOCK), np.int32) if blocks else None,
        cupy.empty((n_tokens, width), np.float16) if halves else None,
        cupy.empty(n_tokens, np.float32) if halves else None,
    )
    return Act(cupy.empty((n_tokens, width), np.float32), quant)


def act_bytes(n_tokens: int, width: int, deterministic: bool = False) -> int:
    """Bytes that `act` takes."""
    total = 4 * width
    if width % ACT_BLOCK == 0:
        total += width + 8 * (width // ACT_BLOCK)
        if not deterministic and n_tokens > MAX_GEMV_TOKENS:
            total += 2 * width + 4
    return n_tokens * total


def act_arguments(act: Act) -> tuple[Any, Any, Any]:
    """The 8-bit form of an activation as the kernels take it; nulls where it has none."""
    if act.quant is None:
        return None, None, None
    return act.quant.values, act.quant.scales, act.quant.sums


def blocks_wanted(act: Act, n_tokens: int, most: int = MAX_GEMV_TOKENS) -> bool:
    """Whether the 8-bit form of an activation that only matrices read (no experts) is worth making.

    Beyond the integer kernels' batch sizes matrices read halves, which they make themselves, and which are out of date
    from now on.
    """
    if act.quant is not None:
        act.quant.has_halves, act.quant.norm = False, None
    return act.quant is not None and (n_tokens <= most or act.quant.halves is None)


def row_threads(width: int) -> int:
    """Threads of a block that reduces one row. Depends on the width only, so that the order of sums does too."""
    return min(1024, max(32, align_up(ceil_div(width, 4), 32)))


def can_wait(n_tokens: int, width: int) -> bool:
    """Whether a norm may be left to those who read its result."""
    return n_tokens <= MAX_GEMV_TOKENS and width <= _MAX_WAITING_WIDTH and width % ACT_BLOCK == 0


def pending_norm(act: Act) -> PendingNorm | None:
    """The norm that `act` still waits for."""
    return None if act.quant is None else act.quant.norm


def settle(act: Act) -> None:
    """Make the norm that `act` still waits for: before anything but a fused kernel reads it."""
    norm = pending_norm(act)
    if norm is not None:
        rms_norm(*norm, act)


def rms_norm(x: Array, weight: Array, eps: float, out: Act, may_wait: bool = False) -> None:
    """See Ops.rms_norm."""
    n_tokens, width = x.shape
    act = act_arguments(out) if blocks_wanted(out, n_tokens, _MAX_EXPERT_DOT_TOKENS) else (None, None, None)
    halves = (None, None)
    if out.quant is not None:
        if may_wait and can_wait(n_tokens, width):
            out.quant.norm = PendingNorm(x, weight, eps)
            return
        out.quant.has_halves = n_tokens > MAX_GEMV_TOKENS and out.quant.halves is not None
        halves = (out.quant.halves, out.quant.half_scales) if out.quant.has_halves else halves
    RMS_NORM_KERNEL((n_tokens,), (row_threads(width),), (x, weight, out.f32, *act, *halves, width, eps))
