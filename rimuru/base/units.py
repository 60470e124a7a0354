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
        if not math.isfinite(text) or text < 0:
            raise BadInputError(f"a size must be a finite number of bytes, at least 0; got {text}")
        return int(text)
    match = _SIZE.fullmatch(str(text))
    if match is None or match.group(2).lower() not in _SUFFIX_BYTES:
        raise BadInputError(f"cannot read the size {text!r}; write it like 8GiB, 14GB or 512MiB")
    return int(float(match.group(1)) * _SUFFIX_BYTES[match.group(2).lower()])


def human_bytes(n: int | float) -> str:
    """A size for people, in binary units: `1.5 GiB`."""
    value = float(n)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.2f} TiB"
