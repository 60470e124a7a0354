"""One small model with experts for the tests of stores. A test module says what it asks: PROMPTS and GREEDY."""

from __future__ import annotations

from pathlib import Path

import pytest

from rimuru import LLM
from tools.make_random_gguf import write_random_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("experts") / "random.gguf"
    return write_random_model(path, arch="qwen3moe", quant="q8_0", seed=3, context_length=256)


@pytest.fixture(scope="module")
def answers(model: Path, request: pytest.FixtureRequest) -> list[list[int]]:
    """What each prompt gets alone, with everything resident."""
    with LLM(model, device="cpu") as llm:
        return [llm.generate(prompt, request.module.GREEDY)[0].token_ids for prompt in request.module.PROMPTS]


@pytest.fixture(scope="module")
def tiny(model: Path, request: pytest.FixtureRequest) -> int:
    """A budget whose pool holds the requests' pages and a third of the experts at most."""
    with LLM(model, device="cpu", max_step_tokens=64, max_sequences=len(request.module.PROMPTS)) as llm:
        report = llm.memory()
        fixed = report["dense_bytes"] + report["scratch_bytes"] + report["views"]["buffer"]["bytes"]
        return fixed + report["views"]["expert"]["bytes"] // 3
