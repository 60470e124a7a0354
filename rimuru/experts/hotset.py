"""Offline hot-set profiles: how often a text's tokens chose each expert. JSON beside the model.

{"format": "rimuru-hotset", "version": 1, "architecture": "qwen3moe", "model": "...", "n_tokens": 12000,
 "layers": [{"layer": 0, "counts": [17, 230, ...]}, ...]}
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rimuru.base.errors import BadInputError
from rimuru.base.screen import brief
from rimuru.memory.specs import ExpertLayout

log = logging.getLogger(__name__)

FORMAT, VERSION = "rimuru-hotset", 1
SUFFIX = ".hotset.json"
MOST_CELLS = 1 << 22
"""Layers times experts: far more than any model has, and few enough to hold."""
MOST_TOKENS = 1 << 62
"""Sums of two still are int64."""


@dataclass(frozen=True, slots=True)
class HotsetProfile:
    """counts: int64 [n_slots, max experts], tokens that chose each expert, of n_tokens in all. widths: experts of each
    layer, as a file says; () where counts were made for the model."""

    architecture: str
    model: str
    n_tokens: int
    layers: tuple[int, ...]
    counts: np.ndarray
    widths: tuple[int, ...] = ()

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
        for found, layer in zip(self.widths, layout.layers, strict=False):
            if found != layer.n_experts:
                raise BadInputError(
                    f"the hot-set profile counts {found} experts in layer {layer.layer}, which has {layer.n_experts}; "
                    f"run `rimuru profile` again"
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
    """Read a profile. Raises BadInputError for anything that is none, whatever is damaged in it."""
    try:
        return _profile_of(json.loads(path.read_text(encoding="utf-8")))
    except KeyError as error:
        reason = f"it has no {error}"
    except RecursionError:
        reason = "it is nested too deeply"
    except (OSError, ValueError, TypeError) as error:
        reason = str(error)
    raise BadInputError(f"{path} is not a hot-set profile: {brief(reason, 200)}; run `rimuru profile` again") from None


def _profile_of(data: Any) -> HotsetProfile:
    """Raises ValueError, KeyError or TypeError where a value is missing or cannot be."""
    if not isinstance(data, dict) or data["format"] != FORMAT or data["version"] != VERSION:
        raise ValueError("another format or version")
    n_tokens = _whole(data["n_tokens"], "n_tokens", MOST_TOKENS)
    rows = [layer["counts"] for layer in data["layers"]]
    widths = tuple(len(row) if isinstance(row, list) else 0 for row in rows)
    if not rows or not min(widths) or len(rows) * max(widths) > MOST_CELLS:
        raise ValueError("it has no layers, a layer without counts, or more than any model has")
    counts = np.zeros((len(rows), max(widths)), np.int64)
    for slot, row in enumerate(rows):  # a token chooses an expert of a layer once, so no count is more than tokens
        counts[slot, : len(row)] = [_whole(count, "a count", n_tokens) for count in row]
    if not n_tokens or not counts.any(axis=1).all():
        raise ValueError("it counts no tokens, or none in one of the layers")
    layers = tuple(_whole(layer["layer"], "a layer", MOST_CELLS) for layer in data["layers"])
    return HotsetProfile(
        brief(str(data["architecture"]), 80), brief(str(data["model"]), 200), n_tokens, layers, counts, widths
    )


def _whole(value: Any, what: str, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise ValueError(f"{what} is {brief(repr(value), 40)}, not a whole number from 0 to {most}")
    return value


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
