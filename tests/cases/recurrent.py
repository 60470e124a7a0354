"""Cases of the recurrent verbs: states in shuffled pages, NaN wherever nothing was stored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cases.common import (
    Case,
    Inputs,
    Outputs,
    address_of,
    make_batch,
    normal,
    poisoned,
    read_conv,
    read_ssm,
    write_conv,
    write_ssm,
)
from rimuru.arch.spec import DeltaNetSpec, Mamba1Spec, Mamba2Spec
from rimuru.memory.specs import ConvLayout, SsmLayout
from rimuru.ops.base import Ops, StateLayer, Step

N_COLUMNS, COLUMN = 2, 1
"""Recurrent layers of a sequence, and the one that the cases use."""


@dataclass(frozen=True)
class Tokens:
    """n_new and context_len per sequence; a sequence whose tokens are all new starts from zero."""

    n_new: Sequence[int]
    context_len: Sequence[int]

    @property
    def n_tokens(self) -> int:
        return sum(self.n_new)


MIXED = Tokens([3, 1, 9, 1], [3, 5, 20, 1])
DECODE = Tokens([1], [10])
LONG = Tokens([150, 2], [150, 9])


def _state_page(shape: tuple[int, ...]) -> SsmLayout:
    n_bytes = int(np.prod(shape)) * 4
    return SsmLayout(n_bytes + 192, n_bytes, tuple(range(N_COLUMNS)))


def recurrent_inputs(tokens: Tokens, shape: tuple[int, ...], rng: np.random.Generator) -> Inputs:
    """Batch and pool image; sequences that go on have a stored state, the pages of the others hold NaN."""
    batch = make_batch(rng, tokens.n_new, tokens.context_len, n_recurrent=N_COLUMNS)
    layout = _state_page(shape)
    pool = poisoned(batch.ssm_pages.size * layout.page_bytes)
    for seq in np.flatnonzero(~batch.fresh_state):
        write_ssm(pool, layout, int(batch.ssm_pages[seq, COLUMN]), normal(rng, *shape, scale=0.5))
    return {"batch": batch, "pool": pool}


def _run_recurrent(
    ops: Ops, i: Inputs, shape: tuple[int, ...], width: int, call: Callable[[Step, StateLayer, Any], None]
) -> Outputs:
    layout, pool, batch = _state_page(shape), i["pool_on_device"], i["batch"]
    out = ops.empty((batch.n_tokens, width), np.float32)
    call(ops.stage(batch), StateLayer(address_of(pool), layout, COLUMN, None, 0), out)
    image = ops.download(pool)
    states = [read_ssm(image, layout, int(page), shape) for page in batch.ssm_pages[:, COLUMN]]
    return {"out": ops.download(out), "states": np.stack(states)}


def _case(
    name: str,
    tokens: Tokens,
    shape: tuple[int, ...],
    make: Callable[[np.random.Generator], Inputs],
    run: Callable[[Ops, Inputs], Outputs],
    kind: Any,
    flops_per_state: int = 6,
) -> Case:
    size = int(np.prod(shape))

    def uploaded(ops: Ops, i: Inputs) -> Outputs:
        return run(ops, {**i, "pool_on_device": ops.upload(i["pool"])})

    return Case(
        name, make, uploaded, lambda _: len(tokens.n_new) * size * 8,
        lambda _: tokens.n_tokens * size * flops_per_state, 2e-5, kind,
    )  # fmt: skip


def delta_case(name: str, tokens: Tokens, spec: DeltaNetSpec, kind: Any = "edge") -> Case:
    shape = (spec.n_value_heads, spec.head_dim, spec.head_dim)

    def make(rng: np.random.Generator) -> Inputs:
        n, heads = tokens.n_tokens, spec.n_value_heads
        return {
            **recurrent_inputs(tokens, shape, rng),
            "qkv": normal(rng, n, spec.conv_channels),
            "beta": normal(rng, n, heads),
            "alpha": normal(rng, n, heads, scale=3.0),
            "a": -np.exp(normal(rng, heads)),
            "dt_bias": normal(rng, heads),
        }

    def run(ops: Ops, i: Inputs) -> Outputs:
        qkv, beta, alpha, a, dt_bias = (ops.upload(i[n]) for n in ("qkv", "beta", "alpha", "a", "dt_bias"))

        def call(step: Step, state: StateLayer, out: Any) -> None:
            ops.delta_net(qkv, beta, alpha, a, dt_bias, spec, 1e-6, step, state, out)

        return _run_recurrent(ops, i, shape, spec.n_value_heads * spec.head_dim, call)

    return _case(f"delta_net {name}", tokens, shape, make, run, kind, 8)


def mamba2_case(name: str, tokens: Tokens, spec: Mamba2Spec, kind: Any = "edge") -> Case:
    shape = (spec.n_heads, spec.inner_size // spec.n_heads, spec.state_size)

    def make(rng: np.random.Generator) -> Inputs:
        n, heads = tokens.n_tokens, spec.n_heads
        return {
            **recurrent_inputs(tokens, shape, rng),
            "xbc": normal(rng, n, spec.conv_channels),
            "dt": normal(rng, n, heads, scale=2.0),
            "a": -np.exp(normal(rng, heads)),
            "d": normal(rng, heads),
            "dt_bias": normal(rng, heads),
        }

    def run(ops: Ops, i: Inputs) -> Outputs:
        xbc, dt, a, d, dt_bias = (ops.upload(i[n]) for n in ("xbc", "dt", "a", "d", "dt_bias"))

        def call(step: Step, state: StateLayer, out: Any) -> None:
            ops.mamba2(xbc, dt, a, d, dt_bias, spec, step, state, out)

        return _run_recurrent(ops, i, shape, spec.inner_size, call)

    return _case(f"mamba2 {name}", tokens, shape, make, run, kind)


def mamba1_case(name: str, tokens: Tokens, spec: Mamba1Spec, kind: Any = "edge") -> Case:
    shape = (spec.inner_size, spec.state_size)

    def make(rng: np.random.Generator) -> Inputs:
        n = tokens.n_tokens
        return {
            **recurrent_inputs(tokens, shape, rng),
            "x": normal(rng, n, spec.inner_size),
            "dt": normal(rng, n, spec.inner_size, scale=2.0),
            "b": normal(rng, n, spec.state_size),
            "c": normal(rng, n, spec.state_size),
            "a": -np.exp(normal(rng, *shape)),
            "d": normal(rng, spec.inner_size),
        }

    def run(ops: Ops, i: Inputs) -> Outputs:
        x, dt, b, c, a, d = (ops.upload(i[n]) for n in ("x", "dt", "b", "c", "a", "d"))

        def call(step: Step, state: StateLayer, out: Any) -> None:
            ops.mamba1(x, dt, b, c, a, d, spec, step, state, out)

        return _run_recurrent(ops, i, shape, spec.inner_size, call)

    return _case(f"mamba1 {name}", tokens, shape, make, run, kind)


def conv_case(
    name: str, tokens: Tokens, channels: int, n_taps: int, bias: bool, silu: bool, kind: Any = "edge"
) -> Case:
    rows = n_taps - 1
    layout = ConvLayout(channels * 4 + 64, channels * 4, rows, tuple(range(N_COLUMNS)), "ssm")

    def make(rng: np.random.Generator) -> Inputs:
        batch = make_batch(rng, tokens.n_new, tokens.context_len, conv_rows=[rows] * N_COLUMNS)
        pool = poisoned(batch.conv_pages.size * rows * layout.page_bytes)
        for seq in np.flatnonzero(~batch.fresh_state):
            write_conv(pool, layout, int(batch.conv_pages[seq, COLUMN]), normal(rng, rows, channels))
        return {
            "batch": batch, "pool": pool, "u": normal(rng, tokens.n_tokens, channels),
            "weight": normal(rng, channels, n_taps), "bias": normal(rng, channels) if bias else None,
        }  # fmt: skip

    def run(ops: Ops, i: Inputs) -> Outputs:
        pool, batch = ops.upload(i["pool"]), i["batch"]
        out = ops.empty((batch.n_tokens, channels), np.float32)
        state = StateLayer(address_of(pool), None, 0, layout, COLUMN)
        bias_array = None if i["bias"] is None else ops.upload(i["bias"])
        ops.conv_update(ops.upload(i["u"]), ops.upload(i["weight"]), bias_array, silu, ops.stage(batch), state, out)
        image = ops.download(pool)
        states = np.stack([read_conv(image, layout, int(first)) for first in batch.conv_pages[:, COLUMN]])
        return {"out": ops.download(out), "states": states}

    n = tokens.n_tokens
    return Case(
        f"conv_update {name}", make, run, lambda _: n * channels * 8, lambda _: 2 * n * channels * n_taps, 1e-5, kind
    )


CASES: tuple[Case, ...] = (
    *[
        conv_case(f"{channels} channels, {taps} taps, {label}", tokens, channels, taps, bias, silu)
        for channels, taps, bias, silu in ((20, 4, True, True), (513, 3, False, False), (300, 2, True, False))
        for label, tokens in (("mixed", MIXED), ("decode", DECODE), ("long", LONG))
    ],
    conv_case("decode of 8192 channels", Tokens([1] * 4, [9] * 4), 8192, 4, False, True, "model"),
    *[
        delta_case(
            f"{label}, {order}, {n_key}/{n_value} heads of {dim}", tokens, DeltaNetSpec(n_key, n_value, dim, 4, order)
        )
        for n_key, n_value, dim, order in (
            (2, 4, 16, "grouped"),
            (2, 4, 32, "tiled"),
            (3, 3, 24, "tiled"),
            (1, 2, 64, "grouped"),
        )
        for label, tokens in (("mixed", MIXED), ("decode", DECODE), ("long", LONG))
    ],
    delta_case("decode, 16/32 heads of 128", DECODE, DeltaNetSpec(16, 32, 128, 4, "tiled"), "model"),
    *[
        mamba2_case(
            f"{label}, {heads} heads of {dim}, {groups} groups, state {size}",
            tokens,
            Mamba2Spec(heads * dim, size, heads, groups, 4),
        )
        for heads, dim, groups, size in ((4, 8, 2, 16), (3, 10, 1, 24), (2, 64, 2, 128))
        for label, tokens in (("mixed", MIXED), ("decode", DECODE), ("long", LONG))
    ],
    mamba2_case("decode, 128 heads of 64, state 128", DECODE, Mamba2Spec(8192, 128, 128, 1, 4), "model"),
    *[
        mamba1_case(f"{label}, {inner} channels, state {size}", tokens, Mamba1Spec(inner, size, 8, 4))
        for inner, size in ((64, 16), (70, 8), (300, 20))
        for label, tokens in (("mixed", MIXED), ("decode", DECODE), ("long", LONG))
    ],
    mamba1_case("decode of 8192 channels", DECODE, Mamba1Spec(8192, 16, 256, 4), "model"),
)
