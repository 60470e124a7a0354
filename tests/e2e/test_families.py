"""Every architecture that can run here, on small random models, against the float64 oracle (tests/naive).

Float32 weights: the oracle's logits up to rounding. Quantised weights: up to the 8-bit rounding of activations; all
experts are used there, because a rounding that flips the choice of an expert says nothing about the arithmetic.
Pieces and placement must not change a bit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from naive.model import naive_logits

from rimuru import LLM
from rimuru.arch.registry import runnable_architectures
from rimuru.formats.gguf import open_gguf
from tools.make_random_gguf import KEYS, write_random_model

ARCHITECTURES = runnable_architectures("cpu")
TOKENS = np.random.default_rng(1).integers(0, 160, 45).tolist()
PLACEMENTS = ((None, 1), (None, 7), (0.5, 16), (0, 45))
"""(resident experts, tokens of a piece), compared with all resident and one piece."""


def logits(path: Path, chunk: int, resident: float | int | None = None) -> np.ndarray:
    with LLM(path, device="cpu", context=128, kv_type="f32", resident_experts=resident) as llm:
        return llm.logits(TOKENS, chunk=chunk)


def errors(path: Path, found: np.ndarray) -> np.ndarray:
    """Normalised squared error of every position against the oracle."""
    with open_gguf(path) as gguf:
        expected = naive_logits(gguf, TOKENS, 128)
    return ((found - expected) ** 2).sum(axis=1) / (expected**2).sum(axis=1)


def check_placements(path: Path, arch: str, found: np.ndarray) -> None:
    placements = PLACEMENTS if "expert_count" in KEYS[arch] else PLACEMENTS[:2]
    for resident, chunk in placements:
        other = logits(path, chunk, resident)
        assert np.array_equal(other, found), f"pieces of {chunk}, resident {resident}: bits differ"


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_float_models_give_the_oracles_logits(arch: str, tmp_path: Path) -> None:
    changes = {"expert_feed_forward_length": 64} if "expert_count" in KEYS[arch] else {}
    if KEYS[arch].get("feed_forward_length") == 256:  # the width of the experts
        changes["feed_forward_length"] = 64
    path = write_random_model(tmp_path / "m.gguf", arch, "f32", tokenizer=False, **changes)
    found = logits(path, len(TOKENS))
    assert errors(path, found).max() <= 1e-10
    assert (found.argmax(axis=1) == TOKENS).mean() < 0.5, "the layers do not matter: tests of its answers show nothing"
    check_placements(path, arch, found)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_quantised_models_differ_by_rounding_only(arch: str, tmp_path: Path) -> None:
    changes: dict[str, Any] = {}
    if "expert_count" in KEYS[arch]:
        changes = {"expert_count": 4, "expert_used_count": 4, "expert_group_count": None}
    path = write_random_model(tmp_path / "m.gguf", arch, "mixed", seed=3, tokenizer=False, **changes)
    found = logits(path, len(TOKENS))
    error = errors(path, found)
    assert np.median(error) <= 3e-3 and error.max() <= 3e-2, (np.median(error), error.max())
    check_placements(path, arch, found)


def test_every_runnable_architecture_has_a_random_model() -> None:
    assert set(ARCHITECTURES) <= set(KEYS)
