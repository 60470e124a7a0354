"""The recurrent verbs over the same tokens cut in different pieces and batches: outputs and states must be equal."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cases.common import Outputs, address_of, make_batch, normal, poisoned, write_conv, write_ssm
from cases.recurrent import COLUMN, N_COLUMNS
from rimuru.arch.spec import DeltaNetSpec, Mamba1Spec, Mamba2Spec
from rimuru.memory.specs import ConvLayout, SsmLayout
from rimuru.ops.base import Ops, StateLayer, Step

N_TOKENS, N_SEQS, CONTEXT = 35, 3, 9
"""Tokens that each sequence brings, and what the last sequence has behind it; the others begin."""

Piece = Sequence[int]
"""Tokens of each sequence in one step; 0: it is not in the step."""

CUTS: dict[str, Sequence[Piece]] = {
    "one piece": [(N_TOKENS,) * N_SEQS],
    "token by token": [(1,) * N_SEQS] * N_TOKENS,
    "pieces of 2": [(2,) * N_SEQS] * 17 + [(1,) * N_SEQS],
    "pieces of 16": [(16,) * N_SEQS] * 2 + [(3,) * N_SEQS],
    "each alone": [(35, 0, 0), (0, 7, 0), (0, 28, 0), *[(0, 0, 1)] * 35],
    "mixed": [(1, 17, 1), (1, 16, 1), (20, 1, 0), (13, 1, 33)],
}


@dataclass(frozen=True)
class Recurrent:
    """A verb: its inputs by token, its fixed arrays, and the call. `state` is the shape of a sequence's state."""

    name: str
    widths: tuple[int, ...]
    fixed: Callable[[np.random.Generator], list[np.ndarray]]
    call: Callable[[Any, list[Any], list[Any], Step, StateLayer, Any], None]
    out_width: int
    state: tuple[int, ...]
    is_conv: bool = False


def conv(channels: int, n_taps: int) -> Recurrent:
    return Recurrent(
        f"conv of {n_taps} taps",
        (channels,),
        lambda rng: [normal(rng, channels, n_taps), normal(rng, channels)],
        lambda ops, x, fixed, step, state, out: ops.conv_update(x[0], fixed[0], fixed[1], True, step, state, out),
        channels,
        (n_taps - 1, channels),
        True,
    )


def delta_net(spec: DeltaNetSpec) -> Recurrent:
    heads = spec.n_value_heads
    return Recurrent(
        f"delta_net of {heads}x{spec.head_dim}, {spec.head_order}",
        (spec.conv_channels, heads, heads),
        lambda rng: [-np.exp(normal(rng, heads)), normal(rng, heads)],
        lambda ops, x, fixed, step, state, out: ops.delta_net(*x, *fixed, spec, 1e-6, step, state, out),
        heads * spec.head_dim,
        (heads, spec.head_dim, spec.head_dim),
    )


def mamba2(spec: Mamba2Spec) -> Recurrent:
    heads = spec.n_heads
    return Recurrent(
        f"mamba2 of {spec.inner_size}, state of {spec.state_size}",
        (spec.conv_channels, heads),
        lambda rng: [-np.exp(normal(rng, heads)), normal(rng, heads), normal(rng, heads)],
        lambda ops, x, fixed, step, state, out: ops.mamba2(*x, *fixed, spec, step, state, out),
        spec.inner_size,
        (heads, spec.inner_size // heads, spec.state_size),
    )


def mamba1(spec: Mamba1Spec) -> Recurrent:
    shape = (spec.inner_size, spec.state_size)
    return Recurrent(
        f"mamba1 of {spec.inner_size}, state of {spec.state_size}",
        (spec.inner_size, spec.inner_size, spec.state_size, spec.state_size),
        lambda rng: [-np.exp(normal(rng, *shape)), normal(rng, spec.inner_size)],
        lambda ops, x, fixed, step, state, out: ops.mamba1(*x, *fixed, spec, step, state, out),
        spec.inner_size,
        shape,
    )


VERBS = (
    conv(40, 4),
    conv(33, 3),
    delta_net(DeltaNetSpec(2, 4, 24, 4, "tiled")),
    delta_net(DeltaNetSpec(1, 2, 64, 4, "grouped")),
    mamba2(Mamba2Spec(30, 24, 3, 1, 4)),
    mamba2(Mamba2Spec(64, 128, 2, 1, 4)),
    mamba1(Mamba1Spec(40, 16, 8, 4)),
)


def run_in_pieces(verb: Recurrent, ops: Ops, pieces: Sequence[Piece]) -> Outputs:
    """out [sequences, N_TOKENS, width] and the pool's bytes after the last piece; equal inputs on every call."""
    rng = np.random.default_rng(zlib.crc32(verb.name.encode()))
    rows = verb.state[0]
    whole = make_batch(
        rng,
        (N_TOKENS,) * N_SEQS,
        (N_TOKENS, N_TOKENS, N_TOKENS + CONTEXT),
        n_recurrent=N_COLUMNS,
        conv_rows=(rows,) * N_COLUMNS if verb.is_conv else (),
    )
    tokens = [normal(rng, N_SEQS, N_TOKENS, width) for width in verb.widths]
    fixed = [ops.upload(array) for array in verb.fixed(rng)]
    layer, image = _pool(verb, whole, normal(rng, *verb.state, scale=0.5))
    pool = ops.upload(image)
    state = layer(address_of(pool))
    out = np.full((N_SEQS, N_TOKENS, verb.out_width), np.nan, np.float32)
    done = np.zeros(N_SEQS, np.int64)
    for piece in pieces:
        seqs = [seq for seq in range(N_SEQS) if piece[seq]]
        n_new = [piece[seq] for seq in seqs]
        step = make_batch(rng, n_new, [int(whole.context_len[s] - N_TOKENS + done[s] + piece[s]) for s in seqs])
        step.ssm_pages, step.conv_pages = whole.ssm_pages[seqs], whole.conv_pages[seqs]
        places = [(seq, slice(int(done[seq]), int(done[seq]) + piece[seq])) for seq in seqs]
        inputs = [ops.upload(np.concatenate([x[place] for place in places])) for x in tokens]
        result = ops.empty((sum(n_new), verb.out_width), np.float32)
        verb.call(ops, inputs, fixed, ops.stage(step), state, result)
        found, at = ops.download(result), 0
        for place, n in zip(places, n_new, strict=True):
            out[place], at = found[at : at + n], at + n
        done += piece
    assert (done == N_TOKENS).all()
    return {"out": out, "pool": ops.download(pool)}


def _pool(verb: Recurrent, batch: Any, last: np.ndarray) -> tuple[Callable[[int], StateLayer], np.ndarray]:
    """(layer at an address, pool image): NaN but for the stored state of the last sequence."""
    n_bytes = int(np.prod(verb.state)) * 4
    if not verb.is_conv:
        ssm = SsmLayout(n_bytes + 192, n_bytes, tuple(range(N_COLUMNS)))
        image = poisoned(batch.ssm_pages.size * ssm.page_bytes)
        write_ssm(image, ssm, int(batch.ssm_pages[-1, COLUMN]), last)
        return lambda base: StateLayer(base, ssm, COLUMN, None, 0), image
    row_bytes, rows = verb.state[1] * 4, verb.state[0]
    conv_rows = ConvLayout(row_bytes + 64, row_bytes, rows, tuple(range(N_COLUMNS)), "ssm")
    image = poisoned(batch.conv_pages.size * rows * conv_rows.page_bytes)
    write_conv(image, conv_rows, int(batch.conv_pages[-1, COLUMN]), last)
    return lambda base: StateLayer(base, None, 0, conv_rows, COLUMN), image
