"""The oracle itself: against the handed logits, and against properties that any right forward pass has."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

from naive.model import naive_logits
from rimuru.arch.registry import runnable_architectures
from rimuru.formats.gguf import open_gguf
from rimuru.formats.writer import write_gguf
from tools.make_random_gguf import write_random_model

# One per structure and one per tensor type; the rest of the handed models are variations of these.
STRUCTURES = (
    "llama", "llama-rope-freqs", "llama-moe", "qwen2", "qwen3", "qwen2moe", "qwen2moe-60", "qwen3moe", "qwen3moe-tied",
    "qwen3moe-320", "qwen3moe-qkv", "qwen3moe-yarn", "olmoe", "qwen3next", "qwen3next-legacy", "qwen35", "qwen35moe",
    "qwen35moe-mtp", "qwen35moe-gate-up", "qwen35moe-320", "granitehybrid", "granitehybrid-rope", "granitehybrid-dense",
    "granitemoe", "nemotron_h_moe", "nemotron_h_moe-latent", "jamba", "deepseek2-v3", "deepseek2-gate-up",
    "deepseek2-legacy", "gpt-oss", "gpt-oss-mxfp4", "glm4moe", "glm4moe-mtp", "lfm2moe", "bailingmoe2", "minimax-m2",
    "hunyuan-moe", "dots1", "ernie4_5-moe", "gemma3", "phi3", "phi3-short", "phi3-long", "qwen3moe-mixed",
    "qwen2moe-mixed", "qwen35moe-mixed", "deepseek2-lite",
)  # fmt: skip
CONTEXT = 512


@pytest.fixture(scope="session")
def handed_models(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the handed models, written by their generator."""
    folder = tmp_path_factory.mktemp("handed")
    source = shared / "cases/logits/make_models.py"
    spec = importlib.util.spec_from_file_location("make_models", source)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["make_models"] = module  # its dataclasses look their module up by name
    spec.loader.exec_module(module)
    for name in STRUCTURES:
        model = module.build(name)
        module.write_gguf(folder / f"{name}.gguf", model.metadata, model.tensors)
    return folder


@pytest.mark.parametrize("name", STRUCTURES)
def test_handed_logits(name: str, handed_models: Path, shared: Path) -> None:
    expected = np.load(shared / f"cases/logits/expected/{name}.npz")
    with open_gguf(handed_models / f"{name}.gguf") as gguf:
        logits = naive_logits(gguf, expected["tokens"], CONTEXT)
    reference = expected["logits"].astype(np.float64)
    error = ((logits - reference) ** 2).sum() / (reference**2).sum()
    # gemma3's reference takes GELU from a table of half-precision values.
    assert error < (1e-6 if name == "gemma3" else 1e-9)


@pytest.mark.parametrize("arch", runnable_architectures())
def test_a_token_does_not_see_later_ones(arch: str, tmp_path: Path) -> None:
    path = write_random_model(tmp_path / "m.gguf", arch, "q8_0", tokenizer=False, block_count=2)
    ids = np.random.default_rng(1).integers(0, 160, 24)
    with open_gguf(path) as gguf:
        whole = naive_logits(gguf, ids)
        changed = ids.copy()
        changed[12] = (changed[12] + 1) % 160
        other = naive_logits(gguf, changed)
    # Not bit-equal: the number of rows an expert gets decides the order of sums inside the matrix product.
    np.testing.assert_allclose(other[:12], whole[:12], rtol=1e-9, atol=1e-9)
    assert not np.allclose(other[12:], whole[12:], rtol=1e-6)
    assert np.isfinite(whole).all()


def test_a_prefix_alone_gives_the_same_logits(tmp_path: Path) -> None:
    path = write_random_model(tmp_path / "m.gguf", "qwen3moe", "mixed", tokenizer=False, block_count=2)
    ids = np.random.default_rng(2).integers(0, 160, 20)
    with open_gguf(path) as gguf:
        whole, part = naive_logits(gguf, ids), naive_logits(gguf, ids[:7])
    np.testing.assert_allclose(part, whole[:7], rtol=1e-9, atol=1e-9)


def test_a_tied_head_is_the_embedding(tmp_path: Path) -> None:
    """Known fault L01: a file without output.weight answers like one with a copy of token_embd.weight."""
    source = write_random_model(tmp_path / "a.gguf", "qwen3", "q8_0", tokenizer=False, block_count=1)
    ids = np.arange(10)
    with open_gguf(source) as gguf:
        rows = [(t.name, t.shape, t.format, gguf.raw(t.name).copy()) for t in gguf.tensors.values()]
        kv = [(key, gguf.kv.type_name(key), gguf.kv[key]) for key in gguf.kv]
    embedding = next(row for row in rows if row[0] == "token_embd.weight")
    others = [row for row in rows if row[0] != "output.weight"]
    write_gguf(tmp_path / "tied.gguf", kv, others)
    write_gguf(tmp_path / "copy.gguf", kv, [*others, ("output.weight", *embedding[1:])])
    with open_gguf(tmp_path / "tied.gguf") as tied, open_gguf(tmp_path / "copy.gguf") as copy:
        assert np.array_equal(naive_logits(tied, ids), naive_logits(copy, ids))
