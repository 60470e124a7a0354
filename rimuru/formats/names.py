"""Bare names of models: `rimuru run qwen3-30b-a3b` finds `Qwen3-30B-A3B-Q4_K_M.gguf` where models are kept."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from rimuru.base.env import models_folders
from rimuru.base.errors import BadInputError
from rimuru.formats.demo import DEMO_NAME
from rimuru.formats.gguf_splits import models_in

_DEPTH = 3
"""Folders below a models folder that are looked into: as deep as publisher/model/file."""
_MOST_FOLDERS = 2000
_BOUNDARIES = "-._ "


def find_model(name: str | Path) -> Path:
    """The path that a name means. A path that exists, `demo`, and whatever has a folder in it stay as they are.

    A bare name is looked for in the current folder and in the folders where models are kept (RIMURU_MODELS): all of a
    file's name, with or without `.gguf`, else its beginning; letters may be large or small. A converted model comes
    before the file beside it. Raises BadInputError that tells where it looked and what is there: nothing of this name,
    or several.
    """
    path = Path(name)
    if str(name) == DEMO_NAME or os.path.exists(name) or path.name != str(name):
        return path
    folders = [Path(), *models_folders()]
    models = {os.path.realpath(model): (model, its_name) for folder in folders for its_name, model in _below(folder)}
    found = sorted(models.values())
    wanted = path.name.lower().removesuffix(".gguf").removesuffix(".rimuru")
    matches = [model for model, its_name in found if its_name.lower() == wanted]
    matches = matches or [model for model, its_name in found if its_name.lower().startswith(_longer(wanted))]
    matches = [m for m in matches if m.suffix == ".rimuru" or m.with_suffix(".rimuru") not in matches]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise BadInputError(
            f"{name!r} may be {_listed([str(model) for model in matches])}; write more of the name, or the path"
        )
    there = _listed([model.name for model, _ in found]) or "none"
    raise BadInputError(
        f"there is no model {name!r}: looked for a file or folder of that name, and in {_folder_names(folders)} for a "
        f"GGUF whose name begins so (found there: {there}); give a path, or set RIMURU_MODELS"
    )


def _longer(name: str) -> tuple[str, ...]:
    """How names begin that add a part to this one."""
    return tuple(name + boundary for boundary in _BOUNDARIES)


def _below(folder: Path) -> Iterator[tuple[str, Path]]:
    """(name, path) of each model in a folder and in the folders below; of the current folder only what lies in it."""
    depth = 0 if folder == Path() else _DEPTH
    pending, n_seen = [(folder, 0)], 0
    while pending and n_seen < _MOST_FOLDERS:
        here, level = pending.pop()
        n_seen += 1
        try:
            inner = [Path(entry.path) for entry in os.scandir(here) if entry.is_dir()]
            yield from models_in(here)
        except OSError:  # not there, or not to be looked into
            continue
        yield from ((child.stem, child) for child in inner if child.suffix == ".rimuru")
        if level < depth:
            pending += [(child, level + 1) for child in inner if child.suffix != ".rimuru"]


def _folder_names(folders: Sequence[Path]) -> str:
    return ", ".join("this folder" if folder == Path() else str(folder) for folder in folders)


def _listed(names: Sequence[str], most: int = 6) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
