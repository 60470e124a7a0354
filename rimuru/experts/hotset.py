"""Offline hot-set profiles: how often a text's tokens chose each expert. JSON beside the model.

{"format": "rimuru-hotset", "version": 1, "architecture": "qwen3moe", "model": "...", "n_tokens": 12000,
 "layers": [{"layer": 0, "counts": [17, 230, ...]}, ...]}
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rimuru.base.errors import BadInputError
from rimuru.memory.specs import ExpertLayout

log = logging.getLogger(__name__)

FORMAT, VERSION = "rimuru-hotset", 1
SUFFIX = ".hotset.json"


@dataclass(frozen=True, slots=True)
class HotsetProfile:
    """counts: int64 [n_slots, max experts], tokens that chose each expert, of n_tokens in all."""

    architecture: str
    model: str
    n_tokens: int
    layers: tuple[int, ...]
    counts: np.ndarray

    def probabilities(self) -> np.ndarray:
        """Probability that a token chooses each expert, float64 [n_slots, max experts]."""
        return self.counts / max(self.n_tokens, 1)

    def check(self, layout: ExpertLayout, architecture: str) -> None:
        """Raises BadInputError unless the profile is of a model with the same layers and experts."""
        layers = tuple(layer.layer for layer in layout.layers)
        width = max(layer.n_experts for layer in layout.layers)
        if self.architecture != architecture or self.layers != layers or self.counts.shape != (len(layers), width):
            raise BadInputError(
                f"the hot-set profile is of {self.model!r} ({self.architecture}, {len(self.layers)} layers of "
                f"{self.counts.shape[1]} experts), not of this model; run `rimuru profile` again"
            )


def profile_path(model: Path) -> Path:
    """Where the profile of a model file is found."""
    return model.with_name(model.name + SUFFIX)


def save_profile(profile: HotsetProfile, layout: ExpertLayout, path: Path) -> None:
    """Write a profile, visible at once or not at all; into a device or a pipe directly, for a file must not take its
    place. Raises BadInputError where it cannot be written."""
    layers = [
        {"layer": layer.layer, "counts": profile.counts[slot, : layer.n_experts].tolist()}
        for slot, layer in enumerate(layout.layers)
    ]
    header = {"format": FORMAT, "version": VERSION, "architecture": profile.architecture, "model": profile.model}
    text = json.dumps(header | {"n_tokens": profile.n_tokens, "layers": layers})
    partial = _partial(path)
    try:
        partial.write_text(text + "\n", encoding="utf-8")
        if partial != path:
            partial.replace(path)
    except OSError as error:
        raise _cannot_write(path, error) from None


def check_writable(path: Path) -> None:
    """Raises BadInputError where save_profile could not write: before a long text is run in vain."""
    partial = _partial(path)
    if partial == path and not path.is_dir():
        return  # opened and closed, a pipe would be at its end for who reads it
    try:
        partial.open("a").close()
        partial.unlink()
    except OSError as error:
        raise _cannot_write(path, error) from None


def _partial(path: Path) -> Path:
    """Where it is written before it is complete."""
    return path if path.exists() and not path.is_file() else path.with_name(path.name + ".partial")


def _cannot_write(path: Path, error: OSError) -> BadInputError:
    return BadInputError(f"cannot write the profile {path}: {error.strerror or error}; choose another place with -o")


def load_profile(path: Path) -> HotsetProfile:
    """Read a profile. Raises BadInputError for anything that is none."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["format"] != FORMAT or data["version"] != VERSION:
            raise ValueError("another format or version")
        rows = [np.array(layer["counts"], np.int64) for layer in data["layers"]]
        counts = np.zeros((len(rows), max(row.size for row in rows)), np.int64)
        for slot, row in enumerate(rows):
            counts[slot, : row.size] = row
        if (counts < 0).any() or not isinstance(data["n_tokens"], int):
            raise ValueError("negative counts")
        layers = tuple(int(layer["layer"]) for layer in data["layers"])
        return HotsetProfile(str(data["architecture"]), str(data["model"]), data["n_tokens"], layers, counts)
    except (OSError, UnicodeDecodeError, ValueError, KeyError, TypeError) as error:
        raise BadInputError(f"{path} is not a hot-set profile: {error}; run `rimuru profile` again") from None


def find_profile(model: Path, layout: ExpertLayout, architecture: str) -> HotsetProfile | None:
    """The profile beside a model file. One that does not fit is left aside with a warning: it only costs speed."""
    path = profile_path(model)
    if not path.is_file():
        return None
    try:
        profile = load_profile(path)
        profile.check(layout, architecture)
    except BadInputError as error:
        log.warning("%s", error)
        return None
    return profile
