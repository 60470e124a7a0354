"""Layers with a sliding window: their KV pages go back while a request runs, and no answer depends on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rimuru import LLM, SamplingParams
from tools.make_random_gguf import write_random_model

N_PROMPT, N_NEW, WINDOW = 50, 220, 32
GREEDY = SamplingParams(max_tokens=N_NEW, temperature=0.0, ignore_eos=True)
PROMPTS = [list(range(start, start + N_PROMPT)) for start in (0, 30, 60, 90)]


@pytest.fixture(scope="module", params=["gpt-oss", "gemma3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("window") / f"{request.param}.gguf"
    return write_random_model(path, request.param, "q8_0", tokenizer=False, attention__sliding_window=WINDOW)


def load(model: Path, **options: Any) -> LLM:
    return LLM(model, device="cpu", context=320, max_step_tokens=64, **options)


def test_pages_that_left_the_window_are_given_back(model: Path) -> None:
    with load(model, prefix_cache=False) as llm:
        kv = llm.loaded.layout.kv
        assert kv is not None
        windows = [group.window for group in kv.groups]
        assert sorted(windows, key=str) == [WINDOW, None]
        n_seen = 0
        for _ in llm.stream(PROMPTS[0], GREEDY):
            memory = llm.memory()
            if not memory["requests"]:
                continue
            (request,) = memory["requests"]
            # A window spans at most one page more than its tokens fill; the token being made may need the next one.
            most = sum(
                -(-(request["tokens"] + 1) // group.page_tokens)
                if group.window is None
                else -(-group.window // group.page_tokens) + 2
                for group in kv.groups
            )
            kept = sum(-(-request["tokens"] // group.page_tokens) for group in kv.groups if group.window is None)
            assert kept < request["pages"] <= most, request
            assert memory["views"]["kv"]["pages"] == request["pages"]
            n_seen += request["tokens"] > 2 * WINDOW + N_PROMPT
        assert n_seen > 100, "the request was not looked at while its window moved"
        assert llm.memory()["views"]["kv"]["pages"] == 0


def test_little_memory_changes_no_answer(model: Path) -> None:
    with load(model) as llm:
        plenty = [answer.token_ids for answer in llm.generate(PROMPTS, GREEDY)]
        memory, layout = llm.memory(), llm.loaded.layout
    assert layout.kv is not None
    fixed_bytes = memory["dense_bytes"] + memory["scratch_bytes"]
    # The pool holds the pages of one such request as if none were given back, beside a third of the experts.
    pages = sum(-(-320 // group.page_tokens) for group in layout.kv.groups)
    pool_bytes = pages * layout.kv.page_bytes + memory["views"]["expert"]["bytes"] // 3
    pool_bytes += memory["views"]["buffer"]["bytes"] + 2 * layout.huge_bytes
    with load(model, memory=fixed_bytes + pool_bytes) as llm:
        assert [answer.token_ids for answer in llm.generate(PROMPTS, GREEDY)] == plenty
        assert [answer.token_ids for answer in llm.generate(PROMPTS[::-1], GREEDY)] == plenty[::-1]
        llm.loaded.engine.audit()
