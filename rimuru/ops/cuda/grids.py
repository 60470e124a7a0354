"""The header `quants/grids.cuh`, written from the tables of the `gguf` package when a source is flattened.

A grid is an array of selectors: nibble i of an entry says which of at most eight levels element i has, in the form that
`__byte_perm` takes, so four weights are one instruction and a table of 2048 groups of eight takes 8 KiB.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from rimuru.formats.quants_grid import GRIDS, grid, levels

PATH = "quants/grids.cuh"
_ROW = 12


@cache
def header() -> str:
    """The header's text: for each grid an array NAME_grid of its selectors, and NAME_LEVELS, its levels as bytes."""
    parts = [
        "// Written by rimuru/ops/cuda/grids.py from the tables of the gguf package (MIT licence).",
        "#pragma once",
    ]
    for name in GRIDS:
        points = grid(name)
        selectors = (np.searchsorted(levels(name), points) << 4 * np.arange(points.shape[1])).sum(axis=1)
        kind = "u32" if points.shape[1] == 8 else "u16"
        entries = [f"{value:#x}," for value in selectors]
        parts.append(f"\n__device__ const {kind} {name}_grid[{len(points)}] = {{")
        parts += ["    " + " ".join(entries[i : i + _ROW]) for i in range(0, len(entries), _ROW)]
        parts += ["};", f"#define {name.upper()}_LEVELS {{{_bytes(name, 0)}, {_bytes(name, 4)}}}"]
    return "\n".join(parts) + "\n"


def _bytes(name: str, first: int) -> str:
    """Four levels as a word."""
    word = sum((level & 255) << (8 * i) for i, level in enumerate(levels(name)[first : first + 4]))
    return f"{word:#010x}u"
