"""How to get what is installed only on demand."""

from __future__ import annotations


def install_command(extra: str) -> str:
    """What to type for an optional part of pyproject.toml. By path: in a package index the name may be another's."""
    return f"pip install '.[{extra}]' in Rimuru's folder, or 'WHEEL[{extra}]' with the path of its wheel"
