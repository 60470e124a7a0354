"""Which files make up a model: one GGUF, any part of a split set, or a folder.

Parts are named `<prefix>-00001-of-00003.gguf`; the number in a name counts from 1, the key `split.no` from 0. A file
without `split.count`, or with a count of 1, is a model of its own whatever its name is.
"""

from __future__ import annotations

import re
from pathlib import Path

from rimuru.base.errors import BadInputError, FileFormatError

_PART_NAME = re.compile(r"(?P<prefix>.*)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf", re.DOTALL)
_NOT_A_MODEL = ("mmproj-", "mtp-")


def find_file(path: Path) -> Path:
    """The file to open first: `path` itself, or a part of the only model in the folder `path`."""
    if not path.is_dir():
        if not path.exists():
            raise BadInputError(f"{path}: there is no such file or folder")
        if not path.is_file():
            raise BadInputError(f"{path}: this is no regular file")
        return path
    models = models_in(path)
    if not models:
        raise BadInputError(f"{path}: this folder holds no GGUF model")
    if len(models) > 1:
        names = ", ".join(file.name for _, file in models[:4])
        raise BadInputError(f"{path}: this folder holds {len(models)} models ({names} ...); name the file to use")
    return models[0][1]


def models_in(folder: Path) -> list[tuple[str, Path]]:
    """(name without part and `.gguf`, file) of each model that lies in a folder; of a set the first part there is."""
    found: dict[tuple[str, str], tuple[str, Path]] = {}
    for file in sorted(folder.iterdir()):
        if file.suffix.lower() != ".gguf" or not file.is_file() or file.name.startswith(_NOT_A_MODEL):
            continue
        match = _PART_NAME.fullmatch(file.name)
        key = (match["prefix"], match["count"]) if match else (file.name, "")
        found.setdefault(key, (match["prefix"] if match else file.stem, file))
    return list(found.values())


def part_paths(path: Path, number: int, count: int) -> list[Path]:
    """All parts of the set in order, from the one at `path` whose keys say part `number` (from 0) of `count`.

    Raises FileFormatError when the name does not fit those keys or a part is missing.
    """
    match = _PART_NAME.fullmatch(path.name)
    if match is None or int(match["number"]) != number + 1 or int(match["count"]) != count:
        wanted = f"<name>-{number + 1:05d}-of-{count:05d}.gguf"
        raise FileFormatError(f"{path}: this is part {number + 1} of {count}, so its name must be {wanted}")
    # The names on disk are looked for one by one, so a hostile count ends at the first missing part.
    parts: list[Path] = []
    for index in range(count):
        part = path.with_name(f"{match['prefix']}-{index + 1:05d}-of-{count:05d}.gguf")
        if not part.is_file():
            raise FileFormatError(f"{path}: part {index + 1} of {count} is missing: {part.name}")
        parts.append(part)
    return parts
