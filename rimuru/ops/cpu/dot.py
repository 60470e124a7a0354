"""The table of compiled kernels: format -> addresses. Compiles what is asked for, once, and keeps it on disk."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from rimuru.base.errors import UnsupportedModelError
from rimuru.ops.cpu import dot_kernels, quantize_record, simd_build
from rimuru.ops.cpu.dot_formats import PLAIN_FORMATS, DotFormat
from rimuru.ops.cpu.dot_formats_grid import GRID_FORMATS
from rimuru.ops.cpu.simd import Isa

FLOAT_FORMATS = ("f32", "f16", "bf16")
FORMATS: dict[str, DotFormat] = PLAIN_FORMATS | GRID_FORMATS


@dataclass(frozen=True, slots=True)
class DotKernels:
    """Entry points for the matrices of one format; see dot_kernels.py for their arguments."""

    name: str
    rows: int
    expand: int
    tiles: tuple[int, ...]
    """tiles[i] computes 2^i tokens."""
    offset: int
    is_float: bool
    per_16: bool
    has_minimum: bool
    float_sub_scales: bool

    def panel_row_bytes(self, n_in: int) -> int:
        """Bytes of an expanded row."""
        return (n_in + 15) // 16 * 64 if self.is_float else (n_in + 255) // 256 * dot_kernels.PANEL_BYTES


@cache
def kernels(name: str, isa: Isa | None = None) -> DotKernels:
    """Kernels of a format by name (formats/quants.py); UnsupportedModelError if there are none."""
    variant = isa or simd_build.host_isa()
    fmt: DotFormat | str
    if name in FORMATS:
        fmt = FORMATS[name]
        kind = "".join(part for part, on in zip(("sub", "min", "float"), fmt.kind, strict=True) if on) or "plain"
        offset = fmt.offset
    elif name in FLOAT_FORMATS:
        fmt, kind, offset = name, "float", 0
    else:
        raise UnsupportedModelError(f"no CPU kernel for weights of type {name}; use a file with another quantisation")
    tiles = []
    n_tokens = 1
    while n_tokens <= variant.tile_tokens:
        tiles.append(_tile(kind, fmt, n_tokens, variant))
        n_tokens *= 2
    return DotKernels(
        name,
        simd_build.build(f"rows_{name}", 6, dot_kernels.rows_emitter(fmt), variant),
        simd_build.build(f"expand_{name}", 5, dot_kernels.expand_emitter(fmt), variant),
        tuple(tiles),
        offset,
        isinstance(fmt, str),
        *((False, False, False) if isinstance(fmt, str) else fmt.kind),
    )


_tiles: dict[tuple[str, int, Isa], int] = {}


def _tile(kind: str, fmt: DotFormat | str, n_tokens: int, isa: Isa) -> int:
    """Tiles are shared by all formats with the same kind of scales."""
    key = kind, n_tokens, isa
    if key not in _tiles:
        emitter = dot_kernels.tile_emitter(fmt, n_tokens)
        _tiles[key] = simd_build.build(f"tile_{kind}_{n_tokens}", 8, emitter, isa)
    return _tiles[key]


@cache
def quantizer(isa: Isa | None = None) -> int:
    """Address of quantize_record.emit_quantize."""
    return simd_build.build("quantize", 5, quantize_record.emit_quantize, isa or simd_build.host_isa())
