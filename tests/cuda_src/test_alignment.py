"""Shared memory that kernels read in vectors: an array has the alignment of its element, and where a compiler puts it
may change with any other variable. The host emulator cannot see this: it aligns more than a card must."""

from __future__ import annotations

import re
from pathlib import Path

SOURCES = sorted((Path(__file__).resolve().parents[2] / "cuda_src").rglob("*.cu*"))
SCALARS = ("int", "unsigned", "float", "bool")


def unaligned(text: str) -> list[str]:
    """Declarations of shared arrays and structures that do not state their alignment."""
    lines = re.findall(r"^.*__shared__ .*$", text, flags=re.M)
    found = [line.strip() for line in lines if "__align__" not in line and "#define" not in line]
    return [line for line in found if "[" in line or line.split("__shared__ ")[1].split()[0] not in SCALARS]


def test_shared_arrays_state_their_alignment() -> None:
    assert len(SOURCES) > 50
    assert {str(path.name): lines for path in SOURCES if (lines := unaligned(path.read_text()))} == {}


def test_an_unaligned_one_is_seen() -> None:
    assert unaligned("    __shared__ Prepared prepared;\n    __shared__ int last;\n") == [
        "__shared__ Prepared prepared;"
    ]
    assert unaligned("    __shared__ float x[4];") and not unaligned("    __shared__ __align__(16) float x[4];")
