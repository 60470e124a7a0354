"""The tool that measures conversations, on small models with states and of attention alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from rimuru import LLM
from tools.bench.conversation import measure
from tools.make_random_gguf import write_random_model


@pytest.mark.parametrize("arch", ["qwen35moe", "qwen3moe"])
def test_later_turns_compute_their_own_tokens(arch: str, tmp_path: Path) -> None:
    path = write_random_model(tmp_path / "m.gguf", arch, "q8_0", block_count=4)
    with LLM(path, device="cpu", threads=2, memory="64MiB", context=600) as llm:
        result = measure(llm, 200, 3, 20, 5)
    assert [row["turn"] for row in result["rows"]] == [
        "first",
        "turn 2",
        "turn 3",
        "last turn edited",
        "same system prompt",
    ]
    assert result["rows"][0]["computed_tokens"] == 200
    assert result["ok"] and 20 <= result["most_computed_later"] < 60
    assert result["rows"][2]["prompt_tokens"] == 200 + 2 * (5 + 1 + 20)


def test_without_reuse_it_says_so(tmp_path: Path) -> None:
    path = write_random_model(tmp_path / "m.gguf", "qwen35moe", "q8_0")
    with LLM(path, device="cpu", threads=2, memory="64MiB", context=600, prefix_cache=False) as llm:
        assert not measure(llm, 200, 2, 20, 5)["ok"]
