"""Vectors whose file gives them axes of one behind their length: [256, 1] holds what [256] does."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rimuru import LLM
from tools import make_random_gguf
from tools.make_random_gguf import write_random_model

PROMPT = [1, 7, 30, 99, 3]


@pytest.mark.parametrize("arch", ["gpt-oss", "deepseek2", "granitehybrid", "jamba", "qwen35moe", "gemma3", "qwen2"])
def test_axes_of_one_change_nothing(arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"arch": arch, "quant": "q8_0", "seed": 3, "context_length": 128}
    plain = write_random_model(tmp_path / "plain.gguf", **options)
    write, n_longer = make_random_gguf.write_gguf, 0

    def write_longer(path: Path, keys: Any, tensors: Iterable[Any], **more: Any) -> None:
        nonlocal n_longer
        longer = [(name, (*shape, 1) if len(shape) == 1 else shape, *rest) for name, shape, *rest in tensors]
        n_longer = sum(len(shape) > 1 and shape[-1] == 1 for _, shape, *_ in longer)
        write(path, keys, longer, **more)

    monkeypatch.setattr(make_random_gguf, "write_gguf", write_longer)
    other = write_random_model(tmp_path / "other.gguf", **options)
    assert n_longer > 5
    with LLM(plain, device="cpu") as llm:
        expected = llm.logits(PROMPT)
    with LLM(other, device="cpu") as llm:
        assert np.array_equal(llm.logits(PROMPT), expected)
