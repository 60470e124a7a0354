"""Every architecture on a GPU, and tensor types of few bits, on small random models, against the float64 oracle
(tests/naive).

All experts are used, because a rounding that flips the choice of one says nothing about the arithmetic. Prompts in one
piece take other kernels than single tokens do; where experts lie must not change a bit. Types in plenty mean kernels
in plenty to compile: the usual ones are in the handed models (tools/logits_check.py).
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

pytestmark = pytest.mark.gpu

OPTIONS: dict[str, Any] = {"device": "cuda", "memory": "1GiB", "context": 128, "max_sequences": 4}
TOKENS = np.random.default_rng(1).integers(0, 160, 45).tolist()
TYPES = ("iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s", "tq1_0", "tq2_0", "nvfp4")
PLAIN_BOUND, QUANTISED_BOUND = 3e-5, 1.5e-3
"""Of the median position's normalised squared error (tools/logits_check.py)."""
ALL_EXPERTS: dict[str, Any] = {"expert_count": 4, "expert_used_count": 4, "expert_group_count": None}


def write(path: Path, arch: str, quant: str) -> Path:
    changes = ALL_EXPERTS if "expert_count" in KEYS[arch] else {}
    return write_random_model(path, arch, quant, seed=3, tokenizer=False, **changes)


def check(path: Path, bound: float) -> None:
    with open_gguf(path) as gguf:
        expected = naive_logits(gguf, TOKENS, 128)
        has_experts = any("_exps" in name for name in gguf.tensors)
    found = {}
    with LLM(path, **OPTIONS) as llm:
        for chunk in (45, 7, 1):
            found[chunk] = llm.logits(TOKENS, chunk=chunk)
            error = ((found[chunk] - expected) ** 2).sum(axis=1) / (expected**2).sum(axis=1)
            assert np.isfinite(found[chunk]).all() and np.median(error) <= bound, (chunk, np.median(error))
    if has_experts:
        with LLM(path, resident_experts=0.5, **OPTIONS) as llm:
            for chunk in (45, 1):
                assert np.array_equal(llm.logits(TOKENS, chunk=chunk), found[chunk]), f"pieces of {chunk}"


@pytest.mark.parametrize("arch", runnable_architectures("cuda"))
def test_float_models(arch: str, tmp_path: Path) -> None:
    check(write(tmp_path / "m.gguf", arch, "f32"), PLAIN_BOUND)


@pytest.mark.parametrize("arch", runnable_architectures("cuda"))
def test_quantised_models(arch: str, tmp_path: Path) -> None:
    check(write(tmp_path / "m.gguf", arch, "q4_k_m"), 4 * QUANTISED_BOUND)  # jamba: 3.1e-3


@pytest.mark.parametrize("name", TYPES)
def test_types_that_the_handed_models_do_not_have(name: str, tmp_path: Path) -> None:
    check(write(tmp_path / "m.gguf", "qwen3moe", name), QUANTISED_BOUND)


@pytest.mark.parametrize("arch", ["qwen2moe", "qwen35moe", "gpt-oss", "granitemoe", "deepseek2"])
def test_factors_of_nvfp4_tensors(arch: str, tmp_path: Path) -> None:
    """Beside biases of matrices and of experts, shared experts, split matrices and scaled residuals."""
    check(write(tmp_path / "m.gguf", arch, "nvfp4"), 2 * QUANTISED_BOUND)
