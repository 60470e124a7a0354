"""The model that a plan is made for: a file, or the headers of a published model that need not be here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rimuru.arch.common import Gguf
from rimuru.arch.shapes import shape_gguf, shape_names
from rimuru.base.errors import BadInputError
from rimuru.experts.source import open_model
from rimuru.formats.names import find_model


@contextmanager
def planned_model(name: str, quant: str) -> Iterator[Gguf]:
    """The model of `name`, closed afterwards: a file or folder of that name, a published model, a file's beginning.

    Raises BadInputError where neither is found, with what was looked at and the names of the shapes.
    """
    if name.lower() in shape_names() and not Path(name).exists():
        yield shape_gguf(name, quant)[0]
        return
    try:
        path = find_model(name)
    except BadInputError as error:
        raise BadInputError(f"{error}; or name a published model: {', '.join(shape_names())}") from error
    gguf, source = open_model(path)
    try:
        yield gguf
    finally:
        if source is not None:
            source.close()
        gguf.close()
