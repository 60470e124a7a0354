"""Hybrids with long prompts on a GPU, whose DeltaNet layers go by chunks there, against the float64 oracle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from naive.model import naive_logits

from rimuru import LLM, SamplingParams
from rimuru.formats.gguf import open_gguf
from rimuru.ops.cuda import delta_chunks
from tools.make_random_gguf import write_random_model

pytestmark = pytest.mark.gpu

N_TOKENS = 700
TOKENS = np.random.default_rng(2).integers(0, 160, N_TOKENS).tolist()
OPTIONS: dict[str, Any] = {"device": "cuda", "memory": "1GiB", "context": 1024, "max_sequences": 4}
ALL_EXPERTS: dict[str, Any] = {"expert_count": 4, "expert_used_count": 4}


def errors(found: np.ndarray, expected: np.ndarray) -> np.ndarray:
    assert np.isfinite(found).all()
    return ((found - expected) ** 2).sum(axis=1) / (expected**2).sum(axis=1)


@pytest.mark.parametrize("arch", ["qwen35moe", "qwen3next"])
def test_logits_by_chunks(arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One piece, pieces that end inside a chunk and token by token: each as near to the oracle as the others."""
    path = write_random_model(tmp_path / "m.gguf", arch, "f32", seed=3, tokenizer=False, **ALL_EXPERTS)
    with open_gguf(path) as gguf:
        expected = naive_logits(gguf, TOKENS, 1024)
    worst = {}
    for window in (delta_chunks.WINDOW_CHUNKS, 2, 0):
        monkeypatch.setattr(delta_chunks, "WINDOW_CHUNKS", window)
        with LLM(path, **OPTIONS) as llm:
            for piece in (N_TOKENS, 333):
                found = errors(llm.logits(TOKENS, chunk=piece), expected)
                worst[window, piece] = float(np.median(found))
    assert max(worst.values()) <= 3e-5, worst


def test_long_prompts_beside_short_ones_and_their_prefixes(tmp_path: Path) -> None:
    """States that chunks left are snapshots like any other: answers are those of prompts that run alone."""
    path = write_random_model(tmp_path / "m.gguf", "qwen35moe", "f32", seed=3, tokenizer=False, **ALL_EXPERTS)
    prompts = [TOKENS[:600], TOKENS[5:12], TOKENS[:600] + TOKENS[:150], TOKENS[300:]]
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    with LLM(path, **OPTIONS) as llm:
        together = [completion.token_ids for completion in llm.generate(prompts, params)]
        scores = [llm.logits(prompt + ids)[len(prompt) - 1 :] for prompt, ids in zip(prompts, together, strict=True)]
    for ids, rows in zip(together, scores, strict=True):
        for token, row in zip(ids, rows, strict=False):
            assert row[token] >= row.max() - 1e-2 * np.abs(row).max()
