"""rimuru profile: which experts a text uses, written beside the model, where loading finds it."""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from pathlib import Path

import numpy as np

from rimuru.base.errors import BadInputError
from rimuru.commands.common import note, open_llm, read_text
from rimuru.experts.hotset import HotsetProfile, check_writable, profile_path, save_profile
from rimuru.experts.replay import check_recordable, save_recording
from rimuru.llm import LLM
from rimuru.ops.base import Array


def profile(args: argparse.Namespace) -> int:
    """Run the text through the model and write the counts."""
    text = read_text(args.file)
    for check, asked in ((check_writable, args.output), (check_recordable, args.record)):
        if asked:
            check(Path(asked))  # before a large model is loaded
    with open_llm(args) as llm:
        ids = llm.tokenize(text)
        path = Path(args.output) if args.output else profile_path(llm.loaded.gguf.path)
        if not args.output:
            check_writable(path)
        with RoutingRecorder(llm) if args.record else nullcontext() as recorder:
            found = measure(llm, ids)
        layout = llm.loaded.layout.expert
        assert layout is not None
        save_profile(found, layout, path)
        if recorder is not None:
            width = max(layer.n_experts for layer in layout.layers)
            save_recording(Path(args.record), recorder.ids(), width, f"{found.model}, {Path(args.file).name}")
    if not args.quiet:
        half = _experts_for_half(found)
        note(f"{path}: {found.n_tokens} tokens; half of all choices fall on {half:.0%} of the experts")
    return 0


class RoutingRecorder:
    """While it is open: keeps the experts of every token that runs, which costs a transfer a layer."""

    def __init__(self, llm: LLM) -> None:
        self._engine = llm.loaded.engine
        self._layers: dict[int, list[np.ndarray]] = {}

    def __enter__(self) -> RoutingRecorder:
        self._engine.runner.model.tap.chosen = self._note
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.runner.model.tap.chosen = None

    def _note(self, layer_slot: int, ids: Array) -> None:
        self._layers.setdefault(layer_slot, []).append(self._engine.runner.ops.download(ids).copy())

    def ids(self) -> np.ndarray:
        """int32 [n_tokens, n_layers, top_k]."""
        return np.stack([np.concatenate(self._layers[slot]) for slot in sorted(self._layers)], axis=1)


def measure(llm: LLM, ids: list[int]) -> HotsetProfile:
    """Counts of a text, in windows of the context length. Raises BadInputError without experts or text."""
    loaded = llm.loaded
    if loaded.layout.expert is None or loaded.store is None:
        raise BadInputError("this model has no routed experts: there is nothing to profile")
    if len(ids) < 2:
        raise BadInputError("the text is too short to profile")
    engine, residency = loaded.engine, loaded.store.residency
    before = residency.n_chosen.copy()
    for start in range(0, len(ids), engine.context_length):
        for _ in engine.score(ids[start : start + engine.context_length]):
            pass
    counts = residency.n_chosen - before
    if not counts.any():
        raise BadInputError("routing cannot be counted on this device; profile with --device cpu")
    layers = tuple(layer.layer for layer in loaded.layout.expert.layers)
    name = loaded.config.name or loaded.gguf.path.name
    return HotsetProfile(loaded.config.architecture, name, len(ids), layers, counts)


def _experts_for_half(profile: HotsetProfile) -> float:
    """Share of the experts that half of all choices fall on."""
    counts = sorted(profile.counts.ravel().tolist(), reverse=True)
    total, seen = sum(counts), 0
    for number, n in enumerate(counts, 1):
        seen += n
        if 2 * seen >= total:
            return number / len(counts)
    return 1.0
