"""Tensor types that the handed models do not have: small random models against the float64 oracle (tests/naive).

All experts are used, because a rounding that flips the choice of one says nothing about the arithmetic. NVFP4 tensors
have factors, one of a matrix or one for each expert; scales of the rows then use the whole range of their 8 bits.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from naive.model import naive_logits

from rimuru import LLM
from rimuru.formats.gguf import open_gguf
from rimuru.formats.quants import BY_NAME
from tools.make_random_gguf import write_random_model

TYPES = ("iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s", "tq1_0", "tq2_0", "nvfp4")
TOKENS = np.random.default_rng(1).integers(0, 160, 45).tolist()
BOUND = 1.5e-3
"""Of the median position's normalised squared error: activations are rounded to 8 bits."""


def logits(path: Path, chunk: int, resident: float | int | None = None) -> np.ndarray:
    with LLM(path, device="cpu", context=128, kv_type="f32", resident_experts=resident) as llm:
        return llm.logits(TOKENS, chunk=chunk)


def median_error(path: Path, found: np.ndarray) -> float:
    with open_gguf(path) as gguf:
        expected = naive_logits(gguf, TOKENS, 128)
    return float(np.median(((found - expected) ** 2).sum(axis=1) / (expected**2).sum(axis=1)))


@pytest.mark.parametrize("name", TYPES)
def test_logits_are_the_oracles(name: str, tmp_path: Path) -> None:
    path = write_random_model(
        tmp_path / "m.gguf", "qwen3moe", name, seed=3, tokenizer=False, expert_count=4, expert_used_count=4,
        block_count=2,
    )  # fmt: skip
    with open_gguf(path) as gguf:
        assert sum(info.format == BY_NAME[name] for info in gguf.tensors.values()) > 10
    found = logits(path, len(TOKENS))
    assert median_error(path, found) <= BOUND
    for resident, chunk in ((None, 1), (0.5, 16), (0, 45)):
        assert np.array_equal(logits(path, chunk, resident), found), (resident, chunk)


@pytest.mark.parametrize("arch", ["qwen2moe", "qwen35moe", "gpt-oss", "granitemoe", "deepseek2"])
def test_factors_of_nvfp4_tensors(arch: str, tmp_path: Path) -> None:
    """Beside biases of matrices and of experts, shared experts, split matrices and scaled residuals."""
    path = write_random_model(
        tmp_path / "m.gguf", arch, "nvfp4", seed=3, tokenizer=False, expert_count=4, expert_used_count=4,
        expert_group_count=None,
    )  # fmt: skip
    with open_gguf(path) as gguf:
        assert sum(name.endswith("_exps.scale") for name in gguf.tensors) >= 3
    found = logits(path, len(TOKENS))
    assert median_error(path, found) <= 2 * BOUND
    assert np.array_equal(logits(path, 7, 0.5), found)


def test_factors_are_counted_and_checked(tmp_path: Path) -> None:
    """A factor of the wrong number of values has no place in a model."""
    path = write_random_model(tmp_path / "m.gguf", quant="nvfp4", tokenizer=False, block_count=1)
    raw = path.read_bytes()
    name = b"blk.0.ffn_up_exps.scale"
    at = raw.index(name) + len(name) + 4  # behind the number of dimensions: its size
    assert raw[at] == 8
    path.write_bytes(raw[:at] + bytes([4]) + raw[at + 1 :])
    with pytest.raises(Exception, match=r"ffn_up_exps\.scale"):
        LLM(path, device="cpu")
