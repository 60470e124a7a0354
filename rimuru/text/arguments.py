"""The arguments of a tool call in a conversation's history: an object for templates that look into it, and the JSON
text that the model wrote for templates that print it or join it with other text."""

from __future__ import annotations

import json
from collections.abc import Mapping


class JsonArguments(dict[str, object]):
    """A mapping that is also its own JSON text. `text` is that of the call, or plain JSON where there was none."""

    def __init__(self, values: Mapping[str, object], text: str | None = None) -> None:
        super().__init__(values)
        self.text = json.dumps(values, ensure_ascii=False) if text is None else text

    def __str__(self) -> str:
        return self.text

    def __format__(self, spec: str) -> str:
        return format(self.text, spec)

    def __add__(self, other: object) -> str:
        return self.text + other if isinstance(other, str) else NotImplemented

    def __radd__(self, other: object) -> str:
        return other + self.text if isinstance(other, str) else NotImplemented
