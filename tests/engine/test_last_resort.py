"""A request that fits in the pool is run, whatever fills it now: experts and unused prefixes may both have to go."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from rimuru import LLM, SamplingParams
from tools.make_random_gguf import write_random_model


@pytest.mark.parametrize("policy", ["paper", "cost"])
@pytest.mark.parametrize("arch", ["qwen3moe", "granitehybrid"])
def test_whoever_fits_alone_is_run(arch: str, policy: str, tmp_path: Path) -> None:
    """One request after another in a pool that is full of experts and of what earlier requests left."""
    rng = random.Random(1)
    path = write_random_model(tmp_path / "model.gguf", arch, context_length=2048)
    with LLM(path, device="cpu", threads=2, policy=policy) as llm:
        engine = llm.loaded.engine
        fixed_bytes = llm.loaded.dense_bytes + llm.loaded.scratch_bytes
        llm.resize(fixed_bytes + llm.loaded.least_pool_bytes + (5 << 19))
        longest = max(n for n in range(64, 2000) if engine.cache.fits_alone(n + 9, engine.scheduler.max_step_tokens))
        n_tight = 0
        for _ in range(16):
            n_tokens = min(longest, 1500) if rng.random() < 0.4 else rng.randrange(1, longest)
            n_tight += engine.cache.cached_pages > 0
            prompt = [rng.randrange(97) for _ in range(n_tokens)]
            sequence = engine.add(prompt, SamplingParams(rng.randrange(1, 8), 0.0, ignore_eos=True))
            engine.run_until([sequence])
            assert sequence.error is None, (n_tokens, longest)
            engine.audit()
        assert n_tight > 5
