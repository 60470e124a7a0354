"""The loops around `dot_formats`: written once, for every format.

All kernels take addresses and counts as 64-bit integers. `n_in` is the width of a row in elements.

    rows(w, row_bytes, n_rows, x, n_in, out)                 out[r] = w[r] . x for one token
    expand(w, row_bytes, n_rows, n_in, panel)                rows -> panel, to be used by many tokens
    tile_N(panel, panel_row_bytes, n_rows, n_in, tokens, out, out_stride, offset)
                                                             out[t][r] = panel row r . x[tokens[t]] for N tokens

`x` is a row of activation records (quantize_record.py) for quantised weights, and plain float32 for float weights. A
panel row is n_super records of PANEL_BYTES, or float32 padded to 16. Tiles take 4 rows at a time: they read and write
up to 3 rows more than n_rows.

The result of a (row, token) is the same in `rows` and in every `tile_N`: lane b sums block b of all superblocks in
order, each block's integer product exact, then one fixed tree over the lanes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from rimuru.formats.quants import BY_NAME
from rimuru.ops.cpu.dot_formats import BLOCKS, DotFormat, Unpacked
from rimuru.ops.cpu.quantize_record import QUANTS_AT, RECORD_BYTES, SCALES_AT, SUMS16_AT, SUMS32_AT
from rimuru.ops.cpu.simd import F16, F32, F32X8, F32X16, I8, I16, I32, I32X8, I32X16, I64, Emitter, Kernel, V, Var

PANEL_BYTES = 448
"""A superblock of a panel row: [256 quants][8 scales][8 minimums][16 sub-scales][16 sub-minimums], 4 bytes each."""
SCALE_AT, MINIMUM_AT, SUB_SCALE_AT, SUB_MINIMUM_AT = 256, 288, 320, 384
TILE_ROWS = 4


# ---- one superblock


class _Act:
    """A token's record of one superblock."""

    def __init__(self, k: Kernel, address: V, per_16: bool, has_minimum: bool, offset: int | V) -> None:
        self.k = k
        self.address = address
        self.scale = k.load(address + SCALES_AT, F32X8)
        sums = [k.load(address + SUMS16_AT + 32 * h, I32X8) for h in (0, 1)] if per_16 else []
        if not per_16:
            sums = [k.load(address + SUMS32_AT, I32X8)]
        self.sums = sums
        # products start from what the weights' offset adds to them
        zero = k.const(0, I32X8)
        self.starts = [(zero if has_minimum else -(s * offset)).padded() for s in sums]
        self.scaled_sum = self.scale * sums[0].to_f32() if has_minimum and not per_16 else None

    def quad(self, p: int) -> V:
        return self.k.load(self.address + QUANTS_AT + 64 * p, I32X16)


def _accumulate(k: Kernel, acc: V, w: Unpacked, a: _Act) -> V:
    """acc[b] += weights . activations of block b. The only place that defines the order of float operations."""
    if w.sub_scales is None:
        lanes = a.starts[0]
        for p in range(4):
            lanes = k.dot4(lanes, w.quads[p], a.quad(p))
    else:
        parts = []
        for h in (0, 1):
            part = a.starts[h]
            for p in (2 * h, 2 * h + 1):
                part = k.dot4(part, w.quads[p], a.quad(p))
            parts.append(part)
        if w.sub_scales[0].type == F32X8:
            sums = [(part.low() + part.high()).to_f32() * sub for part, sub in zip(parts, w.sub_scales, strict=True)]
            return k.fma(sums[0] + sums[1], w.scale * a.scale, acc)
        lanes = parts[0] * w.sub_scales[0].twice() + parts[1] * w.sub_scales[1].twice()
    total = lanes.low() + lanes.high()
    acc = k.fma(total.to_f32(), w.scale * a.scale, acc)
    if w.sub_minimums is not None:
        minimum = w.sub_minimums[0] * a.sums[0] + w.sub_minimums[1] * a.sums[1]
        assert w.minimum is not None
        return k.fma(-minimum.to_f32(), w.minimum * a.scale, acc)
    if w.minimum is not None:
        assert a.scaled_sum is not None
        return k.fma(-w.minimum, a.scaled_sum, acc)
    return acc


def _sum_lanes(acc: V) -> V:
    """Sum of all lanes as a fixed tree: halves added until one is left."""
    while True:
        half = acc.low() + acc.high()
        if half.type.count == 1:
            return half.lane(0)
        acc = half


def _sum_lanes_of_rows(k: Kernel, rows: list[V]) -> V:
    """_sum_lanes of some vectors at once: the same tree, in fewer instructions."""
    n_rows = len(rows)
    halves = [[v.low() for v in rows], [v.high() for v in rows]]
    while True:
        joined = [_concat_all(parts) for parts in halves]
        total = joined[0] + joined[1]
        n = total.type.count // n_rows  # lanes left of each row
        if n == 1:
            return total
        split = [total.pick([n * r + i for r in range(n_rows) for i in range(h, h + n // 2)]) for h in (0, n // 2)]
        halves = [[split[0]], [split[1]]]


def _concat_all(parts: list[V]) -> V:
    while len(parts) > 1:
        parts = [parts[i].concat(parts[i + 1]) for i in range(0, len(parts), 2)]
    return parts[0]


def _n_super(n_in: V) -> V:
    return (n_in + 255) >> 8


class _Rest:
    """The end of a packed row that is no whole superblock: 1 to 7 blocks of 32 elements.

    It is read where it lies, together with what follows it in memory, and what does not belong to it counts with scale
    zero (activations are zero there too). Near the end of the matrix a zero-padded copy is read instead.
    """

    def __init__(self, k: Kernel, fmt: DotFormat, w: V, row_bytes: V, n_rows: V, n_in: V) -> None:
        self.k = k
        self.fmt = fmt
        self.exists = BY_NAME[fmt.name].block_elements < 256
        self.n_whole = n_in >> 8
        if self.exists:
            self.n_blocks = (n_in & 255) >> 5
            self.end = w + n_rows * row_bytes
            self.copy = k.scratch(fmt.super_bytes)
            with k.loop(k.i64(fmt.super_bytes)) as i:
                k.store(k.const(0, I8), self.copy + i)
            self.mask = k.const(list(range(BLOCKS)), I32X8).compare("<", self.n_blocks.trunc(I32).splat(BLOCKS))

    @contextmanager
    def of(self, row: V) -> Iterator[Unpacked]:
        """Code for rows that have a rest."""
        k, fmt = self.k, self.fmt
        with k.when(self.n_blocks.compare(">", 0)):
            at = row + self.n_whole * fmt.super_bytes
            ends_early = self.end.compare("<", at + fmt.super_bytes)
            with k.when(ends_early), k.loop(self.n_blocks * (fmt.super_bytes // BLOCKS)) as i:
                k.store(k.load(at + i, I8), self.copy + i)
            yield self._masked(fmt.unpack(k, ends_early.select(self.copy, at)))

    def _masked(self, u: Unpacked) -> Unpacked:
        def masked(v: V) -> V:
            return self.mask.select(v, self.k.const(0.0, F32X8)) if v.type == F32X8 else v

        subs = None if u.sub_scales is None else (masked(u.sub_scales[0]), masked(u.sub_scales[1]))
        minimum = None if u.minimum is None else masked(u.minimum)
        return Unpacked(u.quads, masked(u.scale), minimum, subs, u.sub_minimums)


# ---- quantised weights


def emit_rows(fmt: DotFormat, k: Kernel, w: V, row_bytes: V, n_rows: V, x: V, n_in: V, out: V) -> None:
    """One token. Row by row: two rows side by side would share work, but lose the processor's prefetching (3x)."""
    rest = _Rest(k, fmt, w, row_bytes, n_rows, n_in)

    def accumulate(acc: Var, s: V, u: Unpacked) -> None:
        a = _Act(k, x + s * RECORD_BYTES, fmt.per_16, fmt.has_minimum, fmt.offset)
        acc.set(_accumulate(k, acc.get(), u, a))

    with k.loop(n_rows) as r:
        row = w + r * row_bytes
        acc = k.var(k.const(0.0, F32X8))
        with k.loop(rest.n_whole) as s:
            accumulate(acc, s, fmt.unpack(k, row + s * fmt.super_bytes))
        if rest.exists:
            with rest.of(row) as u:
                accumulate(acc, rest.n_whole, u)
        k.store(_sum_lanes(acc.get()), out + r * 4)


def emit_expand(fmt: DotFormat, k: Kernel, w: V, row_bytes: V, n_rows: V, n_in: V, panel: V) -> None:
    """Rows to panel records."""
    rest = _Rest(k, fmt, w, row_bytes, n_rows, n_in)
    target = k.var(panel)
    with k.loop(n_rows) as r:
        row = w + r * row_bytes
        with k.loop(rest.n_whole) as s:
            _store_record(k, fmt.unpack(k, row + s * fmt.super_bytes), target)
        if rest.exists:
            with rest.of(row) as u:
                _store_record(k, u, target)


def _store_record(k: Kernel, u: Unpacked, target: Var) -> None:
    at = target.get()
    for p in range(4):
        k.store(u.quads[p], at + 64 * p)
    k.store(u.scale, at + SCALE_AT)
    if u.minimum is not None:
        k.store(u.minimum, at + MINIMUM_AT)
    for pair, offset in ((u.sub_scales, SUB_SCALE_AT), (u.sub_minimums, SUB_MINIMUM_AT)):
        if pair is not None:
            k.store(pair[0].concat(pair[1]), at + offset)
    target.set(at + PANEL_BYTES)


class _PanelRecord(Sequence[V]):
    """The quads of a panel record, loaded where they are used."""

    def __init__(self, k: Kernel, at: V) -> None:
        self.k = k
        self.at = at

    def __len__(self) -> int:
        return 4

    def __getitem__(self, p):  # type: ignore[no-untyped-def, override]
        return self.k.load(self.at + 64 * p, I32X16)


def _from_panel(k: Kernel, at: V, per_16: bool, has_minimum: bool, float_sub_scales: bool) -> Unpacked:
    def pair(offset: int) -> tuple[V, V]:
        type_ = F32X8 if float_sub_scales else I32X8
        return k.load(at + offset, type_), k.load(at + offset + 32, type_)

    return Unpacked(
        _PanelRecord(k, at),
        k.load(at + SCALE_AT, F32X8),
        k.load(at + MINIMUM_AT, F32X8) if has_minimum else None,
        pair(SUB_SCALE_AT) if per_16 else None,
        pair(SUB_MINIMUM_AT) if per_16 and has_minimum else None,
    )


def emit_tile(
    kind: tuple[bool, bool, bool], n_tokens: int,
    k: Kernel, panel: V, panel_row_bytes: V, n_rows: V, n_in: V, tokens: V, out: V, out_stride: V, offset: V,
) -> None:  # fmt: skip
    """TILE_ROWS rows x n_tokens tokens in registers."""
    per_16, has_minimum, float_sub_scales = kind
    starts = [k.load(tokens + 8 * t, I64) for t in range(n_tokens)]
    offset_lanes = offset.trunc(I32).splat(8)
    with k.loop(n_rows, step=TILE_ROWS) as first:
        accs = [[k.var(k.const(0.0, F32X8)) for _ in range(n_tokens)] for _ in range(TILE_ROWS)]
        rows = [panel + (first + r) * panel_row_bytes for r in range(TILE_ROWS)]
        with k.loop(_n_super(n_in)) as s:
            acts = [_Act(k, start + s * RECORD_BYTES, per_16, has_minimum, offset_lanes) for start in starts]
            for r, row in enumerate(rows):
                w = _from_panel(k, row + s * PANEL_BYTES, per_16, has_minimum, float_sub_scales)
                for t, act in enumerate(acts):
                    accs[r][t].set(_accumulate(k, accs[r][t].get(), w, act))
        _store_tile(k, accs, out + first * 4, out_stride)


def _store_tile(k: Kernel, accs: list[list[Var]], out: V, out_stride: V) -> None:
    for t in range(len(accs[0])):
        rows = [row[t].get() for row in accs]
        k.store(_sum_lanes_of_rows(k, rows), out + out_stride * t)


# ---- float weights


def _floats(name: str, k: Kernel, address: V, n: int) -> V:
    """n float weights as float32."""
    if name == "f32":
        return k.load(address, type(F32X16)(F32, n))
    if name == "f16":
        return k.load(address, type(F32X16)(F16, n)).to_f32()
    return (k.load(address, type(F32X16)(I16, n)).zext(I32) << 16).bitcast(type(F32X16)(F32, n))


def emit_float_rows(name: str, k: Kernel, w: V, row_bytes: V, n_rows: V, x: V, n_in: V, out: V) -> None:
    """One token."""
    size = 4 if name == "f32" else 2
    whole = n_in & -16
    n_rest = n_in - whole
    rest = k.scratch(64)
    k.store(k.const(0, I32X16), rest)
    with k.loop(n_rows) as r:
        row = w + r * row_bytes
        acc = k.var(k.const(0.0, F32X16))
        with k.loop(whole, step=16) as i:
            acc.set(k.fma(_floats(name, k, row + i * size, 16), k.load(x + i * 4, F32X16), acc.get()))
        with k.when(n_rest.compare(">", 0)):
            with k.loop(n_rest) as i:
                k.store(_floats(name, k, row + (whole + i) * size, 1).lane(0), rest + i * 4)
            acc.set(k.fma(k.load(rest, F32X16), k.load_f32_head(x + whole * 4, n_rest), acc.get()))
        k.store(_sum_lanes(acc.get()), out + r * 4)


def emit_float_expand(name: str, k: Kernel, w: V, row_bytes: V, n_rows: V, n_in: V, panel: V) -> None:
    """Rows to float32, padded with zeros to 16."""
    size = 4 if name == "f32" else 2
    whole = n_in & -16
    stride = ((n_in + 15) & -16) * 4
    with k.loop(n_rows) as r:
        row, target = w + r * row_bytes, panel + r * stride
        with k.loop(whole, step=16) as i:
            k.store(_floats(name, k, row + i * size, 16), target + i * 4)
        with k.when(whole.compare("<", n_in)):
            k.store(k.const(0.0, F32X16), target + whole * 4)
            with k.loop(n_in, start=whole) as i:
                k.store(_floats(name, k, row + i * size, 1).lane(0), target + i * 4)


def emit_float_tile(
    n_tokens: int,
    k: Kernel, panel: V, panel_row_bytes: V, n_rows: V, n_in: V, tokens: V, out: V, out_stride: V, offset: V,
) -> None:  # fmt: skip
    """TILE_ROWS float rows x n_tokens tokens in registers."""
    starts = [k.load(tokens + 8 * t, I64) for t in range(n_tokens)]
    whole = n_in & -16
    n_rest = n_in - whole
    with k.loop(n_rows, step=TILE_ROWS) as first:
        accs = [[k.var(k.const(0.0, F32X16)) for _ in range(n_tokens)] for _ in range(TILE_ROWS)]
        rows = [panel + (first + r) * panel_row_bytes for r in range(TILE_ROWS)]
        with k.loop(whole, step=16) as i:
            _float_step(k, accs, rows, i, [k.load(start + i * 4, F32X16) for start in starts])
        with k.when(n_rest.compare(">", 0)):
            _float_step(k, accs, rows, whole, [k.load_f32_head(start + whole * 4, n_rest) for start in starts])
        _store_tile(k, accs, out + first * 4, out_stride)


def _float_step(k: Kernel, accs: list[list[Var]], rows: list[V], i: V, acts: list[V]) -> None:
    for r, row in enumerate(rows):
        w = k.load(row + i * 4, F32X16)
        for t, a in enumerate(acts):
            accs[r][t].set(k.fma(w, a, accs[r][t].get()))


def rows_emitter(fmt: DotFormat | str) -> Emitter:
    return partial(emit_float_rows, fmt) if isinstance(fmt, str) else partial(emit_rows, fmt)


def expand_emitter(fmt: DotFormat | str) -> Emitter:
    return partial(emit_float_expand, fmt) if isinstance(fmt, str) else partial(emit_expand, fmt)


def tile_emitter(fmt: DotFormat | str, n_tokens: int) -> Emitter:
    return partial(emit_float_tile, n_tokens) if isinstance(fmt, str) else partial(emit_tile, fmt.kind, n_tokens)
