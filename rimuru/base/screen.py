"""Text of models and files on a terminal, which obeys control characters."""

from __future__ import annotations

from typing import TextIO

_PICTURES = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"}
_PICTURES |= {0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


def visible(text: str) -> str:
    """The text with pictures in place of control characters (ESC and the like), except line feeds and tabs."""
    return text.translate(_PICTURES)


def for_stream(text: str, stream: TextIO) -> str:
    """What to write: every byte where it is kept or read by a program, `visible` where a terminal would obey it."""
    return visible(text) if stream.isatty() else text


def brief(text: str, most: int = 2000) -> str:
    """One visible line of at most `most` characters, cut in the middle."""
    text = visible(" ".join(text.split()))
    return text if len(text) <= most else f"{text[: most - most // 4 - 5]} ... {text[-(most // 4) :]}"
