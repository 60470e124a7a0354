"""Reference logits of small models of every runnable architecture and tensor type, on the CPU.

Bounds: plain types 1e-6 over all positions; quantised ones 1.5e-3 at the median position (activations are rounded to
8 bits) and the reference's best token at 88 of 96 positions. Pieces and placement must not change a bit.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rimuru import LLM
from rimuru.formats.gguf import open_gguf
from rimuru.formats.quants import BY_NAME

KINDS = [f"-{name}" for name in BY_NAME if not BY_NAME[name].is_float]
NAMES = [
    "llama",
    "llama-rope-freqs",
    "llama-moe",
    "qwen2",
    "qwen3",
    "qwen2moe",
    "qwen2moe-60",
    "qwen3moe",
    "qwen3moe-tied",
    "qwen3moe-320",
    "qwen3moe-qkv",
    "qwen3moe-yarn",
    "olmoe",
    "qwen3next",
    "qwen3next-legacy",
    "qwen35",
    "qwen35moe",
    "qwen35moe-mtp",
    "qwen35moe-gate-up",
    "qwen35moe-320",
    "granitehybrid",
    "granitehybrid-rope",
    "granitehybrid-dense",
    "granitemoe",
    "nemotron_h_moe",
    "nemotron_h_moe-latent",
    "jamba",
    "deepseek2-lite",
    "deepseek2-v3",
    "deepseek2-gate-up",
    "deepseek2-legacy",
    "gpt-oss",
    "gpt-oss-mxfp4",
    "glm4moe",
    "glm4moe-mtp",
    "lfm2moe",
    "bailingmoe2",
    "minimax-m2",
    "hunyuan-moe",
    "dots1",
    "ernie4_5-moe",
    "gemma3",
    "phi3",
    "phi3-short",
    "phi3-long",
]
TYPES = [
    "f32",
    "bf16",
    "q4_0",
    "q4_1",
    "q5_0",
    "q5_1",
    "q8_0",
    "q2_k",
    "q3_k",
    "q4_k",
    "q5_k",
    "q6_k",
    "iq4_nl",
    "iq4_xs",
    "mxfp4",
    "mixed",
]
NAMES += [f"{arch}-{kind}" for arch in ("qwen3moe", "qwen2moe", "qwen35moe") for kind in TYPES]
PLACEMENTS = ((None, 2), (None, 7), (None, 64), (0.5, 16), (0.5, 1), (0, 1), (0, 96))
PIECES = ((None, 1), (None, 2), (None, 7), (None, 16), (None, 64))


def logits(path: Path, tokens: list[int], chunk: int, resident: float | int | None = None) -> np.ndarray:
    with LLM(path, device="cpu", context=512, kv_type="f32", resident_experts=resident) as llm:
        return llm.logits(tokens, chunk=chunk)


@pytest.mark.parametrize("name", NAMES)
def test_reference_logits(name: str, logit_models: Path, shared: Path) -> None:
    path = logit_models / f"{name}.gguf"
    with open_gguf(path) as gguf:
        has_experts = any("_exps" in tensor for tensor in gguf.tensors)
        plain = all(info.format.is_float for info in gguf.tensors.values())
    case = np.load(shared / "cases/logits/expected" / f"{name}.npz")
    tokens, expected = case["tokens"].tolist(), case["logits"].astype(np.float64)
    found = logits(path, tokens, 96)
    error = ((found - expected) ** 2).sum(axis=1) / (expected**2).sum(axis=1)
    if plain:
        total = ((found - expected) ** 2).sum() / (expected**2).sum()
        assert total <= 1e-6, f"normalised squared error {total:.2e}"
    else:
        assert np.median(error) <= 1.5e-3, f"median normalised squared error {np.median(error):.2e}"
        assert (found.argmax(axis=1) == expected.argmax(axis=1)).sum() >= 88
    for resident, chunk in PLACEMENTS if has_experts else PIECES:
        other = logits(path, tokens, chunk, resident)
        assert np.array_equal(other, found), f"chunk {chunk}, resident {resident} differ from chunk 96, all resident"
