"""The grids of the IQ1, IQ2 and IQ3 types: which groups of 8 or 4 weights a code can stand for.

The tables come with the MIT-licensed `gguf` package (its `quants` module) and are read from there when first needed; no
copy is kept here.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

GRID_OF = {
    "iq1_s": "iq1_s", "iq1_m": "iq1_s", "iq2_xxs": "iq2_xxs", "iq2_xs": "iq2_xs", "iq2_s": "iq2_s",
    "iq3_xxs": "iq3_xxs", "iq3_s": "iq3_s",
}  # fmt: skip
"""Tensor type -> name of its grid."""

GRIDS = tuple(dict.fromkeys(GRID_OF.values()))


@cache
def grid(name: str) -> NDArray[np.int8]:
    """Levels of every code of a grid: int8 [n_codes, 8], for IQ3 [n_codes, 4]. IQ1: -1, 0, 1; the others positive."""
    from gguf import quants

    kind = getattr(quants, name.upper())
    kind.init_grid()
    levels: NDArray[np.int8] = np.ascontiguousarray(kind.grid.reshape(kind.grid_shape).astype(np.int8))
    levels.flags.writeable = False
    return levels


@cache
def levels(name: str) -> tuple[int, ...]:
    """The at most eight different levels of a grid, ascending."""
    return tuple(int(level) for level in np.unique(grid(name)))


@cache
def even_signs() -> NDArray[np.uint8]:
    """The 7-bit sign index as 8 sign bits, uint8 [128]: bit 7 makes the number of set bits even."""
    index = np.arange(128, dtype=np.uint8)
    parity = np.unpackbits(index[:, None], axis=1).sum(axis=1) & 1
    return (index | parity << 7).astype(np.uint8)
