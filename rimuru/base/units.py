"""Sizes and integer arithmetic used everywhere. `12GB` is 12e9 bytes, `12GiB` is 12 * 2**30 bytes."""

from __future__ import annotations

import math
import re

from rimuru.base.errors import BadInputError

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

_SUFFIX_BYTES = {
    "": 1,
    "b": 1,
    "k": 10**3,
    "kb": 10**3,
    "m": 10**6,
    "mb": 10**6,
    "g": 10**9,
    "gb": 10**9,
    "t": 10**12,
    "tb": 10**12,
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": 1 << 40,
}
_MOST_BYTES = 1 << 60
"""A larger size means as much as there is, too."""
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def ceil_div(a: int, b: int) -> int:
    """Smallest integer that is at least a / b, for b > 0."""
    return -(-a // b)


def align_up(n: int, alignment: int) -> int:
    """Smallest multiple of `alignment` that is at least n."""
    return ceil_div(n, alignment) * alignment


def parse_bytes(text: str | int | float) -> int:
    """Bytes of a size such as `8GiB`, `14GB`, `512MiB` or a plain number of bytes.

    Raises BadInputError for anything else, for negative and for non-finite values.
    """
    if isinstance(text, (int, float)) and not isinstance(text, bool):
        if not 0 <= text < math.inf:
            shown = "a negative number" if text < 0 else text
            raise BadInputError(f"a size must be a finite number of bytes, at least 0; got {shown}")
        return min(int(text), _MOST_BYTES)
    if isinstance(text, str) and text.lstrip().startswith("-") and _SIZE.fullmatch(text.replace("-", "", 1)):
        raise BadInputError(f"a size must be at least 0, got {text.strip()}")
    match = _SIZE.fullmatch(text) if isinstance(text, str) else None
    if match is None or match.group(2).lower() not in _SUFFIX_BYTES:
        shown = repr(text) if len(repr(text)) <= 80 else repr(text)[:77] + "..."
        raise BadInputError(f"cannot read the size {shown}; write it like 8GiB, 14GB or 512MiB")
    return int(min(float(match.group(1)) * _SUFFIX_BYTES[match.group(2).lower()], _MOST_BYTES))


def counted(n: int, name: str) -> str:
    """1 answer, 2 answers."""
    return f"{n} {name}" if n == 1 else f"{n} {name}s"


def plain_number(value: float) -> str:
    """Three digits, for people, without an exponent: 5,770, 57.7, 0.577."""
    rounded = float(f"{value:.3g}")
    return f"{rounded:,.0f}" if abs(rounded) >= 100 else f"{rounded:.3g}"


def human_bytes(n: int | float) -> str:
    """A size for people, in binary units: `1.5 GiB`."""
    value = float(n)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.2f} TiB"
