"""LLM.score: the rows of LLM.logits, a few at a time, while other methods may be called."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from rimuru import LLM, SamplingParams
from rimuru.base.errors import RimuruError
from tools.make_random_gguf import write_random_model

IDS = [(7 * i + 3) % 150 for i in range(40)]
GREEDY = SamplingParams(max_tokens=6, temperature=0.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("score") / "m.gguf", context_length=256, tokenizer=False)


@pytest.mark.parametrize("overlaps", [False, True])
def test_other_methods_may_be_called_between_rows(model: Path, overlaps: bool) -> None:
    """From the same thread and from others; neither the answers nor the logits change."""
    with LLM(model, device="cpu") as llm:
        llm.loaded.engine.overlaps = overlaps
        expected, answer = llm.logits(IDS), llm.generate([IDS], GREEDY)[0].token_ids
        rows, answers = [], []
        for piece in llm.score(IDS, chunk=16):
            rows.append(piece)
            assert llm.memory()["requests"]
            answers.append(llm.generate([IDS], GREEDY)[0].token_ids)
            other = threading.Thread(target=lambda: answers.append(llm.generate([IDS], GREEDY)[0].token_ids))
            other.start()
            other.join(60)
            assert not other.is_alive(), "the scoring holds the lock while it is suspended"
        assert np.array_equal(np.concatenate(rows), expected)
        assert len(rows) == 3 and answers == [answer] * 6
        assert llm.memory()["requests"] == []
        llm.loaded.engine.audit()


def test_leaving_early_gives_the_pages_back(model: Path) -> None:
    with LLM(model, device="cpu") as llm:
        free = llm.loaded.pool.allocator.free_pages("kv")
        scoring = llm.score(IDS, chunk=8)
        next(scoring)
        assert llm.loaded.pool.allocator.free_pages("kv") < free
        scoring.close()  # type: ignore[attr-defined]
        assert llm.loaded.pool.allocator.free_pages("kv") == free and llm.memory()["requests"] == []


def test_closing_ends_a_scoring(model: Path) -> None:
    with LLM(model, device="cpu") as llm:
        scoring = llm.score(IDS, chunk=8)
        next(scoring)
    with pytest.raises(RimuruError, match="closed"):
        next(scoring)
